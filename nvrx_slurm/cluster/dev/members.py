"""Which processes belong to a cluster, and which to one of its nodes.

Descent tells nearly all: every daemon adopts its orphans. Three marks tell the rest, whose daemon died before them:
a job's processes carry SLURM_CONF and SLURMD_NODENAME in their environment, a slurmstepd (which wipes its own) stands
in its node's spool folder, and a daemon carries a mark of ours.
"""

from __future__ import annotations

from nvrx_slurm.cluster.dev.daemons import MARK, living
from nvrx_slurm.cluster.dev.processes import (
    Process,
    Table,
    descendants,
    environment_of,
    working_folder_of,
)
from nvrx_slurm.cluster.dev.spec import ClusterSpec


def of_node(spec: ClusterSpec, node: str, table: Table) -> set[int]:
    """The node's slurmd, its slurmstepds, and all that runs below them."""
    daemons = living(spec.places, table)
    own = {daemons.pop(node)} if node in daemons else set[int]()
    stray = {process.pid for process in table.values() if _is_stray(process, spec, node)}
    return descendants(table, own | stray, barrier=daemons.values())


def of_cluster(spec: ClusterSpec, table: Table) -> set[int]:
    """Every daemon of the cluster and all that runs below them."""
    daemons = set(living(spec.places, table).values())
    stray = {process.pid for process in table.values() if _is_any_stray(process, spec)}
    return descendants(table, daemons | stray)


def _is_any_stray(process: Process, spec: ClusterSpec) -> bool:
    marked = environment_of(process.pid).get(MARK) == spec.state
    return marked or any(_is_stray(process, spec, node) for node in spec.nodes)


def _is_stray(process: Process, spec: ClusterSpec, node: str) -> bool:
    if process.program == "slurmstepd":
        return working_folder_of(process.pid) == str(spec.places.spool(node))
    environment = environment_of(process.pid)
    return (
        environment.get("SLURMD_NODENAME") == node
        and environment.get("SLURM_CONF") == str(spec.places.slurm_conf)
        and "SLURM_JOB_ID" in environment
    )
