"""The service itself: one computation for each key, for any number of clients and requests. One event loop owns all
of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence

from msgspec.structs import replace

from nvrx_slurm.attribution.service import lifecycle
from nvrx_slurm.attribution.service.confinement import Roots
from nvrx_slurm.attribution.service.lifecycle import InquiryRecord
from nvrx_slurm.attribution.service.metrics import Metrics
from nvrx_slurm.attribution.service.storage import (
    FileSystemThreads,
    InquiryTable,
    RecordWriter,
    RetentionLimits,
    StateFolder,
    TrackedInquiry,
)
from nvrx_slurm.attribution.service.wire import InFlight, Stats, Submission, id_of
from nvrx_slurm.attribution.service.workers import AnalysisWorker, WorkerLost
from nvrx_slurm.errors import SourceError
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger

log = get_logger("attrsvc")

FILE_SYSTEM_S = 5.0
SHOWN_AT_MOST = 1000


class Busy(Exception):
    """No more is taken now; the message says why. `retry_in_s`: when it is worth another try."""

    def __init__(self, message: str, retry_in_s: float) -> None:
        super().__init__(message)
        self.retry_in_s = retry_in_s


class AttributionService:
    """`start` it inside a running loop; then `drain` and `close` it."""

    def __init__(
        self,
        roots: Roots,
        workers: Sequence[AnalysisWorker],
        *,
        clock: Clock,
        metrics: Metrics,
        results: StateFolder | None = None,
        bounds: RetentionLimits = RetentionLimits(),  # noqa: B008 -- frozen
    ) -> None:
        self._roots, self._workers, self._clock, self._metrics = roots, workers, clock, metrics
        self._aside = FileSystemThreads(FILE_SYSTEM_S)
        self._keeper = RecordWriter(results, self._aside, metrics)
        self._entries = InquiryTable(bounds)
        self._queue: asyncio.PriorityQueue[tuple[bool, int, str]] = asyncio.PriorityQueue()
        self._serial = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        self._started_at = clock.monotonic()
        self._spent_s, self._analyses, self._lost = 0.0, 0, 0
        self.draining = self._closed = False
        metrics.watch(self._entries.counts)

    # ---- life

    def start(self) -> None:
        """Take up what the state folder holds, and begin to work. Raises OSError."""
        now = self._clock.wall()
        for identity, record in sorted(self._keeper.load().items(), key=lambda kept: kept[1].changed_at):
            self._go_on(identity, self._entries.put(identity, lifecycle.recover(record, now)))
        self._tasks = [asyncio.create_task(self._work(worker)) for worker in self._workers]

    async def drain(self, within_s: float) -> bool:
        """Take no new work, and finish what there is. False: the bound came first; what is left then stays in the
        state folder."""
        self.draining = True
        try:
            async with asyncio.timeout(within_s):
                while self._entries.is_busy:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """End the workers, and answer every waiting request with what is known."""
        self.draining = self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.end() for worker in self._workers))
        for entry in self._entries:
            entry.stop_timer()
            entry.notify()

    # ---- asking

    async def submit(self, asked: Submission) -> TrackedInquiry:
        """The inquiry's entry, queued if there is something to do. Raises Busy, OutsideRoots, FileSystemTimeout."""
        identity = id_of(asked.inquiry.key)
        known = self._entries.get(identity)
        if known is not None and not lifecycle.is_news(known.record, asked):
            return known
        self._refuse_if_draining()

        def check() -> None:
            for path in (*asked.inquiry.paths, *asked.inquiry.earlier):
                self._roots.check(path)

        await self._aside.run(check)
        # Meanwhile another may have asked the same, and the service may have begun to drain.
        entry = self._entries.get(identity)
        before = None if entry is None else entry.record
        if entry is not None and not lifecycle.is_news(entry.record, asked):
            return entry
        self._refuse_if_draining()
        # Nothing is awaited from here to `put`: the counts that the bounds are compared with hold.
        record = lifecycle.accept(before, asked, self._clock.wall())
        waiting, bounds = self._entries.counts["queued"], self._entries.bounds
        if record.state == "queued" and (before is None or before.state != "queued") and waiting >= bounds.queued:
            mean_s = self._spent_s / max(1, self._analyses)
            raise Busy(f"{waiting} analyses are queued already", max(1.0, mean_s * waiting / len(self._workers)))
        if before is None and record.state == "queued" and self._entries.open >= bounds.open:
            raise Busy(f"{bounds.open} inquiries are open already", retry_in_s=30.0)
        entry = self._entries.put(identity, record)
        self._go_on(identity, entry, before)
        await self._keeper.save(identity, record)
        await self._keeper.drop(self._entries.forget(self._clock.wall()))
        return entry

    def find(self, identity: str) -> TrackedInquiry | None:
        return self._entries.get(identity)

    async def wait(self, entry: TrackedInquiry, wait_s: float, after: int) -> InquiryRecord:
        """The record as soon as it is answered, or says more than its revision `after`; at the latest in `wait_s`."""
        deadline = self._clock.monotonic() + wait_s
        while entry.record.is_open and entry.record.revision <= after and not self._closed:
            left_s = deadline - self._clock.monotonic()
            if left_s <= 0.0:
                break
            try:
                await asyncio.wait_for(entry.news.wait(), left_s)
            except TimeoutError:
                break
        return entry.record

    def in_flight(self) -> InFlight:
        still = [entry.record for entry in self._entries if entry.record.is_open]
        oldest = sorted(still, key=lambda record: record.created_at)[:SHOWN_AT_MOST]
        return InFlight(inquiries=tuple(record.answer() for record in oldest), total=len(still))

    def stats(self) -> Stats:
        return Stats(
            inquiries=dict(self._entries.counts),
            analyses=self._analyses,
            workers_lost=self._lost,
            uptime_s=self._clock.monotonic() - self._started_at,
            mean_analysis_s=self._spent_s / max(1, self._analyses),
            workers=tuple(worker.stats() for worker in self._workers),
        )

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise Busy("the service is about to end and takes no new work", retry_in_s=5.0)

    # ---- working

    async def _work(self, worker: AnalysisWorker) -> None:
        with contextlib.suppress(Exception):  # tried again with the first inquiry, which reports it
            await worker.start()
        while True:
            _, _, identity = await self._queue.get()
            entry = self._entries.get(identity)
            if entry is not None and entry.record.state == "queued":  # not one that was queued twice
                await self._look(worker, identity, entry)
            if not self._entries.is_busy:
                self._idle.set()

    async def _look(self, worker: AnalysisWorker, identity: str, entry: TrackedInquiry) -> None:
        begun = lifecycle.begin(entry.record)
        self._entries.put(identity, begun)
        try:
            await self._keeper.save(identity, begun)
            began = self._clock.monotonic()
            attribution = await worker.analyze(begun.inquiry)
        except asyncio.CancelledError:  # the service ends, and the inquiry has no part in that
            await self._keeper.save(identity, replace(entry.record, state="queued"))
            raise
        except SourceError as error:
            lost = isinstance(error, WorkerLost)
            outcome = "lost" if lost else "failed"
            log.warning("%.200r: %.500r", str(begun.inquiry.key), str(error))  # line breaks in them would forge lines
            ended = lifecycle.give_up(entry.record, begun, str(error), self._clock.wall(), lost=lost)
        else:
            outcome = attribution.verdict
            found = replace(attribution, source="attrsvc")
            ended = lifecycle.conclude(entry.record, begun, found, self._clock.wall())
        seconds = self._clock.monotonic() - began
        self._analyses += 1
        self._spent_s += seconds
        self._lost += outcome == "lost"
        self._metrics.analyses.labels(outcome).inc()
        self._metrics.seconds.observe(seconds)
        # An answer is saved before any client reads it: from then on it never changes. If another request comes
        # meanwhile, `submit` saves what that has changed; then the answer is saved once more, after it.
        before = None
        while ended.state == "done" and entry.record is not before:
            before = entry.record
            await self._keeper.save(identity, ended)
        changed = not ended.is_open or ended.revision != entry.record.revision
        self._entries.put(identity, ended)
        if changed:
            entry.notify()
        self._go_on(identity, entry)
        if ended.state != "done":
            await self._keeper.save(identity, ended)

    def _go_on(self, identity: str, entry: TrackedInquiry, before: InquiryRecord | None = None) -> None:
        """Queue what is to be looked at now, and set a timer for what is to be looked at later."""
        entry.stop_timer()
        record = entry.record
        if record.state == "queued":
            if before is None or (before.state, before.is_last) != (record.state, record.is_last):
                # A last look comes first: a decision may wait for it. The serial keeps the order among equals.
                self._queue.put_nowait((not record.is_last, next(self._serial), identity))
        elif record.is_followed:
            entry.timer = asyncio.get_running_loop().call_later(record.pause_s, self._look_again, identity)

    def _look_again(self, identity: str) -> None:
        entry, now = self._entries.get(identity), self._clock.wall()
        if entry is None or self.draining or not entry.record.is_followed:
            return
        if now - entry.record.created_at >= self._entries.bounds.followed_for_s:
            self._entries.put(identity, lifecycle.close(entry.record, now))
        elif self._entries.counts["queued"] < self._entries.bounds.queued:
            self._entries.put(identity, lifecycle.look_again(entry.record))
        self._go_on(identity, entry)
