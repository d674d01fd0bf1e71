"""The promises (docs/architecture.md), checked on the ground truth: what the store took, and which processes live.

Each is checked where it could break, at the very step: a worker starts, a commit is taken, an order appears, a
supervisor gets its order to stop. Those of a whole run are checked at its end (`verdict.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

import msgspec

from nvrx_slurm.errors import EXIT_UNREACHABLE
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.records import (
    Attributed,
    AttributionJudged,
    ControllerUp,
    Decision,
    Entry,
    Fence,
    FromAgent,
    JobEnded,
    JobStarted,
    NodeIsolated,
    NodeJoined,
    NodeLost,
    Progress,
    RendezvousClosed,
    RendezvousOpened,
    ReplicaEnded,
    RestartDecided,
    Shutdown,
    WorkerFailed,
    WorkerHung,
    WorkersDone,
    WorkersStarted,
    pack,
    unpack_entry,
    unpack_order,
)
from nvrx_slurm.lab.simulation.workers import SimulatedWorker

OF_A_CYCLE = (WorkersStarted, Progress, WorkerFailed, WorkerHung, WorkersDone, NodeIsolated)
RESTARTS = ("restart_replica", "restart_job")


class Promise(StrEnum):
    """What the product promises, in short."""

    DECIDER = "one decider"
    JOURNAL = "one journal, in order"
    JOURNAL_FIRST = "the journal first, ranks before the close"
    RANKS = "no rank is held twice"
    LEASE = "workers start only under a lease that lasts"
    FRESH = "a stale record leaves no trace"
    FENCED = "an agent that is given up is fenced"
    REGISTERED = "only an agent that has registered is given up"
    SHUTDOWN = "the first shutdown is the only one"
    BUDGET = "the restart budget is kept"
    VERDICT = "a verdict is read once, in time, and for its own failure"
    LEAVING = "every process that waits leaves"
    REPLAY = "a journal replayed decides the same"
    FINISH = "with nodes enough a job finishes"
    UNTOUCHED = "control plane down, workload up"
    SOUND = "nothing crashes"


class Promises:
    """What has happened so far, as far as a promise is about it. `broken` gets the first promise that is, in one
    sentence, and the run ends there; `fencing` gets each fence when it is journaled."""

    def __init__(self, plan: Plan, broken: Callable[[Promise, str], None], fencing: Callable[[Fence], None]) -> None:
        self.plan, self._broken, self._fencing = plan, broken, fencing
        self.roles = {f"{role.name}-{index}": role for role in plan.roles for index in range(role.replicas)}
        self.journal: list[Entry] = []
        self.shutdown: Shutdown | None = None
        self.ended: JobEnded | None = None
        self.closed: dict[tuple[str, int], RendezvousClosed] = {}
        self.cycle: dict[str, int] = {}  # replica → the newest cycle that was opened
        self.live: dict[tuple[str, int], SimulatedWorker] = {}
        self._ordered: set[bytes] = set()
        self._closing: dict[bytes, int] = {}
        self._speakers: dict[str, str] = {}
        self._heard: dict[str, int] = {}
        self._joined: set[tuple[str, str]] = set()
        self._fenced: set[str] = set()
        self._over: set[str] = set()  # replicas that run no more
        self._restarts: dict[str, int] = {}
        self._judged: set[tuple[str, int]] = set()  # replica and cycle
        self._epoch = 0

    # ---- the store

    def acquired(self, epoch: int) -> None:
        """A controller has taken over."""
        if epoch <= self._epoch:
            self._broken(Promise.DECIDER, f"two controllers have got epoch {epoch}")
        self._epoch = epoch

    def committed(self, epoch: int, entries: Iterable[bytes]) -> None:
        """The store has taken a commit."""
        if epoch != self._epoch:
            self._broken(
                Promise.DECIDER, f"a commit of epoch {epoch} was taken although epoch {self._epoch} has begun"
            )
        begun = len(self.journal)
        for packed in entries:
            self._enter(unpack_entry(packed))
        for entry in self.journal[begun:]:
            if isinstance(entry.record, NodeLost) and entry.record.incarnation not in self._fenced:
                self._broken(Promise.FENCED, f"{entry.record.node} was given up without a fence")

    def ordered(self, packed: bytes, ranks: Sequence[int]) -> None:
        """An order can be read. `ranks`: of how many nodes, for each rendezvous that closes with it."""
        if packed not in self._ordered:
            order = unpack_order(packed)
            if not isinstance(order, ControllerUp):
                self._broken(Promise.JOURNAL_FIRST, f"an order that is not in the journal can be read: {order}")
        elif packed in self._closing and (wanted := self._closing[packed]) not in ranks:
            self._broken(
                Promise.JOURNAL_FIRST,
                f"a rendezvous was closed when {ranks} of its {wanted} nodes could read their ranks",
            )

    def shutdown_stands(self, packed: bytes | None) -> None:
        """An agent that comes late reads this shutdown."""
        if self.shutdown is None or packed != pack(self.shutdown):
            self._broken(
                Promise.SHUTDOWN, f"the shutdown that agents read is not the journal's first: {self.shutdown}"
            )

    def _enter(self, entry: Entry) -> None:
        last = self.journal[-1] if self.journal else None
        if last is not None and (entry.n != last.n + 1 or entry.t < last.t):
            self._broken(Promise.JOURNAL, f"journal entry {entry.n} at {entry.t} follows {last.n} at {last.t}")
        self.journal.append(entry)
        if isinstance(entry.record, FromAgent):
            self._said(entry.record)
        if (check := _CHECKS.get(type(entry.record))) is not None:
            check(self, entry.record)
        if isinstance(entry.record, RendezvousClosed):
            packed = pack(msgspec.structs.replace(entry.record, nodes=(), promoted=()))
            self._ordered.add(packed)
            self._closing[packed] = len(entry.record.nodes)
        elif isinstance(entry.record, Decision):
            self._ordered.add(pack(entry.record))

    # ---- the journal

    def _said(self, fact: FromAgent) -> None:
        """What the journal has taken was new when it came: of the node's present agent, and of the present cycle."""
        if isinstance(fact, NodeJoined):
            self._speakers[fact.node] = fact.incarnation
        present = self._speakers.get(fact.node) == fact.incarnation
        if not present or fact.seq <= self._heard.get(fact.incarnation, 0):
            self._broken(Promise.FRESH, f"the journal has taken this, which is old: {fact}")
        self._heard[fact.incarnation] = fact.seq
        if not isinstance(fact, OF_A_CYCLE) or fact.incarnation in self._fenced:  # who is fenced is only answered
            return
        if fact.cycle != self.cycle[fact.replica] or (fact.replica, fact.cycle) not in self.closed:
            self._broken(Promise.FRESH, f"cycle {self.cycle[fact.replica]} is on, and this was taken: {fact}")

    def _job_started(self, fact: JobStarted) -> None:
        if any(isinstance(entry.record, JobStarted) for entry in self.journal[:-1]):
            self._broken(Promise.JOURNAL, "the job has started twice")

    def _node_joined(self, fact: NodeJoined) -> None:
        self._joined.add((fact.node, fact.incarnation))

    def _node_lost(self, fact: NodeLost) -> None:
        if (fact.node, fact.incarnation) not in self._joined:
            self._broken(
                Promise.REGISTERED, f"{fact.node} was given up, and its agent {fact.incarnation} had never registered"
            )

    def _fence(self, fence: Fence) -> None:
        self._fenced.add(fence.incarnation)
        self._fencing(fence)

    def _rendezvous_opened(self, opened: RendezvousOpened) -> None:
        if self.shutdown is not None:
            self._broken(Promise.SHUTDOWN, f"{opened.replica} cycle {opened.cycle} was opened after the shutdown")
        self.cycle[opened.replica] = opened.cycle

    def _rendezvous_closed(self, closed: RendezvousClosed) -> None:
        self.closed[closed.replica, closed.cycle] = closed
        if self.cycle.get(closed.replica) != closed.cycle:
            self._broken(Promise.JOURNAL, f"{closed.replica} cycle {closed.cycle} was closed and not open")
        for (replica, _), worker in self.live.items():
            if replica == closed.replica:
                self._broken(Promise.RANKS, f"{closed.replica} cycle {closed.cycle} was closed while {worker} lived")

    def _replica_ended(self, ended: ReplicaEnded) -> None:
        self._over.add(ended.replica)

    def _restart_decided(self, decided: RestartDecided) -> None:
        if decided.action not in RESTARTS or decided.rank is None:
            return
        spent = self._restarts[decided.replica] = self._restarts.get(decided.replica, 0) + 1
        limit = self.plan.fault_tolerance.max_restarts.count
        if spent > limit:
            self._broken(
                Promise.BUDGET,
                f"{decided.replica} was restarted {spent} times after failures of its workers, of {limit}",
            )

    def _attribution_judged(self, judged: AttributionJudged) -> None:
        """Acted on: a STOP that some source has given of this very failure, before the next rendezvous has closed."""
        key = judged.replica, judged.cycle
        if key in self._judged:
            self._broken(Promise.VERDICT, f"the answers about {judged.replica} cycle {judged.cycle} were read twice")
        self._judged.add(key)
        if not judged.acted:
            return
        if (judged.replica, judged.cycle + 1) in self.closed:
            self._broken(
                Promise.VERDICT, f"{judged.replica} runs cycle {judged.cycle + 1}, and this stops it: {judged}"
            )
        given = (entry.record for entry in self.journal if isinstance(entry.record, Attributed))
        if not any((each.replica, each.cycle) == key and each.attribution.verdict == "STOP" for each in given):
            self._broken(Promise.VERDICT, f"no source has said STOP, and this stops the job: {judged}")

    def _shutdown(self, shutdown: Shutdown) -> None:
        if self.shutdown is not None:
            self._broken(Promise.SHUTDOWN, f"the job was shut down for a second reason: {shutdown.reason}")
        self.shutdown = self.shutdown or shutdown

    def _job_ended(self, ended: JobEnded) -> None:
        self.ended = ended
        first = self.shutdown
        if first is None or (first.exit_code, first.reason) != (ended.exit_code, ended.reason):
            self._broken(
                Promise.SHUTDOWN,
                f"the job ended with {ended.exit_code} ({ended.reason}), and was shut down for {first}",
            )

    # ---- the nodes

    def worker_wanted(self, node: str, rank: int, lease_s: float) -> None:
        """An agent asks for a worker, who may live for so long unless it is in touch again."""
        if lease_s <= 0.0:
            self._broken(Promise.LEASE, f"{node} was to start rank {rank}, and its lease was over")

    def worker_started(self, worker: SimulatedWorker) -> None:
        """The strongest one: a rank has one live worker at most, over all cycles and all nodes."""
        replica, cycle, rank = worker.world.replica, worker.world.cycle, worker.rank
        if (other := self.live.get((replica, rank))) is not None:
            self._broken(Promise.RANKS, f"{worker} started while {other} lived")
        self.live[replica, rank] = worker
        closed = self.closed.get((replica, cycle))
        if closed is None:
            self._broken(Promise.JOURNAL_FIRST, f"{worker} started, and the journal knows of no such rendezvous")
            return
        seat = rank // self.roles[replica].workers_per_node
        if seat >= len(closed.nodes) or closed.nodes[seat] != worker.node:
            self._broken(Promise.JOURNAL_FIRST, f"{worker} started, and the journal gives that rank to another node")

    def worker_ended(self, worker: SimulatedWorker) -> None:
        key = worker.world.replica, worker.rank
        if self.live.get(key) is worker:
            del self.live[key]

    def left(self, node: str, code: int) -> None:
        """An agent has ended by itself, and no signal had asked it to."""
        ends = () if self.shutdown is None else (self.shutdown.exit_code,)
        if code not in (*ends, EXIT_UNREACHABLE):
            self._broken(Promise.LEAVING, f"the agent of {node} left with {code}; the shutdown is {self.shutdown}")


_CHECKS: dict[type, Callable[[Promises, object], None]] = {
    JobStarted: Promises._job_started,  # type: ignore[dict-item]  # each takes its own kind of record
    NodeJoined: Promises._node_joined,  # type: ignore[dict-item]
    NodeLost: Promises._node_lost,  # type: ignore[dict-item]
    Fence: Promises._fence,  # type: ignore[dict-item]
    RendezvousOpened: Promises._rendezvous_opened,  # type: ignore[dict-item]
    RendezvousClosed: Promises._rendezvous_closed,  # type: ignore[dict-item]
    ReplicaEnded: Promises._replica_ended,  # type: ignore[dict-item]
    AttributionJudged: Promises._attribution_judged,  # type: ignore[dict-item]
    RestartDecided: Promises._restart_decided,  # type: ignore[dict-item]
    Shutdown: Promises._shutdown,  # type: ignore[dict-item]
    JobEnded: Promises._job_ended,  # type: ignore[dict-item]
}
