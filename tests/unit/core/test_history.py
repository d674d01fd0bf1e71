"""Arbitrary histories: the invariants hold for all facts, in any order, repeated or late."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nvrx_slurm.controller.controller import replay
from nvrx_slurm.core.job import next_deadline
from nvrx_slurm.core.state import NodeState, Phase, new_job
from nvrx_slurm.jobspec.model import AttributionSpec, ProgressSpec
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.jobspec.values import Allowance
from nvrx_slurm.journal.records import (
    Attributed,
    AttributionAsked,
    AttributionJudged,
    DecisionsLate,
    DrainAsked,
    FromAgent,
    JobEnded,
    NodeFenced,
    NodeJoined,
    NodeLost,
    NodeReady,
    RendezvousClosed,
    RendezvousOpened,
    RestartAsked,
    RestartDecided,
    Shutdown,
    UndrainAsked,
)
from nvrx_slurm.journal.verdicts import Attribution, Scope, Verdict
from nvrx_slurm.lab.simulation.monitors import JournalMonitors
from tests.unit.core.fleet import Fleet, plain, plan_of

SOURCES = AttributionSpec(enable_lib=True, enable_mcp=True, dry_run=False)
PLANS: tuple[Plan, ...] = (
    plain(nodes=2, spares=1),
    plain(nodes=3, spares=2, max_restarts=1),
    plain(nodes=3, spares=1, min_nodes=1, hang__exit_skew=15.0, max_node_losses=3),
    plain(nodes=2, spares=2, max_restarts=Allowance(count=1, per_s=60.0), backoff={"after": 1, "max": 8.0}),
    plain(nodes=2, spares=2, attribution=SOURCES, progress=ProgressSpec(max_no_progress_cycles=3)),
    plain(nodes=2, spares=1, attribution=msgspec.structs.replace(SOURCES, dry_run=True)),
    plan_of(
        RolePlan(name="policy", command=("x",), nodes_per_replica=2, on_failure="restart_job"),
        RolePlan(name="rollout", command=("x",), replicas=2),
        spares=1,
        attribution=msgspec.structs.replace(SOURCES, aggregation="all"),
        progress=ProgressSpec(max_no_progress_cycles=3),
    ),
    plan_of(
        RolePlan(name="policy", command=("x",), nodes_per_replica=2, on_failure="restart_job"),
        RolePlan(name="rollout", command=("x",), replicas=2, on_failure="ignore"),
        spares=1,
        max_job_restarts=2,
        quarantine_after=1,
    ),
)
NODES = st.integers(0, 5)


class History(RuleBasedStateMachine):
    """A fleet whose facts hypothesis chooses."""

    @initialize(plan=st.sampled_from(PLANS))
    def start(self, plan):
        self.watch(Fleet(plan))

    def watch(self, fleet):
        self.fleet = fleet
        self.monitored, self.broken = 0, []
        self.monitors = JournalMonitors(
            fleet.plan,
            lambda promise, sentence: self.broken.append((promise, sentence)),
            outage_s=lambda: 1e6,  # the rules skip deadlines
        )

    def _node(self, index):
        return self.fleet.names[index % len(self.fleet.names)]

    def _replica(self, node):
        known = self.fleet.job.nodes[node].replica
        return self.fleet.job.replicas[known] if known else None

    @rule(index=NODES)
    def join(self, index):
        self.fleet.join(self._node(index))

    @rule(index=NODES)
    def agent_is_replaced(self, index):
        self.fleet.rejoin(self._node(index))

    @rule(index=NODES)
    def node_dies(self, index):
        self.fleet.lose(self._node(index))

    @rule(index=NODES)
    def node_falls_silent(self, index):
        self.fleet.lose(self._node(index), safe_after_s=20.0)

    @rule(index=NODES)
    def death_is_proven(self, index):
        self.fleet.prove_dead(self._node(index))

    @rule(index=NODES)
    def worker_hangs(self, index):
        if replica := self._replica(node := self._node(index)):
            self.fleet.hang(node, replica=replica.id)

    @rule(index=NODES)
    def node_was_cut_off(self, index):
        if replica := self._replica(node := self._node(index)):
            self.fleet.isolate(node, replica=replica.id)

    @rule(index=NODES, count=st.integers(1, 9), longest=st.floats(0, 9))
    def something_is_learned(self, index, count, longest):
        self.fleet.learn(self._node(index), step=(count, longest))

    @rule(index=NODES)
    def node_leaves(self, index):
        self.fleet.leave(self._node(index))

    @rule(index=NODES, behind=st.integers(0, 1))
    def node_gets_ready(self, index, behind):
        if replica := self._replica(node := self._node(index)):
            self.fleet.ready(node, replica=replica.id, cycle=replica.cycle - behind + replica.ended)

    @rule(index=NODES)
    def workers_start(self, index):
        if replica := self._replica(node := self._node(index)):
            self.fleet.started(node, replica=replica.id)

    @rule(index=NODES, step=st.integers(1, 9))
    def worker_steps(self, index, step):
        if replica := self._replica(node := self._node(index)):
            self.fleet.step(node, step=step, replica=replica.id)

    @rule(index=NODES, behind=st.integers(0, 1))
    def worker_fails(self, index, behind):
        if replica := self._replica(node := self._node(index)):
            self.fleet.fail(node, replica=replica.id, cycle=replica.cycle - behind)

    @rule(index=NODES)
    def workers_finish(self, index):
        if replica := self._replica(node := self._node(index)):
            self.fleet.done(node, replica=replica.id)

    @rule(index=NODES, ahead=st.sampled_from([0, 0, 0, 1, -1]), again=st.integers(0, 4))
    def user_restarts(self, index, ahead, again):
        replicas = list(self.fleet.job.replicas.values())
        replica = replicas[index % len(replicas)]
        cycles = {replica.id: max(0, replica.cycle + ahead)}
        self.fleet.tell(RestartAsked(request=self._request(again), by="u", cycles=cycles))

    @rule(index=NODES, force=st.booleans(), again=st.integers(0, 4))
    def user_drains(self, index, force, again):
        self.fleet.tell(DrainAsked(request=self._request(again), by="u", node=self._node(index), force=force))

    @rule(index=NODES)
    def user_undrains(self, index):
        drained = sorted(self.fleet.job.drained) or [self._node(index)]
        self.fleet.tell(UndrainAsked(request=self._request(1), by="u", node=drained[index % len(drained)]))

    def _request(self, again):
        """The name of a request: a new one, or with 0 one that was used before, if any was."""
        return str(len(self.fleet.journal) if again else max(0, len(self.fleet.job.requests) - 1))

    @rule(seconds=st.sampled_from([0.1, 3.0, 20.0, 700.0]))
    def time_passes(self, seconds):
        self.fleet.later(seconds)

    @rule(back=st.integers(1, 9), seconds=st.sampled_from([3.0, 20.0, 700.0]))
    def decisions_reach_the_store_late(self, back, seconds):
        """The decisions about the latest facts are late. For the facts that follow no deadline is over."""
        since = self.fleet.journal[-min(back, len(self.fleet.journal))].t
        self.fleet.now += seconds
        self.fleet.tell(DecisionsLate(since=since))

    @rule(reason=st.sampled_from(["cancel", "interrupt", "time_limit", "agents_gone"]), rarely=st.integers(0, 9))
    def host_is_told_to_end(self, reason, rarely):
        if rarely == 0:
            self.fleet.signal(reason)

    @rule(
        back=st.integers(0, 2),
        source=st.sampled_from(SOURCES.sources),
        verdict=st.sampled_from([*Verdict, Verdict.RESTART, Verdict.RESTART]),
        blamed=NODES,
    )
    def a_source_answers(self, back, source, verdict, blamed):
        """A source answers about one of the last failures, even an old one."""
        asked = self.fleet.said(AttributionAsked)
        if len(asked) > back:
            about = {key: getattr(asked[-1 - back], key) for key in ("replica", "cycle", "generation", "rank")}
            answer = Attribution(
                source=source, verdict=verdict, scope=Scope.NODE, confidence=0.9, nodes=(self._node(blamed),)
            )
            self.fleet.tell(Attributed(**about, attribution=answer))

    @rule(back=st.integers(1, 40))
    def an_old_message_arrives_again(self, back):
        old = [entry.record for entry in self.fleet.journal[-back:] if isinstance(entry.record, FromAgent)]
        if old:
            assert self.fleet.tell(old[0]) is None or self.fleet.journal[-1].record.__class__.__name__ == "Fence"

    @invariant()
    def the_second_model_agrees(self):
        """The monitors of the simulation know only the journal and the documentation."""
        for entry in self.fleet.journal[self.monitored :]:
            self.monitors.enter(entry)
        self.monitored = len(self.fleet.journal)
        self.monitors.complete()
        assert self.broken == []

    @invariant()
    def no_rank_is_held_twice(self):
        members = [
            name
            for replica in self.fleet.job.replicas.values()
            if replica.phase is Phase.RUNNING
            for name in replica.order
            if self.fleet.job.nodes[name].replica == replica.id
            and self.fleet.job.nodes[name].state is NodeState.ACTIVE
        ]
        assert len(members) == len(set(members))

    @invariant()
    def running_replicas_have_all_their_nodes(self):
        job = self.fleet.job
        for replica in job.replicas.values():
            if replica.phase is Phase.RUNNING and job.shutdown is None:
                for name in replica.order:
                    assert name in replica.done or (
                        job.nodes[name].state is NodeState.ACTIVE and job.nodes[name].replica == replica.id
                    )

    @invariant()
    def no_rank_is_given_away_while_its_worker_may_live(self):
        """By the journal alone: after the loss of a silent member, its replica's next rendezvous closes only when the
        member's death is proven, its lease must have lapsed, or it is back."""
        holds: dict[str, str] = {}
        may_live: dict[str, tuple[str, float]] = {}
        for entry in self.fleet.journal:
            match entry.record:
                case RendezvousClosed(replica=replica, nodes=nodes):
                    assert not [n for n, (held, until) in may_live.items() if held == replica and entry.t < until]
                    holds.update(dict.fromkeys(nodes, replica))
                case NodeLost(node=node, safe_after_s=safe_after_s) if node in holds:
                    may_live[node] = (holds.pop(node), entry.t + safe_after_s)
                case NodeReady(node=node) | NodeFenced(node=node) | NodeJoined(node=node):
                    holds.pop(node, None)
                    may_live.pop(node, None)

    @invariant()
    def pool_is_who_stands_by(self):
        job = self.fleet.job
        assert job.standby == {n.name for n in job.nodes.values() if n.state is NodeState.STANDBY}

    @invariant()
    def closed_rounds_are_whole_and_keep_the_survivors_ranks(self):
        before: dict[str, RendezvousClosed] = {}
        for closed in self.fleet.said(RendezvousClosed):
            role = self.fleet.job.replicas[closed.replica].role
            assert len(set(closed.nodes)) == len(closed.nodes)
            assert (role.min_nodes or role.nodes_per_replica) <= len(closed.nodes) <= role.nodes_per_replica
            previous = before.get(closed.replica)
            if previous and len(previous.nodes) == len(closed.nodes) == role.nodes_per_replica:
                for name in set(previous.nodes) & set(closed.nodes):
                    assert previous.nodes.index(name) == closed.nodes.index(name) or name in closed.promoted
            before[closed.replica] = closed

    @invariant()
    def nothing_is_decided_after_the_first_shutdown(self):
        kinds = [type(entry.record) for entry in self.fleet.journal]
        assert kinds.count(Shutdown) <= 1
        assert kinds.count(JobEnded) <= 1
        if Shutdown in kinds:
            after = set(kinds[kinds.index(Shutdown) + 1 :])
            assert not after & {RendezvousOpened, RendezvousClosed, RestartDecided}

    @invariant()
    def a_verdict_is_read_once_and_stops_only_before_the_round(self):
        """By the journal alone: a verdict is judged at most once, and acted on only while the next rendezvous has not
        closed."""
        closed: set[tuple[str, int]] = set()
        judged: set[tuple[str, int]] = set()
        for entry in self.fleet.journal:
            match entry.record:
                case RendezvousClosed(replica=replica, cycle=cycle):
                    closed.add((replica, cycle))
                case AttributionJudged(replica=replica, cycle=cycle, acted=acted):
                    assert (replica, cycle) not in judged
                    assert not (acted and (replica, cycle + 1) in closed)
                    judged.add((replica, cycle))

    @invariant()
    def nothing_waits_without_a_deadline(self):
        """An open rendezvous always has a deadline."""
        job = self.fleet.job
        waiting = [each for each in job.replicas.values() if each.phase is Phase.RENDEZVOUS]
        assert not waiting or job.ended or next_deadline(job) is not None

    @invariant()
    def what_is_due_is_done(self):
        """The controller would tick for ever at a deadline that has passed and stays."""
        job, deadline = self.fleet.job, next_deadline(self.fleet.job)
        is_behind = self.fleet.now <= job.behind_until  # the next tick comes at once
        assert deadline is None or deadline > self.fleet.now or is_behind

    @invariant()
    def every_cycle_number_is_opened_once_and_closed_at_most_once(self):
        opened = [(o.replica, o.cycle) for o in self.fleet.said(RendezvousOpened)]
        closed = [(c.replica, c.cycle) for c in self.fleet.said(RendezvousClosed)]
        assert len(set(opened)) == len(opened)
        assert len(set(closed)) == len(closed)
        assert set(closed) <= set(opened)

    def teardown(self):
        """A controller that replays the journal makes the same decisions, and has the same state."""
        if not hasattr(self, "fleet"):
            return
        again = new_job(self.fleet.plan)
        assert replay(again, self.fleet.journal) == []
        again.catches_up = self.fleet.job.catches_up  # of the last fact, even if that was refused
        assert again == self.fleet.job


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=200, stateful_step_count=40)
