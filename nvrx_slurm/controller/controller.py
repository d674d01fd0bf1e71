"""The controller: receives facts, lets the core decide, journals, and so gives orders. No other process decides.

    inbox ─────┐
    detector ──┼─▶ one queue ─▶ core.step ─▶ one commit (journal, ranks, orders, together) ─▶ events.jsonl
    broker ──────┤
    timer ─────┘

It holds no state that the store does not. If it is killed, at any moment, the next one replays the journal through
the core, takes a newer epoch, which fences this one, and continues with the first fact that is not in the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from nvrx_slurm.controller.attribution_requests import AttributionRequests
from nvrx_slurm.controller.environment import ControllerEnvironment
from nvrx_slurm.controller.failure_detector import FailureDetector
from nvrx_slurm.core.assignment import assignments
from nvrx_slurm.core.job import next_deadline, step
from nvrx_slurm.core.state import ControlState, NodeState, new_job
from nvrx_slurm.errors import StoreUnreachable
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.folder import JobInfo, Result
from nvrx_slurm.journal.records import (
    AnyFact,
    Attributed,
    CommandOrdered,
    ControllerStarted,
    ControllerUp,
    Decision,
    DecisionsLate,
    DumpOrdered,
    Entry,
    Fact,
    Fence,
    JobResumed,
    JobStarted,
    JobSuspended,
    LogFindings,
    NodeJoined,
    NodeLeft,
    NodeLost,
    Record,
    RendezvousClosed,
    RendezvousOpened,
    ReplicaEnded,
    Shutdown,
    Signalled,
    SignalReason,
    StoreDataLost,
    Suspending,
    Terminating,
    Tick,
)
from nvrx_slurm.journal.verdicts import Attribution, FailureKey
from nvrx_slurm.store.client import BLOCK_MS, INBOX_BATCH, Rendezvous, StoreClient
from nvrx_slurm.store.heartbeat_reader import HeartbeatReader
from nvrx_slurm.util.admission import LOG_EVERY_S
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.standstill import standstill
from nvrx_slurm.util.tasks import end

log = get_logger("controller")

MIRROR_FLUSH_S = 10.0
# A read of the inbox returns sooner than this, with or without facts, unless something stands still.
INBOX_STALL_S = BLOCK_MS / 1000 + 1.0

CATCH_UP_S = 0.05

# Orders that agents can read so much later than what they rest on arrived are late: each deadline counts from then.
LATE_S = 2.0
# How long the store may keep a controller whose job has ended.
LAST_WORDS_S = 5.0

AFTERWARDS_S, LEDGER_S = 6.0, 3.0  # longer than the broker still waits for answers
LEASE_BEATS = 3
# How long a site's own store keeps the keys of a job that has ended.
KEEP_KEYS_S = 3600
# Controllers that committed nothing may have got epochs that the copy does not know, and one of them may be frozen
# and go on. No generation of a job has had so many by its age.
EPOCHS_PER_S, MOST_EPOCHS = 10, 2**30

# The signals with which the batch host, the controller's parent, asks it to end the job.
SIGNALS: dict[signal.Signals, SignalReason] = {
    signal.SIGTERM: "cancel",
    signal.SIGINT: "interrupt",
    signal.SIGUSR1: "time_limit",
    signal.SIGUSR2: "agents_gone",
    signal.SIGALRM: "no_agents",
    signal.SIGHUP: "hangup",
    signal.SIGQUIT: "lease_lapsed",
}

# Those that a preemption may be behind.
BY_SLURM = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

EXPLAINED_S = 3.0

ORDERS = (
    RendezvousOpened,
    RendezvousClosed,
    ReplicaEnded,
    Shutdown,
    Fence,
    JobSuspended,
    DumpOrdered,
    CommandOrdered,
)


class InboundFact(msgspec.Struct, frozen=True):
    """A fact on its way to the core. `inbox_id`: its place in the inbox, if it came from there; `since`: a moment on
    this process's monotonic clock at which it was not yet there."""

    fact: AnyFact | LogFindings
    inbox_id: str = ""
    since: float | None = None


class Batch(msgspec.Struct):
    """What one commit carries."""

    entries: list[Entry] = []
    orders: list[Record] = []
    rendezvous: list[Rendezvous] = []
    cursor: str = ""
    shutdown: Shutdown | None = None
    nodes: set[str] = set()  # whose agent has joined, or is gone


class Controller:
    """One job's decider. `run` returns once the job has ended, or raises FencedError."""

    def __init__(
        self,
        *,
        plan: Plan,
        info: JobInfo,
        environment: ControllerEnvironment,
        store: StoreClient,
        heartbeats: HeartbeatReader,
        token: str,
        bind: str,
        clock: Clock,
    ) -> None:
        self.plan, self.info, self.environment, self.store, self.bind = plan, info, environment, store, bind
        self.clock, self.server_clock = clock, ServerClock(clock)
        self.owner = f"{environment.host}:{environment.pid}"
        self.job: ControlState = new_job(plan)
        self.mirror = environment.mirror
        self.queue: asyncio.Queue[InboundFact] = asyncio.Queue()
        self.heartbeats = heartbeats
        self.inbox_read_at = -math.inf  # not yet: facts that arrived without a controller precede any deadline
        self.detector = FailureDetector(
            plan=plan,
            info=info,
            nodes=lambda: self.job.nodes,
            heartbeats=heartbeats,
            environment=environment,
            token=token,
            clock=clock,
            post=self._post,
        )
        self.broker = environment.attribution_broker(self._attributed)
        self.requests = AttributionRequests(self.job, environment.files, self.broker)
        self.epoch = 0
        self._explaining: asyncio.Task[None] | None = None
        self.written = self.committed = 0  # numbers of the last journal entry, and of the last that the store has

    async def run(self) -> Shutdown:
        """Take over, serve, and return how the job ended."""
        # Before the take-over, which may wait for the store: a signal that arrives meanwhile waits in the queue.
        for number in SIGNALS:
            self.environment.on_signal(number, self._signalled)
        cursor, late = await self._take_over()
        tasks = [
            asyncio.create_task(self._read_inbox(cursor)),
            asyncio.create_task(self.detector.run()),
            asyncio.create_task(self._renew_lease()),
            asyncio.create_task(self._watch_orders(await self.store.newest_order())),
        ]
        try:
            return await self._serve(tasks, late)
        finally:
            await end(tasks if self._explaining is None else [*tasks, self._explaining])
            await self.detector.close()
            settings = self.plan.fault_tolerance.attribution  # the broker may still have messages to deliver
            await self.broker.close(AFTERWARDS_S if settings.slack or settings.dataflow else LEDGER_S)
            self.mirror.close(MIRROR_FLUSH_S)

    # ---- start

    async def _take_over(self) -> tuple[str, list[InboundFact]]:
        """Fence older controllers, get the state out of the journal, announce where the controller listens. Returns
        the place from which the inbox is to be read, and what comes before it."""
        info, host, kept = self.info, self.environment.host, self.mirror.last_number()
        # From here on the store refuses an older controller's commits: the journal that is read below is whole.
        self.epoch, self.written, cursor = await self.store.acquire(self.owner, self._lease_s(), kept)
        copied: list[Entry] = []
        if not self.epoch:
            # A fresh store, as that of a job which was requeued, or one that has lost its data: only the copy has
            # what it lacks. Numbers and epochs go on from there: agents read no older order.
            copied = list(self.environment.read_copy())
            kept = max((entry.n for entry in copied), default=0)  # an older controller may have added to it meanwhile
            epochs = [entry.record.epoch for entry in copied if isinstance(entry.record, ControllerStarted)]
            unknown = max(0, round(EPOCHS_PER_S * (self.clock.wall() - info.started_at)))
            epoch = min(max(epochs, default=0) + unknown, MOST_EPOCHS)
            self.epoch, self.written, cursor = await self.store.acquire(self.owner, self._lease_s(), kept, epoch)
        self.server_clock.set(await self.store.time())
        dated = await self.store.dated_journal()
        journal = [entry for _, entry in dated]
        self.mirror.start(journal)
        lost = max(0, kept - (journal[-1].n if journal else 0))
        if kept and len(journal) < self.written:
            in_store = {entry.n for entry in journal}
            lacking = [entry for entry in copied or self.environment.read_copy() if entry.n not in in_store]
            journal = sorted([*lacking, *journal], key=lambda entry: entry.n)
        self.committed = self.written
        replay(self.job, journal)
        self.requests.replayed((entry.record, entry.t) for entry in journal)
        # Whether an earlier controller of this generation has begun the job. All of them run on one host, which has
        # not booted since: the job would not have outlived that.
        has_begun = self.job.started_at > 0.0 and self.job.generation >= info.generation
        # The journal's time goes on by this host's clock, where the controller before ran here too; and never back.
        for entry in reversed(journal):
            if isinstance(before := entry.record, ControllerStarted):
                if before.clock_s and before.host == host and has_begun:
                    self.server_clock.go_on(entry.t, before.clock_s)
                break
        if journal:
            self.server_clock.start_after(journal[-1].t)
        if has_begun:  # else these nodes are of the generation before, and the job may not have them any more
            self.detector.start_with(node for node in self.job.nodes.values() if node.alive)
        # It listens before agents learn of it, and they learn of it in the commit that begins its epoch.
        port = await self.detector.server.start("0.0.0.0" if self.bind == "*" else self.bind)
        up = ControllerUp(epoch=self.epoch, host=info.addr if self.bind == "*" else self.bind, port=port)
        pid, clock_s = self.environment.pid, self.clock.monotonic()
        facts: list[AnyFact] = [ControllerStarted(epoch=self.epoch, host=host, pid=pid, clock_s=clock_s)]
        if has_begun:
            facts[:0] = _unmarked(dated)
            if lost:
                log.error("the store has lost the last %d entries of the journal: all agents join again", lost)
                facts.append(StoreDataLost(entries=lost, generation=info.generation))
        else:
            facts.append(
                JobStarted(
                    job=info.job_id,
                    name=info.name,
                    expected=info.nodes,
                    generation=info.generation,
                    suspects=info.suspects,
                )
            )
        batch, _ = self._decide([InboundFact(fact) for fact in facts])
        late = await self._commit(batch, up)
        if self.plan.fault_tolerance.attribution.acts:
            self.broker.open()
        self.requests.go_on()
        self._report(list(self.job.nodes))
        log.info("epoch %d, %d journal entries replayed", self.epoch, len(journal))
        return cursor, late

    # ---- the loop

    async def _serve(self, tasks: list[asyncio.Task[None]], left: list[InboundFact]) -> Shutdown:
        try:
            while not self.job.ended:
                if left:
                    inbound = left
                elif self.job.suspended_at is None:
                    inbound = await self._next_batch(tasks)
                else:  # what arrives meanwhile stays in the queue: after the resumption no deadline is overdue
                    inbound = [await self._sit_out_suspension(tasks)]
                batch, left = self._decide(inbound)
                left[:0] = await self._commit(batch)
                # Only after the commit: a fence or a request that no journal knows would be lost with this process,
                # or sent by a controller that a newer one has fenced.
                for order in batch.orders:
                    if isinstance(order, Fence):
                        self.detector.fence(order.node, order.incarnation)
                self._report(batch.nodes)
                self.requests.go_on()
        except StoreUnreachable as error:
            if self.job.shutdown is None:
                raise
            log.warning("%s; the job ends as it was decided", error)  # the batch host ends the agents that are left
        shutdown, now = self.job.shutdown, self.server_clock.now()
        assert shutdown is not None
        self.store.hurry(LAST_WORDS_S)
        # First of all: without a result the batch host starts another controller.
        self.environment.write_result(Result(exit_code=shutdown.exit_code, reason=shutdown.reason, ended_at=now))
        with contextlib.suppress(StoreUnreachable):  # the job has ended: its keys expire by themselves
            await self.store.retire(KEEP_KEYS_S)
        return shutdown

    async def _next_batch(self, tasks: list[asyncio.Task[None]]) -> list[InboundFact]:
        """Wait for a fact, for the core's next deadline, or for a task that failed. Returns all queued facts."""
        deadline = next_deadline(self.job)
        timeout = None if deadline is None else self.server_clock.until(deadline)
        getting = asyncio.ensure_future(self.queue.get())
        await _wait(getting, tasks, timeout)
        if not getting.done():
            getting.cancel()
            # A fact that is in the queue by now, and has not woken this task, comes before the deadline.
            return [InboundFact(Tick())] if await self._has_read_all() and self.queue.empty() else []
        batch = [getting.result()]
        while not self.queue.empty():
            batch.append(self.queue.get_nowait())
        # Its own facts come after those that arrived while it stood still: the time of one, which is now, would be
        # past a deadline that those in the inbox have kept.
        own = [item for item in batch if not item.inbox_id]
        if own and not await self._has_read_all():
            for item in own:
                self.queue.put_nowait(item)
            return [item for item in batch if item.inbox_id]
        return batch

    async def _sit_out_suspension(self, tasks: list[asyncio.Task[None]]) -> InboundFact:
        """Wait until this process has stood still with the job, or for as long as the announcement may come ahead."""
        self.detector.suspended = True
        waiting = asyncio.ensure_future(standstill(self.clock))
        await _wait(waiting, tasks)
        stood_still_s = await waiting
        log.info("resumed: the job stood still for %.1f s", stood_still_s)
        self.detector.resume(stood_still_s)
        arrived = [self.queue.get_nowait() for _ in range(self.queue.qsize())]
        for item in arrived:  # a node that was suspended late has announced this suspension, not another one
            if not isinstance(item.fact, Suspending):
                self.queue.put_nowait(item)
        return InboundFact(JobResumed(generation=self.job.generation, stood_still_s=stood_still_s))

    async def _has_read_all(self) -> bool:
        """Whether the inbox is being read; waits a moment where it is not."""
        # After a freeze of this process or of the store, the facts that arrived meanwhile come first: one of them may
        # be what the deadline waited for.
        if self.clock.monotonic() - self.inbox_read_at < INBOX_STALL_S:
            return True
        await asyncio.sleep(CATCH_UP_S)
        return False

    def _decide(self, inbound: list[InboundFact]) -> tuple[Batch, list[InboundFact]]:
        """What one commit carries, and the facts that come after it: first the agents must know of late orders."""
        batch = Batch()
        for number, item in enumerate(inbound, start=1):
            fact, before = item.fact, self.server_clock.last
            if isinstance(fact, LogFindings):  # for the broker: the core, and so the journal, knows nothing of it
                batch.cursor = item.inbox_id or batch.cursor
                self.requests.found(fact)
                continue
            if item.inbox_id:
                # A fact counts from its arrival in the store, not from when it is read: a backlog, after a freeze of
                # this process or of the store, is judged as if it had been read in time.
                now = self.server_clock.stamp(int(item.inbox_id.partition("-")[0]) / 1000, item.since)
            else:
                now = self.server_clock.now()
            due_before = next_deadline(self.job) if isinstance(fact, Tick) else None
            decisions = step(self.job, fact, now)
            batch.cursor = item.inbox_id or batch.cursor
            # A tick that moved a deadline must not be missing from a replay.
            is_idle = isinstance(fact, Tick) and not decisions and next_deadline(self.job) == due_before
            if decisions is None or is_idle:
                self.server_clock.last = before  # it left no trace: a fact that arrived before it keeps its own time
                continue
            self.detector.take_note(fact)
            if isinstance(fact, Terminating) and self.info.cluster == "slurm":
                self._explain(None)
            for record in (fact, *decisions):
                self._take(batch, record, now)
            if batch.orders and self.server_clock.passed_since(now) > LATE_S:
                return batch, inbound[number:]
        return batch, []

    def _take(self, batch: Batch, record: Record, now: float) -> None:
        """Put one record into the batch: into the journal first, then into the orders that agents read."""
        self.written += 1
        self.requests.note(record, now)
        batch.entries.append(Entry(n=self.written, t=now, record=record))  # type: ignore[arg-type]
        if isinstance(record, Decision):
            log.info("%s", record)
        if isinstance(record, RendezvousClosed):
            role = self.job.replicas[record.replica].role
            ranks = [
                (node, msgspec.structs.replace(assignment, incarnation=self.job.nodes[node].incarnation))
                for node, assignment in assignments(record, role, self.job.seen.get(role.name))
            ]
            batch.rendezvous.append((record.replica, record.generation, record.cycle, ranks))
            # An agent reads its own field of the assignment only: the order need not name every node to every node.
            record = msgspec.structs.replace(record, nodes=(), promoted=())
        if isinstance(record, Shutdown):
            batch.shutdown = record
        if isinstance(record, ORDERS):
            batch.orders.append(record)
        if isinstance(record, NodeJoined | NodeLeft | NodeLost | Fence):
            batch.nodes.add(record.node)

    def _report(self, nodes: Iterable[str]) -> None:
        """Tell the batch host where an agent is missing. Not of nodes that were lost too often: they get no ranks."""
        limit = self.plan.fault_tolerance.quarantine_after
        for node in (self.job.nodes[name] for name in nodes if name in self.job.nodes):
            if node.alive:
                self.environment.report_node(node.name, is_lost=False)
            elif node.state in (NodeState.LOST, NodeState.LEFT) and node.deaths < limit and not self.job.shutdown:
                self.environment.report_node(node.name, is_lost=True)

    async def _commit(self, batch: Batch, controller: ControllerUp | None = None) -> list[InboundFact]:
        """Returns what the core must learn before any other fact: that these decisions reached the agents late."""
        if not (batch.entries or batch.orders or batch.cursor):
            return []
        asked_at = self.clock.monotonic()
        server_time = await self.store.commit(
            self.epoch,
            batch.entries,
            orders=batch.orders if controller is None else [*batch.orders, controller],
            rendezvous=batch.rendezvous,
            cursor=batch.cursor,
            shutdown=batch.shutdown,
            controller=controller,
        )
        self.server_clock.set(server_time, self.clock.monotonic() - asked_at)
        self.mirror.add(batch.entries)  # only what the store has taken: the copy is never ahead of its source
        self.committed = self.written
        if batch.orders and self.server_clock.passed_since(since := batch.entries[0].t) > LATE_S:
            return [InboundFact(DecisionsLate(since=since))]
        return []

    def _signalled(self, number: signal.Signals) -> None:
        if self.info.cluster == "slurm" and number in BY_SLURM:
            self._explain(SIGNALS[number])
        else:
            self._post(Signalled(reason=SIGNALS[number], generation=self.info.generation))

    def _explain(self, reason: SignalReason | None) -> None:
        """Ask Slurm why it has signalled the job; without evidence of a preemption it was for `reason`."""
        if self._explaining is None or self._explaining.done():
            self._explaining = asyncio.get_running_loop().create_task(self._ask_slurm(reason))
        elif reason is not None:
            self._explaining.add_done_callback(lambda _: self._explain(reason) if self.job.shutdown is None else None)

    async def _ask_slurm(self, reason: SignalReason | None) -> None:
        job, generation = None, self.info.generation
        with contextlib.suppress(TimeoutError, OSError, RuntimeError):  # also where no process can be started
            async with asyncio.timeout(EXPLAINED_S):
                job = await self.environment.signalled_job(self.info.slurm_id, generation)
        if job is not None and job.preempted:
            self._post(Signalled(reason="preempted", generation=generation, saves=job.has_grace))
        elif reason is None and self.info.allocation is not None and job is not None and job.taken is not None:
            # Slurm ends an allocation of the user's: it has signalled the agents alone, and not the batch host.
            self._post(Signalled(reason=job.taken, generation=generation))
        elif reason is not None:
            self._post(Signalled(reason=reason, generation=generation))

    # ---- facts

    def _attributed(self, key: FailureKey, attribution: Attribution) -> None:
        self._post(
            Attributed(
                replica=key.replica,
                cycle=key.cycle,
                generation=key.generation,
                rank=key.rank,
                attribution=attribution,
            )
        )

    def _post(self, fact: AnyFact) -> None:
        self.queue.put_nowait(InboundFact(fact))

    async def _read_inbox(self, cursor: str) -> None:
        since: float | None = None
        while True:
            asked_at = self.clock.monotonic()
            items = await self.store.inbox(cursor)
            now = self.clock.monotonic()
            # An answer that took longer than it may is from before this process stood still: facts may have arrived
            # since, and the next read brings them.
            self.inbox_read_at = now if now - asked_at < INBOX_STALL_S else asked_at
            for identity, fact in items:
                cursor = identity
                if fact is not None:
                    self.queue.put_nowait(InboundFact(fact, identity, since))
            if len(items) < INBOX_BATCH:  # all that had arrived by then
                since = asked_at

    async def _renew_lease(self) -> None:
        """Renew this controller's lease, and journal at most once a minute how many records were refused."""
        posted_at = -math.inf
        while True:
            await self.store.renew(self.owner, self._lease_s(), self.epoch, self.committed)
            now = self.clock.monotonic()
            if now - posted_at >= LOG_EVERY_S:
                for fact in (*self.store.refused.take(), *self.heartbeats.refused.take()):
                    posted_at = now
                    self._post(fact)
            await asyncio.sleep(self.plan.fault_tolerance.heartbeat.interval)

    async def _watch_orders(self, after: str) -> None:
        """Read what agents read, after the newest order at the take-over: the store client counts forged orders."""
        while True:
            for identity, _ in await self.store.orders(after):
                after = identity

    def _lease_s(self) -> float:
        return LEASE_BEATS * self.plan.fault_tolerance.heartbeat.interval


async def _wait(for_: asyncio.Future[Any], tasks: list[asyncio.Task[None]], timeout: float | None = None) -> None:
    """Wait until it is there, or the time is up. Raises what one of the tasks has failed with."""
    await asyncio.wait([for_, *tasks], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            for_.cancel()
            task.result()


def _unmarked(dated: Sequence[tuple[float, Entry]]) -> list[AnyFact]:
    """That the last decisions reached the agents late, where the controller before did not live to record it."""
    committed = [entry for took_at, entry in dated if took_at == dated[-1][0]]
    has_orders = any(isinstance(entry.record, ORDERS) for entry in committed)
    if has_orders and dated[-1][0] - committed[0].t > LATE_S:
        return [DecisionsLate(since=committed[0].t)]
    return []


def replay(job: ControlState, journal: Iterable[Entry]) -> list[tuple[Entry, Record | None]]:
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


# A clock that is adjusted in passing moves by less between two answers; one that is set moves by more.
JUMP_S = 1.0


class ServerClock:
    """Estimates the store's time between its answers. Never runs backwards, and never jumps.

    The core measures its deadlines on this clock. When an administrator sets the store's, they would all pass at
    once, or not for hours: so it follows small corrections, and goes on at its own pace over large ones.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset = 0.0
        self._store_offset: float | None = None  # of the store's own clock, jumps and all
        self.last = 0.0  # the newest moment that was given out

    def set(self, server_time: float, took_s: float = 0.0) -> None:
        """The store's time (seconds since the epoch) has arrived, `took_s` after it was asked for."""
        offset = server_time - self._clock.monotonic()
        if self._store_offset is None:
            self._offset = offset
        elif -took_s <= (step := offset - self._store_offset) < 0.0:
            # The answer was on its way for that long, and no clock was set: this process may have been frozen. Else
            # time would stand still until the next answer, and what has arrived meanwhile would be dated wrongly.
            return
        elif abs(step) <= JUMP_S:
            self._offset += step
        else:
            log.warning("the store's clock was set, or its answer took long (%+.1f s); the journal's goes on", step)
        self._store_offset = offset

    def go_on(self, t: float, clock_s: float) -> None:
        """It was `t` when this host's monotonic clock showed `clock_s`: an earlier controller has noted that. If the
        store's clock was set meanwhile, the difference is no time that has passed."""
        self._offset = t - clock_s

    def start_after(self, t: float) -> None:
        """Nothing may be stamped before `t`: the journal already holds it. A clock that is behind goes on from
        there."""
        self._offset += max(0.0, t - self.now())
        self.last = max(self.last, t)

    def stamp(self, t: float, since: float | None = None) -> float:
        """The moment `t` of the store's clock, on this one; not before an earlier stamp, and not after now.

        `since`: when it had not arrived yet, by this process's monotonic clock.
        """
        stamped = t if self._store_offset is None else t - self._store_offset + self._offset
        # A store whose clock is set back numbers new entries by the moment of the last one before, and this process
        # learns of it only with the store's next answer: `since` bounds the error.
        earliest = self.last if since is None else since + self._offset
        self.last = max(self.last, min(max(stamped, earliest), self._clock.monotonic() + self._offset))
        return self.last

    def now(self) -> float:
        self.last = max(self.last, self._clock.monotonic() + self._offset)
        return self.last

    def passed_since(self, t: float) -> float:
        """Seconds; no later stamp depends on it."""
        return self._clock.monotonic() + self._offset - t

    def until(self, t: float) -> float:
        """Seconds from now until `t`; a moment, if it has passed."""
        return max(0.001, t - (self._clock.monotonic() + self._offset))
