"""The start of a cycle's workers on this node: torchrun's environment, their output, their slots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nvrx_slurm.agent.events import Cycle
from nvrx_slurm.agent.machine import BoardPort, OutputPort, StacksPort, WorkersPort
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Assignment


def start_workers(
    cycle: Cycle,
    *,
    plan: Plan,
    folder: JobFolder,
    node: str,
    generation: int,
    workers: WorkersPort,
    board: BoardPort,
    output: OutputPort,
    stacks: StacksPort,
) -> None:
    """Start all ranks of a cycle that are this node's. `Spawned` or `Exited` follows for each."""
    role = next(role for role in plan.roles if role.name == cycle.assignment.role)
    logs = folder.cycle_logs(cycle.replica, generation, cycle.number)
    for local_rank in range(cycle.assignment.workers):
        rank = cycle.assignment.first_rank + local_rank
        env = worker_environment(
            cycle.assignment,
            local_rank=local_rank,
            job_id=folder.job_id,
            max_restarts=plan.fault_tolerance.max_restarts.count,
            generation=generation,
            replica=cycle.replica,
            cycle=cycle.number,
            node=node,
            store_file=folder.store_path.absolute(),
            own=role.env,
        )
        env |= board.prepare(rank, cycle.number) | stacks.environment(role.env)
        prefix = f"[{cycle.replica} {rank}] "
        out = output.capture(logs / f"rank-{rank}.out", prefix, rank)
        err = output.capture(logs / f"rank-{rank}.err", prefix, rank)
        cycle.running.add(rank)
        workers.spawn(rank, role.command, env, role.workdir or plan.workdir, out, err)


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
