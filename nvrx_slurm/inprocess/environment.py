"""What the launcher says of this process, and the variables that give the function its new rank.

Only this module of the wrapper reads or writes the environment. A process may inherit the variables of an outer
launcher (a Slurm step, an agent). So a launcher's variables count only if their rank and number of ranks are those of
this process.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nvrx_slurm.inprocess.exception import OptionError
from nvrx_slurm.inprocess.state import FrozenState
from nvrx_slurm.util.processes import environment_of, parent_of, started_ticks

RANK, WORLD_SIZE = "RANK", "WORLD_SIZE"


@dataclass(frozen=True)
class RankIdentity:
    """This process among those that were started together.

    `group`: the name of this start of this set of processes; a later start has another name. It comes from
    NVRX_INPROCESS_GROUP, else from the launcher. `replaced`: an agent puts another process in a dead one's place.
    """

    rank: int
    world_size: int
    local_rank: int | None
    group: str
    host: str
    replaced: bool


class _Names(NamedTuple):
    """The variables by which a launcher gives a process its rank."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


_TORCH = _Names(RANK, WORLD_SIZE, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLURM = _Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
_OPEN_MPI = _Names(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
_HYDRA = _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# The inner launcher first: an sbatch script has a SLURM_PROCID, and the ranks of its mpirun inherit that.
_LAUNCHERS = (_TORCH, _OPEN_MPI, _HYDRA, _SLURM)


def launch() -> RankIdentity:
    """This process's identity. Raises OptionError where no launcher gives it one, or where its rank cannot be."""
    names = next((names for names in _LAUNCHERS if _get(names.rank)), _TORCH)
    rank, world_size = _number(names.rank), _number(names.world_size)
    if rank is None or world_size is None:
        missing = names.rank if rank is None else names.world_size
        raise OptionError(
            f"{missing} is not set: start the ranks with nvrx-slurm, torchrun, srun or mpirun, "
            "or set RANK and WORLD_SIZE in each process",
            missing,
        )
    if not 0 <= rank < world_size:
        raise OptionError(
            f"{names.rank}={rank} of {names.world_size}={world_size}: ranks are 0 to {world_size - 1}",
            names.rank,
            names.world_size,
        )
    # srun with PMI2 sets the rank of Hydra too, but only its own local rank.
    local_names = [each.local_rank for each in _LAUNCHERS if each is names or _is_about(each, rank, world_size)]
    return RankIdentity(
        rank=rank,
        world_size=world_size,
        local_rank=next(filter(lambda number: number is not None, map(_number, local_names)), None),
        group=_group(rank, world_size),
        host=os.uname().nodename,
        replaced=_get("NVRX_CYCLE") is not None,
    )


def all_on_this_host(launch: RankIdentity) -> bool:
    """Whether it is certain that all ranks run here."""
    if launch.world_size == 1:
        return True
    # The launcher's number of ranks on this host, where it gives one.
    for names in _LAUNCHERS:
        if names is _TORCH or _is_about(names, launch.rank, launch.world_size):
            if names is _SLURM:
                return _number("SLURM_STEP_NUM_NODES") == 1
            if (size := _number(names.local_world_size)) is not None:
                return size == launch.world_size
    # Without a launcher: ranks that meet at a loopback address, or at none, are on one host.
    master = _get("MASTER_ADDR")
    return master == "localhost" or (master or "127.").startswith("127.") or master == "::1"


# The variables that a group's name is made of.
_NAMING = (
    "NVRX_INPROCESS_GROUP",
    "NVRX_JOB_ID",
    "NVRX_REPLICA",
    "NVRX_GENERATION",
    "NVRX_CYCLE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_CLUSTER_NAME",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
)


def older_starts() -> set[tuple[int, int]]:
    """The processes of this host that another launcher, or this one earlier, has started as this rank of a group of
    this name: each with the ticks at which it began. What two starts have in common, above all the launcher, decides
    which is older; so all ranks of two runs find the same one older.

    A process is recognised by the environment that it was started with. One whose launcher is init may be what a dead
    rank has left behind: it is not counted.
    """
    rank = next((names.rank for names in _LAUNCHERS if _get(names.rank)), RANK)

    def assigned(pid: int) -> tuple[str | None, ...] | None:
        variables = environment_of(pid)
        return (rank, variables[rank], *map(variables.get, _NAMING)) if rank in variables else None

    own = assigned(os.getpid())
    # The rank may have been set by the script itself.
    if own is None or own[1] != _get(rank):
        return set()

    def lineage(pid: int) -> list[tuple[int, int]]:
        """From init's child down to the topmost process that has this rank."""
        path = [pid]
        while (parent := parent_of(path[0]) or 0) > 1:
            path.insert(0, parent)
        while len(path) > 1 and assigned(path[-2]) == own:
            path.pop()
        return [(started_ticks(each) or 0, each) for each in path]

    mine, older = lineage(os.getpid()), set[tuple[int, int]]()
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()):
        began = started_ticks(pid)
        if began is None or pid == os.getpid() or assigned(pid) != own:
            continue
        theirs = lineage(pid)
        shared = next((place for place, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        if shared is not None and len(theirs) > 1 and theirs[shared] < mine[shared]:
            older.add((pid, began))
    return older


def forking_parent() -> str:
    """The process whose multiprocessing started this one; empty where none did. All ranks that one host has of a run
    that is started so have the same parent, and their environment does not tell: they set it themselves."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is None or multiprocessing.parent_process() is None:
        return ""
    return f"{os.getppid()}.{started_ticks(os.getppid()) or 0}"


def job_store_file() -> Path | None:
    """The agent's file with the address and the password of the job's own store."""
    return Path(value) if (value := _get("NVRX_STORE_FILE")) else None


def watchdog_method() -> str:
    """How the watchdog asks the main thread: `pending-call` or `signal` (NVRX_INPROCESS_WATCHDOG). Raises OptionError
    for anything else."""
    method = _get("NVRX_INPROCESS_WATCHDOG") or "pending-call"
    if method not in ("pending-call", "signal"):
        raise OptionError(
            f"NVRX_INPROCESS_WATCHDOG={method!r} must be pending-call or signal", "NVRX_INPROCESS_WATCHDOG"
        )
    return method


def torchrun_store() -> tuple[str, int] | None:
    """Host and port of the store that torchrun's agent has for its workers; None where there is none."""
    host, port = _get("MASTER_ADDR"), _number("MASTER_PORT")
    if _get("TORCHELASTIC_USE_AGENT_STORE") != "True" or host is None or port is None:
        return None
    return host, port


def of_python_child() -> dict[str, str]:
    """The environment for a Python process that finds the modules of this one, and dumps no stacks."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {name: value for name, value in os.environ.items() if name != "NVRX_DUMP_DIR"} | {"PYTHONPATH": path}


_local_ranks: list[int | None] = []  # of the calls that have set RANK


def local_rank() -> int | None:
    """This process's rank on its host by its launcher, also where `RankVariables` has set another RANK."""
    if _local_ranks:
        return _local_ranks[-1]
    try:
        return launch().local_rank
    except OptionError:
        return None


class RankVariables:
    """RANK and WORLD_SIZE as the function sees them; the `with` block restores them at its end."""

    def __enter__(self) -> RankVariables:
        _local_ranks.append(local_rank())
        self._before = {name: os.environ.get(name) for name in (RANK, WORLD_SIZE)}
        return self

    def set(self, state: FrozenState) -> None:
        """To the place among the active ranks. A rank in reserve keeps its variables: it does not call the
        function."""
        if state.active_rank is not None:
            os.environ[RANK] = str(state.active_rank)
            os.environ[WORLD_SIZE] = str(state.active_world_size)

    def __exit__(self, *exception: object) -> None:
        _local_ranks.pop()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _group(rank: int, world_size: int) -> str:
    if named := _get("NVRX_INPROCESS_GROUP"):
        return named
    # The value that an agent gives TORCHELASTIC_RUN_ID.
    agent_run = f"{_get('NVRX_JOB_ID')}.{_get('NVRX_REPLICA')}"
    cycle, run = _get("NVRX_CYCLE"), _get("TORCHELASTIC_RUN_ID")
    outer = None if cycle is None else f"{agent_run}.{_get('NVRX_GENERATION')}.{cycle}"
    if outer and run == agent_run:
        return outer
    # The ranks of a torchrun that the agent has started are one group of several within the agent's cycle.
    inner = _launcher_group(None if run == agent_run else run, rank, world_size)
    return f"{outer}.{inner}" if outer else inner


def _launcher_group(torchrun: str | None, rank: int, world_size: int) -> str:
    """The name of this start by the launcher's variables, the most specific launcher first."""
    # Where torch's ranks would meet: one address and port for all of them, usually another one at each start.
    host = _get("MASTER_ADDR")
    meeting_point = f"{host}:{_get('MASTER_PORT') or ''}" if host else None
    if torchrun is not None:
        return f"torchrun.{torchrun}.{_get('TORCHELASTIC_RESTART_COUNT') or 0}.{meeting_point}"
    if _is_about(_SLURM, rank, world_size):
        names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return "slurm." + ".".join(_get(name) or "0" for name in names)
    space = _get("PMIX_NAMESPACE") or _get("OMPI_MCA_ess_base_jobid")
    if space and _is_about(_OPEN_MPI, rank, world_size):
        return f"mpi.{space}"
    if meeting_point is not None:
        return meeting_point
    # The children of one process: multiprocessing, a shell script.
    parent = os.getppid()
    return f"{os.uname().nodename}.{parent}.{started_ticks(parent) or 0}"


def _is_about(names: _Names, rank: int, world_size: int) -> bool:
    return (_get(names.rank), _get(names.world_size)) == (str(rank), str(world_size))


def _number(name: str) -> int | None:
    if (value := _get(name)) is None:
        return None
    try:
        return int(value)
    except ValueError:
        raise OptionError(f"{name}={value!r} is no whole number", name) from None


def _get(name: str) -> str | None:
    return os.environ.get(name) or None
