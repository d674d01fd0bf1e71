"""The one module that reads the environment. Standard library only: agents import it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PREFIX = "NVRX_SLURM_"


def get(name: str) -> str | None:
    """The variable, or None where it is unset or empty."""
    return os.environ.get(name) or None


def overrides() -> dict[str, str]:
    """Every variable that sets a configuration key: `NVRX_SLURM_<KEY>`, a double underscore for each level."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


def store_password() -> str | None:
    """The password of a store that job.yaml names by URL."""
    return get("NVRX_SLURM_STORE_PASSWORD")


def job_folder() -> Path | None:
    """The running job's folder, as the batch host tells its children."""
    value = get("NVRX_JOB_FOLDER")
    return Path(value) if value else None


def node_name() -> str | None:
    """This node's name: what the batch host or Slurm calls it."""
    return get("NVRX_NODE") or slurm_node_name()


def slurm_node_name() -> str | None:
    """What Slurm calls this node; on a development cluster that is not its host name."""
    return get("SLURMD_NODENAME")


def slurm_job_id() -> str | None:
    return get("SLURM_JOB_ID")


def slurm_restart_count() -> int:
    """How often Slurm has requeued this job."""
    return int(get("SLURM_RESTART_COUNT") or 0)


def slurm_nodelist() -> str | None:
    """The allocation in Slurm's compressed form. Stale after a node is lost."""
    return get("SLURM_JOB_NODELIST")


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `extra` on top, for a child process."""
    return {**os.environ, **extra}
