"""A journal read as failures: what `explain` shows of one, and which would-be STOPs were right."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from nvrx_slurm.jobspec.model import AttributionSpec
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.records import (
    Attributed,
    ControllerStarted,
    NodeJoined,
    NodeReady,
    Progress,
    RestartAsked,
    Tick,
    WorkersDone,
)
from nvrx_slurm.journal.verdicts import Attribution, Evidence, Scope, Verdict
from nvrx_slurm.lab.plans import plain_bounds
from nvrx_slurm.report import explanation, hindsight, plain, screen
from nvrx_slurm.report.explanation import Explanation
from nvrx_slurm.report.failure_replay import ReplayedFailure, read_failures
from nvrx_slurm.report.metrics import registry_of
from nvrx_slurm.report.model import JobView
from nvrx_slurm.report.presence import OutsideState
from nvrx_slurm.report.snapshot import snap
from nvrx_slurm.util.files import JobFiles
from tests.unit.report.recorder import BEGIN, Recorder, plain_plan, roles_plan, write
from tests.unit.report.test_goodput import wandering_fleet
from tests.unit.report.test_history import history_of

FILES = JobFiles(Path("/jobs/42"))
LINE = Evidence(
    file="/jobs/42/logs/main-0/gen-0/cycle-0/rank-3.err", line=218, text="KeyError: 'lr'", rank=3, node="n1"
)


def plan(max_restarts: int = 3, **attribution: Any) -> Plan:
    bounds = plain_bounds(max_restarts=max_restarts, attribution=AttributionSpec(enable_lib=True, **attribution))
    return msgspec.structs.replace(plain_plan(), fault_tolerance=bounds)


def running(**attribution: Any) -> Recorder:
    recorder = Recorder(plan(**attribution))
    recorder.tell(ControllerStarted(epoch=1, host="head", pid=7))
    recorder.join()
    recorder.start_workers()
    recorder.progress(1)
    return recorder


def says(recorder: Recorder, verdict: Verdict, *, cycle: int = 0, after_s: float = 0.4) -> None:
    attribution = Attribution(
        source="lib",
        verdict=verdict,
        confidence=0.9,
        fault="key_error",
        scope=Scope.USER_CODE,
        ranks=(3,),
        nodes=("n1",),
        primary=LINE,
        secondary=(msgspec.structs.replace(LINE, file="/jobs/42/logs/other.err", rank=0, text="NCCL timeout"),),
        explanation="Rank 3 failed first.",
        hint="Fix the key.",
        latency_s=0.4,
    )
    recorder.tell(Attributed(replica="main-0", cycle=cycle, rank=3, attribution=attribution), after_s)


def told(recorder: Recorder) -> tuple[list[ReplayedFailure], JobView]:
    return read_failures(recorder.plan, FILES, recorder.entries)


def failures(recorder: Recorder) -> list[ReplayedFailure]:
    return told(recorder)[0]


def explained(recorder: Recorder) -> Explanation:
    """The last failure."""
    found, view = told(recorder)
    return explanation.explanation(found[-1], view, job="42", name="digits")


def page(recorder: Recorder) -> str:
    found = explained(recorder)
    rows = explanation.facts(found, recorder.plan.fault_tolerance, "/jobs/42")
    return plain.pairs(rows) + "\n\n" + plain.table(explanation.verdicts(found))


def test_a_failure_that_the_job_ignored_did_not_end_it() -> None:
    """The end of the job, which came later, is not shown as its consequence either."""
    role = msgspec.structs.replace(plain_plan().roles[0], on_failure="ignore")
    recorder = Recorder(msgspec.structs.replace(plan(), roles=(role,)))
    recorder.join()
    recorder.start_workers()
    recorder.fail("n1", 3, exit_code=1)
    says(recorder, Verdict.STOP)
    recorder.leave()
    assert recorder.job.shutdown is not None
    assert page(recorder).splitlines()[0].endswith("; went on without the replica")


def test_a_stop_is_explained() -> None:
    """One page has what failed first, what followed, each verdict, and the decision with the controller that made
    it."""
    recorder = running(dry_run=False)
    recorder.fail("n1", 3, exit_code=1, step=80)
    says(recorder, Verdict.STOP)
    recorder.leave()
    assert page(recorder).splitlines() == [
        "in short  STOP: a restart would fail the same way; the job ended",
        "job       42 (digits), main-0 cycle 0",
        "first     2026-09-21 14:13:22.963Z, rank 3 on n1 exited with code 1, at step 80",
        "          rank 3 on n1  logs/main-0/gen-0/cycle-0/rank-3.err:218",
        "          KeyError: 'lr'",
        "blamed    rank 3 on n1",
        "hint      Fix the key.",
        "then      rank 0 on n1  logs/other.err:218  NCCL timeout",
        "verdict   STOP (any of 1 source); the controller acted on it",
        "progress  step 80 was reached; progress is not judged",
        "budget    3 restarts are left for failed workers",
        "decision  the controller on head (epoch 1) stops the job because a source of attribution says STOP",
        "          2026-09-21 14:13:23.363Z, 400 ms after the failure",
        "end       the job ends with exit code 93: main-0: a restart cannot help: lib: STOP, Rank 3 failed first; "
        "last: rank 3 on n1 exited with code 1",
        "",
        "SOURCE  VERDICT  SURE  FAULT      SCOPE        TOOK  WHY",
        "lib     STOP      90%  key_error  user code  400 ms  Rank 3 failed first.",
    ]


def test_lost_steps_are_those_of_the_cycle_that_failed() -> None:
    """Steps of an earlier cycle that had come further were lost then and are not counted again; `status` shows the
    same number."""
    recorder = running()
    recorder.fail("n1", 3, exit_code=1, step=80)
    for failed_at in (65, None):
        recorder.ready()
        recorder.start_workers()
        recorder.progress(61)
        if failed_at is not None:
            recorder.fail("n1", 3, exit_code=1, step=failed_at)
    found = explained(recorder)
    assert (found.best_step, found.resumed_from, found.steps_lost) == (80, 61, 5)
    assert found.steps_lost == list(told(recorder)[1].recoveries.values())[-1].steps_lost
    assert "the workers resumed from step 61, 5 steps lost" in page(recorder)


def test_a_failure_names_its_own_step() -> None:
    """It also names a rank that was ahead in the same cycle, but no step of an earlier cycle that had come
    further."""
    recorder = running()
    recorder.fail("n1", 3, exit_code=1, step=80)
    for reached, step in ((66, 65), (None, None)):
        recorder.ready()
        recorder.start_workers()
        if reached is not None:
            recorder.progress(reached)
        recorder.fail("n1", 3, exit_code=1, step=step)
        said = "rank 3 on n1 exited with code 1"
        said += ", at step 65; another rank had reached step 66" if step else ""
        assert page(recorder).splitlines()[1].endswith(f"Z, {said}")
        assert (explained(recorder).last_step, explained(recorder).best_step) == (reached, 80)


@pytest.mark.parametrize("width", [60, 200])
def test_lines_are_fitted_to_the_terminal(width: int) -> None:
    """A cut log line keeps what follows it, such as a count; sentences are wrapped; no line is wider than 100
    columns."""
    recorder = running(dry_run=False)
    recorder.fail("n1", 3, exit_code=1, step=80)
    long = msgspec.structs.replace(LINE, text="KeyError: " + "lr " * 80, rule="key_error.raised")
    following = tuple(msgspec.structs.replace(long, rank=rank, rule="nccl_timeout.watchdog") for rank in range(3))
    answer = Attribution(
        source="lib", verdict=Verdict.STOP, confidence=0.9, primary=long, secondary=following, hint="Fix it. " * 30
    )
    recorder.tell(Attributed(replica="main-0", cycle=0, rank=3, attribution=answer), 0.4)
    found = explained(recorder)
    console = Console(width=width, file=io.StringIO(), highlight=False)
    rows = explanation.facts(found, recorder.plan.fault_tolerance, "/jobs/42")
    screen.show_facts(rows, explanation.verdicts(found), console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= min(width, screen.WIDEST_FACTS)
    assert sum("KeyError" in line for line in lines) <= 2  # the first line, and one line for the three that followed
    assert sum(line.endswith("…") for line in lines) == 1
    assert sum(line.endswith("…  (and 2 more)") for line in lines) == 1
    assert sum("Fix it." in line for line in lines) > 1


def test_the_object_has_the_first_line_too() -> None:
    """The object has the verdict and its meaning for this job."""
    recorder = running(dry_run=False)
    recorder.fail("n1", 3, exit_code=1, step=80)
    says(recorder, Verdict.STOP)
    recorder.leave()
    found = explained(recorder)
    assert (found.verdict, found.meaning) == (Verdict.STOP, "a restart would fail the same way; the job ended")


def test_what_took_how_long_until_all_nodes_stepped_again() -> None:
    """The last line has the duration of each phase; a cycle that failed before that has no such line."""
    recorder = running()
    recorder.fail("n1", 3, exit_code=1, step=80)
    recorder.ready()
    recorder.start_workers()
    assert "every node had stepped" not in page(recorder)
    recorder.progress(76)
    assert page(recorder).split("\n\n")[0].splitlines()[-1] == (
        "          every node had stepped 1.00 s after the failure: decided 0.0 ms, torn down 120 ms, closed 0.0 ms, "
        "spawned 80.0 ms, first step 803 ms"
    )


def test_a_late_verdict_is_shown_as_late() -> None:
    """A verdict that came after the decision is shown as dropped."""
    recorder = running(dry_run=False, decision_timeout=1.0)
    recorder.fail("n1", 3, exit_code=1, step=80)
    recorder.ready()
    recorder.tell(Tick(), 2.0)
    says(recorder, Verdict.STOP)
    assert "STOP (too late: dropped)" in page(recorder)
    assert "verdict   TIMEOUT (any of 1 source); it was no reason to stop; the rendezvous waited" in page(recorder)


def test_the_end_belongs_to_the_failure_that_it_was_decided_for() -> None:
    """Another replica may have failed since; the shutdown is not in the timeline of that failure."""
    bounds = plan(dry_run=False).fault_tolerance
    recorder = Recorder(msgspec.structs.replace(roles_plan(), fault_tolerance=bounds))
    recorder.join()
    recorder.fail("n2", 0, replica="rollout-0", exit_code=1)
    recorder.fail("n3", 0, replica="rollout-1", exit_code=1)
    answer = Attribution(source="lib", verdict=Verdict.STOP)
    recorder.tell(Attributed(replica="rollout-0", cycle=0, rank=0, attribution=answer))
    first, second = failures(recorder)
    assert first.timeline.shutdown is not None
    assert second.timeline.shutdown is None


def test_where_the_end_waits_for_no_answer_the_one_that_came_later_counts(tmp_path: Path) -> None:
    """A spent budget ends the job at once, and the journal records a TIMEOUT: no source was too late, and the metrics
    count none."""
    bounds = plain_bounds(max_restarts=0, attribution=AttributionSpec(enable_lib=True))
    recorder = Recorder(msgspec.structs.replace(plain_plan(), fault_tolerance=bounds))
    recorder.join()
    recorder.start_workers()
    recorder.fail("n1", 3, exit_code=1)
    recorder.leave()
    (failure,), view = told(recorder)
    assert failure.timeline.judged is not None and failure.timeline.judged.verdict is Verdict.TIMEOUT
    assert failure.timeline.verdict is None
    answer = Attribution(source="lib", verdict=Verdict.STOP, confidence=0.98)
    before = explanation.explanation(failure, view, job="42", name="digits")
    after = explanation.explanation(failure, view, job="42", name="digits", now=answer)
    assert (before.verdict, after.verdict) == (None, Verdict.STOP)
    shot = snap(view, write(tmp_path, recorder), outside=OutsideState())
    registry = registry_of(lambda: [(shot, history_of(recorder.entries))])
    labels = {"job_id": shot.folder.job_id, "verdict": "TIMEOUT", "acted": "no"}
    assert registry.get_sample_value("nvrx_verdicts_total", labels) == 0


def test_a_stop_that_comes_while_the_job_ends_is_said_not_to_be_acted_on() -> None:
    """The verdict was a STOP, but the job was ending already."""
    recorder = running(dry_run=False)
    recorder.fail("n1", 3, exit_code=1, step=80)
    recorder.cancel()
    says(recorder, Verdict.STOP)
    assert "STOP (any of 1 source); the controller did not act on it" in page(recorder)


def test_the_inquiry_holds_what_the_journal_knew() -> None:
    """An inquiry built from the journal asks what the controller asked."""
    recorder = running()
    recorder.fail("n1", 3, exit_code=7, step=80)
    inquiry = failures(recorder)[0].inquiry
    assert (inquiry.key.replica, inquiry.key.cycle, inquiry.key.rank) == ("main-0", 0, 3)
    assert inquiry.paths == ("/jobs/42/logs/main-0/gen-0/cycle-0",)
    assert inquiry.nodes == ("n0", "n1", "n2", "n3")
    assert inquiry.pids[3] == 4003
    assert inquiry.failed is not None and (inquiry.failed.exit_code, inquiry.failed.step) == (7, 80)
    assert inquiry.started_at > BEGIN
    recorder.ready()
    recorder.start_workers()
    recorder.fail("n0", 0, exit_code=1)
    assert failures(recorder)[1].inquiry.earlier == ("/jobs/42/logs/main-0/gen-0/cycle-0",)


def test_the_failed_cycles_own_steps_are_no_earlier_ones() -> None:
    """This also holds if a spare takes the ranks at once, so that the next cycle begins with the failure."""
    recorder = Recorder(roles_plan())
    recorder.join()
    for step in (80, 120):
        recorder.start_workers("rollout-0")
        recorder.progress(step, "rollout-0")
        [node] = recorder.job.replicas["rollout-0"].order
        recorder.lose(node, at=step)
        recorder.tell(NodeJoined(node=node, incarnation="another", seq=1, addr="127.0.0.1", port=5000))
    assert recorder.job.replicas["rollout-0"].cycle == 2
    found = [(failure.best_before, failure.best_step) for failure in failures(recorder)]
    assert found == [(None, 80), (80, 120)]


# what the restarted job does then → outcome
def fails_again(recorder: Recorder) -> None:
    recorder.fail("n1", 3, exit_code=1, step=80, after_s=100.0)


def goes_further(recorder: Recorder) -> None:
    recorder.progress(90)
    recorder.fail("n1", 3, exit_code=1, step=120, after_s=100.0)


def completes(recorder: Recorder) -> None:
    recorder.now += 100.0
    recorder.finish()


def is_cancelled(recorder: Recorder) -> None:
    recorder.cancel()
    recorder.leave()


@pytest.mark.parametrize(
    ("then", "outcome"),
    [(fails_again, "right"), (goes_further, "wrong"), (completes, "wrong"), (is_cancelled, "open")],
)
def test_hindsight(then: Any, outcome: str) -> None:
    """A STOP was right if the restart made no progress, wrong if it made progress, and open if this cannot be
    known."""
    recorder = running()
    recorder.fail("n1", 3, exit_code=1, step=80)
    says(recorder, Verdict.STOP)
    recorder.ready()
    recorder.start_workers()
    then(recorder)
    found = hindsight.hindsight([("42", *told(recorder))])
    (stop,) = found.stops
    assert stop.outcome == outcome
    assert found.precision == {"right": 1.0, "wrong": 0.0, "open": None}[outcome]
    if outcome == "right":
        assert found.rank_hours_saved == pytest.approx(8 * 100.0 / 3600, rel=0.02)  # 4 nodes of 2 workers
    assert plain.table(hindsight.table(found)).count("\n") == 1


def test_hindsight_of_a_crash_loop_without_steps() -> None:
    """The controller did not wait for verdicts on the last failure; it counts as the same failure because its cause
    is the same."""
    recorder = Recorder(plan(max_restarts=1))
    recorder.join()
    recorder.start_workers()
    recorder.fail("n1", 3, exit_code=1)
    says(recorder, Verdict.STOP)
    recorder.ready()
    recorder.start_workers()
    recorder.fail("n1", 3, exit_code=1)
    recorder.leave()
    assert recorder.job.shutdown is not None
    assert [stop.outcome for stop in hindsight.hindsight([("42", *told(recorder))]).stops] == ["right"]


def test_restarts_that_no_source_stopped_are_no_would_be_stops() -> None:
    """Only failures with a STOP are judged in hindsight."""
    recorder = running()
    recorder.fail("n1", 3, exit_code=1, step=80)
    says(recorder, Verdict.RESTART)
    found = hindsight.hindsight([("42", *told(recorder))])
    assert (found.failures, found.stops, found.precision) == (1, (), None)


def test_steps_that_are_found_after_the_failure_belong_to_it() -> None:
    """If nodes read the steps from a file or a log, a job that fails again at the same step has made no progress."""
    recorder = running()
    for cycle in (0, 1):
        recorder.fail("n1", 3, exit_code=1, after_s=100.0)
        says(recorder, Verdict.STOP, cycle=cycle)
        for node in recorder.job.replicas["main-0"].order:
            found = NodeReady(**recorder.agent(node), replica="main-0", cycle=cycle + 1, port=5001, step=500)
            recorder.tell(found)
        recorder.start_workers()
    assert [failure.best_step for failure in failures(recorder)] == [500, 500]
    found = hindsight.hindsight([("42", *told(recorder))])
    assert [stop.outcome for stop in found.stops] == ["right", "open"]


RESET: dict[str, Any] = {"exit_code": 1, "error": "ConnectionResetError: peer", "peer_lost": True}


def lost_after_its_peers(recorder: Recorder, *, killed: bool) -> None:
    """Ranks of n0 lose their peer and are reported first; the cause is that rank 3 on n1 was killed, or that n1 is
    dead."""
    recorder.fail("n0", 0, **RESET)
    if killed:
        recorder.fail("n1", 3, cycle=0, after_s=0.01, signal=9)
    else:
        recorder.lose("n1", after_s=0.01)
    recorder.ready(peers_lost={"n0": (0, 1)})


@pytest.mark.parametrize(("killed", "rank"), [(True, 3), (False, None)])
def test_the_cause_is_explained_first_and_then_what_its_peers_noticed(killed: bool, rank: int | None) -> None:
    """The sources are asked about the cause too, and cause and consequences are one failure."""
    recorder = running()
    lost_after_its_peers(recorder, killed=killed)
    found, view = told(recorder)
    [failure] = found
    failed = failure.inquiry.failed
    assert failed is not None
    assert (failed.node, failed.rank, failed.signal) == ("n1", rank, 9 if killed else None)
    assert failure.inquiry.key.rank == rank
    assert explained(recorder).peers_lost == (0, 1)
    assert view.last_failure is not None
    assert (view.last_failure.node, view.last_failure.rank, view.last_failure.peers_lost) == ("n1", rank, (0, 1))
    assert "ranks 0-1" in page(recorder)


def test_the_cause_in_another_replica_is_the_one_failure() -> None:
    """In a job that restarts as a whole, the first report came from a replica that only noticed the failure. Trace,
    metrics and page also count one failure, of the replica that has the cause."""
    roles = [msgspec.structs.replace(role, on_failure="restart_job") for role in roles_plan().roles]
    recorder = Recorder(msgspec.structs.replace(roles_plan(), roles=tuple(roles)))
    recorder.join()
    rollout = next(name for name in recorder.job.replicas if not name.startswith("policy"))
    node, cause = (recorder.job.replicas[name].order[0] for name in (rollout, "policy-0"))
    recorder.fail(node, 0, replica=rollout, **RESET)
    recorder.fail(cause, 0, replica="policy-0", cycle=0, after_s=0.01, signal=9)
    for replica in recorder.job.replicas:
        recorder.ready(replica)
    [failure] = failures(recorder)
    assert failure.inquiry.key.replica == "policy-0"
    assert failure.timeline.decided is not None
    [timeline] = history_of(recorder.entries).failures
    assert (timeline.key, timeline.cause.kind, timeline.more) == (("policy-0", 0, 0), "worker_signal", 1)


@pytest.mark.parametrize("noticed_with", ["tick", "step"])
@pytest.mark.parametrize("on_failure", ["restart_replica", "ignore"])
def test_workers_that_hang_at_the_exit_of_others_are_a_failure(on_failure: Any, noticed_with: str) -> None:
    """No record reports it: the controller finds at a deadline that the other nodes have finished. A spare's loss
    that was reported before is another failure."""
    [role] = plain_plan().roles
    bounds = plain_bounds(hang__exit_skew=60.0, progress__max_no_progress_cycles=3)
    role = msgspec.structs.replace(role, on_failure=on_failure)
    recorder = Recorder(msgspec.structs.replace(plain_plan(), roles=(role,), fault_tolerance=bounds))
    recorder.join()
    recorder.start_workers()
    for node in ("n0", "n1", "n2"):
        recorder.tell(WorkersDone(**recorder.agent(node), replica="main-0", cycle=0, step=80))
    recorder.lose("n5")
    working = {"replica": "main-0", "cycle": 0, "rank": 7, "step": 90}
    recorder.tell(Tick() if noticed_with == "tick" else Progress(**recorder.agent("n3"), **working), 61.0)
    [failure], [spare, timeline] = failures(recorder), history_of(recorder.entries).failures
    assert (spare.cause.node, spare.key) == ("n5", None)
    assert (timeline.at, timeline.key) == (recorder.now, ("main-0", 0, 0))
    assert failure.inquiry.failed is not None and "n3 hung" in failure.inquiry.failed.cause
    if on_failure == "restart_replica":  # the decision waits until all nodes have reported their steps
        assert timeline.decided is None
        recorder.ready()
    timeline = history_of(recorder.entries).failures[-1]
    assert timeline.decided is not None and "n3 hung" in timeline.cause.why


def test_nodes_that_are_lost_before_they_have_ranks_end_no_cycle() -> None:
    """The first rendezvous is open: each loss is a failure of its own, and so is the worker that fails in cycle 0."""
    recorder = Recorder(plan())
    recorder.join("n0", "n1", "n2", "n5")
    recorder.lose("n1", after_s=1.0)
    recorder.lose("n2", after_s=1.0)
    recorder.tell(NodeJoined(node="n1", incarnation="another", seq=1, addr="127.0.0.1", port=5000))
    recorder.join("n3", "n4")
    recorder.fail("n3", 7, exit_code=1, after_s=3600.0)
    found = history_of(recorder.entries).failures
    assert [(each.cause.node, each.key) for each in found] == [
        ("n1", None),
        ("n2", None),
        ("n3", ("main-0", 0, 0)),
    ]
    assert found[-1].at == recorder.now


def test_a_restart_that_a_user_asked_for_is_no_failure() -> None:
    """A node that is lost while its rendezvous is open is a failure without a decision. The next failure ends its
    cycle before the controller decides on it."""
    recorder = running(dry_run=False)
    recorder.tell(RestartAsked(request="r", by="ann", cycles={"main-0": 0}))
    recorder.lose("n2", after_s=0.1)
    recorder.ready()
    recorder.start_workers()
    [timeline] = history_of(recorder.entries).failures
    assert (timeline.cause.node, timeline.key) == ("n2", None)
    assert failures(recorder) == []
    recorder.fail("n1", 3, exit_code=1)
    timeline = history_of(recorder.entries).failures[-1]
    assert (timeline.key, timeline.decided) == (("main-0", 0, 1), None)


def test_every_report_has_the_same_failures() -> None:
    """In any history, the failures that ended a cycle by the records alone are those that the core decided on, with
    the same decisions."""
    for seed in range(300):
        fleet = wandering_fleet(seed)
        replayed, _ = read_failures(fleet.plan, FILES, fleet.journal)
        history = history_of(fleet.journal)
        ended = {each.key for each in history.failures if each.key is not None}
        keys = [each.inquiry.key for each in replayed]
        assert ended == {(key.replica, key.generation, key.cycle) for key in keys}, seed
        assert len(ended) == len(keys), seed
        decided = [(each.key, each.decided) for each in history.failures if each.decided is not None]
        assert all(key and (key[0], key[2]) == (each.replica, each.cycle) for key, each in decided), seed
