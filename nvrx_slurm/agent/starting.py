"""The start of a cycle's workers on this node: torchrun's environment, their output, their slots."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from nvrx_slurm.agent import container
from nvrx_slurm.agent.events import Cycle
from nvrx_slurm.agent.machine import BoardPort, OutputPort, StacksPort, WorkersPort
from nvrx_slurm.agent.workers import Exited
from nvrx_slurm.jobspec import env as environment
from nvrx_slurm.jobspec.container import TAKEN_BY, image_kind
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.folder import JobFolder

# Of what a worker is given: that which differs from rank to rank, or from cycle to cycle.
RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *(
        "TORCHELASTIC_ERROR_FILE",
        "NVRX_CYCLE",
        "NVRX_GENERATION",
        "NVRX_REPLICA",
        "NVRX_BEAT_SOCKET",
        *("NVRX_BEAT_FILE", "NVRX_MODULES_FILE"),
    ),
)

# torchrun's default. A worker's own torchrun, and torch.multiprocessing, read it.
SIGNALS_TO_HANDLE = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


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
    post: Callable[[Exited], None],
    warm: str | None,
    learn: bool,
) -> None:
    """Start all ranks of a cycle that are this node's. `Spawned` or `Exited` follows for each. `warm`: the role, if
    it has a warm process; `learn`: have the first worker write down what it imports."""
    role = next(role for role in plan.roles if role.name == cycle.assignment.role)
    logs = folder.cycle_logs(cycle.replica, generation, cycle.number)
    for local_rank in range(cycle.assignment.workers):
        rank = cycle.assignment.first_rank + local_rank
        env = worker_environment(cycle, local_rank, role, plan=plan, folder=folder, node=node, generation=generation)
        # Inside a container the host's PYTHONPATH leads nowhere.
        own = role.env if role.container is None else {"PYTHONPATH": "", **role.env}
        # Before the slot's variables: commands beside the worker (`commands.py`) must not report in its name.
        cycle.environments[rank] = env
        # The role may name an error file of its own, which the agent then does not read.
        what = "/dev/shm"
        try:
            env = board.prepare(rank, cycle.number) | env | stacks.environment(own)
            what, prefix = "the pipes for its output", f"[{cycle.replica} {rank}] "
            with contextlib.ExitStack() as opened:
                out = output.capture(logs / f"rank-{rank}.out", prefix, rank)
                opened.callback(os.close, out)
                err = output.capture(logs / f"rank-{rank}.err", prefix, rank)
                opened.pop_all()
        except OSError as error:  # data loaders may have filled the slots' memory; or no descriptor is left
            cycle.running.add(rank)
            post(Exited(rank, error=f"{error.strerror}: {error.filename or what}"))
            continue
        if learn and local_rank == 0:
            cycle.modules_file = Path(env["NVRX_BEAT_SOCKET"]).with_name("modules")
            cycle.modules_file.unlink(missing_ok=True)
            env["NVRX_MODULES_FILE"] = str(cycle.modules_file)
        cycle.slot_names = frozenset(env).difference(cycle.environments[rank])
        command, workdir = role.command, role.workdir or plan.workdir
        if role.container is not None:
            order = {
                "image": role.container.image,
                "runtime": role.container.runtime,
                "takes": TAKEN_BY[image_kind(role.container.image)],
                "mounts": role.container.mounts,
                "inside": role.container.workdir or workdir,
                "command": command,
                "own": sorted(env),  # these variables come before the image's own, the host's after them
                "shared": [plan.folder, workdir],
                "label": f"{container.label_of(folder.runtime_name, node)}{rank}",
            }
            command = (*container.PROGRAM, json.dumps(order))
            env[container.START_FD], workdir = "", "/"  # the worker's own is a folder of the container
        cycle.running.add(rank)
        workers.spawn(rank, command, env, workdir, out, err, warm)


def role_environment(role: RolePlan, plan: Plan, folder: JobFolder, node: str) -> dict[str, str]:
    """What is the same for all workers of a role on this node."""
    # As torchrun: only where the user's environment has none; the threads only where a node has several workers.
    unset = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCHELASTIC_SIGNALS_TO_HANDLE": SIGNALS_TO_HANDLE}
    if role.workers_per_node > 1:
        unset["OMP_NUM_THREADS"] = "1"
    return {
        **{name: value for name, value in unset.items() if environment.get(name) is None},
        # Rank 0 hosts the workers' store at MASTER_PORT; with True all ranks would look there for the agent's.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        # The role's own may override what is above, and nothing below.
        **role.env,
        "ROLE_NAME": role.name,
        "TORCHELASTIC_MAX_RESTARTS": str(plan.fault_tolerance.max_restarts.count),
        "NVRX_JOB_ID": folder.job_id,
        "NVRX_NODE": node,
        # For `inprocess.RedisStore`; only the job's owner can read it.
        "NVRX_STORE_FILE": str(folder.store_path.absolute()),
    }


def worker_environment(
    cycle: Cycle, local_rank: int, role: RolePlan, *, plan: Plan, folder: JobFolder, node: str, generation: int
) -> dict[str, str]:
    """What is added to the agent's own environment for one worker: all that torchrun 2.13 sets, and more."""
    assignment = cycle.assignment
    rank = assignment.first_rank + local_rank
    return {
        **role_environment(role, plan, folder, node),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(assignment.world_size),
        "LOCAL_WORLD_SIZE": str(assignment.workers),
        "GROUP_RANK": str(assignment.group_rank),
        "GROUP_WORLD_SIZE": str(assignment.group_world_size),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(assignment.world_size),
        "MASTER_ADDR": assignment.master_addr,
        "MASTER_PORT": str(assignment.master_port),
        "TORCHELASTIC_RUN_ID": f"{folder.job_id}.{cycle.replica}",
        "TORCHELASTIC_RESTART_COUNT": str(assignment.restart_count),
        "NVRX_CYCLE": str(cycle.number),
        "NVRX_GENERATION": str(generation),
        "NVRX_REPLICA": cycle.replica,
    }
