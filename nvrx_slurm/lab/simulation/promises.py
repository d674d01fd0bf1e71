"""The promises (docs/architecture.md), checked on the ground truth: what the store took, and which processes live.

`Promises` checks at each step that could break one: a commit is taken, an order appears, a worker starts, an agent
leaves. `broken_at_the_end` checks those that are about a whole run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import msgspec

from nvrx_slurm.agent.agent import MOST_SUPERVISORS, SUPERVISORS_S
from nvrx_slurm.controller.controller import INBOX_STALL_S, replay
from nvrx_slurm.core.state import new_job
from nvrx_slurm.errors import EXIT_FAILED, EXIT_UNREACHABLE
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.records import (
    ControllerStarted,
    ControllerUp,
    Decision,
    Entry,
    Fence,
    FromAgent,
    JobEnded,
    JobResumed,
    JobStarted,
    JobSuspended,
    NodeIsolated,
    NodeJoined,
    NodeLost,
    Record,
    RendezvousClosed,
    RendezvousOpened,
    RestartDecided,
    RestartOrdered,
    Shutdown,
    WorkerFailed,
    WorkerHung,
    pack,
    unpack_entry,
    unpack_order,
)
from nvrx_slurm.lab.simulation.adversary import Act, Trait
from nvrx_slurm.lab.simulation.job_history import RESTARTS
from nvrx_slurm.lab.simulation.monitors import JournalMonitors, Promise
from nvrx_slurm.lab.simulation.workers import SimulatedWorker
from nvrx_slurm.report.goodput import GoodputMeter
from nvrx_slurm.report.view import JobFold

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.run import SimulationRun


class Promises:
    """What has happened so far, as far as a promise is about it. `broken` gets the first promise that is, in one
    sentence, and the run ends there; `fencing` gets each fence when it is journaled."""

    def __init__(
        self,
        plan: Plan,
        broken: Callable[[Promise, str], None],
        entered: Callable[[Entry], None],
        outage_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.plan, self._broken, self._entered = plan, broken, entered
        self.roles = {f"{role.name}-{index}": role for role in plan.roles for index in range(role.replicas)}
        self._outage_s = outage_s
        self.monitors = JournalMonitors(plan, broken, outage_s)
        self.journal: list[Entry] = []
        self.shutdown: Shutdown | None = None
        self.lost_shutdown: Shutdown | None = None  # with the store's data; agents may have read it
        self.ended: JobEnded | None = None
        self.generation = -1
        self.closed: dict[tuple[str, int], RendezvousClosed] = {}  # of this generation
        self.live: dict[tuple[str, int], SimulatedWorker] = {}
        self._ordered: set[bytes] = set()
        self._closing: dict[bytes, int] = {}
        self._joined: set[tuple[str, str]] = set()
        self._fenced: set[str] = set()
        self._epoch = self._number = 0  # of the newest controller, of the newest order
        self._followed: dict[str, int] = {}  # incarnation → epoch of the controller that it has connected to
        self._arrived: dict[bytes, float] = {}  # packed fact → when it came into the inbox
        self.knows_times = True  # the journal's clock is the store's: none was set, and nothing was suspended

    # ---- the store

    def acquired(self, epoch: int) -> None:
        """A controller has taken over."""
        if epoch <= self._epoch:
            self._broken(Promise.DECIDER, f"two controllers have got epoch {epoch}")
        self._epoch = epoch

    def begin_with(self, copy: Sequence[Entry]) -> None:
        """A new store: it knows no epoch, and the journal goes on from what the job folder has kept."""
        self._epoch = self._number = 0
        self.go_on_from(copy)

    def go_on_from(self, copy: Sequence[Entry]) -> None:
        """The journal is what the job folder has kept."""
        if len(copy) < len(self.journal):  # the controller had no time to copy the end
            self.journal = list(copy)
            records = [entry.record for entry in copy]
            self.generation = max((each.generation for each in records if isinstance(each, JobStarted)), default=-1)
            if self.shutdown not in records:
                self.lost_shutdown, self.shutdown = self.shutdown, None
            self.monitors = JournalMonitors(self.plan, self._broken, self._outage_s)
            for entry in copy:
                self.monitors.enter(entry)
            self.monitors.complete()

    def committed(self, epoch: int, entries: Iterable[bytes], at: float = -math.inf) -> None:
        """The store has taken a commit, `at` by the run's time."""
        if epoch != self._epoch:
            self._broken(
                Promise.DECIDER, f"a commit of epoch {epoch} was taken although epoch {self._epoch} has begun"
            )
        begun = len(self.journal)
        for packed in entries:
            self._enter(unpack_entry(packed), at)
        self.monitors.complete()
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

    def numbered(self, number: int) -> None:
        """The number of an order that can be read: it begins with the epoch, and agents leave out one that has not
        grown."""
        if number >> 32 != self._epoch or number <= self._number:
            why = (
                f"order {number:#x} of epoch {number >> 32} follows {self._number:#x}, and epoch {self._epoch} leads"
            )
            self._broken(Promise.DECIDER, why)
        self._number = number

    def shutdown_stands(self, packed: bytes | None) -> None:
        """An agent that comes late reads this shutdown."""
        if self.shutdown is None or packed != pack(self.shutdown):
            self._broken(
                Promise.SHUTDOWN, f"the shutdown that agents read is not the journal's first: {self.shutdown}"
            )

    def arrived(self, packed: bytes, at: float) -> None:
        """This fact is in the inbox now."""
        self._arrived[packed] = at

    def obeyed_twice(self, node: str, order: object) -> None:
        """An agent has taken the copy of an order for another order."""
        self._broken(
            Promise.FRESH, f"the agent of {node} has read this again, as a copy, and took it for new: {order}"
        )

    def joined_twice(self, incarnation: bytes | str) -> None:
        """A join that was sent again, since its reply was lost, is in the inbox twice."""
        self._broken(Promise.FRESH, f"the join of agent {incarnation!r} was carried out twice")

    def judged(self, at: float, waited_s: float) -> None:
        """A deadline has passed, and the oldest fact that the controller had not read by then has waited so long."""
        if self.knows_times and waited_s > UNREAD_S:
            why = f"a deadline was judged at {at:.3f}, and a fact had waited in the inbox for {waited_s:.3f} s"
            self._broken(Promise.ARRIVAL, why)

    def controller_left(self, pid: int) -> None:
        """The controller that was started last has left, since another one leads: one that was started before it and
        was frozen may have taken over after it."""
        started = [entry.record for entry in self.journal if isinstance(entry.record, ControllerStarted)]
        if any(record.pid == pid and record.epoch == self._epoch for record in started):
            self._broken(Promise.DECIDER, "a controller left for a newer one, and there is none")

    def _enter(self, entry: Entry, at: float) -> None:
        last = self.journal[-1] if self.journal else None
        if last is not None and (entry.n != last.n + 1 or entry.t < last.t):
            self._broken(Promise.JOURNAL, f"journal entry {entry.n} at {entry.t} follows {last.n} at {last.t}")
        if self.knows_times and last is not None and isinstance(entry.record, FromAgent):
            # Its time may be that of the fact before it in the controller's queue: times never go back.
            came = self._arrived.get(pack(entry.record), entry.t)
            if entry.t > max(came, last.t) + STAMPED_S:
                why = f"{entry.t - came:.3f} s after it had arrived this fact was taken to happen: {entry.record}"
                self._broken(Promise.ARRIVAL, why)
        self.journal.append(entry)
        self._check(entry.record)
        self._entered(entry)
        self.monitors.enter(entry, at)
        if isinstance(entry.record, RendezvousClosed):
            # As the controller writes the order: without nodes, for each agent reads its own ranks alone.
            packed = pack(msgspec.structs.replace(entry.record, nodes=(), promoted=()))
            self._ordered.add(packed)
            self._closing[packed] = len(entry.record.nodes)
        elif isinstance(entry.record, Decision):
            self._ordered.add(pack(entry.record))

    def _check(self, record: Record) -> None:
        """One record that the journal has taken, against all before it."""
        match record:
            case JobStarted(generation=generation):
                if generation <= self.generation:
                    self._broken(Promise.JOURNAL, f"generation {generation} started after {self.generation}")
                self.generation, self.shutdown, self.ended = generation, None, None
                self.closed.clear()
            case NodeJoined():
                self._joined.add((record.node, record.incarnation))
            case NodeLost():
                if (record.node, record.incarnation) not in self._joined:
                    why = f"{record.node} was given up, and its agent {record.incarnation} had never registered"
                    self._broken(Promise.REGISTERED, why)
            case Fence():
                self._fenced.add(record.incarnation)
            case RendezvousOpened():
                if self.shutdown is not None:
                    why = f"{record.replica} cycle {record.cycle} was opened after the shutdown"
                    self._broken(Promise.SHUTDOWN, why)
            case RendezvousClosed():
                self.closed[record.replica, record.cycle] = record
                what = f"{record.replica} cycle {record.cycle} was closed"
                for (replica, _), worker in self.live.items():
                    if replica == record.replica:
                        self._broken(Promise.RANKS, f"{what} while {worker} lived")
            case Shutdown():
                if self.shutdown is not None:
                    self._broken(Promise.SHUTDOWN, f"the job was shut down for a second reason: {record.reason}")
                self.shutdown = self.shutdown or record
            case JobEnded():
                self.ended = record
                first = self.shutdown
                if first is None or (first.exit_code, first.reason) != (record.exit_code, record.reason):
                    why = f"the job ended with {record.exit_code} ({record.reason}), and was shut down for {first}"
                    self._broken(Promise.SHUTDOWN, why)

    # ---- the nodes

    def connected(self, node: str, incarnation: str, epoch: int) -> None:
        """An agent connects to the controller of this epoch, and takes no older one for the newest again."""
        if epoch < (before := self._followed.get(incarnation, 0)):
            self._broken(
                Promise.DECIDER, f"{node} goes back from the controller of epoch {before} to that of {epoch}"
            )
        self._followed[incarnation] = epoch

    def let_in(self, node: str) -> None:
        """A process that has not the job's key was taken for the agent of the node."""
        self._broken(Promise.SIGNED, f"the controller takes a process without the job's key for the agent of {node}")

    def worker_wanted(self, node: str, rank: int, lease_s: float) -> None:
        """An agent asks for a worker, who may live for so long unless it is in touch again."""
        if lease_s <= LEAST_LEASE * self.plan.fault_tolerance.fence_timeout:
            why = f"{node} was to start rank {rank} out of touch: its lease was for {lease_s:.3f} s more"
            self._broken(Promise.LEASE, why)

    def acted_for(self, node: str, replica: str, cycle: int, incarnation: str) -> None:
        """An agent starts workers by an answer to the agent that it was before it was given up."""
        self._broken(Promise.OLDER, f"{node} starts {replica} cycle {cycle}, whose ranks were {incarnation}'s")

    def acted_early(self, node: str, replica: str, cycle: int) -> None:
        """An agent starts workers before it has read all orders that are older than the answer with its ranks."""
        why = f"{node} starts {replica} cycle {cycle}, and orders that are older than that answer are unread"
        self._broken(Promise.OLDER, why)

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

    def left(self, node: str, code: int, supervisor_deaths: Sequence[float] = ()) -> None:
        """An agent has ended by itself, and no signal had asked it to. `supervisor_deaths`: when its supervisors were
        killed, on the loop's clock."""
        ends = tuple(each.exit_code for each in (self.shutdown, self.lost_shutdown) if each is not None)
        # By its own clock, which may be slower.
        last = supervisor_deaths[-MOST_SUPERVISORS:]
        if len(last) == MOST_SUPERVISORS and last[-1] - last[0] < 1.01 * SUPERVISORS_S:
            ends = (*ends, EXIT_FAILED)
        if code not in (*ends, EXIT_UNREACHABLE):
            self._broken(Promise.LEAVING, f"the agent of {node} left with {code}; the shutdown is {self.shutdown}")


# ---- a whole run


# An agent that was out of touch for more than half of the lease starts no workers (`heartbeat.is_in_touch`).
LEAST_LEASE = 0.45

# For so long a fact may have waited when a deadline is judged: a read of the inbox takes most of it, at most.
UNREAD_S = INBOX_STALL_S + 0.5

# By how much the controller's estimate of the store's time may be wrong.
STAMPED_S = 0.5

# How many cycles may still fail of what is left of faults that are over.
SETTLES = 2

# Of the time that workers go on without a control plane: so much of it, at most, must touch none of them.
LONGEST_OUTAGE = 0.5

COUNTED = (NodeLost, NodeIsolated, WorkerFailed, WorkerHung, RestartDecided)
# Agents that wait less for the control plane may give it up in a suspension: a call of theirs takes half of it.
SHORTEST_PATIENCE_S = 30.0

# The kinds of acts after which another controller has to take over, or the same one has to ask again.
REPLACING = ("kill_controller", "kill_at_commit", "overtake", "overtake_at_commit", "break_commit", "replace_frozen")

# What a fault that ends workers must be counted as.
SETTLED_AS = {
    "kill_agent": "node",
    "kill_supervisor": "node",
    "kill_everything": "node",
    "power_off": "node",
    "kill_worker": "worker",
    "fail_worker": "worker",
}

# How long there is no controller after one was killed, at most.
AFTER_A_KILL_S = 1.5


def _wrong_accounts(plan: Plan, journal: Sequence[Entry]) -> str | None:
    """What is wrong with `report.goodput` of this journal, measured against the ends of the job alone."""
    meter = GoodputMeter()
    fold = JobFold(plan, [meter])
    held_us = nodes = 0
    until_us: int | None = None  # the last entry of the present generation, or of the one before the queue
    runs = False
    for entry, following in zip_longest(journal, journal[1:]):
        fold.take(entry)
        at_us = round(entry.t * 1e6)
        if isinstance(entry.record, ControllerStarted) and following and isinstance(following.record, JobStarted):
            continue  # the controller of the next generation
        if isinstance(entry.record, JobStarted):
            # In the queue, the job waits for as many nodes as it then gets.
            held_us += len(entry.record.expected) * (0 if until_us is None else at_us - until_us)
            until_us, nodes, runs = at_us, len(entry.record.expected), True
        elif runs and until_us is not None:
            held_us += nodes * (at_us - until_us)
            until_us, runs = at_us, not isinstance(entry.record, JobEnded)
    goodput = meter.result(fold.view)
    if min(goodput.parts_us.values()) < 0 or sum(goodput.parts_us.values()) != held_us:
        return f"the job held its nodes for {held_us} us, and the parts of that are {goodput.parts_us}"
    return None


def _begins_watch(record: Record, node: str) -> bool:
    """Whether the controller counts the node's silence from this entry on."""
    return isinstance(record, JobResumed) or (isinstance(record, NodeJoined) and record.node == node)


def outage_of(acts: Sequence[Act]) -> float:
    """For how long these acts may keep the controller from deciding, at most: outages may follow one another. One of
    them is a suspension: before the first agent has joined none announces it, and the journal does not have it."""
    killed = sum(act.kind in REPLACING for act in acts)
    return sum(act.lasts_s for act in acts if act.traits & (Trait.OUTAGE | Trait.SUSPENDS)) + killed * AFTER_A_KILL_S


def broken_at_the_end(run: SimulationRun) -> Iterator[tuple[Promise, str]]:
    """The promises that this run has broken as a whole, each with one sentence."""
    promises, plan, bounds = run.promises, run.plan, run.plan.fault_tolerance
    shutdown, ended = promises.shutdown, promises.ended
    records = [entry.record for entry in promises.journal]
    restarts = [record for record in records if isinstance(record, RestartDecided)]

    for entry, decided in replay(new_job(plan), promises.journal)[:1]:
        yield Promise.REPLAY, f"journal entry {entry.n} is {entry.record}, and its replay decides {decided}"

    if wrong := _wrong_accounts(plan, promises.journal):
        yield Promise.ACCOUNTS, wrong

    if not run.batch.gave_up and not run.batch.killed_suspended and run.exit_code is not None:
        if shutdown is None:
            yield Promise.SHUTDOWN, f"the job ended with {run.exit_code}, and no shutdown is in the journal"
        elif run.exit_code != shutdown.exit_code:
            yield Promise.SHUTDOWN, f"the job ended with {run.exit_code}, and was shut down with {shutdown.exit_code}"

    for name in ended.missing if ended is not None else ():
        # An agent that a fault has killed, or that has left without reaching the store, reports nothing, and is given
        # up after these timeouts: since the fault, or since the controller read its join or resumed the job, which a
        # partition or a suspension had delayed. A silence of all nodes is no node's death.
        node, beats = run.nodes[name], bounds.heartbeat
        code = node.agent.exit_code if node.agent is not None else None
        has_gone = code is not None and (code < 0 or code == EXIT_UNREACHABLE)
        watched_from = max(
            (each.t for each in promises.journal if _begins_watch(each.record, name)), default=-math.inf
        )
        since_s = min(run.contact.others_heard_at(name) - node.weak_until_s, promises.journal[-1].t - watched_from)
        unnoticed = since_s < max(beats.timeout, beats.startup_timeout) + beats.timeout
        if node.is_well and not (has_gone and unnoticed):
            yield Promise.LEAVING, f"the job has ended, and {name} had not reported that it leaves"

    if any(act.traits & Trait.SUSPENDS for act in run.performed):
        # An agent that joins later was not granted that its supervisor outlives the lease.
        kinds = list(map(type, records))
        began = kinds.index(JobSuspended) if JobSuspended in kinds else 0
        patient = bounds.control_plane_grace >= SHORTEST_PATIENCE_S and NodeJoined not in kinds[began:]
        if not patient or not all(act.traits & Trait.SUSPENDS for act in run.performed):
            return
        for record in records:
            opened_again = isinstance(record, RendezvousOpened) and record.cycle > 0
            if opened_again or isinstance(record, COUNTED):
                yield Promise.SUSPENDED, f"the job was suspended, and this is in its journal: {record}"
                break

    # With one fault, a decision names its node, and its kind: the peers that notice it are not the cause.
    if len(run.performed) == 1 and (act := run.performed[0]).kind in SETTLED_AS:
        for restart in restarts:
            kind = "node" if restart.rank is None else "worker"
            waits = promises.roles[restart.replica].on_failure in RESTARTS and restart.by != "attribution"
            if waits and (restart.node, kind) != (act.node, SETTLED_AS[act.kind]):
                yield Promise.CAUSE, f"the one fault was {act}, and this was decided: {restart}"

    outage_s = outage_of(run.performed)
    # What may touch workers soonest: their lease; their agents' patience; or, since their ends are reported through
    # the store, the bound for how far apart these may be.
    skew_s = math.inf if bounds.hang.exit_skew is None else bounds.hang.exit_skew
    touched_after_s = min(bounds.fence_timeout, bounds.control_plane_grace, skew_s)
    is_fatal = promises.lost_shutdown is not None or any(act.traits & Trait.FATAL for act in run.performed)
    if is_fatal or outage_s >= LONGEST_OUTAGE * touched_after_s:
        return
    on_nodes = [act for act in run.performed if act.traits & Trait.NODE]

    # Must the job finish? Only where the acts leave nodes enough, and no budget was spent and no verdict given that
    # refused a restart: whether these were right is checked where they were decided.
    if (
        all(role.on_failure.startswith("restart") for role in plan.roles)
        and len({act.node for act in on_nodes}) <= plan.spares
        and not any(each.action == "stop" for each in restarts)
        and not (promises.generation > 0 and bounds.max_preemptions is not None)
    ):
        if run.exit_code != 0:
            reason = shutdown.reason if shutdown is not None else "no shutdown was decided"
            yield Promise.FINISH, f"nodes enough were healthy, and the job ended with {run.exit_code}: {reason}"
        # What was left undone by the last fault is noticed, torn down and done again; that may fail once more.
        most_s = SETTLES * (run.shape.recovery_s + run.shape.work_s) + run.shape.leaves_within_s
        if (took_s := run.loop.now_s - run.disturbed_until_s) > most_s:
            yield Promise.FINISH, f"the job ended {took_s:.1f} s after the last fault was over, of {most_s:.1f} s"

    # Where only the control plane failed, no worker may have been stopped, but for users who asked for it.
    asked = {(each.replica, each.cycle + 1) for each in records if isinstance(each, RestartOrdered)}
    for record in records if not on_nodes and promises.generation <= 0 else ():
        opened_again = isinstance(record, RendezvousOpened) and record.cycle > 0
        if isinstance(record, RendezvousOpened) and (record.replica, record.cycle) in asked:
            continue
        if isinstance(record, RestartDecided) or opened_again:
            yield Promise.UNTOUCHED, f"only the control plane failed, and workers were stopped: {record}"
            break
