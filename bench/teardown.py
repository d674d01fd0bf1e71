"""Teardown of a node's 64 workers, of which 8 ignore SIGTERM: from the stop to the last one's end, phase by phase."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench import tables
from bench.processes import temporary_folder
from nvrx_slurm.agent.workers import Spawned, Stopped, Tearing, WorkerEvent, Workers
from nvrx_slurm.diagnostics.stacks.dump import dump
from nvrx_slurm.diagnostics.stacks.hook_client import hook_environment
from nvrx_slurm.jobspec.env import child_environment
from nvrx_slurm.util.clock import SystemClock

WORKERS, DEAF = 64, 8
GRACE_S = 5.0
KILL_MARGIN_S = 0.25
WAIT_S = 60.0

_WORKER = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == "deaf" else signal.SIG_DFL)
os.write(1, b"1")
while True:
    signal.pause()
"""


@dataclass(slots=True)
class Course:
    """How one teardown went: when each phase began, in order, and when it was over; seconds since the stop."""

    began: dict[str, float] = field(default_factory=dict)
    took_s: float = 0.0

    def phases(self) -> dict[str, float]:
        """How long each phase lasted; empty where all had ended before the first was told."""
        starts = list(self.began.values())
        ends = [*starts[1:], self.took_s]
        return {name: end - start for name, start, end in zip(self.began, starts, ends, strict=False)}


def teardown(runs: int, peers: Path) -> None:
    """All obey; then 8 of 64 do not."""
    for deaf in (0, DEAF):
        with temporary_folder() as room:
            courses = [asyncio.run(_ours(room, deaf)) for _ in range(runs)]
            bare = [_bare(deaf) for _ in range(runs)]
        _report(deaf, courses, bare)


def _report(deaf: int, courses: list[Course], bare: list[float]) -> None:
    phases = [course.phases() for course in courses]
    rows = {f"  {name}": [each[name] for each in phases if name in each] for name in phases[0]}
    if rows:
        rows["  their sum"] = [sum(each.values()) for each in phases]
    rows["nvrx-slurm"] = [course.took_s for course in courses]
    rows["a bare killpg loop"] = bare
    title = f"{WORKERS} workers, {deaf} deaf to SIGTERM, {GRACE_S:g} s of grace: the stop → the last one's end"
    tables.print_rows(title, rows, unit="ms", first="a bare killpg loop")
    budget_s = GRACE_S + KILL_MARGIN_S
    tables.print_target(f"every run ≤ {budget_s} s", max(rows["nvrx-slurm"]), at_most=budget_s)


async def _ours(room: Path, deaf: int) -> Course:
    clock, inbox = SystemClock(), asyncio.Queue[WorkerEvent]()
    workers = Workers(inbox.put_nowait)
    workers.start()
    hook = hook_environment(child_environment({}), room)
    try:
        ready, told = os.pipe()
        for rank in range(WORKERS):
            workers.spawn(rank, _argv(rank, deaf), hook, str(room), os.dup(told), os.dup(told))
        os.close(told)
        pids = await _all_spawned(inbox)
        # A worker that has not set its handler yet would obey SIGTERM, deaf or not.
        await asyncio.to_thread(_all_up, ready)
        began, course = clock.monotonic(), Course()
        workers.stop(GRACE_S)
        while not isinstance(event := await inbox.get(), Stopped):
            if isinstance(event, Tearing) and event.phase not in course.began:
                course.began[event.phase] = clock.monotonic() - began
                if event.phase == "dump":
                    await _write_down(room, {pids[pid]: pid for pid in event.left if pid in pids})
                    workers.phase_done("dump")
        course.took_s = clock.monotonic() - began
    finally:
        workers.close()
    return course


async def _all_spawned(inbox: asyncio.Queue[WorkerEvent]) -> dict[int, int]:
    """Pid → rank, once all have started."""
    pids = dict[int, int]()
    async with asyncio.timeout(WAIT_S):
        while len(pids) < WORKERS:
            if isinstance(event := await inbox.get(), Spawned):
                pids[event.pid] = event.rank
    return pids


async def _write_down(room: Path, ranks: Mapping[int, int]) -> None:
    """What the agent does in the dump phase."""
    groups = {f"rank {rank}": [pid] for rank, pid in ranks.items()}
    await dump(groups, dump_dir=room, out=room / "stacks", why="bench", timeout_s=GRACE_S)


def _argv(rank: int, deaf: int) -> list[str]:
    return [sys.executable, "-c", _WORKER, "deaf" if rank < deaf else "obedient"]


def _all_up(ready: int) -> None:
    """Wait until each worker has said that it is; closes the pipe."""
    with os.fdopen(ready, "rb", buffering=0) as pipe:
        up = 0
        while up < WORKERS:
            up += len(pipe.read(WORKERS))


def _bare(deaf: int) -> float:
    """The least that it takes: SIGTERM to each group, wait, SIGKILL to each that is left. No daemons, no dump."""
    clock = SystemClock()
    ready, told = os.pipe()
    to_pipe = (os.POSIX_SPAWN_DUP2, told, 1)
    left = {
        os.posix_spawn(sys.executable, _argv(rank, deaf), os.environ, setsid=True, file_actions=[to_pipe])
        for rank in range(WORKERS)
    }
    os.close(told)
    _all_up(ready)
    began = clock.monotonic()
    _signal_groups(left, signal.SIGTERM)
    while left and clock.monotonic() < began + GRACE_S:
        _reap(left)
        clock.sleep(0.001)
    _signal_groups(left, signal.SIGKILL)
    while left:
        _reap(left)
    return clock.monotonic() - began


def _signal_groups(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)


def _reap(left: set[int]) -> None:
    for pid in list(left):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None:
            left.discard(pid)
