"""What the journal says of a job, by the rules of docs/architecture.md: a second, small model of it.

It is independent of the core: it takes the facts and the decisions as they stand in the journal, decides nothing, and
imports none of `nvrx_slurm.core`. What the two must agree on is compared by the monitors (`monitors.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal import records
from nvrx_slurm.journal.verdicts import Attribution, Verdict

RESTARTS = ("restart_replica", "restart_job")
# What began so long after a symptom did not cause it.
CAUSED_WITHIN_S = 10.0

Place = Literal["expected", "spare", "ready", "active", "gone", "quarantined", "drained"]


@dataclass(slots=True)
class NodeHistory:
    """One node: where it is, and which agent process represents it."""

    name: str
    place: Place = "expected"
    incarnation: str = ""
    replica: str | None = None
    """Whose ranks it has, or is ready for."""
    deaths: int = 0
    seq: int = 0
    grant: int | None = None
    """The suspension since which its workers outlive their lease."""

    @property
    def is_here(self) -> bool:
        return self.place not in ("expected", "gone")


@dataclass(slots=True)
class FailureHistory:
    """The first failure of a cycle, or its cause since that is known, and what the sources have answered about it."""

    replica: str
    cycle: int
    kind: Literal["worker", "node"]
    at: float
    noticed: float
    rank: int | None
    policy: str
    held: frozenset[str]
    """The replicas that restart with it."""
    node: str = ""
    first_noticed: float = 0.0
    is_symptom: bool = False
    """It is of a lost connection to a peer: what ended the peer is yet unknown."""
    hung: bool = False
    settles: bool = False
    """It may have been a consequence when it was reported first: the decision waits for the end of the rendezvous."""
    answers: dict[str, Attribution] = field(default_factory=dict)
    waits: bool = False
    decided: bool = False
    judged: bool = False
    due_at: float = 0.0


@dataclass(slots=True)
class ReplicaHistory:
    """One replica: its open rendezvous, or its running cycle."""

    id: str
    role: RolePlan
    cycle: int = -1
    state: Literal["open", "running", "ended"] = "open"
    nodes: tuple[str, ...] = ()
    """Of the last rendezvous that closed; before the first one: whom it prefers."""
    awaited: set[str] = field(default_factory=set)
    ready: set[str] = field(default_factory=set)
    opened_at: float = 0.0
    called_at: float = 0.0
    """Its nodes knew by then that it is open."""
    committed_at: float = -math.inf
    closed_at: float = 0.0
    not_before: float = 0.0
    started: set[str] = field(default_factory=set)
    """Nodes whose workers of this cycle run, or have run."""
    stepped: set[str] = field(default_factory=set)
    """Nodes that have reported a step of it."""
    recorded: list[type[records.Decision]] = field(default_factory=list)
    """Which records of its recovery the journal has."""
    recovered_at: float = 0.0
    done: set[str] = field(default_factory=set)
    first_done_at: float | None = None
    unproven: dict[str, float] = field(default_factory=dict)
    """Lost nodes whose workers may still live → until when, at most."""
    silent: set[str] = field(default_factory=set)
    """Nodes that were too late for its open rendezvous, and have not been heard since."""
    restarted_at: list[float] = field(default_factory=list)
    first_step: int | None = None
    reached: int | None = None
    best: int | None = None
    stuck_cycles: int = 0
    crashes: int = 0

    @property
    def new_steps(self) -> int:
        """How many steps the cycle has made that no cycle before it had."""
        if self.reached is None:
            return 0
        if self.best is not None:
            return self.reached - self.best
        return self.reached - (0 if self.first_step is None else self.first_step - 1)

    def report(self, step: int | None, *, first: bool = False) -> None:
        """A worker or its node says how far the cycle has come."""
        if step is not None:
            self.reached = step if self.reached is None else max(step, self.reached)
            if first:
                self.first_step = step if self.first_step is None else min(step, self.first_step)


@dataclass(slots=True)
class UserRequestHistory:
    """What must come of a user's request: `refused`, or these replicas restart. `owner`: the replica that has the
    node of a drain."""

    refused: bool = True
    restarts: frozenset[str] = frozenset()
    owner: str | None = None
    is_copy: bool = False


@dataclass(slots=True)
class HistoryStep:
    """A fact, and the decisions that the journal has after it."""

    fact: records.Fact
    t: float
    failures: list[FailureHistory] = field(default_factory=list)
    """Which failures the fact reports, or makes due."""
    decisions: list[records.Decision] = field(default_factory=list)
    request: UserRequestHistory | None = None
    begin_again: frozenset[str] = frozenset()
    """The replicas that ran when the store had lost its data."""


class JobHistory:
    """The job so far. `apply` each entry in the journal's order."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.bounds = plan, plan.fault_tolerance
        self.replicas = {
            f"{role.name}-{index}": ReplicaHistory(f"{role.name}-{index}", role)
            for role in plan.roles
            for index in range(role.replicas)
        }
        self.nodes: dict[str, NodeHistory] = {}
        self.called_back: set[str] = set()  # nodes whose agents have to join again
        self.wanted: dict[str, str] = {}  # node → the open rendezvous that prefers it
        self.generation, self.started_at, self.t = 0, 0.0, 0.0
        self.requeued_at: list[float] = []
        self.nodes_lost_at: list[float] = []
        self.failures: dict[tuple[str, int], FailureHistory] = {}
        self.blamed: set[str] = set()
        self.suspects: set[str] = set()
        self.requests: set[str] = set()
        self.drained: set[str] = set()
        self.leaving: dict[str, str] = {}  # drained nodes → the replica whose rendezvous has yet to replace them
        self.shutdown: records.Shutdown | None = None
        self.shut_down_at = 0.0
        self.behind_until = -math.inf
        self.committed_at = -math.inf  # the latest entry, by the run's time; or that is not known
        self.ended = False
        self.suspended = False
        self.step = HistoryStep(records.JobStarted(job="", name="", expected=()), 0.0)

    def spares(self) -> list[NodeHistory]:
        return [node for node in self.nodes.values() if node.place == "spare"]

    def have(self, replica: ReplicaHistory) -> int:
        """How many nodes its open rendezvous could have."""
        return len(replica.ready) + len(self.spares())

    def is_evidence_against(self, node: str) -> bool:
        return node in self.blamed or node in self.suspects

    def apply(self, entry: records.Entry) -> None:
        """Take the next entry in."""
        record, self.t = entry.record, entry.t
        if isinstance(record, records.Fact):
            self.step = HistoryStep(record, entry.t)
            self._apply_fact(record)
            if isinstance(record, records.FromAgent) and (node := self.nodes.get(record.node)) is not None:
                node.seq = max(node.seq, record.seq)
            # The time of any fact may be past that deadline; but facts that arrived while no controller ran, or
            # while it stood still, and so have the time at which it went on, come before it.
            if isinstance(record, records.ControllerStarted | records.DecisionsLate | records.JobResumed):
                self.behind_until = self.t
            elif isinstance(record, records.Tick) or self.t > self.behind_until:
                self._end_exit_skew()
                if not self._stops(record):
                    self._blame_late()
        else:
            self.step.decisions.append(record)
            self._apply_decision(record)

    # ---- facts

    def _apply_fact(self, fact: records.Fact) -> None:
        match fact:
            case records.JobStarted():
                self._start(fact)
            case records.NodeJoined():
                node = self.nodes.setdefault(fact.node, NodeHistory(fact.node))
                self.called_back.discard(node.name)
                if node.is_here:
                    node.deaths += 1
                    self._depart(node, self.t, None)
                self._is_safe(node.name)  # it joins only when none of its old workers is left
                node.incarnation, node.seq, node.replica, node.grant = fact.incarnation, fact.seq, None, None
                if node.deaths < self.bounds.quarantine_after:
                    self._arrive(node)
                else:
                    node.place = "quarantined"
                    self._forget(node)
            case records.NodeReady():
                replica = self.replicas[fact.replica]
                if replica.state == "open":
                    replica.report(fact.step)
                self._arrive(self.nodes[fact.node])
            case records.WorkersStarted():
                self.replicas[fact.replica].started.add(fact.node)
            case records.Progress():
                self.replicas[fact.replica].report(fact.step, first=True)
                self.replicas[fact.replica].stepped.add(fact.node)
            case records.WorkerFailed() | records.WorkerHung():
                at, lost = self.t - fact.ago_s, isinstance(fact, records.WorkerFailed) and fact.peer_lost
                hung, limit_s = (True, fact.limit_s) if isinstance(fact, records.WorkerHung) else (False, None)
                about = (at, fact.rank, fact.step, fact.node)
                self._fail(fact.replica, "worker", *about, is_symptom=lost, hung=hung, limit_s=limit_s)
            case records.NodeIsolated():
                self._fail(fact.replica, "node", self.t, None, None, fact.node)
            case records.WorkersDone():
                replica = self.replicas[fact.replica]
                replica.done.add(fact.node)
                replica.first_done_at = self.t if replica.first_done_at is None else replica.first_done_at
                if replica.done.issuperset(replica.nodes):
                    replica.state = "ended"
            case records.NodeLeft():
                node = self.nodes[fact.node]
                node.deaths = max(node.deaths, self.bounds.quarantine_after) if fact.survivors else node.deaths
                self._depart(node, self.t, fact.step)
            case records.NodeLost():
                node = self.nodes[fact.node]
                node.deaths += 1
                if node.place == "active" and node.replica is not None and fact.safe_after_s > 0.0:
                    self._may_live(node, node.replica, fact.safe_after_s)
                began, noticed = self.t - fact.ago_s, self.t - fact.ago_s
                if fact.cause == "heartbeat_timeout" or fact.safe_after_s:  # it was heard until so long ago
                    began = self.t - max(0.0, self.bounds.gives_away_after_s - fact.safe_after_s)
                self._depart(node, noticed, fact.step, began)
            case records.NodeFenced():
                if self.nodes[fact.node].incarnation == fact.incarnation:
                    self._is_safe(fact.node)
            case records.RestartAsked() | records.DrainAsked() | records.UndrainAsked():
                self.step.request = self._ask(fact)
            case records.NodeResumed():
                if self.nodes[fact.node].grant == fact.suspension:
                    self.nodes[fact.node].grant = None
            case records.JobResumed():
                self.suspended = False
                self._move(fact.stood_still_s)
            case records.DecisionsLate():
                self._commit_late(fact.since)
            case records.StoreDataLost():
                self._lose_store_data(fact)
            case records.Attributed():
                failure = self.failures.get((fact.replica, fact.cycle))
                if failure is not None:
                    failure.answers.setdefault(fact.attribution.source, fact.attribution)

    def _lose_store_data(self, fact: records.StoreDataLost) -> None:
        """All agents that are here join again, and nodes keep their ranks in the next cycle if they do."""
        if fact.generation != self.generation or self.shutdown is not None:
            return
        self.step.begin_again = frozenset(each.id for each in self.replicas.values() if each.state == "running")
        for node in self.nodes.values():
            if node.is_here:
                if node.place == "active" and node.replica is not None:
                    self._may_live(node, node.replica, self.bounds.gives_away_after_s)
                node.place = "gone"
                self._forget(node)
                if node.name not in self.drained:
                    self.called_back.add(node.name)
            else:  # it may not have read its fence, and renew its lease at the empty store
                for replica in self.replicas.values():
                    if self.t < replica.unproven.get(node.name, 0.0):
                        self._may_live(node, replica.id, self.bounds.gives_away_after_s)
        for replica in self.replicas.values():
            if replica.state == "open":
                replica.called_at = self.t
                self._await_back(replica)

    def _await_back(self, replica: ReplicaHistory) -> None:
        again = self.called_back.intersection(replica.nodes)
        replica.awaited |= again
        self.wanted.update(dict.fromkeys(again, replica.id))

    def _commit_late(self, since: float) -> None:
        """What was decided since then counts from now for those who must act on it."""
        late_s, fenced_by = self.t - since, since + self.bounds.gives_away_after_s
        self.shut_down_at += late_s if self.shut_down_at >= since else 0.0
        for failure in self.failures.values():
            failure.due_at += late_s if failure.at >= since else 0.0
        for replica in self.replicas.values():
            if replica.state == "open" and replica.opened_at >= since:
                replica.called_at = self.t
            replica.unproven = {
                node: until + late_s if until >= fenced_by else until for node, until in replica.unproven.items()
            }

    def _ask(self, fact: records.RestartAsked | records.DrainAsked | records.UndrainAsked) -> UserRequestHistory:
        """What must come of a request."""
        if fact.request in self.requests:
            return UserRequestHistory(is_copy=True)
        self.requests.add(fact.request)
        if fact.generation != self.generation or self.shutdown is not None:
            return UserRequestHistory()
        running = {each.id: each for each in self.replicas.values() if each.state == "running"}
        if isinstance(fact, records.RestartAsked):
            chosen = {name for name, cycle in fact.cycles.items() if name in running and running[name].cycle == cycle}
            restarts = frozenset().union(*(self._with(self.replicas[name]) for name in chosen))
            return UserRequestHistory(refused=not chosen, restarts=restarts)
        node = self.nodes.get(fact.node)
        if node is None or isinstance(fact, records.UndrainAsked):
            return UserRequestHistory(refused=node is None or node.name not in self.drained)
        if node.name in self.drained:
            return UserRequestHistory(refused=False)
        owner = self.wanted.get(node.name) or (node.replica if node.place == "active" else None)
        works = node.place == "active" and owner in running and node.name not in self.replicas[owner or ""].done
        return UserRequestHistory(
            refused=not self._can_spare(node, owner, force=fact.force),
            restarts=self._with(running[owner]) if works and owner is not None else frozenset(),
            owner=owner,
        )

    def _with(self, replica: ReplicaHistory) -> frozenset[str]:
        if replica.role.on_failure != "restart_job":
            return frozenset({replica.id})
        return frozenset(each.id for each in self.replicas.values() if each.state == "running")

    def _can_spare(self, node: NodeHistory, owner: str | None, *, force: bool) -> bool:
        """Whether every rendezvous that is open, and the one that would be, finds its nodes without this one."""
        if node.place in ("gone", "quarantined"):
            return True
        out = self.drained | {node.name}
        free = [
            name
            for name, each in self.nodes.items()
            if name not in out and (each.place == "spare" or (each.place == "expected" and name not in self.wanted))
        ]
        missing = -len(free)
        for replica in self.replicas.values():
            if replica.state == "open":
                missing += max(0, replica.role.nodes_per_replica - len((replica.ready | replica.awaited) - out))
            elif replica.id == owner and replica.state == "running":
                missing += 1
        if missing <= 0 or owner is None or not force:
            return missing <= 0
        replica = self.replicas[owner]
        left = len(replica.nodes) - 1
        if replica.state != "running":
            left = replica.role.nodes_per_replica - missing
        return replica.role.min_nodes is not None and left >= replica.role.min_nodes

    def _move(self, by_s: float) -> None:
        """The job stood still for so long: it counts for nothing that is measured from a moment."""
        self.started_at += by_s
        self.shut_down_at += by_s
        self.requeued_at = [at + by_s for at in self.requeued_at]
        self.nodes_lost_at = [at + by_s for at in self.nodes_lost_at]
        for replica in self.replicas.values():
            replica.opened_at += by_s
            replica.called_at += by_s
            replica.closed_at += by_s
            replica.recovered_at += by_s
            replica.not_before += by_s
            replica.first_done_at = None if replica.first_done_at is None else replica.first_done_at + by_s
            replica.unproven = {node: until + by_s for node, until in replica.unproven.items()}
            replica.restarted_at = [at + by_s for at in replica.restarted_at]
        for failure in self.failures.values():
            failure.at += by_s
            failure.noticed += by_s
            failure.first_noticed += by_s
            failure.due_at += by_s

    def _start(self, fact: records.JobStarted) -> None:
        self.generation, self.started_at = fact.generation, self.t
        self.nodes = {name: NodeHistory(name) for name in fact.expected}
        self.wanted, self.failures, self.suspects = {}, {}, set(fact.suspects)
        self.called_back.clear()
        self.shutdown, self.ended = None, False
        self.drained, self.leaving = set(), {}
        if fact.generation:
            self.requeued_at.append(self.t)
        preferred = iter(sorted(fact.expected, key=self.is_evidence_against))
        for replica in self.replicas.values():
            replica.nodes = tuple(islice(preferred, replica.role.nodes_per_replica))
            replica.cycle, replica.state, replica.unproven, replica.silent = -1, "open", {}, set()
            replica.crashes, replica.not_before = 0, 0.0

    def _arrive(self, node: NodeHistory) -> None:
        """It has no old worker, and is here for the rendezvous that prefers it, or as a spare."""
        if node.name in self.drained:
            self._forget(node)
            node.place, node.replica = "drained", None
            return
        replica_id = self.wanted.get(node.name)
        node.place, node.replica = "spare" if replica_id is None else "ready", replica_id
        if replica_id is not None:
            replica = self.replicas[replica_id]
            replica.ready.add(node.name)
            replica.awaited.discard(node.name)

    def _forget(self, node: NodeHistory) -> None:
        if (replica_id := self.wanted.pop(node.name, None)) is not None:
            self.replicas[replica_id].ready.discard(node.name)
            self.replicas[replica_id].awaited.discard(node.name)

    def _depart(self, node: NodeHistory, noticed: float, step: int | None, began: float | None = None) -> None:
        had_ranks = node.place == "active"
        node.place = "gone"
        self._forget(node)
        if had_ranks and node.replica is not None and node.name not in self.replicas[node.replica].done:
            self._fail(node.replica, "node", noticed, None, step, node.name, began)

    def _end_exit_skew(self) -> None:
        skew_s = self.bounds.hang.exit_skew
        if skew_s is None:
            return
        restarts = self.step.request.restarts if self.step.request is not None else frozenset()
        for replica in self.replicas.values():
            begun = replica.first_done_at
            runs = replica.state == "running" and replica.id not in restarts  # a user's order comes first
            if runs and begun is not None and self.t >= begun + skew_s:
                self._fail(replica.id, "worker", self.t, None, None, hung=True)

    def _blame_late(self) -> None:
        """A node that has not answered when its rendezvous' time is up is what the others have lost, also where
        nothing replaces it, so that it is not fenced but the job ends. A fenced one is, by the time at which its
        workers are dead, what hung workers have waited for."""
        for replica in self.replicas.values():
            if any(self.t < until for until in replica.unproven.values()):
                continue
            silent, replica.silent = sorted(replica.silent), set()
            for name in silent:
                if self.open_symptom(replica.id) is not None:
                    self._fail(replica.id, "node", self.t, None, None, name, -math.inf)
            is_overdue = self.t >= replica.called_at + self.bounds.rendezvous.join_timeout
            known = self.open_symptom(replica.id) if is_overdue else None
            if known is None:
                continue
            for name in sorted(replica.awaited):
                if known.is_symptom and self.nodes[name].place == "active":
                    self._fail(replica.id, "node", self.t, None, None, name, known.first_noticed)

    def _stops(self, fact: records.Fact) -> bool:
        """Whether the fact is the signal, or the answer, that ends the job before its rendezvous is looked at."""
        if isinstance(fact, records.Signalled):
            return True
        known = self.failures.get((fact.replica, fact.cycle)) if isinstance(fact, records.Attributed) else None
        if known is None or not known.waits or known.decided:
            return False
        return is_settled(self, known, self.t) and verdict_of(self, known) is Verdict.STOP

    def _hangs_before_a_loss(self, limit_s: float | None) -> bool:
        """Whether a worker may count as hung, by its bound or else by any of the job's, sooner than the silent node
        that it waits for counts as lost."""
        hang, beats = self.bounds.hang, self.bounds.heartbeat
        of_the_job = (hang.step_timeout, hang.startup_timeout, hang.no_output, hang.exit_skew)
        found = of_the_job if limit_s is None else (limit_s,)
        return any(each is not None and each <= beats.timeout + beats.interval for each in found)

    def open_symptom(self, replica_id: str) -> FailureHistory | None:
        """The failure that the replica's open rendezvous follows, whose cause may still be reported."""
        if self.shutdown is not None or self.replicas[replica_id].state != "open":
            return None
        held = (each for each in self.failures.values() if replica_id in each.held)
        return next((each for each in held if each.settles and not each.decided), None)

    def _settle(self, known: FailureHistory, cause: FailureHistory, began: float) -> None:
        """Better evidence of what has failed already: `cause`, if it is no symptom where that is one, or else the
        first of its kind."""
        is_later = began > known.first_noticed + CAUSED_WITHIN_S
        outranks = (cause.is_symptom, cause.noticed) < (known.is_symptom, known.noticed)
        is_better = outranks and not is_later
        was_waited_for = known.hung and cause.kind == "node" and began < known.noticed
        if not (is_better or was_waited_for):
            return
        if known.rank != cause.rank or known.replica != cause.replica:
            known.answers.clear()
        del self.failures[known.replica, known.cycle]
        known.replica, known.cycle = cause.replica, cause.cycle  # restarted as the symptom's replica says
        known.kind, known.rank, known.node = cause.kind, cause.rank, cause.node
        known.noticed, known.is_symptom, known.hung = cause.noticed, cause.is_symptom, cause.hung
        self.failures[known.replica, known.cycle] = known

    def _fail(
        self,
        replica_id: str,
        kind: Literal["worker", "node"],
        noticed: float,
        rank: int | None,
        step: int | None,
        node: str = "",
        began: float | None = None,
        *,
        is_symptom: bool = False,
        hung: bool = False,
        limit_s: float | None = None,
    ) -> None:
        """A cycle fails, unless it has failed before, or is over. `began`: it did not fail before."""
        replica = self.replicas[replica_id]
        known = self.open_symptom(replica_id)
        if self.shutdown is not None or (replica.state != "running" and known is None):
            return
        if any(failure.replica == replica_id for failure in self.step.failures):
            return
        replica.report(step)
        policy, settings = replica.role.on_failure, self.bounds.attribution
        waits = policy in RESTARTS and bool(settings.sources) and not settings.dry_run
        restarted = [replica_id]
        if policy == "restart_job":
            restarted = [each.id for each in self.replicas.values() if each.state == "running"]
        failure = FailureHistory(
            replica=replica_id,
            cycle=replica.cycle,
            kind=kind,
            at=self.t,
            noticed=noticed,
            rank=rank,
            policy=policy,
            held=frozenset(restarted) if policy in RESTARTS else frozenset(),
            node=node,
            first_noticed=noticed,
            is_symptom=is_symptom,
            hung=hung,
            settles=(is_symptom or (hung and self._hangs_before_a_loss(limit_s))) and policy in RESTARTS,
            waits=waits,
            due_at=self.t + (settings.decision_timeout if waits else settings.timeout),
        )
        if known is not None:
            failure.cycle -= 1
            self._settle(known, failure, noticed if began is None else began)
            return
        self.failures[replica_id, replica.cycle] = failure
        self.step.failures.append(failure)

    # ---- decisions

    def _apply_decision(self, decision: records.Decision) -> None:
        match decision:
            case records.RendezvousOpened():
                self._open(self.replicas[decision.replica], decision.cycle)
            case records.RendezvousClosed():
                self._close(self.replicas[decision.replica], decision.nodes)
            case records.Recovered() | records.FirstStepReached():
                replica = self.replicas[decision.replica]
                replica.recorded.append(type(decision))
                replica.recovered_at = self.t if isinstance(decision, records.Recovered) else replica.recovered_at
            case records.RestartDecided():
                self._restart(decision)
            case records.AttributionAsked():
                failure = self.failures[decision.replica, decision.cycle]
                if not failure.waits:
                    failure.due_at = self.t + self.bounds.attribution.timeout
            case records.AttributionJudged():
                self.failures[decision.replica, decision.cycle].judged = True
                self.blamed.update(decision.blamed)
            case records.ReplicaEnded():
                self.replicas[decision.replica].state = "ended"
            case records.NodeDrained():
                self._drain(self.nodes[decision.node])
            case records.NodeUndrained():
                self.drained.discard(decision.node)
                owner, node = self.leaving.pop(decision.node, None), self.nodes[decision.node]
                if decision.why and owner is not None:  # it has its seat back
                    self.wanted[node.name] = owner
                if node.place == "drained":
                    self._arrive(node)
            case records.Fence():
                self._fence(self.nodes[decision.node])
            case records.JobSuspended():
                self.suspended = True
                for node in self.nodes.values():
                    node.grant = decision.suspension if node.is_here else node.grant
            case records.Shutdown():
                self.shutdown = self.shutdown or decision
                self.shut_down_at = self.t
            case records.JobEnded():
                self.ended = True

    def _drain(self, node: NodeHistory) -> None:
        request = self.step.request
        if node.name in self.drained:
            return
        self.drained.add(node.name)
        owner = None if request is None else request.owner
        if owner is not None and self.replicas[owner].state != "ended":
            self.leaving[node.name] = owner
        if node.place in ("spare", "ready"):
            self._arrive(node)
        elif node.place == "expected":
            self._forget(node)

    def _open(self, replica: ReplicaHistory, cycle: int) -> None:
        replica.cycle, replica.state = cycle, "open"
        replica.opened_at, replica.called_at, replica.committed_at = self.t, self.t, self.committed_at
        replica.ready, replica.awaited, replica.done, replica.first_done_at = set(), set(), set(), None
        # An agent that was replaced had lost its ranks when this was opened: its successor is a spare.
        fact, lost = self.step.fact, [each for each in self.step.failures if each.kind == "node"]
        back = (
            fact.node
            if isinstance(fact, records.NodeJoined) and any(replica.id in each.held for each in lost)
            else None
        )
        for node in map(self.nodes.__getitem__, replica.nodes):
            if node.name == back or (node.place == "expected" and node.name in self.drained):
                continue
            if node.place in ("expected", "spare") or (node.place == "active" and node.replica == replica.id):
                replica.awaited.add(node.name)
                self.wanted[node.name] = replica.id
                if node.place == "spare":
                    self._arrive(node)
        if isinstance(self.step.fact, records.StoreDataLost):
            self._await_back(replica)

    def _close(self, replica: ReplicaHistory, nodes: tuple[str, ...]) -> None:
        for name in replica.nodes:
            self.wanted.pop(name, None)
        for name in replica.ready.difference(nodes):
            self.nodes[name].place, self.nodes[name].replica = "spare", None
        for name in nodes:
            self.nodes[name].place, self.nodes[name].replica = "active", replica.id
        replica.state, replica.nodes, replica.closed_at, replica.not_before = "running", nodes, self.t, 0.0
        replica.awaited, replica.ready, replica.silent = set(), set(), set()
        replica.started, replica.stepped, replica.recorded = set(), set(), []
        self.leaving = {name: owner for name, owner in self.leaving.items() if owner != replica.id}
        if replica.reached is not None:
            replica.best = replica.reached if replica.best is None else max(replica.best, replica.reached)
        replica.first_step = replica.reached = None

    def _restart(self, decided: records.RestartDecided) -> None:
        failure, replica = self.failures[decided.replica, decided.cycle], self.replicas[decided.replica]
        failure.decided = True
        if failure.policy not in RESTARTS or decided.by == "attribution":
            return
        replica.stuck_cycles = 0 if self.makes_progress(replica) else replica.stuck_cycles + 1
        if decided.action != "stop":
            (self.nodes_lost_at if failure.kind == "node" else replica.restarted_at).append(self.t)
            replica.crashes = self.crashes(replica, failure)
            for name in failure.held if decided.delay_s else ():
                self.replicas[name].not_before = failure.at + decided.delay_s

    def _fence(self, node: NodeHistory) -> None:
        """An agent that is here and was not lost is fenced: it is too late for its rendezvous, and loses them."""
        if not node.is_here or (replica_id := self.wanted.get(node.name)) is None:
            return
        self._may_live(node, replica_id, self.bounds.gives_away_after_s)
        if (known := self.open_symptom(replica_id)) is not None and known.is_symptom:
            self._fail(replica_id, "node", self.t, None, None, node.name, known.first_noticed)
        self.replicas[replica_id].silent.add(node.name)
        node.place = "gone"
        self._forget(node)

    def _is_safe(self, node: str) -> None:
        """None of its workers lives."""
        for replica in self.replicas.values():
            replica.unproven.pop(node, None)
            replica.silent.discard(node)

    def _may_live(self, node: NodeHistory, replica_id: str, dead_after_s: float) -> None:
        """Workers of the replica there must be dead after that time, and may live until then."""
        until = self.t + dead_after_s if node.grant is None else math.inf
        self.replicas[replica_id].unproven[node.name] = until

    def makes_progress(self, replica: ReplicaHistory) -> bool:
        return replica.new_steps >= self.bounds.progress.min_progress_steps

    def crashes(self, replica: ReplicaHistory, failure: FailureHistory) -> int:
        """How many cycles in a row have crashed, this failure included."""
        if replica.new_steps > 0 or failure.noticed - replica.closed_at > self.bounds.backoff.within:
            return 0
        return replica.crashes + (failure.kind == "worker")


def verdict_of(history: JobHistory, failure: FailureHistory) -> Verdict:
    """What the answers so far come to. A source that is silent has timed out."""
    settings, answers = history.bounds.attribution, failure.answers
    said = [answers[name].verdict if name in answers else Verdict.TIMEOUT for name in settings.sources]
    stops = [verdict is Verdict.STOP for verdict in said]
    if (any if settings.aggregation == "any" else all)(stops) and said:
        return Verdict.STOP
    if any(stops) or Verdict.RESTART in said:
        return Verdict.RESTART
    return Verdict.TIMEOUT if Verdict.TIMEOUT in said else Verdict.UNKNOWN


def is_settled(history: JobHistory, failure: FailureHistory, now: float) -> bool:
    """Whether no answer that is still to come can change the verdict, or none is in time any more."""
    settings, said = history.bounds.attribution, {answer.verdict for answer in failure.answers.values()}
    if now >= failure.due_at or len(failure.answers) == len(settings.sources):
        return True
    return Verdict.STOP in said if settings.aggregation == "any" else bool(said - {Verdict.STOP})
