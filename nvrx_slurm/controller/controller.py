"""The controller: hears facts, lets the core decide, journals, and thereby orders. It alone decides.

    inbox ─┐
    tether ┼─▶ one queue ─▶ core.step ─▶ one commit (journal, ranks, orders, together) ─▶ events.jsonl
    beats ─┤
    timer ─┘

It holds no state that the store does not: killed at any moment, the next one replays the journal through the core,
takes a newer epoch, which fences this one, and goes on with the first fact that the journal does not account for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from nvrx_slurm.clock import Clock
from nvrx_slurm.controller.mirror import Mirror, read_copy
from nvrx_slurm.controller.server_clock import ServerClock
from nvrx_slurm.core.assignment import assignments
from nvrx_slurm.core.job import next_deadline, step
from nvrx_slurm.core.liveness import Liveness
from nvrx_slurm.core.state import Job, new_job
from nvrx_slurm.folder import JobFolder, JobInfo, Result
from nvrx_slurm.log import get_logger
from nvrx_slurm.records import (
    AnyFact,
    ControllerStarted,
    ControllerUp,
    Decision,
    Entry,
    Fact,
    Fence,
    JobStarted,
    NodeJoined,
    NodeLeft,
    NodeLost,
    Plan,
    Record,
    ReplicaEnded,
    RoundClosed,
    RoundOpened,
    Shutdown,
    Signalled,
    SignalReason,
    Tick,
    WorkerFailed,
    unpack_record,
)
from nvrx_slurm.store.client import Round, Store
from nvrx_slurm.tether import TetherServer

log = get_logger("controller")

MIRROR_FLUSH_S = 10.0
LEASE_BEATS = 3
KEEP_KEYS_S = 3600
"""How long a site's own store keeps the keys of a job that has ended."""

SIGNALS: dict[signal.Signals, SignalReason] = {
    signal.SIGTERM: "cancel",
    signal.SIGINT: "interrupt",
    signal.SIGUSR1: "time_limit",
    signal.SIGUSR2: "agents_gone",
}
"""How the batch host, the controller's parent, says that the job must end."""

ORDERS = (RoundOpened, RoundClosed, ReplicaEnded, Shutdown, Fence)


@dataclass(frozen=True, slots=True)
class Heard:
    """A fact on its way to the core. `inbox_id` names its place in the inbox, if it came from there."""

    fact: AnyFact
    inbox_id: str = ""


@dataclass(slots=True)
class Batch:
    """What one commit carries."""

    entries: list[Entry] = field(default_factory=list)
    orders: list[Record] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    cursor: str = ""
    shutdown: Shutdown | None = None


class Controller:
    """One job's decider. `run` returns once the job has ended, or raises FencedError."""

    def __init__(
        self, *, plan: Plan, info: JobInfo, folder: JobFolder, store: Store, token: str, bind: str, clock: Clock
    ) -> None:
        self.plan, self.info, self.folder, self.store, self.bind = plan, info, folder, store, bind
        self.clock, self.server_clock = clock, ServerClock(clock)
        self.owner = f"{socket.gethostname()}:{os.getpid()}"
        self.job: Job = new_job(plan)
        self.mirror = Mirror(folder.events_path)
        self.tethers = TetherServer(token, self._tether_up, self._tether_lost)
        bounds = plan.fault_tolerance
        grace_until = clock.monotonic() + bounds.heartbeat_timeout_s
        self.liveness = Liveness(timeout_s=bounds.heartbeat_timeout_s, grace_until=grace_until)
        self.queue: asyncio.Queue[Heard] = asyncio.Queue()
        self.steps: dict[str, int] = {}  # node → last step told in a beat
        self.epoch = 0
        self.written = 0  # number of the last journal entry

    async def run(self) -> Shutdown:
        """Take over, serve, and return how the job ended."""
        for number, reason in SIGNALS.items():
            asyncio.get_running_loop().add_signal_handler(number, self._signalled, reason)
        cursor = await self._take_over()
        tasks = [
            asyncio.create_task(self._read_inbox(cursor)),
            asyncio.create_task(self._read_beats()),
            asyncio.create_task(self._watch_silence()),
            asyncio.create_task(self._renew_lease()),
        ]
        try:
            return await self._serve(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await self.tethers.close()
            self.mirror.close(MIRROR_FLUSH_S)

    # ---- start

    async def _take_over(self) -> str:
        """Fence older controllers, get the state out of the journal, say where the tether listens."""
        kept = self.mirror.last_number()
        self.epoch, self.written, cursor = await self.store.acquire(self.owner, self._lease_s(), kept)
        self.server_clock.set(await self.store.time())
        journal = await self.store.journal()
        self.mirror.start(journal)
        if kept and not journal:  # requeued, with a fresh store: budgets live on, nodes do not
            journal = read_copy(self.folder.events_path)
        replay(self.job, journal)
        if journal:
            self.server_clock.start_after(journal[-1].t)
        for node in self.job.nodes.values():
            if node.alive:
                self.liveness.watch(node.name, self.clock.monotonic())
        port = await self.tethers.start("0.0.0.0" if self.bind == "*" else self.bind)
        up = ControllerUp(epoch=self.epoch, host=self._advertised(), port=port)
        host, pid = socket.gethostname(), os.getpid()
        batch = self._decide([Heard(ControllerStarted(epoch=self.epoch, host=host, pid=pid)), *self._begin()])
        batch.orders.append(up)
        await self._commit(batch, up)
        log.info("epoch %d, %d journal entries replayed", self.epoch, len(journal))
        return cursor

    def _begin(self) -> list[Heard]:
        started = self.job.started_at and self.job.generation >= self.info.generation
        if started:
            return []
        info = self.info
        return [Heard(JobStarted(job=info.job_id, name=info.name, expected=info.nodes, generation=info.generation))]

    def _advertised(self) -> str:
        return self.info.addr if self.bind == "*" else self.bind

    # ---- the loop

    async def _serve(self, tasks: list[asyncio.Task[None]]) -> Shutdown:
        while not self.job.ended:
            await self._commit(self._decide(await self._next_batch(tasks)))
        shutdown, now = self.job.shutdown, self.server_clock.now()
        assert shutdown is not None
        self.folder.write_result(Result(exit_code=shutdown.exit_code, reason=shutdown.reason, ended_at=now))
        await self.store.retire(KEEP_KEYS_S)
        return shutdown

    async def _next_batch(self, tasks: list[asyncio.Task[None]]) -> list[Heard]:
        """Wait for a fact, or for the core's next deadline, or for a task that failed; take all that is there."""
        deadline = next_deadline(self.job)
        timeout = None if deadline is None else self.server_clock.until(deadline)
        getting = asyncio.ensure_future(self.queue.get())
        await asyncio.wait([getting, *tasks], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                getting.cancel()
                task.result()
        if not getting.done():
            getting.cancel()
            return [Heard(Tick())]
        batch = [getting.result()]
        while not self.queue.empty():
            batch.append(self.queue.get_nowait())
        return batch

    def _decide(self, heard: Iterable[Heard]) -> Batch:
        batch = Batch()
        for item in heard:
            now = self.server_clock.now()
            fact = _with_age(item, now)
            decisions = step(self.job, fact, now)
            batch.cursor = item.inbox_id or batch.cursor
            if decisions is None or (isinstance(fact, Tick) and not decisions):
                continue
            self._watch(fact)
            for record in (fact, *decisions):
                self._take(batch, record, now)
        return batch

    def _take(self, batch: Batch, record: Record, now: float) -> None:
        """One record into the batch: the journal first, then what agents get to see of it."""
        self.written += 1
        batch.entries.append(Entry(n=self.written, t=now, record=record))  # type: ignore[arg-type]
        if isinstance(record, Decision):
            log.info("%s", record)
        if isinstance(record, RoundClosed):
            role = self.job.replicas[record.replica].role
            batch.rounds.append((record.replica, record.generation, record.cycle, list(assignments(record, role))))
            # An agent reads its own field of the round only: the order need not name everybody to everybody.
            record = msgspec.structs.replace(record, nodes=(), promoted=())
        if isinstance(record, Shutdown):
            batch.shutdown = record
        if isinstance(record, ORDERS):
            batch.orders.append(record)

    async def _commit(self, batch: Batch, controller: ControllerUp | None = None) -> None:
        if not (batch.entries or batch.orders or batch.cursor):
            return
        server_time = await self.store.commit(
            self.epoch,
            batch.entries,
            orders=batch.orders,
            rounds=batch.rounds,
            cursor=batch.cursor,
            shutdown=batch.shutdown,
            controller=controller,
        )
        self.server_clock.set(server_time)
        self.mirror.add(batch.entries)

    def _signalled(self, reason: SignalReason) -> None:
        self.queue.put_nowait(Heard(Signalled(reason=reason, generation=self.info.generation)))

    # ---- witnesses

    def _watch(self, fact: Fact) -> None:
        now = self.clock.monotonic()
        if isinstance(fact, NodeJoined):
            self.liveness.watch(fact.node, now)
        elif isinstance(fact, NodeLost | NodeLeft):
            self.liveness.drop(fact.node)

    def _tether_up(self, node: str, incarnation: str) -> None:
        self.liveness.heard(node, self.clock.monotonic())

    def _tether_lost(self, node: str, incarnation: str) -> None:
        self._lose(node, incarnation, "tether_lost")

    def _lose(self, node: str, incarnation: str, cause: str) -> None:
        lost = NodeLost(node=node, incarnation=incarnation, cause=cause, step=self.steps.get(node))
        self.queue.put_nowait(Heard(lost))

    async def _read_inbox(self, cursor: str) -> None:
        while True:
            for identity, data in await self.store.inbox(cursor):
                cursor = identity
                try:
                    record = unpack_record(data)
                except msgspec.DecodeError as error:
                    log.error("inbox item %s is no record (%s); dropped", identity, error)
                    continue
                if isinstance(record, Fact):
                    self.queue.put_nowait(Heard(record, identity))

    async def _read_beats(self) -> None:
        last = "$"
        while True:
            beats = await self.store.beats(last)
            now = self.clock.monotonic()
            for identity, beat in beats:
                last = identity
                node = self.job.nodes.get(beat.node)
                if node is not None and node.incarnation == beat.incarnation:
                    self.liveness.heard(beat.node, now)
                    if beat.steps:
                        self.steps[beat.node] = max(beat.steps.values())

    async def _watch_silence(self) -> None:
        while True:
            now = self.clock.monotonic()
            for name in self.liveness.silent(now):
                self.liveness.drop(name)
                self._lose(name, self.job.nodes[name].incarnation, "heartbeat_timeout")
            deadline = self.liveness.next_deadline()
            interval_s = self.plan.fault_tolerance.heartbeat_interval_s
            await asyncio.sleep(interval_s if deadline is None else max(deadline - now, interval_s / 4))

    async def _renew_lease(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                await self.store.renew(self.owner, self._lease_s())
            await asyncio.sleep(self.plan.fault_tolerance.heartbeat_interval_s)

    def _lease_s(self) -> float:
        return LEASE_BEATS * self.plan.fault_tolerance.heartbeat_interval_s


def replay(job: Job, journal: Iterable[Entry]) -> list[tuple[Entry, Record | None]]:
    """Feed a journal's facts to the core again. Returns where its decisions differ from those in the journal.

    Each difference is the journal's entry with the decision that came instead (None: nothing came).
    """
    differences: list[tuple[Entry, Record | None]] = []
    due: list[Decision] = []
    for entry in journal:
        if isinstance(entry.record, Fact):
            due = list(step(job, entry.record, entry.t) or [])
            continue
        decided = due.pop(0) if due else None
        if decided != entry.record:
            differences.append((entry, decided))
    return differences


def _with_age(item: Heard, now: float) -> AnyFact:
    """Add the time on the way to what tells its own age, so that a recovery is counted from the death."""
    fact = item.fact
    if not item.inbox_id or not isinstance(fact, WorkerFailed):
        return fact
    arrived = int(item.inbox_id.partition("-")[0]) / 1000
    return msgspec.structs.replace(fact, ago_s=fact.ago_s + max(0.0, now - arrived))
