"""The phases of recoveries."""

from __future__ import annotations

import pytest

from nvrx_slurm.journal.records import FirstStepReached
from nvrx_slurm.report import recovery
from nvrx_slurm.report.goodput import GoodputMeter
from nvrx_slurm.report.model import Recovery
from nvrx_slurm.report.view import JobFold
from tests.unit.report.recorder import Recorder, to_first_cycle, with_one_recovery
from tests.unit.report.test_view import view_of


def last_recovery(recorder: Recorder) -> Recovery:
    return list(view_of(recorder).recoveries.values())[-1]


def test_phases_add_up_to_the_total() -> None:
    """The phases follow each other, and their sum is the recovery's total."""
    each = last_recovery(with_one_recovery())
    assert list(each.phases) == ["decided", "torn_down", "closed", "spawned"]
    assert sum(each.phases.values()) == pytest.approx(each.total_s)
    assert each.noticed_at == pytest.approx(each.recovered_at - each.total_s)


def test_the_users_start_up_is_apart() -> None:
    """The time to the first step is not in the total; both together are the time from the death to the first step."""
    each = last_recovery(with_one_recovery())
    assert each.startup_s == pytest.approx(0.803)  # the other three nodes need 1 ms each
    assert each.to_first_step_s == pytest.approx(each.total_s + 0.803)
    assert each.last_to_step == "n3"
    assert recovery.in_order(each)[-1] == (recovery.STARTUP, "first step", each.startup_s)
    assert (each.step_before, each.first_step) == (80, 76)


def test_a_journal_without_the_first_step_of_all_nodes() -> None:
    """An older version recorded only the first step of each node: the start-up ends with the first of these."""
    recorder = with_one_recovery()
    recorder.entries = [each for each in recorder.entries if not isinstance(each.record, FirstStepReached)]
    each = last_recovery(recorder)
    assert (each.startup_s, each.last_to_step) == (pytest.approx(0.8), None)


def test_the_way_to_the_first_step_is_one_sentence() -> None:
    """The sentence has each phase up to the first step, the last node, and which workers were warm; before the first
    step, the total."""
    recorder = to_first_cycle()
    recorder.lose("n2")
    recorder.ready()
    recorder.start_workers(warm=2)
    assert recovery.describe(last_recovery(recorder)) == (
        "runs after 172 ms: decided 2.0 ms, torn down 90.0 ms, rendezvous closed 0.0 ms, spawned 80.0 ms; "
        "8 workers warm"
    )
    recorder.progress(76)
    assert recovery.describe(last_recovery(recorder)) == (
        "first step after 975 ms: decided 2.0 ms, torn down 90.0 ms, rendezvous closed 0.0 ms, spawned 80.0 ms, "
        "first step 803 ms on n3; 8 workers warm"
    )


def test_why_workers_of_a_recovery_were_cold() -> None:
    """The first reason that a node reported is shown."""
    recorder = to_first_cycle()
    recorder.fail("n0", 0, exit_code=1)
    recorder.ready()
    recorder.start_workers(cold="the command is no Python program")
    each = last_recovery(recorder)
    assert (each.warm, each.cold) == (0, "the command is no Python program")
    assert recovery.describe(each).endswith("; cold: the command is no Python program")


def test_a_recovery_knows_its_cause_and_who_took_over() -> None:
    """It names the lost node, and the hot spare that took its ranks."""
    each = last_recovery(with_one_recovery())
    assert (each.why, each.node, each.promoted) == ("n2 lost: connection to its agent closed", "n2", ("n4",))


def test_a_step_before_the_last_node_had_started_counts_as_at_once() -> None:
    """No start-up time is negative: a first step may be reported before the recovery is complete."""
    recorder = to_first_cycle()
    recorder.fail("n0", 0, exit_code=1)
    recorder.ready()
    recorder.progress(3, after_s=0.0)
    recorder.start_workers()
    each = last_recovery(recorder)
    assert each.startup_s == 0.0
    assert each.first_step == 3


def test_a_failure_during_a_recovery_lengthens_it() -> None:
    """The duration of a failed attempt is a phase of the recovery that succeeds, and the sum still holds."""
    recorder = to_first_cycle()
    recorder.lose("n2", ago_s=0.0)
    died_at = recorder.now
    recorder.ready()
    recorder.lose("n4", after_s=1.0)
    recorder.ready()
    recorder.start_workers()
    each = last_recovery(recorder)
    assert next(iter(each.phases)) == "earlier_attempts"
    assert sum(each.phases.values()) == pytest.approx(each.total_s)
    assert each.noticed_at == pytest.approx(died_at)
    assert each.total_s == pytest.approx(recorder.now - died_at)
    assert each.why == "n2 lost: connection to its agent closed"


def test_without_a_first_step_there_is_no_way_to_it() -> None:
    """Recoveries of a workload that reports no steps have only a total."""
    recorder = to_first_cycle()
    recorder.lose("n2")
    recorder.ready()
    recorder.start_workers()
    each = last_recovery(recorder)
    assert each.startup_s is None
    assert each.to_first_step_s is None
    assert [label for _, label, _ in recovery.in_order(each)] == [
        "decided",
        "torn down",
        "rendezvous closed",
        "spawned",
    ]


def test_one_failure_has_one_step() -> None:
    """The failed rank may have been a step behind: the replica failed at the last step that any of its ranks had
    reported."""
    recorder = to_first_cycle()
    recorder.fail("n0", 0, exit_code=1, step=97)
    recorder.ready(at=98)
    recorder.start_workers()
    recorder.progress(90)
    each = last_recovery(recorder)
    assert (each.step_before, each.first_step, each.steps_lost) == (98, 90, 9)
    assert recovery.steps(each) == "failed at step 98, resumed from step 90: 9 steps lost"


@pytest.mark.parametrize(("first", "lost"), [(21, 7), (27, 1), (28, 0), (35, 0)])
def test_a_reported_step_is_done(first: int, lost: int) -> None:
    """The job failed after step 27, and the first step reported after the restart is 21: steps 21 to 27 are made
    twice, as in the goodput."""
    recorder = to_first_cycle()
    recorder.fail("n0", 0, exit_code=1, step=27)
    recorder.ready(at=27)
    recorder.start_workers()
    recorder.progress(first)
    recorder.finish(at=40)
    assert last_recovery(recorder).steps_lost == lost
    meter = GoodputMeter()
    fold = JobFold(recorder.plan, [meter])
    for entry in recorder.entries:
        fold.take(entry)
    assert meter.result(fold.view).steps_repeated == lost


def test_after_a_crash_loop_the_steps_before_it_are_lost() -> None:
    """The cycles of the loop made no step: their recoveries lose none, and the last recovery loses the steps before
    the loop."""
    recorder = to_first_cycle()
    recorder.fail("n0", 0, exit_code=1, step=27)
    for _ in range(2):
        recorder.ready()
        recorder.start_workers()
        recorder.fail("n0", 0, exit_code=1)
    recorder.ready()
    recorder.start_workers()
    recorder.progress(21)
    assert [each.steps_lost for each in view_of(recorder).recoveries.values()] == [None, None, 7]
