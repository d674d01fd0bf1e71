"""What a worker sees: the environment that torchrun gives, so that a script for torchrun runs unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nvrx_slurm.journal.records import Assignment


def worker_environment(
    assignment: Assignment,
    *,
    local_rank: int,
    job_id: str,
    max_restarts: int,
    generation: int,
    replica: str,
    cycle: int,
    node: str,
    store_file: Path,
    own: Mapping[str, str],
) -> dict[str, str]:
    """What is added to the agent's own environment for one worker. `own`, the role's `env`, may not override it.

    `store_file`: where the job's store is, for `inprocess.RedisStore`; only the job's owner can read it.
    """
    rank = assignment.first_rank + local_rank
    return {
        **own,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(assignment.world_size),
        "LOCAL_WORLD_SIZE": str(assignment.workers),
        "GROUP_RANK": str(assignment.group_rank),
        "GROUP_WORLD_SIZE": str(assignment.group_world_size),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": assignment.role,
        "ROLE_WORLD_SIZE": str(assignment.world_size),
        "MASTER_ADDR": assignment.master_addr,
        "MASTER_PORT": str(assignment.master_port),
        "TORCHELASTIC_RUN_ID": f"{job_id}.{replica}",
        "TORCHELASTIC_RESTART_COUNT": str(assignment.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "NVRX_JOB_ID": job_id,
        "NVRX_CYCLE": str(cycle),
        "NVRX_GENERATION": str(generation),
        "NVRX_REPLICA": replica,
        "NVRX_NODE": node,
        "NVRX_STORE_FILE": str(store_file),
    }
