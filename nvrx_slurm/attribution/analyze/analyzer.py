"""The analysis for callers that wait, on an event loop (`Analyzer`) or in a thread (`analyze_sync`).

Bounded, cancellable, and done once for all who ask the same at a time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from nvrx_slurm.attribution.analyze.analysis import analyze_logs, logs_of
from nvrx_slurm.attribution.rules.catalogue import load_catalogue
from nvrx_slurm.attribution.scan import LogFile
from nvrx_slurm.attribution.scan.prefilter import prefilter_of
from nvrx_slurm.errors import NvrxError, SourceError, UsageError
from nvrx_slurm.jobspec.model import LlmSpec
from nvrx_slurm.journal.verdicts import Attribution, Inquiry, Verdict
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.threads import in_thread

if TYPE_CHECKING:
    from nvrx_slurm.attribution.analyze.llm import LlmAdvisor


T = TypeVar("T")

SOURCE = "lib"
KEPT = 256

AT_ONCE = 2
"""Computations that run at a time; others wait for their turn, within their own bound."""

MARGIN_S = 5.0
"""How much longer than the analysis may take a thread waits for it: for an event loop that has stopped turning."""

Identity = tuple[bytes, tuple[tuple[int, int, int, int], ...]]
"""The inquiry, and of each file device, inode, size and time of change in nanoseconds."""


@dataclass(slots=True, eq=False)
class _Computation:
    """One analysis and those who wait for it. `rules_say` is there before the language model's answer is."""

    task: asyncio.Task[Attribution] | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    askers: int = 0
    rules_say: Attribution | None = None

    def end(self) -> None:
        self.stop.set()
        if self.task is not None:
            self.task.cancel()


class Analyzer:
    """Answers inquiries by the rules, and where they do not know by a language model, if one is configured.

    Used from one event loop. Answers are kept as long as none of the files has changed.
    """

    def __init__(self, *, rules: Sequence[Path] = (), llm: LlmSpec | None = None, clock: Clock | None = None) -> None:
        """Loads the catalogue. Raises ConfigError for a rule file that is wrong."""
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

    async def analyze(self, inquiry: Inquiry, *, timeout_s: float = 60.0) -> Attribution:
        """What ended the cycle. After `timeout_s` what the rules have said by then, or a TIMEOUT.

        An asker that is cancelled takes nothing from the others; the last one ends the computation. Raises UsageError
        where there is nothing to read and nothing known, and SourceError once this is closed.
        """
        began, computation = self._clock.monotonic(), None
        try:
            async with asyncio.timeout(timeout_s):
                logs, identity = await _in_thread(lambda: _identified(inquiry), "find logs")
                if (kept := self._kept.get(identity)) is not None:
                    self._kept.move_to_end(identity)
                    return replace(kept, cached=True, latency_s=self._clock.monotonic() - began)
                if self._closed:
                    raise SourceError("the analyzer is closed")
                if (computation := self._running.get(identity)) is None:
                    computation = self._running[identity] = _Computation()
                    work = self._compute(computation, identity, inquiry, logs)
                    computation.task = asyncio.ensure_future(work)
                    # Retrieve the exception: all askers may have left.
                    computation.task.add_done_callback(lambda task: task.cancelled() or task.exception())
                assert computation.task is not None
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
            answer = known or too_late(timeout_s)
        return replace(answer, latency_s=self._clock.monotonic() - began)

    def warm_up(self) -> None:
        """Compile the rules, which else the first analysis waits for. Blocks."""
        prefilter_of(self._catalogue)

    async def close(self) -> None:
        """End all computations; each asker that waits for one gets a SourceError."""
        self._closed = True
        running = [each for each in self._running.values() if each.task is not None]
        for each in running:
            each.end()
        await asyncio.gather(*(each.task for each in running if each.task), return_exceptions=True)
        if self._llm is not None:
            await self._llm.close()

    async def _compute(
        self, computation: _Computation, identity: Identity, inquiry: Inquiry, logs: list[LogFile]
    ) -> Attribution:
        try:
            async with self._turns:
                work = partial(analyze_logs, inquiry, self._catalogue, logs=logs, stop=computation.stop)
                result = await _in_thread(work, "analyze logs")
            computation.rules_say = answer = result.attribution
            if self._llm is not None:
                answer = await self._llm.advise(answer, inquiry, result.tails)
            self._kept[identity] = answer
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return answer
        finally:
            if self._running.get(identity) is computation:
                del self._running[identity]


def _identified(inquiry: Inquiry) -> tuple[list[LogFile], Identity]:
    """The inquiry's files, and what makes an answer about them the same."""
    logs = logs_of(inquiry)
    states = []
    for log in logs:
        try:
            found = log.path.stat()
            states.append((found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))
        except OSError:  # gone since; the scan reports it
            states.append((0, 0, 0, 0))
    return logs, (msgspec.json.encode(inquiry), tuple(states))


async def _in_thread(work: Callable[[], T], name: str) -> T:
    return await asyncio.wrap_future(in_thread(work, name))


def too_late(timeout_s: float) -> Attribution:
    """The answer when the time is over and nothing is known."""
    problem = f"the analysis took longer than {timeout_s:g} s"
    return Attribution(source=SOURCE, verdict=Verdict.TIMEOUT, problem=problem)


# ---- for callers without an event loop


class EventLoopThread:
    """An event loop in a daemon thread. One that ended, or whose process is now another (a fork), is not `alive`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._process = os.getpid()

        def run() -> None:
            try:
                self._loop.run_forever()
            finally:
                self._loop.close()

        self._thread = threading.Thread(target=run, name="attribution", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._process == os.getpid() and self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """What the coroutine returns or raises. Raises TimeoutError; the work is then cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(MARGIN_S)


class SyncAnalyzer:
    """Analyzers by their rules and language model, on one event loop in a daemon thread. Thread-safe.

    A start that failed leaves nothing behind, so that the next call starts again. An analyzer that failed with
    anything but a UsageError is replaced by the next call.
    """

    def __init__(self, make: Callable[..., Analyzer] = Analyzer) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._loop: EventLoopThread | None = None
        self._analyzers: dict[bytes, Analyzer] = {}

    def analyze(
        self, inquiry: Inquiry, *, rules: Sequence[Path], llm: LlmSpec | None, timeout_s: float
    ) -> Attribution:
        """As `Analyzer.analyze`."""
        key = msgspec.json.encode((tuple(map(str, rules)), llm))
        with self._lock:
            if self._loop is None or not self._loop.alive:
                self._loop, self._analyzers = EventLoopThread(), {}
            if key not in self._analyzers:
                self._analyzers[key] = self._make(rules=rules, llm=llm)
            loop, analyzer = self._loop, self._analyzers[key]
        try:
            return loop.run(analyzer.analyze(inquiry, timeout_s=timeout_s), timeout_s + MARGIN_S)
        except UsageError:
            raise
        except concurrent.futures.TimeoutError:
            self._drop(key, analyzer, with_loop=True)
            return too_late(timeout_s)
        except Exception as error:
            self._drop(key, analyzer)
            if isinstance(error, NvrxError):
                raise
            raise SourceError(f"the analysis failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End all computations and the thread; a later call starts them again."""
        with self._lock:
            loop, self._loop = self._loop, None
            analyzers, self._analyzers = list(self._analyzers.values()), {}
        if loop is not None and loop.alive:
            for analyzer in analyzers:
                loop.run(analyzer.close(), MARGIN_S)
            loop.stop()

    def forget(self) -> None:
        """In a forked child: the parent's thread, loop and lock are not here."""
        self._lock, self._loop, self._analyzers = threading.Lock(), None, {}

    def _drop(self, key: bytes, analyzer: Analyzer, *, with_loop: bool = False) -> None:
        with self._lock:
            if self._analyzers.get(key) is analyzer:
                del self._analyzers[key]
            if with_loop:
                self._loop = None


_SYNC_ANALYZER = SyncAnalyzer()
os.register_at_fork(after_in_child=_SYNC_ANALYZER.forget)


def analyze_sync(
    inquiry: Inquiry, *, rules: Sequence[Path] = (), llm: LlmSpec | None = None, timeout_s: float = 60.0
) -> Attribution:
    """What ended the cycle, for callers without an event loop. Answers within `timeout_s`, with a TIMEOUT if need be.

    Raises UsageError where there is nothing to read and nothing known, ConfigError for a rule file that is wrong, and
    SourceError where the analysis itself failed.
    """
    return _SYNC_ANALYZER.analyze(inquiry, rules=rules, llm=llm, timeout_s=timeout_s)
