"""Has the logs of this node's ranks read when their cycle has failed, by a process of low priority.

A large job's logs are too much for the broker to read in time. Each agent starts such a process at the failure
(`python -m nvrx_slurm.attribution.node_reader`), gets what it finds in the logs as they are then, and again once no
worker is left. What the process finds is sent to the broker; where it fails the broker reads the logs itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.model import AttributionSpec
from nvrx_slurm.journal.records import Assignment
from nvrx_slurm.journal.verdicts import FINDINGS_LENGTH_BYTES, MOST_FINDINGS_BYTES, SHARED_FROM_BYTES
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import dies_with_parent, send_signal
from nvrx_slurm.util.tasks import start
from nvrx_slurm.util.threads import awaitable_thread

log = get_logger("agent")

COMMAND = (sys.executable, "-P", "-m", "nvrx_slurm.attribution.node_reader")
# So long it may take to read the logs once; the broker has judged by then.
ANSWER_S = 60.0

REAP_S = 2.0
# A process that outlives its worker may hold the worker's pipe open.
DRAIN_S = 0.5

Found = Callable[[bool, bytes], None]


class LogReader:
    """Reads for one cycle at a time. `begin` and `whole` return at once, and `found` is called with what was found:
    whether the logs were whole, and the encoded findings."""

    def __init__(self, node: str, settings: AttributionSpec, drained: Callable[[float], bool]) -> None:
        """`drained` blocks, at most so many seconds, until the files hold all that the workers have printed."""
        self._node, self._settings, self._drained = node, settings, drained
        self._task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # reading, or reaping their process
        self._is_whole = asyncio.Event()

    def begin(self, logs: Path, assignment: Assignment, found: Found) -> None:
        """The cycle with its logs in this folder has failed."""
        if self._task is not None:
            self._task.cancel()
        if self._settings.enable_lib and assignment.group_world_size > 1:
            # One for each cycle: a reading that is being called off must not see this cycle's end.
            self._is_whole = asyncio.Event()
            self._task = start(self._read(logs, assignment, found, self._is_whole), self._tasks, self._failed)

    def whole(self) -> None:
        """No worker of that cycle is left on this node."""
        self._is_whole.set()

    async def close(self) -> None:
        """Read nothing more; bounded."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=REAP_S)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=REAP_S)

    def _failed(self, error: BaseException) -> None:
        log.warning("the logs of this node's ranks were not read here: %r", error)  # the broker reads them

    async def _read(self, logs: Path, assignment: Assignment, found: Found, is_whole: asyncio.Event) -> None:
        first = assignment.first_rank
        ranks = range(first, first + assignment.workers)
        looking = awaitable_thread(lambda: _size_of(logs, ranks), "size of logs")
        # Small logs are not read here: the broker reads them all, and sooner.
        if await looking * assignment.group_world_size < SHARED_FROM_BYTES:
            return
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            env=env.child_environment({}),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            start_new_session=True,
            preexec_fn=dies_with_parent(signal.SIGKILL),
        )
        try:
            assert process.stdin is not None
            request = {"node": self._node, "folder": str(logs), "ranks": [*ranks], "rules": self._settings.rules}
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            # Where the workers had ended by now the second reading is the only one.
            if not is_whole.is_set():
                if data := await _next(process):
                    found(False, data)
                await is_whole.wait()
            await awaitable_thread(partial(self._drained, DRAIN_S), "drain output")
            if data := await _next(process):
                found(True, data)
        finally:
            # A task of its own: a cancellation at this moment leaves no process behind.
            await asyncio.shield(start(_reap(process), self._tasks, self._failed))


async def _reap(process: Process) -> None:
    """Kill the process, if it lives. One that a dead file server holds is left behind."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    send_signal(process, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REAP_S):
            await asyncio.gather(process.wait(), process.stdout.read())


async def _next(process: Process) -> bytes:
    """What is found in the logs now; nothing where that is too much. Raises EOFError where the process has died,
    TimeoutError."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"\n")
    async with asyncio.timeout(ANSWER_S):
        length = int.from_bytes(await process.stdout.readexactly(FINDINGS_LENGTH_BYTES), "big")
        if length > MOST_FINDINGS_BYTES:
            raise ValueError(f"findings of {length} bytes")
        return await process.stdout.readexactly(length)


def _size_of(logs: Path, ranks: range) -> int:
    size = 0
    for rank in ranks:
        for kind in ("out", "err"):
            with contextlib.suppress(OSError):
                size += (logs / f"rank-{rank}.{kind}").stat().st_size
    return size
