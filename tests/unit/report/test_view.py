"""The fold of a journal into a view."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nvrx_slurm.core.limits import restarts_left
from nvrx_slurm.jobspec.values import Allowance
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import (
    AttributionJudged,
    ControllerStarted,
    DrainAsked,
    Entry,
    JobResumed,
    JobStarted,
    NodeJoined,
    RendezvousOpened,
    Suspending,
    Tick,
    UndrainAsked,
)
from nvrx_slurm.journal.verdicts import Verdict
from nvrx_slurm.lab.plans import plain_bounds
from nvrx_slurm.report.failure_replay import FailureReplay
from nvrx_slurm.report.history import JobTimeline
from nvrx_slurm.report.model import JobView
from nvrx_slurm.report.page import tally, waiting
from nvrx_slurm.report.view import JobFold, fold, new_view, with_heartbeat
from tests.jobs import eventful
from tests.unit.report.recorder import (
    JOB,
    Recorder,
    ended,
    plain_plan,
    roles_plan,
    to_first_cycle,
    with_one_recovery,
)


def view_of(recorder: Recorder, *, with_plan: bool = True) -> JobView:
    view = new_view(recorder.plan if with_plan else None)
    for entry in recorder.entries:
        view = fold(view, entry)
    return view


def states(view: JobView) -> dict[str, str]:
    return {node.name: node.state for node in view.nodes.values()}


def test_nodes_that_have_not_joined_are_what_the_first_round_waits_for() -> None:
    """Before a rendezvous closes, its replica is joining and waits for exactly those of its nodes that have not
    joined."""
    recorder = Recorder(plain_plan())
    recorder.join("n0", "n4")
    view = view_of(recorder)
    assert states(view) == dict.fromkeys(["n1", "n2", "n3", "n5"], "joining") | {"n0": "ready", "n4": "standby"}
    assert view.replicas["main-0"].phase == "joining"
    assert view.waits_for("main-0") == ("n1", "n2", "n3")
    assert waiting(view) == "main-0 waits for n[1-3] to join"


def test_a_closed_round_gives_each_node_its_ranks() -> None:
    """In the first cycle 4 nodes have 2 ranks each, in order, and the rest are hot spares."""
    view = view_of(to_first_cycle())
    assert {node.name: node.ranks for node in view.nodes.values() if node.state == "active"} == {
        "n0": (0, 1),
        "n1": (2, 3),
        "n2": (4, 5),
        "n3": (6, 7),
    }
    assert view.spares == ("n4", "n5")
    assert view.replicas["main-0"].world_size == 8
    assert view.replicas["main-0"].phase == "running"
    assert (view.job, view.name, view.cycle, view.step) == (JOB, "digits", 0, 1)


def test_workers_that_have_not_started_are_waited_for() -> None:
    """Between the rendezvous's close and the last workers_started the replica is starting and names the nodes without
    workers."""
    recorder = Recorder(plain_plan())
    recorder.join()
    view = view_of(recorder)
    assert view.replicas["main-0"].phase == "starting"
    assert waiting(view) == "main-0 waits for n[0-3] to start workers"


def test_after_a_loss_the_survivors_are_waited_for_and_the_failure_is_shown() -> None:
    """A lost node is marked with its cause; its replica is stopping until the survivors are ready."""
    recorder = to_first_cycle()
    recorder.lose("n2", ago_s=0.5)
    view = view_of(recorder)
    assert states(view)["n2"] == "lost"
    assert view.nodes["n2"].why == "connection to its agent closed"
    assert view.replicas["main-0"].phase == "stopping"
    assert view.waits_for("main-0") == ("n0", "n1", "n3")
    failure = view.last_failure
    assert failure is not None
    assert (failure.why, failure.node, failure.replica, failure.cycle, failure.step) == (
        "n2 lost: connection to its agent closed",
        "n2",
        "main-0",
        0,
        80,
    )
    assert failure.at == pytest.approx(recorder.now - 0.5)
    assert view.last_decision is not None
    assert view.last_decision.what.startswith("the controller restarts main-0 after cycle 0")
    assert view.restarts == 1


def test_a_spare_takes_the_lost_nodes_ranks() -> None:
    """After the next rendezvous the promoted node has the dead one's ranks, and one spare is left."""
    view = view_of(with_one_recovery())
    assert view.nodes["n4"].ranks == (4, 5)
    assert view.nodes["n4"].promoted
    assert view.nodes["n2"].ranks == ()
    assert view.spares == ("n5",)
    assert view.cycle == 1
    assert view.step == 76
    assert tally(view) == "4 active, 1 standby, 1 lost"


def test_a_lost_spare_restarts_nothing() -> None:
    """The loss of a hot spare is the last failure, of no replica, and no decision follows."""
    recorder = to_first_cycle()
    recorder.lose("n5", at=None)
    view = view_of(recorder)
    assert view.spares == ("n4",)
    assert view.restarts == 0
    assert view.last_failure is not None
    assert view.last_failure.replica is None
    assert view.replicas["main-0"].phase == "running"


def test_a_failed_worker_is_shown_with_rank_and_signal_and_spends_the_budget() -> None:
    """The failure names rank, node and signal; one restart fewer is left."""
    recorder = to_first_cycle()
    recorder.fail("n1", 3, signal=9)
    view = view_of(recorder)
    assert view.last_failure is not None
    assert view.last_failure.why == "rank 3 on n1 was killed by SIGKILL"
    assert view.last_failure.rank == 3
    assert view.restarts_left(view.t) == 2


def test_the_timeline_has_each_cycle_with_its_end() -> None:
    """Cycles follow each other: the first ends with the cause of its restart, the last one as done."""
    view = view_of(ended())
    first, second = view.cycles.values()
    assert first.outcome == "n2 lost: connection to its agent closed"
    assert first.ended_at == second.opened_at
    assert (second.outcome, second.promoted) == ("done", ("n4",))
    stamps = [second.opened_at, second.closed_at, second.started_at, second.first_step_at, second.ended_at]
    assert stamps == sorted(stamp for stamp in stamps if stamp is not None)


def test_spares_that_leave_with_the_job_are_not_lost() -> None:
    """One of the two spares replaced n2; the other stayed a spare until the end."""
    assert view_of(ended()).spares == ("n5",)


def test_a_job_that_ended_has_its_exit_code_and_no_node_present() -> None:
    """After job_ended the exit code is known, the replica is done, and the agents have left."""
    view = view_of(ended())
    assert view.exit_code == 0
    assert view.replicas["main-0"].phase == "done"
    assert view.present == ()


def test_a_cancelled_job_waits_for_its_nodes_and_then_is_stopped() -> None:
    """After a cancel the running replica stops, waits for its nodes to leave, and never counts as failed."""
    recorder = to_first_cycle()
    recorder.cancel()
    view = view_of(recorder)
    assert view.replicas["main-0"].phase == "stopping"
    assert view.waits_for("main-0") == ("n0", "n1", "n2", "n3")
    recorder.leave("cancelled")
    view = view_of(recorder)
    assert (view.exit_code, view.replicas["main-0"].phase) == (143, "stopped")
    assert view.last_failure is None


def test_replicas_fail_one_by_one() -> None:
    """The death of a rollout's node opens a rendezvous of that replica only; the others keep running."""
    recorder = Recorder(roles_plan())
    recorder.join()
    for replica in recorder.job.replicas:
        recorder.start_workers(replica)
    recorder.lose("n3")
    view = view_of(recorder)
    assert {replica.id: (replica.phase, replica.cycle) for replica in view.replicas.values()} == {
        "policy-0": ("running", 0),
        "rollout-0": ("running", 0),
        "rollout-1": ("starting", 1),
        "rollout-2": ("running", 0),
    }
    assert view.nodes["n5"].role == "rollout"


def test_a_requeued_job_starts_again_and_keeps_its_past() -> None:
    """A new generation resets nodes and exit code, and keeps the timeline and the count of restarts."""
    recorder = ended()
    recorder.tell(JobStarted(job=JOB, name="digits", expected=recorder.nodes, generation=1))
    view = view_of(recorder)
    assert view.generation == 1
    assert view.exit_code is None
    assert set(states(view).values()) == {"joining"}
    assert len(view.cycles) == 3
    assert view.restarts == 1


def test_the_cycles_of_a_generation_end_with_it() -> None:
    """Also if it has no recorded end; its cycles keep their last steps even if later generations report others."""
    recorder = with_one_recovery()
    recorder.progress(90)
    left_at = recorder.now
    for record in (
        ControllerStarted(epoch=2, host="h", pid=1),
        JobStarted(job=JOB, name="digits", expected=recorder.nodes, generation=1),
    ):
        recorder.tell(record, 300.0)
    recorder.join()
    recorder.start_workers()
    recorder.progress(500)
    view = view_of(recorder)
    assert {key: (each.ended_at, each.last_step) for key, each in view.cycles.items()} == {
        ("main-0", 0, 0): (view.cycles["main-0", 0, 1].opened_at, 80),
        ("main-0", 0, 1): (left_at, 90),
        ("main-0", 1, 0): (None, None),
    }
    assert [view.last_step(each) for each in view.cycles.values()] == [80, 90, 500]
    recorder.finish(at=510)
    assert view_of(recorder).cycles["main-0", 1, 0].last_step == 510


def test_while_a_rendezvous_is_open_the_last_step_is_of_the_cycle_before() -> None:
    recorder = to_first_cycle()
    recorder.lose("n2", at=80)
    view = view_of(recorder)
    assert [view.last_step(each) for each in view.cycles.values()] == [80, None]


BUDGETS = [
    {"max_restarts": 2},
    {"max_restarts": Allowance(count=2, per_s=3600.0)},
    {"max_restarts": 10, "max_job_restarts": 4},
]


@pytest.mark.parametrize("bounds", BUDGETS)
def test_the_restarts_that_are_left_are_those_that_the_controller_has(bounds: dict[str, Any]) -> None:
    """The minimum over the replicas is compared before the first failure, after one of each replica, after a lost
    node, which spends none, after a suspension, and after the time of a rate."""
    recorder = Recorder(msgspec.structs.replace(roles_plan(), fault_tolerance=plain_bounds(**bounds)))
    view = new_view(recorder.plan)

    def compare() -> None:
        for entry in recorder.entries:
            fold(view, entry)
        for at in (recorder.now, recorder.now + 86400.0):
            left = min(restarts_left(recorder.job, each, at) for each in recorder.job.replicas.values())
            assert view.restarts_left(at) == left

    compare()
    recorder.join()
    for replica in list(recorder.job.replicas):
        recorder.start_workers(replica)
    for node, replica in (("n2", "rollout-0"), ("n2", "rollout-0"), ("n0", "policy-0")):
        recorder.fail(node, 0, replica=replica, exit_code=1)
        recorder.ready(replica)
        recorder.start_workers(replica)
        compare()
    recorder.lose("n3")
    recorder.ready("rollout-1")
    compare()
    recorder.tell(Suspending(**recorder.agent("n0")), 1800.0)
    recorder.tell(JobResumed(stood_still_s=3000.0), 3000.0)
    compare()


def test_without_a_plan_the_last_decision_says_how_many_restarts_are_left() -> None:
    recorder = to_first_cycle()
    assert view_of(recorder, with_plan=False).restarts_left(recorder.now) is None
    recorder.fail("n1", 3, exit_code=1)
    assert view_of(recorder, with_plan=False).restarts_left(recorder.now) == 2


def test_an_entry_that_was_folded_in_already_changes_nothing() -> None:
    """Entries may arrive twice, from the file and from the store: the second time they are ignored."""
    recorder = with_one_recovery()
    view = view_of(recorder)
    for entry in recorder.entries:
        view = fold(view, entry)
    assert view == view_of(recorder)


def test_a_journal_can_be_read_without_its_plan() -> None:
    """Without the plan the first rendezvous waits for every expected node; all else is the same."""
    recorder = Recorder(plain_plan())
    recorder.join("n0")
    assert view_of(recorder, with_plan=False).waits_for("main-0") == ("n1", "n2", "n3", "n4", "n5")
    full, bare = view_of(ended()), view_of(ended(), with_plan=False)
    assert states(full) == states(bare)
    assert full.recoveries == bare.recoveries


def test_heartbeats_update_steps_of_the_running_cycle_only() -> None:
    """A heartbeat updates the step of its node and replica; one of an older cycle or agent, or of a spare, updates
    none."""
    recorder = to_first_cycle()
    view = view_of(recorder)
    old = recorder.beat("n1", 500)
    view = with_heartbeat(view, recorder.beat("n1", 42))
    assert (view.nodes["n1"].step, view.step) == (42, 42)
    recorder.lose("n2")
    recorder.ready()
    recorder.start_workers()
    for entry in recorder.entries:
        fold(view, entry)
    with_heartbeat(view, old)
    with_heartbeat(view, recorder.beat("n5", 7))
    assert view.step is None


def test_a_node_that_is_too_late_for_a_round_is_shown_as_fenced() -> None:
    """A fence without a loss before it marks the node as lost, with the reason."""
    recorder = to_first_cycle()
    recorder.fail("n0", 0, exit_code=1)
    recorder.ready(but=("n3",))
    recorder.tell(Tick(), after_s=60.0)
    view = view_of(recorder)
    assert view.nodes["n3"].state == "lost"
    assert view.nodes["n3"].why == "fenced: too late for its rendezvous"
    assert view.unproven("main-0") == ("n3",)
    recorder.tell(Tick(), after_s=recorder.plan.fault_tolerance.gives_away_after_s)
    view = view_of(recorder)
    assert view.nodes["n4"].state == "active"
    assert view.nodes["n3"].held_until is None


def test_a_node_that_comes_back_is_a_spare() -> None:
    """A lost node whose new agent joins is standby again, without its old ranks or cause."""
    recorder = with_one_recovery()
    recorder.tell(NodeJoined(node="n2", incarnation="second", seq=1, addr="h", port=1))
    node = view_of(recorder).nodes["n2"]
    assert (node.state, node.ranks, node.why) == ("standby", (), None)


def test_a_controller_that_took_over_changes_no_state() -> None:
    """What nodes and replicas do goes on."""
    recorder = to_first_cycle()
    before = states(view_of(recorder))
    recorder.tell(ControllerStarted(epoch=1, host="h", pid=1))
    assert states(view_of(recorder)) == before


@pytest.mark.parametrize("acted", [False, True])
def test_a_dry_runs_verdict_is_not_the_last_decision(acted: bool) -> None:
    """A verdict that was not acted on is kept apart: the page of a healthy job shows only decisions that were
    made."""
    recorder = with_one_recovery()
    view = view_of(recorder)
    before, last = view.last_decision, recorder.entries[-1]
    judged = AttributionJudged(replica="main-0", cycle=0, verdict=Verdict.TIMEOUT, acted=acted, why="not waited for")
    fold(view, Entry(n=last.n + 1, t=last.t, record=judged))
    assert (view.last_decision == before) is not acted
    assert (view.last_verdict is None) is acted


def test_subscribers_read_each_entry_once_and_with_the_view() -> None:
    """One pass over the journal feeds the view and every other reader; each sees an entry after the view has taken
    it."""

    class Reader:
        def __init__(self) -> None:
            self.seen: list[tuple[int, int]] = []

        def take(self, entry: Entry, view: JobView) -> None:
            self.seen.append((entry.n, view.n))

    recorder, first, second = with_one_recovery(), Reader(), Reader()
    job = JobFold(recorder.plan, [first, second])
    for item in [*recorder.entries, *recorder.entries[-3:], recorder.beat("n1", 90)]:
        job.take(item)
    assert first.seen == second.seen == [(entry.n, entry.n) for entry in recorder.entries]
    assert job.view.step == 90


def test_a_recovery_names_the_cause_and_not_the_first_to_notice_it() -> None:
    """The node's loss was recorded after its peer's report: the outage, the cycle's end and the recovery name the
    loss."""
    recorder = to_first_cycle()
    recorder.fail("n0", 0, exit_code=1, error="ConnectionResetError: peer", peer_lost=True)
    noticed = view_of(recorder).last_failure
    assert noticed is not None
    assert noticed.peer_lost
    recorder.lose("n1", after_s=0.01)
    recorder.ready(peers_lost={"n0": (0, 1)})
    recorder.start_workers()
    view = view_of(recorder)
    [recovery] = view.recoveries.values()
    assert recovery.node == "n1"
    assert recovery.noticed_at == pytest.approx(noticed.at)
    assert view.cycles["main-0", 0, 0].outcome == recovery.why != noticed.why
    assert view.last_failure is not None
    assert (view.last_failure.node, view.last_failure.peers_lost) == ("n1", (0, 1))


def test_a_cancelled_job_has_the_step_that_it_had_reached() -> None:
    """The store's heartbeats are gone with the job; its agents report the step as they leave."""
    recorder = to_first_cycle()
    recorder.cancel()
    recorder.leave("cancelled", at=3270)
    assert view_of(recorder).step == 3270


def test_a_drained_node_has_no_ranks_and_no_step_and_says_at_whose_request() -> None:
    """The step of its ranks stays that of the replica, whose cycle ended at the user's request."""
    recorder = to_first_cycle()
    recorder.tell(DrainAsked(request="1", by="ada@login1", node="n1"))
    recorder.ready(at=7)
    view = view_of(recorder)
    node = view.nodes["n1"]
    assert (node.state, node.ranks, node.step, node.why) == ("drained", (), None, "drained by ada@login1")
    assert (view.restarts, view.restarts_asked, view.last_failure) == (0, 1, None)
    assert view.cycles["main-0", 0, 0].last_step == 7
    assert "ada@login1" in (view.cycles["main-0", 0, 0].outcome or "")


def with_drains() -> Recorder:
    """Four replicas, one of which restarts; a node is drained, and later undrained."""
    recorder = Recorder(roles_plan())
    recorder.join()
    for replica in list(recorder.job.replicas):
        recorder.start_workers(replica)
        recorder.progress(1, replica)
    recorder.fail("n2", 0, replica="rollout-0", exit_code=1)
    recorder.ready("rollout-0")
    recorder.start_workers("rollout-0")
    recorder.tell(DrainAsked(node="n0", by="ann", request="r1"))
    recorder.ready("policy-0")
    recorder.start_workers("policy-0")
    recorder.tell(UndrainAsked(node="n0", by="ann", request="r2"))
    recorder.finish()
    return recorder


@pytest.mark.parametrize("record", [eventful, with_drains])
@pytest.mark.parametrize("lost", [1, 6, None])
def test_every_reader_reads_a_damaged_journal_to_its_end(record, lost: int | None, tmp_path) -> None:
    """If one line, six lines, or all lines before it are missing, anywhere, the end of the job is still shown."""
    entries = record().entries
    for index in range(len(entries) - 1):
        rest = entries[index:] if lost is None else entries[:index] + entries[index + lost :] + entries[-1:]
        history = JobTimeline()
        job = JobFold(record().plan, [history, FailureReplay(record().plan, JobFolder(tmp_path))])
        for entry in rest:
            job.take(entry)
        history.finish(job.view)
        assert (job.view.n, job.view.exit_code) == (len(entries), 0)


def test_a_cycle_whose_opening_is_lost_is_shown_from_its_close_on() -> None:
    """It has the nodes and ranks that a whole journal gives."""
    recorder = with_one_recovery()
    whole, view = view_of(recorder), new_view(recorder.plan)
    for entry in recorder.entries:
        if not isinstance(entry.record, RendezvousOpened):
            view = fold(view, entry)
    assert states(view) == states(whole)
    assert view.replicas["main-0"].phase == "running"
    assert view.cycles["main-0", 0, 1].nodes == whole.cycles["main-0", 0, 1].nodes
    assert view.recoveries.keys() == whole.recoveries.keys()
