"""Whose nodes a job runs on: two clusters' n1 are two machines."""

from __future__ import annotations

import socket

from nvrx_slurm.jobspec import env
from nvrx_slurm.journal.folder import JobInfo


def cluster_of(job: JobInfo, ledger: str | None) -> str | None:
    """The cluster of a job that runs here, as the ledger names it; None: nothing is kept of its nodes.

    So it is where Slurm does not say which cluster it is. And a job that runs without Slurm pretends its nodes: the
    user's own ledger (`ledger` is None) takes no note of them.
    """
    if job.cluster == "slurm":
        return env.slurm_cluster_name()
    return f"local@{socket.gethostname()}" if ledger else None
