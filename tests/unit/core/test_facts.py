"""Which decisions follow from each kind of fact, as whole records, and which facts leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nvrx_slurm.core.job import next_deadline
from nvrx_slurm.core.state import Node, NodeState
from nvrx_slurm.jobspec.model import AttributionSpec, HangSpec
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import (
    AgentsStarted,
    Attributed,
    CommandEnded,
    DrainAsked,
    DumpAsked,
    DumpOrdered,
    Fact,
    Fence,
    JobEnded,
    JobStarted,
    Learned,
    NodeFenced,
    NodeIsolated,
    NodeLost,
    NodeReady,
    Progress,
    Quarantined,
    Recovered,
    RendezvousClosed,
    RendezvousOpened,
    ReplicaEnded,
    RestartDecided,
    RestartedInProcess,
    Shutdown,
    StacksDumped,
    WorkerFailed,
    WorkerHung,
    WorkersDone,
    WorkersStarted,
)
from nvrx_slurm.journal.restarts import InProcessRestart
from nvrx_slurm.journal.verdicts import Attribution, Verdict
from tests.unit.core.fleet import Fleet, plain, plan_of, running

TWO_REPLICAS = RolePlan(name="main", command=("x",), replicas=2)
"""One node each: n1 has main-0, n2 has main-1."""

IN_PROCESS = InProcessRestart(cause="e", iteration=1, world_size=2, active_world_size=2, total_s=0.1)
OF_CYCLE: dict[str, Any] = {"replica": "main-0", "cycle": 0}

# Facts of an agent about its node or its workers.
SAID: list[Callable[[dict[str, Any]], Fact]] = [
    lambda by: NodeReady(**by, **OF_CYCLE, port=1),
    lambda by: WorkersStarted(**by, **OF_CYCLE, pids={0: 1}),
    lambda by: Progress(**by, **OF_CYCLE, rank=0, step=1),
    lambda by: WorkerFailed(**by, **OF_CYCLE, rank=0, exit_code=1),
    lambda by: WorkerHung(**by, **OF_CYCLE, rank=0, why="no step"),
    lambda by: WorkersDone(**by, **OF_CYCLE),
    lambda by: NodeIsolated(**by, **OF_CYCLE, for_s=30.0),
]
NOTED: list[Callable[[dict[str, Any]], Fact]] = [
    lambda by: Learned(**by, role="main", seen={"step": (1, 1.0)}),
    lambda by: StacksDumped(**by, why="asked for (r)", request="r"),
    lambda by: RestartedInProcess(**by, **OF_CYCLE, restart=IN_PROCESS),
    lambda by: CommandEnded(**by, request="c", exit_code=0),
]


# ------------------------------------------------------------------------------- what leaves no trace


@pytest.mark.parametrize("said", [*SAID, *NOTED])
def test_nothing_of_an_agent_that_was_replaced_counts(said: Callable[[dict[str, Any]], Fact]) -> None:
    """Nor does anything of an agent that is not known."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.rejoin("n3")
    for node, incarnation in (("n1", "n1.9"), ("n3", "n3.0"), ("n9", "n9.0")):
        by = {"node": node, "incarnation": incarnation, "seq": 99, "generation": 0}
        assert fleet.tell(said(by)) is None, (node, incarnation)


@pytest.mark.parametrize("said", SAID)
def test_a_node_reports_for_the_replica_whose_ranks_it_has(said: Callable[[dict[str, Any]], Fact]) -> None:
    """A fact of a spare or of another replica's node does not count, whether main-0 runs or its rendezvous is
    open."""
    fleet = running(plan_of(TWO_REPLICAS, spares=1))
    for _ in range(2):
        assert fleet.tell(said(fleet.by("n2"))) is None
        assert fleet.tell(said(fleet.by("n3"))) is None
        fleet.fail("n1")


@pytest.mark.parametrize("said", SAID)
def test_a_node_that_is_lost_after_its_work_was_done_reports_for_none(
    said: Callable[[dict[str, Any]], Fact],
) -> None:
    """Its agent may live, and the cycle of the others goes on."""
    fleet = running(plain(nodes=2, spares=0))
    fleet.done("n1")
    fleet.lose("n1")
    assert fleet.tell(said(fleet.by("n1"))) is None
    assert fleet.said(RestartDecided) == []


def test_a_node_is_ready_once_for_the_cycle_that_is_called() -> None:
    fleet = running(plain(nodes=2, spares=0))
    assert fleet.tell(NodeReady(**fleet.by("n1"), **OF_CYCLE, port=1)) is None, "its cycle runs"
    fleet.fail("n2")
    assert fleet.tell(NodeReady(**fleet.by("n1"), **OF_CYCLE, port=1)) is None, "an older one"
    assert fleet.ready("n1") == []
    assert fleet.tell(NodeReady(**fleet.by("n1"), replica="main-0", cycle=1, port=1)) is None, "it is ready already"


def test_a_loss_is_that_of_the_nodes_present_agent_and_comes_once() -> None:
    fleet = running(plain(nodes=2, spares=1))
    assert fleet.tell(NodeLost(node="n9", incarnation="n9.0", cause="connection_closed")) is None
    assert fleet.tell(NodeLost(node="n3", incarnation="n3.9", cause="connection_closed")) is None
    assert fleet.lose("n3") == [Fence(node="n3", incarnation="n3.0")]
    assert fleet.lose("n3") is None


def test_a_proof_that_nothing_waits_for_is_no_fact() -> None:
    fleet = running(plain(nodes=2, spares=1))
    fleet.tell(NodeLost(node="n2", incarnation="n2.0", cause="heartbeat_timeout", safe_after_s=20.0))
    assert fleet.tell(NodeFenced(node="n2", incarnation="n2.0", proof="seen")) == []
    assert fleet.tell(NodeFenced(node="n2", incarnation="n2.0", proof="seen again")) is None


def test_evidence_is_given_by_members_of_the_cycle_that_has_failed() -> None:
    """A node of another replica has no evidence about it."""
    fleet = running(plan_of(TWO_REPLICAS, spares=0))
    lost = {**OF_CYCLE, "rank": 0, "exit_code": 1}
    assert fleet.tell(WorkerFailed(**fleet.by("n1"), **lost, peer_lost=True))
    assert fleet.tell(WorkerFailed(**fleet.by("n2"), **OF_CYCLE, rank=1, signal=9)) is None


def test_after_a_shutdown_nothing_is_restarted() -> None:
    """A failure, a hang at the exit and a rendezvous that could close decide nothing; what agents report is
    recorded."""
    fleet = running(plan_of(TWO_REPLICAS, hang=HangSpec(exit_skew=5.0)))
    fleet.fail("n2", replica="main-1")
    fleet.signal("cancel")
    assert fleet.fail("n1") == []
    assert fleet.ready("n2", replica="main-1") == []
    fleet = running(plain(nodes=2, spares=0, hang=HangSpec(exit_skew=5.0)))
    fleet.done("n1")
    fleet.signal("cancel")
    assert fleet.later(5.0) == []


def test_a_request_for_stacks_is_answered_once() -> None:
    asked = DumpAsked(request="r", by="ada", ranks=(1,), replica="main-0")
    fleet = running()
    assert fleet.tell(asked) == [DumpOrdered(request="r", ranks=(1,), replica="main-0")]
    assert fleet.tell(asked) is None


# ----------------------------------------------------------------------------------- what starts a job


def test_a_job_starts_once_in_each_generation() -> None:
    """The first rendezvous of every replica opens, and the wait for its nodes has a bound."""
    fleet = Fleet(plan_of(TWO_REPLICAS, spares=0, rendezvous__join_timeout=60.0))
    opened = [RendezvousOpened(replica=f"main-{number}", cycle=0) for number in range(2)]
    assert fleet.said(RendezvousOpened) == opened
    assert next_deadline(fleet.job) == fleet.now + 60.0
    assert fleet.tell(JobStarted(job="1", name="t", expected=fleet.names)) is None
    assert fleet.requeue() == [RendezvousOpened(replica=f"main-{n}", cycle=0, generation=1) for n in range(2)]


def test_the_first_cycle_is_no_recovery() -> None:
    fleet = running()
    assert fleet.started("n1", "n2") == []


def test_a_cycle_recovers_once() -> None:
    """Another report about its workers changes nothing."""
    fleet = running(plain(nodes=2, spares=0))
    fleet.fail("n1")
    fleet.now += 1.0
    fleet.ready("n1", "n2")
    fleet.now += 2.0
    phases = {"decided": 0.0, "torn_down": 1.0, "closed": 0.0, "spawned": 2.0}
    recovered = Recovered(replica="main-0", cycle=1, phases=phases, total_s=3.0)
    assert fleet.started("n1", "n2") == [recovered]
    assert fleet.started("n2") == []


def test_the_master_of_a_cycle_is_where_its_first_node_holds_a_port() -> None:
    """The port is the one that the node named when it got ready."""
    fleet = running(plain(nodes=2, spares=0))
    fleet.fail("n2")
    fleet.tell(NodeReady(**fleet.by("n1"), replica="main-0", cycle=1, port=31000))
    fleet.tell(NodeReady(**fleet.by("n2"), replica="main-0", cycle=1, port=32000))
    closed = fleet.said(RendezvousClosed)[-1]
    assert (closed.master_addr, closed.master_port) == ("addr-n1", 31000)


# -------------------------------------------------------------------------------- what a decision says of a failure


def test_all_that_a_hung_worker_reports_is_in_the_decision() -> None:
    """The recovery counts from the hang."""
    fleet = running(plain(nodes=2, spares=0, max_restarts=3))
    about: dict[str, Any] = {"why": "no step for 9 s", "where": "train.py:7", "step": 41, "ago_s": 2.0}
    fleet.tell(WorkerHung(**fleet.by("n2"), **OF_CYCLE, rank=3, **about))
    cause = "rank 3 on n2 hung: no step for 9 s, in train.py:7"
    told: dict[str, Any] = {**OF_CYCLE, "cause": cause, "node": "n2", "rank": 3, "step": 41}
    assert fleet.said(RestartDecided) == [RestartDecided(**told, action="restart_replica", restarts_left=2)]
    assert recovery(fleet) == {"decided": 2.0, "torn_down": 0.0, "closed": 0.0, "spawned": 0.0}


def test_all_that_is_known_of_a_lost_node_is_in_the_decision() -> None:
    """The decision has the last step of its workers, and the recovery counts from the loss."""
    fleet = running(plain(nodes=2, spares=1, max_restarts=3))
    fleet.tell(NodeLost(node="n2", incarnation="n2.0", cause="connection_closed", step=41, ago_s=2.0))
    cause = "n2 lost: connection to its agent closed"
    told: dict[str, Any] = {**OF_CYCLE, "cause": cause, "node": "n2", "step": 41}
    assert fleet.said(RestartDecided) == [RestartDecided(**told, action="restart_replica", restarts_left=3)]
    assert recovery(fleet) == {"decided": 2.0, "torn_down": 0.0, "closed": 0.0, "spawned": 0.0}


def recovery(fleet: Fleet) -> dict[str, float]:
    """The phases of the recovery, if all nodes that are left get ready and start at once."""
    fleet.ready(*(name for name in ("n1", "n2") if fleet.state(name) is NodeState.ACTIVE))
    fleet.started(*fleet.said(RendezvousClosed)[-1].nodes)
    [recovered] = fleet.said(Recovered)
    return dict(recovered.phases)


def test_an_agent_that_is_replaced_has_lost_its_workers() -> None:
    fleet = running(plain(nodes=2, spares=1))
    fleet.rejoin("n2")
    assert [each.cause for each in fleet.said(RestartDecided)] == ["n2 lost: its agent was replaced"]


def test_a_node_is_quarantined_with_what_it_did() -> None:
    fleet = running(plain(nodes=2, spares=1, quarantine_after=2))
    fleet.lose("n3")
    fleet.rejoin("n3")
    fleet.lose("n3")
    assert fleet.rejoin("n3") == [Quarantined(node="n3", deaths=2, reason="lost 2 times (limit 2)")]


def test_all_that_is_known_of_a_node_that_has_joined() -> None:
    """A node beyond the allocation is standby behind the others; a quarantined node has nothing left of its former
    agent but that agent's name and the count of its losses."""
    fleet = running(plain(nodes=2, spares=1, quarantine_after=1))
    fleet.names += ("extra",)
    fleet.incarnations["extra"] = fleet.seqs["extra"] = 0
    fleet.join("extra")
    about: dict[str, Any] = {"incarnation": "extra.0", "seq": 1, "addr": "addr-extra", "port": 29500}
    assert fleet.job.nodes["extra"] == Node(name="extra", index=3, state=NodeState.STANDBY, **about)
    fleet.lose("n2")
    fleet.rejoin("n2")
    about = {"incarnation": "n2.1", "seq": 1, "addr": "addr-n2", "port": 29500}
    assert fleet.job.nodes["n2"] == Node(
        name="n2", index=1, state=NodeState.QUARANTINED, deaths=1, former={"n2.0"}, **about
    )


# ------------------------------------------------------------------------- how silence counts as evidence


def silent(safe_after_s: float, at_s: float) -> str:
    """n1 has lost a peer, and `at_s` later n2 is given up for its silence, with `safe_after_s` of its lease left.
    Returns the node that is the cause."""
    fleet = running(plain(nodes=2, spares=1, attribution=AttributionSpec(enable_lib=False)))
    fleet.tell(WorkerFailed(**fleet.by("n1"), **OF_CYCLE, rank=0, exit_code=1, peer_lost=True))
    fleet.now += at_s
    fleet.tell(NodeLost(node="n2", incarnation="n2.0", cause="heartbeat_timeout", safe_after_s=safe_after_s))
    fleet.ready("n1")
    fleet.prove_dead("n2")
    [decided] = fleet.said(RestartDecided)
    return str(decided.node)


def test_a_node_that_fell_silent_in_time_is_what_its_peers_lost() -> None:
    """The silence begins with the last renewal of the lease, whether or not the lease has run out. More than ten
    seconds after the first report it is another failure."""
    lease_s = plain().fault_tolerance.gives_away_after_s
    assert lease_s > 16.0
    assert silent(safe_after_s=0.0, at_s=lease_s) == "n2"
    assert silent(safe_after_s=lease_s - 15.0, at_s=20.0) == "n2"
    assert silent(safe_after_s=lease_s - 15.0, at_s=30.0) == "n1"


@pytest.mark.parametrize("left_s", [0.5, 20.0])
def test_the_ranks_of_a_silent_node_wait_however_short_its_lease(left_s: float) -> None:
    fleet = running(plain(nodes=2, spares=1))
    fleet.tell(NodeLost(node="n2", incarnation="n2.0", cause="heartbeat_timeout", safe_after_s=left_s))
    assert fleet.ready("n1") == []
    assert [type(each) for each in fleet.later(left_s)] == [RendezvousClosed]


def test_a_node_that_was_ready_has_no_workers_to_wait_for() -> None:
    fleet = running(plain(nodes=2, spares=1))
    fleet.fail("n1")
    fleet.ready("n2")
    fleet.tell(NodeLost(node="n2", incarnation="n2.0", cause="heartbeat_timeout", safe_after_s=20.0))
    assert fleet.job.replicas["main-0"].unsafe == {}
    assert [type(each) for each in fleet.ready("n1")] == [RendezvousClosed]


# --------------------------------------------------------------------- what Slurm's end of a step excuses


def test_only_nodes_without_an_agent_are_expected_again() -> None:
    """Neither nodes with an agent nor nodes that a user has drained are expected."""
    fleet = running(plain(nodes=2, spares=3))
    for node in ("n3", "n4"):
        fleet.lose(node)
    fleet.tell(DrainAsked(request="d", by="ada", node="n4"))
    fleet.tell(AgentsStarted(nodes=("n1", "n3", "n4", "n9")))
    assert fleet.job.expected == {"n3"}


def test_one_death_is_excused_by_one_end_of_the_step() -> None:
    fleet = running(plain(nodes=2, spares=1, quarantine_after=9))
    for _ in range(3):
        fleet.lose("n3")
        fleet.rejoin("n3")
    fleet.lose("n3")
    fleet.tell(AgentsStarted(nodes=("n3",), step_ended=True))
    assert fleet.job.nodes["n3"].deaths == 3


# ------------------------------------------------------------------------------------ how a job ends


def test_a_replica_is_done_with_its_last_node_and_the_skew_counts_from_its_first() -> None:
    fleet = running(plain(nodes=3, spares=0, hang=HangSpec(exit_skew=60.0)))
    first_at = fleet.now
    fleet.done("n1")
    fleet.now += 30.0
    fleet.done("n2")
    assert next_deadline(fleet.job) == first_at + 60.0
    ended = ReplicaEnded(replica="main-0", cycle=0, outcome="done")
    assert fleet.done("n3") == [ended, Shutdown(exit_code=0, reason="done")]


def test_a_job_of_which_every_replica_failed_has_failed() -> None:
    """The job ends in the same step if the failure is the loss of its last node."""
    role = RolePlan(name="main", command=("x",), on_failure="ignore")
    dry = AttributionSpec(enable_lib=True)
    fleet = running(plan_of(role, attribution=dry))
    decisions = fleet.lose("n1") or []
    shutdown = Shutdown(exit_code=1, reason="every replica failed")
    assert [each for each in decisions if isinstance(each, ReplicaEnded | Shutdown)] == [
        ReplicaEnded(replica="main-0", cycle=0, outcome="failed"),
        shutdown,
    ]
    assert decisions[-1] == JobEnded(exit_code=1, reason=shutdown.reason)


def test_the_wait_for_those_who_leave_ends_on_its_deadline() -> None:
    fleet = running(plain(nodes=1, spares=1))
    fleet.done("n1")
    fleet.leave("n1")
    ends_at = next_deadline(fleet.job)
    assert ends_at is not None
    assert fleet.later(ends_at - fleet.now) == [JobEnded(exit_code=0, reason="done", missing=("n2",))]


def test_what_is_learned_of_something_that_never_happened_is_kept_as_it_is() -> None:
    fleet = running()
    fleet.learn("n1", save=(0, 0.5))
    assert fleet.job.seen == {"main": {"save": (0, 0.5)}}


def test_an_answer_of_a_source_to_a_job_that_ends_is_recorded() -> None:
    """A STOP that arrives then does not end the job a second time."""
    acting = AttributionSpec(enable_lib=True, dry_run=False, decision_timeout=10.0)
    fleet = running(plain(nodes=2, attribution=acting))
    fleet.fail("n1")
    fleet.signal("cancel")
    answer = Attribution(source="lib", verdict=Verdict.STOP)
    fleet.tell(Attributed(replica="main-0", cycle=0, rank=0, attribution=answer))
    assert [each.reason for each in fleet.said(Shutdown)] == ["cancelled"]
