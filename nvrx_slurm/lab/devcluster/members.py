"""Which processes belong to a cluster, and which to one of its nodes.

Descent tells nearly all: every daemon adopts its orphans. Three marks tell the rest, whose daemon died before them:
a job's processes carry SLURM_CONF and SLURMD_NODENAME in their environment, a slurmstepd (which wipes its own) stands
in its node's spool folder, and a daemon carries a mark of ours. A mark counts only on a process of the cluster's
owner: root reads the environment of all users' processes.
"""

from __future__ import annotations

from nvrx_slurm.lab.devcluster.daemons import MARK, living
from nvrx_slurm.lab.devcluster.places import Places
from nvrx_slurm.lab.devcluster.processes import (
    Process,
    Table,
    descendants,
    environment_of,
    is_own,
    working_folder_of,
)
from nvrx_slurm.lab.devcluster.spec import ClusterSpec


def of_nodes(spec: ClusterSpec, table: Table) -> dict[str, set[int]]:
    """Node → its slurmd, its slurmstepds, and all that runs below them. A dead node has an empty set."""
    daemons = living(spec.places, table)
    roots: dict[str, set[int]] = {node: set() for node in spec.nodes}
    for process in table.values():
        if (node := _stray_of(process, spec)) is not None and is_own(process.pid):
            roots[node].add(process.pid)
    # The barrier: a slurmd that a job on another node restarted may descend from that job.
    return {
        node: descendants(
            table,
            pids | ({daemons[node]} if node in daemons else set()),
            barrier=(pid for name, pid in daemons.items() if name != node),
        )
        for node, pids in roots.items()
    }


def of_node(spec: ClusterSpec, node: str, table: Table) -> set[int]:
    """What `of_nodes` says of one node."""
    return of_nodes(spec, table)[node]


def of_cluster(spec: ClusterSpec, table: Table) -> set[int]:
    """Every daemon of the cluster and all that runs below them."""
    return of_daemons(spec.places, table).union(*of_nodes(spec, table).values())


def of_daemons(places: Places, table: Table) -> set[int]:
    """All that descends from a daemon of the cluster, told without knowing what the cluster is."""
    marked = {pid for pid in table if environment_of(pid).get(MARK) == str(places.state) and is_own(pid)}
    return descendants(table, marked | set(living(places, table).values()))


def _stray_of(process: Process, spec: ClusterSpec) -> str | None:
    """The node that this process says it is of; None when it says nothing."""
    if process.program == "slurmstepd":
        folders = {str(spec.places.spool(node)): node for node in spec.nodes}
        return folders.get(working_folder_of(process.pid))
    environment = environment_of(process.pid)
    ours = environment.get("SLURM_CONF") == str(spec.places.slurm_conf) and "SLURM_JOB_ID" in environment
    node = environment.get("SLURMD_NODENAME")
    return node if ours and node in spec.nodes else None
