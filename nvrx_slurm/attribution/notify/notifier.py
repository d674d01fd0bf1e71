"""Reports a job's decided failures to Slack, an index and the ledger of suspect nodes, each at its own pace."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from nvrx_slurm.attribution.blames import Blame, blames_of
from nvrx_slurm.attribution.http_client import PermanentError, RetryableError
from nvrx_slurm.attribution.ledger import cluster_of, open_ledger
from nvrx_slurm.attribution.notify.base import (
    DecidedFailure,
    DeliveryLimits,
    FlushResult,
    Message,
    Receiver,
    bounded,
)
from nvrx_slurm.attribution.notify.dataflow import DataflowReceiver
from nvrx_slurm.attribution.notify.outbox import OutboxWorker, Spool
from nvrx_slurm.attribution.notify.slack import SlackReceiver
from nvrx_slurm.errors import MalformedRecord, NvrxError, StoreUnreachable, UsageError, WaitTimeout
from nvrx_slurm.jobspec.model import AttributionSpec
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.decoding import decode_json
from nvrx_slurm.util.log import get_logger

log = get_logger("postprocessing")

# Longer than the ledger waits for its lock: the ledger's own error says what is wrong.
LEDGER_S = 10.0


class Notifier:
    """Reports each decided failure to the receivers that the plan names.

    A report goes into `folder`/spool first, and is delivered from there, in order: the next `decided` or `flush`
    delivers what an outage or the end of this process left. `folder` is the job's own, or the one that a service
    keeps for that job: without a job.json no nodes are blamed.
    """

    def __init__(
        self, plan: AttributionSpec, folder: Path, *, clock: Clock | None = None, limits: DeliveryLimits | None = None
    ) -> None:
        self._plan, self._folder = plan, folder
        self._clock, self._limits = clock or SystemClock(), limits or DeliveryLimits()
        self._making: asyncio.Task[list[OutboxWorker]] | None = None
        self._deliveries: dict[str, asyncio.Task[FlushResult]] = {}
        self._missed: set[str] = set()

    async def decided(self, decided: DecidedFailure) -> None:
        """Spool its reports, within a few seconds even on a slow disk; delivery goes on in the background.

        Never raises.
        """
        try:
            workers = await self._workers()
            await asyncio.gather(*(worker.put(decided) for worker in workers))
            for worker in workers:
                self._start_delivery(worker)
        except Exception:
            log.exception("failure %s: not every receiver gets a report", decided.key)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Finish the deliveries, in `timeout_s` at most; the rest stays in the spool. Never raises."""
        workers = await self._workers() if self._making else []
        for worker in workers:
            self._start_delivery(worker)  # a receiver that was away may be back
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while self._deliveries and clock() < deadline:  # another delivery may follow one that ends
            await asyncio.wait(self._deliveries.values(), timeout=deadline - clock())
        for delivery in list(self._deliveries.values()):
            delivery.cancel()
            await asyncio.gather(delivery, return_exceptions=True)
        for worker in workers:
            await worker.close()

    async def flush(self) -> list[FlushResult]:
        """Deliver everything that is spooled; one result for each receiver."""
        return [await worker.empty() for worker in await self._workers()]

    def _start_delivery(self, worker: OutboxWorker) -> None:
        # One delivery at a time; a report that arrives while one is about to end gets a delivery of its own.
        name = worker.receiver.name
        if name in self._deliveries:
            self._missed.add(name)
            return
        self._missed.discard(name)
        self._deliveries[name] = asyncio.create_task(worker.empty(), name=f"deliver to {name}")

        def on_end(delivery: asyncio.Task[FlushResult]) -> None:
            del self._deliveries[name]
            # A receiver with a problem is not asked again at once: the next report, or `close`, starts a delivery.
            if name in self._missed and not delivery.cancelled() and delivery.result().problem is None:
                self._start_delivery(worker)

        self._deliveries[name].add_done_callback(on_end)

    async def _workers(self) -> list[OutboxWorker]:
        # Made when first needed, since it reads the job's folder.
        self._making = self._making or asyncio.create_task(self._make_workers())
        # Shielded: a report that is cancelled must not end what the other reports wait for.
        return await asyncio.shield(self._making)

    async def _make_workers(self) -> list[OutboxWorker]:
        plan, clock, limits, spool = self._plan, self._clock, self._limits, self._folder / "spool"
        name, cluster, has_blames = "", None, False
        try:
            info, has_blames = await bounded(
                lambda: (JobFolder(self._folder).read_info(), (spool / LedgerReceiver.name).is_dir())
            )
        except (OSError, UsageError) as error:
            log.warning("%s: its job.json cannot be read (%s)", self._folder, error)
        else:
            if info:
                name, cluster = info.name, cluster_of(info, plan.ledger)
        found: list[Receiver] = []
        # What a job has left for the ledger names its cluster: it is delivered also where Slurm names none.
        if cluster is not None or has_blames:
            found.append(LedgerReceiver(plan.ledger, cluster=cluster, clock=clock))
        if plan.dataflow is not None:
            found.append(DataflowReceiver(plan.dataflow, name=name, cluster=cluster, limits=limits, clock=clock))
        if plan.slack is not None:
            found.append(SlackReceiver(plan.slack, self._folder, name=name, limits=limits, clock=clock))
        return [OutboxWorker(each, Spool(spool / each.name, clock), limits=limits, clock=clock) for each in found]


async def flush(
    plan: AttributionSpec, folder: Path, *, clock: Clock | None = None, limits: DeliveryLimits | None = None
) -> list[FlushResult]:
    """Deliver all that a job has left in its spool: one result for each receiver of the plan. Never raises."""
    notifier = Notifier(plan, folder, clock=clock, limits=limits)
    try:
        return await notifier.flush()
    finally:
        await notifier.close(0.0)


class LedgerReceiver:
    """Writes blames of nodes into the ledger at `where`: a receiver like the others, for it may be as far away.
    `cluster`: whose nodes failures blame; None: none of them blames any."""

    name, batch = "ledger", 1

    def __init__(self, where: str | None, *, cluster: str | None, clock: Clock) -> None:
        self._where, self._cluster, self._clock = where, cluster, clock

    def body(self, decided: DecidedFailure) -> bytes | None:
        if self._cluster is None:
            return None
        now = self._clock.wall()
        blames = blames_of(decided.inquiry, decided.attributions, cluster=self._cluster, at=now)
        return msgspec.json.encode(blames) if blames else None

    async def deliver(self, messages: Sequence[Message]) -> Mapping[str, str | None]:
        (message,) = messages
        try:
            blames = decode_json(list[Blame], message.body, "the blames")
        except MalformedRecord:
            return {message.identity: "the spooled message holds no blames"}

        def write() -> None:
            open_ledger(self._where, cluster=self._cluster or "", clock=self._clock).blame(blames)

        try:
            await bounded(write, LEDGER_S)
        except (TimeoutError, WaitTimeout) as error:
            raise RetryableError(f"the ledger does not answer ({error or 'in time'})") from None
        except StoreUnreachable as error:
            raise (PermanentError if error.refused else RetryableError)(str(error)) from None
        except NvrxError as error:
            raise PermanentError(str(error)) from None
        return {message.identity: None}

    async def close(self) -> None:
        """It holds nothing open."""
