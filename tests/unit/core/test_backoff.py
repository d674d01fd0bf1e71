"""A crash loop is slowed down: when, for how long, and what ends it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nvrx_slurm.controller.controller import replay
from nvrx_slurm.core.job import next_deadline
from nvrx_slurm.core.state import Phase, new_job
from nvrx_slurm.jobspec.model import AttributionSpec, BackoffSpec, ProgressSpec
from nvrx_slurm.jobspec.plan import RolePlan, plan_from_json
from nvrx_slurm.journal.records import Progress, RendezvousClosed, RestartDecided, Shutdown
from tests.unit.core.fleet import Fleet, plain, plan_of

BACKOFF = BackoffSpec(after=3, within=60.0, initial=1.0, max=8.0)
LIVED_S = 5.0


def started(**bounds: Any) -> Fleet:
    """A job of two nodes and one spare whose first cycle runs."""
    fleet = Fleet(plain(**{"max_restarts": 100, "backoff": BACKOFF} | bounds))
    fleet.join(*fleet.names)
    fleet.started("n1", "n2")
    return fleet


def members(fleet: Fleet) -> tuple[str, ...]:
    return fleet.job.replicas["main-0"].order


def is_running(fleet: Fleet, replica: str = "main-0") -> bool:
    return fleet.job.replicas[replica].phase is Phase.RUNNING


def crash(fleet: Fleet, *, lived_s: float = LIVED_S) -> float:
    """A worker of the running cycle fails after `lived_s`, and all nodes get ready at once. Returns how long the
    rendezvous then stays open."""
    fleet.now += lived_s
    assert fleet.fail("n1") is not None
    fleet.ready("n1", "n2")
    return paused(fleet)


def paused(fleet: Fleet) -> float:
    """Let the core's deadlines pass until the next cycle begins; returns how long that takes."""
    began = fleet.now
    while not is_running(fleet):
        due = next_deadline(fleet.job)
        assert due is not None and due > fleet.now, "a deadline that has passed would be looked at again and again"
        fleet.now = due
        fleet.later(0.0)
    fleet.started(*members(fleet))
    return fleet.now - began


def test_the_first_two_restarts_are_immediate_and_the_third_waits():
    """Each pause is twice as long as the one before, up to the limit."""
    fleet = started()
    assert [crash(fleet) for _ in range(8)] == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    decided = fleet.said(RestartDecided)
    assert [each.delay_s for each in decided] == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert [each.crashes for each in decided] == [0, 0, 3, 4, 5, 6, 7, 8]


def test_without_a_plan_for_it_no_restart_waits():
    """Plans of older versions have none, and plans with `backoff: off`."""
    fleet = started(backoff=BackoffSpec(max=0.0))
    assert [crash(fleet) for _ in range(10)] == [0.0] * 10
    assert not any(each.delay_s or each.crashes for each in fleet.said(RestartDecided))


def test_a_thousand_crashes_are_a_pause_of_the_limit():
    """No number grows without a bound."""
    fleet = started(max_restarts=2000)
    for _ in range(1200):
        last = crash(fleet)
    assert last == BACKOFF.max


def test_a_cycle_that_lasted_ends_the_row():
    """A failure more than a minute after the start does not belong to a crash loop."""
    fleet = started()
    assert [crash(fleet) for _ in range(4)][-1] == 2.0
    assert crash(fleet, lived_s=61.0) == 0.0
    assert [crash(fleet) for _ in range(3)] == [0.0, 0.0, 1.0]


def test_a_new_step_ends_the_row():
    """A job that gets further restarts at once; one that fails at the same step each time does not get further."""
    fleet = started()

    def step(number: int) -> None:
        cycle = fleet.job.replicas["main-0"].cycle
        fleet.tell(Progress(**fleet.by("n1"), replica="main-0", cycle=cycle, rank=0, step=number))

    pauses = []
    for number in (7, 7, 7, 7, 8, 8):
        step(number)
        pauses.append(crash(fleet))
    assert pauses == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_a_lost_node_is_no_crash():
    """A lost node causes no pause and is not counted, and the crashes before it still count."""
    fleet = started()
    assert [crash(fleet) for _ in range(2)] == [0.0, 0.0]
    fleet.now += 1.0
    fleet.lose("n2")
    fleet.ready("n1")
    assert paused(fleet) == 0.0
    fleet.now += LIVED_S
    fleet.fail("n1")
    fleet.ready(*members(fleet))
    assert paused(fleet) == 1.0


def test_the_pause_counts_from_the_failure():
    """The pause includes the teardown: nodes that take three seconds to get ready wait for one more of four."""
    fleet = started()
    for _ in range(4):
        crash(fleet)
    fleet.now += LIVED_S
    fleet.fail("n1")
    fleet.now += 3.0
    fleet.ready("n1", "n2")
    assert paused(fleet) == pytest.approx(1.0)


@pytest.mark.parametrize("reason", ["cancel", "time_limit", "interrupt"])
def test_a_pause_ends_at_once_with_the_job(reason):
    """No pause delays the end of a job."""
    fleet = started()
    for _ in range(5):
        crash(fleet)
    fleet.now += LIVED_S
    fleet.fail("n1")
    fleet.ready("n1", "n2")
    assert not is_running(fleet)
    decisions = fleet.signal(reason)
    assert decisions is not None and isinstance(decisions[0], Shutdown)


def test_a_node_that_is_lost_during_the_pause_is_replaced_after_it():
    """The rendezvous closes when the pause is over, with the spare."""
    fleet = started()
    for _ in range(5):
        crash(fleet)
    fleet.now += LIVED_S
    fleet.fail("n1")
    fleet.ready("n1", "n2")
    fleet.now += 1.0
    fleet.lose("n2")
    assert not is_running(fleet)
    assert paused(fleet) == pytest.approx(7.0)
    assert set(members(fleet)) == {"n1", "n3"}


def test_a_round_that_cannot_close_any_more_is_not_kept_open_for_the_pause():
    """The job ends when no node is left, not a pause later."""
    fleet = started(rendezvous__join_timeout=2.0)
    for _ in range(5):
        crash(fleet)
    fleet.now += LIVED_S
    fleet.fail("n1")
    fleet.ready("n1")
    fleet.lose("n3")
    fleet.lose("n2")
    fleet.later(2.5)
    assert len(fleet.said(Shutdown)) == 1


def test_with_evidence_awaited_the_pause_is_decided_with_the_restart():
    """If a rendezvous waits for verdicts or steps, it then waits for the pause, which counts from the failure."""
    fleet = started(progress=ProgressSpec(max_no_progress_cycles=50), attribution=AttributionSpec(enable_lib=False))
    assert [crash(fleet) for _ in range(5)] == [0.0, 0.0, 1.0, 2.0, 4.0]
    assert [each.delay_s for each in fleet.said(RestartDecided)] == [0.0, 0.0, 1.0, 2.0, 4.0]


def test_all_replicas_that_restart_together_wait_together():
    """A replica that began earlier would fail for lack of the others."""
    role = RolePlan(name="a", command=("x",), replicas=2, on_failure="restart_job")
    fleet = Fleet(plan_of(role, max_restarts=100, backoff=BACKOFF))
    fleet.join(*fleet.names)
    for _ in range(4):
        fleet.now += LIVED_S
        fleet.fail("n1", replica="a-0")
        fleet.ready("n1", replica="a-0")
        fleet.ready("n2", replica="a-1")
        if is_running(fleet, "a-0"):
            continue
        assert not is_running(fleet, "a-1")
        paused_until = next_deadline(fleet.job)
        assert paused_until is not None
        fleet.now = paused_until
        fleet.later(0.0)
        assert is_running(fleet, "a-0") and is_running(fleet, "a-1")
    assert [each.delay_s for each in fleet.said(RestartDecided)] == [0.0, 0.0, 1.0, 2.0]


def test_a_new_generation_begins_a_new_row():
    """Another allocation may do better."""
    fleet = started()
    for _ in range(4):
        crash(fleet)
    fleet.requeue()
    fleet.join(*fleet.names)
    fleet.started("n1", "n2")
    assert [crash(fleet) for _ in range(3)] == [0.0, 0.0, 1.0]


def test_a_replay_decides_the_same():
    """A controller that takes over during a pause continues it."""
    fleet = started()
    for _ in range(6):
        crash(fleet)
    assert replay(new_job(fleet.plan), fleet.journal) == []


def test_a_journal_of_an_older_version_is_replayed_as_it_was():
    """Its plan has no back-off, so none is decided. An older version can read a plan and a record of this one."""
    fleet = started(backoff=BackoffSpec(max=0.0))
    for _ in range(6):
        crash(fleet)
    now = msgspec.to_builtins(fleet.plan)
    old = {key: now[key] for key in ("name", "roles", "spares", "workdir", "folder")}
    old["fault_tolerance"] = {"max_restarts": 100, "heartbeat_interval_s": 1.0}
    assert replay(new_job(plan_from_json(msgspec.json.encode(old))), fleet.journal) == []
    assert all(b"delay_s" not in msgspec.json.encode(each) for each in fleet.said(RestartDecided))
    assert len(fleet.said(RendezvousClosed)) == 7
