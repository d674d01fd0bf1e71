"""From a failure to the first step after it: what the core records, and when."""

from __future__ import annotations

from typing import Any

import pytest

from nvrx_slurm.controller.controller import replay
from nvrx_slurm.core.state import new_job
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.records import (
    ControllerStarted,
    FirstStepReached,
    JobResumed,
    Progress,
    Recovered,
    Suspending,
    WorkersStarted,
)
from tests.unit.core.fleet import Fleet, plain, plan_of, running


def restarted(plan: Plan | None = None) -> Fleet:
    """n2 is lost 1 s after the start; n1 and the spare n3 have the ranks of cycle 1, 0.25 s later."""
    fleet = running(plan or plain(nodes=2, spares=1))
    fleet.started("n1", "n2")
    fleet.step("n1", "n2")
    fleet.now += 1.0
    fleet.lose("n2")
    fleet.now += 0.25
    fleet.ready("n1")
    return fleet


def test_the_phases_up_to_the_first_step_of_all_nodes_add_up() -> None:
    """The last node's first step completes the record, which has the phases of `recovered` and one more."""
    fleet = restarted()
    fleet.now += 0.5
    fleet.started("n1", "n3")
    fleet.now += 2.0
    assert fleet.step("n1", step=11) == []
    fleet.now += 1.0
    (reached,) = fleet.step("n3", step=12)
    assert isinstance(reached, FirstStepReached)
    assert (reached.replica, reached.cycle, reached.node, reached.step) == ("main-0", 1, "n3", 11)
    (recovered,) = fleet.said(Recovered)
    assert reached.phases == pytest.approx({**recovered.phases, "first_step": 3.0})
    assert sum(reached.phases.values()) == pytest.approx(reached.total_s) == 3.75


def test_a_step_before_the_last_node_has_started() -> None:
    """If workers do not wait for each other, both records come with the last start, and no phase is negative."""
    fleet = restarted()
    fleet.started("n1")
    fleet.step("n1", "n3")
    assert fleet.said(FirstStepReached) == []
    fleet.now += 0.5
    assert [type(each) for each in fleet.started("n3")] == [Recovered, FirstStepReached]
    assert fleet.said(FirstStepReached)[0].phases["first_step"] == 0.0


def test_the_first_cycle_is_no_recovery() -> None:
    """Neither a job's first cycle nor that of a new generation has a record."""
    fleet = running()
    fleet.started("n1", "n2")
    assert fleet.step("n1", "n2") == []
    fleet.requeue()
    fleet.join(*fleet.names)
    fleet.started("n1", "n2")
    assert fleet.step("n1", "n2") == []


def test_a_node_that_reports_no_steps() -> None:
    """If one node reports no step, there is no record."""
    fleet = restarted()
    fleet.started("n1", "n3")
    fleet.step("n1")
    fleet.done("n1", "n3")
    assert fleet.said(FirstStepReached) == []


def test_a_cycle_that_fails_before_its_first_step() -> None:
    """That cycle has no record; the next one counts from its own failure, without the steps of the cycle before."""
    fleet = restarted()
    fleet.started("n1", "n3")
    fleet.step("n1")
    fleet.now += 10.0
    fleet.fail("n1")
    fleet.ready("n1", "n3")
    fleet.started("n1", "n3")
    assert fleet.step("n3") == []
    fleet.now += 1.0
    (reached,) = fleet.step("n1")
    assert isinstance(reached, FirstStepReached)
    assert (reached.cycle, reached.total_s) == (2, 1.0)


@pytest.mark.parametrize(
    "stale",
    [{"cycle": 0}, {"generation": 7}, {"incarnation": "n3.9"}, {"seq": 1}],
)
def test_a_stale_step_completes_nothing(stale: dict[str, Any]) -> None:
    """The step is of an older cycle, of another generation or agent, or a repetition."""
    fleet = restarted()
    fleet.started("n1", "n3")
    fleet.step("n1")
    late = {**fleet.by("n3"), "replica": "main-0", "cycle": 1, "rank": 2, "step": 5, **stale}
    assert fleet.tell(Progress(**late)) is None
    assert len(fleet.step("n3")) == 1


def test_each_record_comes_once_a_cycle() -> None:
    """A start or a step that an agent reports again is accepted, and nothing follows."""
    fleet = restarted()
    fleet.started("n1", "n3")
    fleet.step("n1", "n3")
    assert fleet.step("n1", "n3") == []
    assert fleet.started("n1", "n3") == []


def test_a_world_that_got_smaller_waits_for_its_own_nodes_only() -> None:
    """With `min_nodes` and no spare the record needs the nodes of the new cycle."""
    fleet = restarted(plain(nodes=2, spares=0, min_nodes=1))
    fleet.later(1.0)
    fleet.started("n1")
    (reached,) = fleet.step("n1")
    assert isinstance(reached, FirstStepReached)


def test_each_replica_has_its_own() -> None:
    """The steps of another replica complete nothing."""
    role = RolePlan(name="main", command=("x",), nodes_per_replica=1, replicas=2)
    fleet = running(plan_of(role))
    for node, replica in (("n1", "main-0"), ("n2", "main-1")):
        fleet.fail(node, replica=replica)
        fleet.ready(node, replica=replica)
        fleet.started(node, replica=replica)
    fleet.step("n2", replica="main-1")
    assert [each.replica for each in fleet.said(FirstStepReached)] == ["main-1"]


def test_a_controller_that_takes_over_in_between_goes_on() -> None:
    """A controller that has replayed the journal records the same."""
    fleet = restarted()
    fleet.started("n1")
    fleet.tell(ControllerStarted(epoch=2, host="h", pid=1))
    again = new_job(fleet.plan)
    assert replay(again, fleet.journal) == []
    fleet.job = again
    fleet.now += 0.5
    fleet.started("n3")
    fleet.step("n1", "n3")
    assert fleet.said(FirstStepReached)[0].total_s == pytest.approx(0.75)


def test_a_suspension_counts_for_no_phase() -> None:
    """The time for which the job stood still is no part of its recovery."""
    fleet = restarted()
    fleet.now += 0.5
    fleet.started("n1", "n3")
    fleet.tell(Suspending(**fleet.by("n1")))
    fleet.now += 100.0
    fleet.tell(JobResumed(stood_still_s=100.0))
    fleet.now += 1.0
    fleet.step("n1", "n3")
    (reached,) = fleet.said(FirstStepReached)
    assert reached.phases["first_step"] == pytest.approx(1.0)
    assert reached.total_s == pytest.approx(1.75)


def test_a_controller_of_an_older_version_began_the_journal() -> None:
    """The older version recorded no first step: its successor does not record that one late, only the next one."""
    fleet = restarted()
    fleet.started("n1", "n3")
    fleet.step("n1", "n3")
    journal = [entry for entry in fleet.journal if not isinstance(entry.record, FirstStepReached)]
    again = new_job(fleet.plan)
    assert replay(again, journal) == []
    fleet.job = again
    assert fleet.tell(WorkersStarted(**fleet.by("n1"), replica="main-0", cycle=1, pids={0: 1})) == []
