"""The analysis for callers without an event loop: one daemon thread with a loop of its own, started when needed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from nvrx_slurm.attribution.analyzer import Analyzer, too_late
from nvrx_slurm.errors import NvrxError, SourceError, UsageError
from nvrx_slurm.journal.verdicts import Attribution, Inquiry, LlmPlan

T = TypeVar("T")

MARGIN_S = 5.0
"""How much longer than the analysis itself may take its caller waits: for a loop that has stopped turning."""


class LoopThread:
    """An event loop in a daemon thread. One that ended, or whose process is now another (a fork), is not `alive`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="attribution", daemon=True)
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

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


class Bridge:
    """Analyzers by what they were made of, on one loop. Thread-safe.

    A start that failed leaves nothing behind, so that the next call starts again; an analyzer that failed with
    anything but an answer or a UsageError is made anew by the next call.
    """

    def __init__(self, make: Callable[..., Analyzer] = Analyzer) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None
        self._analyzers: dict[bytes, Analyzer] = {}

    def analyze(
        self, inquiry: Inquiry, *, rules: Sequence[Path], llm: LlmPlan | None, timeout_s: float
    ) -> Attribution:
        """As `Analyzer.analyze`."""
        made_of = msgspec.json.encode((tuple(map(str, rules)), llm))
        loop, analyzer = self._ready(made_of, rules, llm)
        try:
            return loop.run(analyzer.analyze(inquiry, timeout_s=timeout_s), timeout_s + MARGIN_S)
        except UsageError:
            raise
        except concurrent.futures.TimeoutError:
            self._drop(made_of, analyzer, with_loop=True)
            return too_late(timeout_s)
        except Exception as error:
            self._drop(made_of, analyzer)
            if isinstance(error, NvrxError):
                raise
            raise SourceError(f"the analysis failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End all computations and the thread; a later call starts anew."""
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

    def _ready(self, made_of: bytes, rules: Sequence[Path], llm: LlmPlan | None) -> tuple[LoopThread, Analyzer]:
        with self._lock:
            if self._loop is None or not self._loop.alive:
                self._loop, self._analyzers = LoopThread(), {}
            if made_of not in self._analyzers:
                self._analyzers[made_of] = self._make(rules=rules, llm=llm)
            return self._loop, self._analyzers[made_of]

    def _drop(self, made_of: bytes, analyzer: Analyzer, *, with_loop: bool = False) -> None:
        with self._lock:
            if self._analyzers.get(made_of) is analyzer:
                del self._analyzers[made_of]
            if with_loop:
                self._loop = None


_BRIDGE = Bridge()
os.register_at_fork(after_in_child=_BRIDGE.forget)


def analyze_sync(
    inquiry: Inquiry, *, rules: Sequence[Path] = (), llm: LlmPlan | None = None, timeout_s: float = 60.0
) -> Attribution:
    """What ended the cycle, for callers without an event loop. Answers within `timeout_s`, with a TIMEOUT if need be.

    Raises UsageError where there is nothing to read and nothing known, ConfigError for a rule file that is wrong, and
    SourceError where the analysis itself failed.
    """
    return _BRIDGE.analyze(inquiry, rules=rules, llm=llm, timeout_s=timeout_s)
