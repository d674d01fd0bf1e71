"""Processes that analyse, as the service sees them: one that hangs or dies is replaced, and costs one answer."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

import msgspec

from nvrx_slurm.attribution.service.jobs import Job, Result, Setup
from nvrx_slurm.attribution.service.wire import WorkerStats
from nvrx_slurm.errors import SourceError
from nvrx_slurm.jobspec import env
from nvrx_slurm.journal.verdicts import Attribution, Inquiry
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import dies_with_parent

log = get_logger("attrsvc")

PROGRAM = (sys.executable, "-P", "-m", "nvrx_slurm.attribution.service.worker")
LONGEST_ANSWER_BYTES = 4 << 20
MARGIN_S = 5.0
"""For the start of the process, and for an analysis to notice that its own bound has passed."""
KILL_S = 5.0
"""How long a process may linger after SIGKILL: it is in uninterruptible sleep (D), in a file system that is gone."""


class WorkerLost(SourceError):
    """The worker hung or died; the message says how."""


class Worker:
    """One process, started when it is first needed, and anew when it is gone. One inquiry at a time."""

    def __init__(
        self,
        setup: Setup,
        *,
        timeout_s: float,
        clock: Clock,
        program: Sequence[str] = PROGRAM,
        margin_s: float = MARGIN_S,
    ) -> None:
        self._setup, self._timeout_s, self._clock, self._program = setup, timeout_s, clock, program
        self._margin_s = margin_s
        self._process: Process | None = None
        self._starting: asyncio.Future[Process] | None = None
        self._busy_since: float | None = None
        self._analyses = 0

    def stats(self) -> WorkerStats:
        busy_s = None if self._busy_since is None else self._clock.monotonic() - self._busy_since
        pid = self._process.pid if self._process is not None and self._process.returncode is None else None
        return WorkerStats(pid=pid, busy_s=busy_s, analyses=self._analyses)

    async def analyze(self, inquiry: Inquiry) -> Attribution:
        """Raises WorkerLost, and SourceError where the worker says why it has no answer."""
        self._busy_since = self._clock.monotonic()
        try:
            result = await self._ask(Job(inquiry=inquiry, timeout_s=self._timeout_s))
        finally:
            self._busy_since = None
            self._analyses += 1
        if result.leaving:
            await self.end()
        if result.attribution is None:
            error = WorkerLost if result.leaving else SourceError
            raise error(result.problem or "the worker answered without an attribution")
        return result.attribution

    async def start(self) -> Process:
        """The process, which may have to be started. Raises OSError."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        # Whoever waits may be cancelled, the start may not: asyncio would wait for ever for its pipes.
        self._starting = asyncio.ensure_future(self._spawned())
        return await asyncio.shield(self._starting)

    async def end(self) -> str:
        """Kill the process, and say how it ended."""
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        process, self._process = self._process, None
        if process is None:
            return "it was not running"
        died = process.returncode is not None or await _dies(process)
        if not died:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        try:
            code = await asyncio.wait_for(process.wait(), KILL_S)
        except TimeoutError:
            log.error("worker %d does not end: it hangs in the kernel; another takes its place", process.pid)
            return "it was killed, and hangs in the kernel"
        finally:
            process._transport.close()  # type: ignore[attr-defined] # or its pipes stay open until it is collected
        return _ending(code) if died else "it was killed"

    async def _spawned(self) -> Process:
        self._process = await asyncio.create_subprocess_exec(
            *self._program,
            stdin=PIPE,
            stdout=PIPE,
            env=env.child_environment({}),
            start_new_session=True,
            preexec_fn=dies_with_parent(signal.SIGKILL),
            limit=LONGEST_ANSWER_BYTES,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._setup) + b"\n")
        return self._process

    async def _ask(self, job: Job) -> Result:
        bound_s = self._timeout_s + self._margin_s
        try:
            async with asyncio.timeout(bound_s):
                return await self._talk(job)
        except TimeoutError:
            await self.end()
            raise WorkerLost(f"the worker hung: it gave no answer within {bound_s:g} s, and was killed") from None
        except (OSError, EOFError, ValueError) as error:  # ValueError: what it wrote is too long, or no answer
            ended = await self.end()
            raise WorkerLost(f"the worker was lost: {error or 'no answer'}; {ended}") from None
        except asyncio.CancelledError:
            await self.end()
            raise

    async def _talk(self, job: Job) -> Result:
        process = await self.start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(job) + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError("its output ended")
        return msgspec.json.decode(line, type=Result)


async def _dies(process: Process) -> bool:
    """Whether it is about to end by itself: its output has ended, and its exit code is on its way."""
    assert process.stdout is not None
    if not process.stdout.at_eof():
        return False
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), 1.0)
    return process.returncode is not None


def _ending(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    hint = " (the kernel does that where memory runs out)" if code == -signal.SIGKILL else ""
    return f"{signal.Signals(-code).name} ended it{hint}"
