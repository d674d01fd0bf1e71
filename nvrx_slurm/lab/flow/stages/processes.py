"""The processes of a job on one machine: which they are, signals to them, and the proof that a signal had its effect.

An order runs on the machine of its processes (`remote.py`), so it is a record, and so is its result. No process is
signalled by its number alone: the number may belong to another process by now, so each is proven to be the job's.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

from nvrx_slurm.diagnostics.stacks.dump import dump
from nvrx_slurm.diagnostics.stacks.process import has_signal, read_task, thread_ids
from nvrx_slurm.errors import FaultFailed, WaitTimeout
from nvrx_slurm.journal.records import Record
from nvrx_slurm.lab.devcluster import processes
from nvrx_slurm.lab.devcluster.processes import children_first, descendants, environment_of, read_table, wait_until
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.files import JobFiles

# How long the proof may take to appear.
PROOF_S = 5.0

SUPERVISOR = "nvrx_slurm.agent.supervisor"

Act = Literal["kill", "stop", "continue", "signal"]
Part = Literal["itself", "supervisor", "store", "tree"]


class FaultAction(Record, frozen=True, kw_only=True, tag="fault_action"):
    """Do `act` to a `part` of the processes `pids`, which are of the job in `folder`.

    `part`: themselves; the supervisor that one of them has as a child, or the store; or they and all below them, at
    once. `who`: what they are, in words. `signal`: which one, of the act of that name.
    """

    act: Act
    who: str
    pids: tuple[int, ...]
    folder: str
    part: Part = "itself"
    signal: str = "SIGTERM"


class FaultResult(Record, frozen=True, kw_only=True):
    """A fault that happened. `at`: seconds since the epoch, right before the fault; `proof`: how that is known, in
    words; `bound`: the node's name, or the rank, that was hit: what `as:` binds."""

    at: float
    proof: str
    bound: str | int | None = None


Members = Callable[[processes.Table], set[int]]


def apply(action: FaultAction, clock: Clock) -> FaultResult:
    """Do it, and return once it is proven. Raises FaultFailed; nothing was signalled then, or all in vain."""
    table = read_table()
    for pid in action.pids:  # the journal has pids, and one may have been given to another process since
        if pid not in table:
            raise FaultFailed(f"{action.who} has ended already: no process {pid} runs here")
        if not _proves_to_be_of_job(pid, action.folder, clock):
            raise FaultFailed(f"{action.who} has ended already: process {pid} is {command_line(pid)!r} now")
    found = set(action.pids)
    # The journal has no pid of these two: they are the children of one that it has.
    if action.part in ("supervisor", "store"):
        children = {process.pid for process in table.values() if process.parent in action.pids}
        if action.part == "supervisor":
            found = {pid for pid in children if SUPERVISOR in command_line(pid)}
        else:
            works_in = JobFiles(Path(action.folder)).store_dir
            found = {pid for pid in children if _is_same(Path(f"/proc/{pid}/cwd"), works_in)}
        if not found:
            raise FaultFailed(f"{action.who} does not run: process {action.pids[0]} has no such child")

    def members(now: processes.Table) -> set[int]:
        return descendants(now, found) if action.part == "tree" else found & now.keys()

    return perform(action, members, clock)


def perform(action: FaultAction, members: Members, clock: Clock) -> FaultResult:
    """Do it to these processes, and return once it is proven. Raises FaultFailed."""
    try:
        return _ACTS[action.act](action, members, clock)
    except WaitTimeout as error:
        raise FaultFailed(f"{action.act} {action.who}: {error}") from None


def _proves_to_be_of_job(pid: int, folder: str, clock: Clock) -> bool:
    is_of_it = False

    def is_settled() -> bool:
        nonlocal is_of_it
        # Within execve, for as long as its program is loaded, a process has neither arguments nor environment. It may
        # be there at one reading and away at the next: so what was read here is compared as well, and settles it.
        environment = environment_of(pid)
        is_of_it = environment.get("NVRX_JOB_FOLDER") == folder or is_of_job(pid, folder)
        return is_of_it or bool(environment) or pid not in read_table()

    with contextlib.suppress(WaitTimeout):
        wait_until(is_settled, timeout_s=PROOF_S, what="its environment", clock=clock)
    return is_of_it


def is_of_job(pid: int, folder: str) -> bool:
    """Whether the process is of the job: by its environment, as agents and workers are; by its standard output, the
    job's log, as the batch host is; or by the folder that it works in, as the store is, which has no environment."""
    files, of_process = JobFiles(Path(folder)), Path(f"/proc/{pid}")
    if environment_of(pid).get("NVRX_JOB_FOLDER") == folder:
        return True
    return _is_same(of_process / "fd" / "1", files.job_log) or _is_same(of_process / "cwd", files.store_dir)


def _is_same(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file; a small disk has another name in another mount namespace."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def command_line(pid: int) -> str:
    """The process's command line; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def _kill(action: FaultAction, members: Members, clock: Clock) -> FaultResult:
    at: list[float] = []
    killed = processes.kill(members, clock, at_the_kill=lambda: at.append(clock.wall()))
    if not killed:
        raise FaultFailed(f"{action.who} has ended already, before SIGKILL was sent")
    return FaultResult(at=at[0], proof=f"SIGKILL ended {action.who}: {_named(killed)} gone")


def _stop(action: FaultAction, members: Members, clock: Clock) -> FaultResult:
    at = clock.wall()
    stopped = processes.freeze(members, clock)
    if not stopped:
        raise FaultFailed(f"{action.who} has ended already, before SIGSTOP was sent")
    wait_until(lambda: all(map(is_stopped, stopped)), timeout_s=PROOF_S, what=f"{action.who} to stop", clock=clock)
    return FaultResult(at=at, proof=f"SIGSTOP froze {action.who}: {_named(stopped)} in state T")


def _continue(action: FaultAction, members: Members, clock: Clock) -> FaultResult:
    table = read_table()
    frozen = set(filter(is_stopped, members(table)))
    if not frozen:
        raise FaultFailed(f"{action.who} is not stopped: there is nothing to continue")
    in_order, at = children_first(frozen, table)[::-1], clock.wall()
    processes.send((table[pid] for pid in in_order), signal.SIGCONT)
    wait_until(lambda: not any(map(is_stopped, frozen)), timeout_s=PROOF_S, what=f"{action.who} to run", clock=clock)
    return FaultResult(at=at, proof=f"SIGCONT woke {action.who}: {_named(frozen)} out of state T")


def _signal(action: FaultAction, members: Members, clock: Clock) -> FaultResult:
    table = read_table()
    number, receivers, at = signal.Signals[action.signal], members(table), clock.wall()
    if not receivers:
        raise FaultFailed(f"{action.who} has ended already, before {action.signal} was sent")
    processes.send((table[pid] for pid in receivers), number)

    def was_taken() -> bool:
        # What is no longer pending was delivered, or its process has ended.
        tasks = [read_task(pid, pid) for pid in receivers]
        return not any(task and not task.has_ended and has_signal(task.pending, number) for task in tasks)

    wait_until(was_taken, timeout_s=PROOF_S, what=f"{action.who} to take {action.signal}", clock=clock)
    return FaultResult(at=at, proof=f"{action.who} took {action.signal}: it is not pending there any more")


def is_stopped(pid: int) -> bool:
    """Whether every thread of the process is in state T."""
    tasks = [read_task(pid, tid) for tid in thread_ids(pid)]
    return bool(tasks) and all(task is not None and task.state == "T" for task in tasks)


_ACTS: dict[Act, Callable[[FaultAction, Members, Clock], FaultResult]] = {
    "kill": _kill,
    "stop": _stop,
    "continue": _continue,
    "signal": _signal,
}


def _named(pids: Iterable[int]) -> str:
    numbers = sorted(pids)
    return f"process {numbers[0]} is" if len(numbers) == 1 else f"processes {', '.join(map(str, numbers))} are"


MOST_PROCESSES, ACCOUNTS_S = 128, 8.0
# What is known by its command line; the first words that fit count.
_CALLED = {
    "nvrx_slurm.batch": "batch host",  # whose line ends in srun's, and that in the agent's
    "srun": "srun",
    SUPERVISOR: "supervisor",
    "nvrx_slurm.agent": "agent",
    "nvrx_slurm.controller": "controller",
    "valkey-server": "store",
    "redis-server": "store",
}


def processes_of(folder: Path, marks: Mapping[str, str] | None = None, node: str = "") -> list[int]:
    """Everything of the job in `folder` that runs on this machine, or on one of the `node`s that it pretends to be.
    `marks`: variables that mark further processes of the job."""
    found = []
    for pid in read_table():
        environment = environment_of(pid)
        marked = marks is not None and marks.items() <= environment.items()
        # A process that names no node, such as the store, counts for every node.
        elsewhere = node and environment.get("SLURMD_NODENAME", node) != node
        if not elsewhere and (marked or is_of_job(pid, str(folder))):
            found.append(pid)
    return found


def described(pid: int) -> str:
    """`agent on n2, pid 4711: python -P -m nvrx_slurm.agent`."""
    line = command_line(pid)
    return f"{_name(pid, line)}, pid {pid}: {line}"


def _name(pid: int, line: str) -> str:
    environment = environment_of(pid)
    node = environment.get("NVRX_NODE") or environment.get("SLURMD_NODENAME")
    worker = f"rank {environment['RANK']}" if "RANK" in environment else "process"
    name = next((name for words, name in _CALLED.items() if words in line), worker)
    return f"{name} on {node}" if node else name


async def write_accounts(folder: Path, out: Path, node: str) -> list[Path]:
    """One file a process: its stacks, as far as py-spy sees them, and what /proc says. Bounded; stops no process.

    No process is sent a signal: workers' own stacks come by the job's dump.
    """
    pids = processes_of(folder, node=node)[:MOST_PROCESSES]
    groups = {f"{_name(pid, command_line(pid))} pid {pid}": [pid] for pid in pids}
    report = await dump(groups, dump_dir=out / "no-signals", out=out, why="diagnosis", timeout_s=ACCOUNTS_S)
    return sorted(report.files.values())
