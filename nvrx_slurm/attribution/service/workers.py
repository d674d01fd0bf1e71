"""Worker processes of the service: the pool's side, and the process itself (`python -P -m` of this module).

A worker that hangs or dies is replaced, and costs one answer. On its pipes are lines of JSON: a `WorkerSetup` first,
then an `AnalysisResult` for each `AnalysisJob`. It reads only below the roots, and its memory is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from nvrx_slurm.attribution.service.confinement import Roots, confine
from nvrx_slurm.attribution.service.wire import ServiceMessage, WorkerStats
from nvrx_slurm.errors import NvrxError, SourceError
from nvrx_slurm.jobspec import env
from nvrx_slurm.journal.verdicts import Attribution, Inquiry
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger, set_up
from nvrx_slurm.util.processes import dies_with_parent
from nvrx_slurm.util.signals import signal_name

if TYPE_CHECKING:
    from nvrx_slurm.attribution.analyze.analyzer import Analyzer

log = get_logger("attrsvc")

# -P: modules are not searched for in the working folder, where any file may lie.
PROGRAM = (sys.executable, "-P", "-m", "nvrx_slurm.attribution.service.workers")
LONGEST_ANSWER_BYTES = 4 << 20
# For the start of the process, and for an analysis to notice that its own bound has passed.
MARGIN_S = 5.0
# How long a process may linger after SIGKILL: it is in uninterruptible sleep (D), in a file system that is gone.
KILL_S = 5.0


class WorkerSetup(ServiceMessage, frozen=True, kw_only=True):
    """What holds for all that follows."""

    roots: tuple[str, ...]
    rules: tuple[str, ...]
    memory_bytes: int


class AnalysisJob(ServiceMessage, frozen=True, kw_only=True):
    inquiry: Inquiry
    timeout_s: float


class WorkerResult(ServiceMessage, frozen=True, kw_only=True):
    """One of the first two is set. `leaving`: the worker ends after this, and another is to take its place."""

    attribution: Attribution | None = None
    problem: str | None = None
    leaving: bool = False


class WorkerLost(SourceError):
    """The worker hung or died; the message says how."""


class AnalysisWorker:
    """One process, started when it is first needed, and again after it has ended. One inquiry at a time."""

    def __init__(
        self,
        setup: WorkerSetup,
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
        job, bound_s = AnalysisJob(inquiry=inquiry, timeout_s=self._timeout_s), self._timeout_s + self._margin_s
        self._busy_since = self._clock.monotonic()
        try:
            async with asyncio.timeout(bound_s):
                process = await self.start()
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(msgspec.json.encode(job) + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
                if not line.endswith(b"\n"):
                    raise EOFError("its output ended")
                result = msgspec.json.decode(line, type=WorkerResult)
        except TimeoutError:
            await self.end()
            raise WorkerLost(f"the worker hung: it gave no answer within {bound_s:g} s, and was killed") from None
        except Exception as error:
            # Also a SubprocessError of its start, or a RecursionError for brackets in brackets: whatever it is costs
            # this inquiry alone. It would end the service's task, which has all later inquiries to do.
            ended = await self.end()
            raise WorkerLost(f"the worker was lost: {error or 'no answer'}; {ended}") from None
        except asyncio.CancelledError:
            await self.end()  # or its answer, which nothing waits for now, would be taken for the next one
            raise
        finally:
            self._busy_since = None
            self._analyses += 1
        if result.leaving:
            await self.end()
        if result.attribution is None:
            kind = WorkerLost if result.leaving else SourceError
            raise kind(result.problem or "the worker answered without an attribution")
        return result.attribution

    async def start(self) -> Process:
        """The process, which may have to be started. Raises OSError, and SubprocessError where `preexec_fn` fails."""
        if self._process is not None and self._process.returncode is None:
            return self._process

        async def spawn() -> Process:
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

        # The waiting call may be cancelled, the start may not: asyncio would wait for ever for its pipes.
        self._starting = asyncio.ensure_future(spawn())
        return await asyncio.shield(self._starting)

    async def end(self) -> str:
        """Kill the process, and say how it ended."""
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        process, self._process = self._process, None
        if process is None:
            return "it was not running"
        # Where its output has ended, it is about to end by itself: its exit code is on its way.
        assert process.stdout is not None
        if process.stdout.at_eof():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 1.0)
        died = process.returncode is not None
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
        if not died:
            return "it was killed"
        if code >= 0:
            return f"it ended with exit code {code}"
        hint = " (the kernel does that where memory runs out)" if code == -signal.SIGKILL else ""
        return f"{signal_name(-code)} ended it{hint}"


# ---- the process


async def analyze(analyzer: Analyzer, job: AnalysisJob) -> WorkerResult:
    """Never raises: an inquiry that cannot be analysed has a problem."""
    try:
        return WorkerResult(attribution=await analyzer.analyze(job.inquiry, timeout_s=job.timeout_s))
    except NvrxError as error:
        return WorkerResult(problem=str(error))
    except Exception as error:
        # Other parts may have failed too, without memory for instance: the process is not used again.
        log.exception("the analysis of %.200r failed", str(job.inquiry.key))
        why = "it took more memory than a worker may have" if isinstance(error, MemoryError) else repr(error)
        return WorkerResult(problem=f"the analysis failed: {why}", leaving=True)


def work(jobs: IO[bytes], answers: IO[bytes]) -> None:
    """Until there are no more jobs."""
    # Only in the worker: the analyzer loads vectorscan, and the service never needs it.
    from nvrx_slurm.attribution.analyze.analyzer import Analyzer

    setup = msgspec.json.decode(jobs.readline(), type=WorkerSetup)
    # Data, not address space: logs that are mapped into memory, however long, cost none.
    resource.setrlimit(resource.RLIMIT_DATA, (setup.memory_bytes, setup.memory_bytes))
    rules = [Path(path) for path in setup.rules]
    roots = Roots(map(Path, setup.roots))
    # Before the analyzer: it starts threads, and Landlock confines only threads that start later.
    confine(roots, rules)
    with asyncio.Runner() as runner:
        analyzer = Analyzer(rules=rules)
        for line in jobs:
            result = runner.run(analyze(analyzer, msgspec.json.decode(line, type=AnalysisJob)))
            answers.write(msgspec.json.encode(result) + b"\n")
            answers.flush()
            if result.leaving:
                os._exit(1)
        runner.run(analyzer.close())


def main() -> None:
    set_up("attrsvc.worker")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which finishes what runs
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    with contextlib.suppress(BrokenPipeError):  # the service is gone
        work(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
