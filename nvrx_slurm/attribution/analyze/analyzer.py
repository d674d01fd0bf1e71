"""The analysis for callers that wait, on an event loop (`Analyzer`) or without one (`analyze_sync`).

Bounded, cancellable, and done once for all who ask the same at a time.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from nvrx_slurm.attribution.analyze.analysis import AnalysisResult, analyze_logs, logs_of
from nvrx_slurm.attribution.analyze.evidence import last_lines
from nvrx_slurm.attribution.analyze.gathering import (
    FIRST_WAIT_SHARE,
    HEAD_START_SHARE,
    ReceivedFindings,
    analyze_gathered,
)
from nvrx_slurm.attribution.rules.catalogue import load_catalogue
from nvrx_slurm.attribution.scan import LogFile
from nvrx_slurm.attribution.scan.prefilter import prefilter_of
from nvrx_slurm.errors import NvrxError, SourceError
from nvrx_slurm.jobspec.model import LlmSpec
from nvrx_slurm.journal.verdicts import SHARED_FROM_BYTES, Attribution, Inquiry, Verdict
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.threads import awaitable_thread

if TYPE_CHECKING:
    from nvrx_slurm.attribution.analyze.llm import LlmAdvisor


SOURCE = "lib"
KEPT = 256

# Files whose last lines a language model may be shown, where agents have read them all.
MOST_SHOWN = 16

# Bounds the wait where there is no deadline: threading refuses an infinite timeout.
MOST_DECIDE_S = 3600.0

# Computations that run at a time; others wait for their turn, within their own bound.
AT_ONCE = 2

# The inquiry, and of each file device, inode, size and time of change in nanoseconds.
Identity = tuple[bytes, tuple[tuple[int, int, int, int], ...]]


# `analyze_gathered`, but for what `analyze_logs` takes too.
_Gather = Callable[..., AnalysisResult]


class _Computation:
    """One analysis and those who wait for it. `rules_say` is set before the language model answers."""

    def __init__(self, compute: Callable[[_Computation], Coroutine[Any, Any, Attribution]]) -> None:
        self.stop, self.askers = threading.Event(), 0
        self.rules_say: Attribution | None = None
        self.task = asyncio.ensure_future(compute(self))
        # Retrieve the exception: all askers may have left.
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def end(self) -> None:
        # Both: the thread that reads looks at `stop` alone, and a request to the language model ends with the task.
        self.stop.set()
        self.task.cancel()


class Analyzer:
    """Answers inquiries by the rules, and where they do not know by a language model, if one is configured.

    Used from one event loop. Answers are kept as long as none of the files has changed.
    """

    def __init__(
        self,
        *,
        rules: Sequence[Path] = (),
        llm: LlmSpec | None = None,
        clock: Clock | None = None,
        received: ReceivedFindings | None = None,
    ) -> None:
        """Loads the catalogue. `received`: what agents find; without it all logs are read here. Raises ConfigError
        for a rule file that is wrong."""
        self._received = received
        self._catalogue = load_catalogue(rules)
        self._llm: LlmAdvisor | None = None
        if llm is not None:
            from nvrx_slurm.attribution.analyze.llm import LlmAdvisor  # few have one, and it needs an HTTP client

            self._llm = LlmAdvisor(llm)
        self._clock = clock or SystemClock()
        self._kept: OrderedDict[Identity, Attribution] = OrderedDict()
        self._running: dict[Identity, _Computation] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._closed = False

    async def analyze(
        self, inquiry: Inquiry, *, timeout_s: float = 60.0, whole: bool = True, decide_s: float = math.inf
    ) -> Attribution:
        """What ended the cycle. After `timeout_s` what the rules have said by then, or a TIMEOUT. `whole`: nothing
        more is written to the logs. Logs that agents read are judged within `decide_s`, by what has come until then.

        An asker that is cancelled takes nothing from the others; the last one ends the computation. Raises UsageError
        where there is nothing to read and nothing known, IncompleteFindings where agents have not sent theirs and the
        logs are not `whole`, and SourceError once this is closed.
        """
        began, computation = self._clock.monotonic(), None
        try:
            async with asyncio.timeout(timeout_s):
                logs, identity, size = await awaitable_thread(lambda: _identified(inquiry), "find logs")
                received = self._received if size >= SHARED_FROM_BYTES and len(inquiry.nodes) > 1 else None
                gathers: _Gather | None = None
                if received is not None:
                    gathers = partial(
                        analyze_gathered, received=received, whole=whole, clock=self._clock, deadline=began + decide_s
                    )
                    await self._wait_for_agents(inquiry, received, whole=whole, decide_s=decide_s)
                    # Findings that come later make another answer about the same files.
                    identity = (identity[0] + b"%d %d" % (whole, received.version), identity[1])
                if (kept := self._kept.get(identity)) is not None:
                    self._kept.move_to_end(identity)
                    return replace(kept, cached=True, latency_s=self._clock.monotonic() - began)
                if self._closed:
                    raise SourceError("the analyzer is closed")
                if (computation := self._running.get(identity)) is None:
                    compute = partial(self._compute, identity=identity, inquiry=inquiry, logs=logs, gathers=gathers)
                    computation = self._running[identity] = _Computation(compute)
                computation.askers += 1
                try:
                    answer = await asyncio.shield(computation.task)
                except asyncio.CancelledError:
                    if self._closed and computation.task.cancelled():
                        raise SourceError("the analyzer was closed before it had an answer") from None
                    raise
                finally:
                    computation.askers -= 1
                    if computation.askers == 0 and not computation.task.done():
                        computation.end()
                        del self._running[identity]  # the next asker starts a new one
        except TimeoutError:
            known = computation.rules_say if computation is not None else None
            problem = f"the analysis took longer than {timeout_s:g} s"
            answer = known or Attribution(source=SOURCE, verdict=Verdict.TIMEOUT, problem=problem)
        return replace(answer, latency_s=self._clock.monotonic() - began)

    def warm_up(self) -> None:
        """Compile the rules, which else the first analysis waits for. Blocks."""
        prefilter_of(self._catalogue)

    async def close(self) -> None:
        """End all computations; each asker that waits for one gets a SourceError."""
        self._closed = True
        running = list(self._running.values())
        for each in running:
            each.end()
        await asyncio.gather(*(each.task for each in running), return_exceptions=True)
        if self._llm is not None:
            await self._llm.close()

    async def _compute(
        self,
        computation: _Computation,
        identity: Identity,
        inquiry: Inquiry,
        logs: list[LogFile],
        gathers: _Gather | None,
    ) -> Attribution:
        try:
            async with self._turns:
                analyze = gathers or analyze_logs
                work = partial(analyze, inquiry, self._catalogue, logs=logs, stop=computation.stop)
                result = await awaitable_thread(work, "analyze logs")
            # Outside of `_turns`: the language model may take a minute, and the next analysis need not wait for it.
            computation.rules_say = answer = result.attribution
            if self._llm is not None:
                tails = result.tails
                if gathers is not None and answer.verdict is Verdict.UNKNOWN:  # agents send no text
                    shown = sorted(logs, key=lambda log: log.rank not in answer.ranks)[:MOST_SHOWN]
                    tails = await awaitable_thread(lambda: last_lines(shown), "read tails")
                answer = await self._llm.advise(answer, inquiry, tails)
            self._kept[identity] = answer
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return answer
        finally:
            if self._running.get(identity) is computation:
                del self._running[identity]

    async def _wait_for_agents(
        self, inquiry: Inquiry, received: ReceivedFindings, *, whole: bool, decide_s: float
    ) -> None:
        """Until each has sent what it found, for a moment."""
        failed = inquiry.failed
        lost = failed.node if failed is not None and failed.rank is None else None  # it sends nothing
        wait_s = min(decide_s, MOST_DECIDE_S) * (HEAD_START_SHARE if whole else FIRST_WAIT_SHARE)
        nodes = [node for node in inquiry.nodes if node != lost]
        wait = partial(received.wait, inquiry.paths[0], nodes, whole=whole, timeout_s=wait_s)
        await awaitable_thread(wait, "wait for findings")


def _identified(inquiry: Inquiry) -> tuple[list[LogFile], Identity, int]:
    """The inquiry's files, what makes an answer about them the same, and their size in bytes."""
    logs = logs_of(inquiry)
    states = []
    for log in logs:
        try:
            found = log.path.stat()
            states.append((found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))
        except OSError:  # gone since; the scan reports it
            states.append((0, 0, 0, 0))
    return logs, (msgspec.json.encode(inquiry), tuple(states)), sum(state[2] for state in states)


def analyze_sync(inquiry: Inquiry, *, rules: Sequence[Path] = (), timeout_s: float = 60.0) -> Attribution:
    """What ended the cycle, for callers without an event loop: as `Analyzer.analyze`.

    Raises UsageError where there is nothing to read and nothing known, ConfigError for a rule file that is wrong, and
    SourceError where the analysis itself failed.
    """

    async def analyze() -> Attribution:
        analyzer = Analyzer(rules=rules)
        try:
            return await analyzer.analyze(inquiry, timeout_s=timeout_s)
        finally:
            await analyzer.close()

    try:
        return asyncio.run(analyze())
    except NvrxError:
        raise
    except Exception as error:
        raise SourceError(f"the analysis failed: {type(error).__name__}: {error}") from error
