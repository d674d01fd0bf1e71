"""Which cluster this is, outside of its jobs."""

from __future__ import annotations

import re

from nvrx_slurm.cluster.commands import Runner, SystemRunner
from nvrx_slurm.jobspec import env

ANSWER_S = 10.0
_CLUSTER_NAME = re.compile(r"^ClusterName\s*=\s*(\S+)", re.MULTILINE)


def named_cluster(run: Runner | None = None) -> str | None:
    """The cluster's name, as its jobs know it from SLURM_CLUSTER_NAME; None where no Slurm answers."""
    if name := env.slurm_cluster_name():
        return name
    try:
        output = (run or SystemRunner())(["scontrol", "show", "config"], timeout_s=ANSWER_S)
    except FileNotFoundError:
        return None
    return cluster_name_of(output.stdout) if output.ok else None


def cluster_name_of(stdout: str) -> str | None:
    """What `scontrol show config` says: `ClusterName             = alpha`."""
    found = _CLUSTER_NAME.search(stdout)
    return found[1] if found else None
