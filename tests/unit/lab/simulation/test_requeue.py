"""A job that Slurm requeues: the next generation goes on, without influence of the one before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from nvrx_slurm.errors import EXIT_FAILED
from nvrx_slurm.jobspec.values import Allowance
from nvrx_slurm.journal.records import (
    ControllerStarted,
    JobStarted,
    Record,
    RendezvousClosed,
    RestartDecided,
    Shutdown,
)
from nvrx_slurm.lab.simulation.adversary import Act
from nvrx_slurm.lab.simulation.run import RunResult, run_scenario
from nvrx_slurm.lab.simulation.scenario import Scenario, draw_scenario

NODES, COUNT = 8, 3


def plain(scenario: Scenario) -> bool:
    """One replica on several nodes on Slurm, a spare, three restarts; no verdicts, no other budgets."""
    plan = scenario.shape.plan
    [role, *others] = plan.roles
    bounds = plan.fault_tolerance
    return (
        scenario.shape.cluster == "slurm"
        and not others
        and role.replicas == 1
        and role.nodes_per_replica > 2
        and role.on_failure == "restart_replica"
        and plan.spares > 0
        and bounds.max_restarts == Allowance(count=COUNT)
        and bounds.max_job_restarts is None
        and bounds.max_preemptions is None
        and not bounds.attribution.acts
        and bounds.progress.max_no_progress_cycles is None
    )


PLAIN = next(scenario for scenario in (draw_scenario(seed, NODES) for seed in range(10_000)) if plain(scenario))
WORKS_S = 10.0
BEGAN_AT = 1_700_000_000.0


def run(*acts: Act, **bounds: object) -> RunResult:
    """Runs the plain job with these acts and bounds. No promise is broken."""
    plan = PLAIN.shape.plan
    plan = structs.replace(plan, fault_tolerance=structs.replace(plan.fault_tolerance, **bounds))
    result = run_scenario(replace(PLAIN, shape=replace(PLAIN.shape, plan=plan, work_s=WORKS_S), acts=acts))
    assert result.broken is None
    return result


def records(result: RunResult, kind):
    return [entry.record for entry in result.journal if isinstance(entry.record, kind)]


def moments(result: RunResult) -> list[tuple[float, Record]]:
    """The time of each record, in seconds since the run began."""
    return [(entry.t - BEGAN_AT, entry.record) for entry in result.journal]


def requeue(at_s: float, number: int = 0, kind: str = "requeue") -> Act:
    return Act(at_s=at_s, kind=kind, number=number)


def fail(at_s: float) -> Act:
    return Act(at_s=at_s, kind="fail_worker", node=PLAIN.shape.nodes[0])


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("kind", ["requeue", "requeue_lost"])
def test_requeued_job_finishes(kind, number):
    """It has its old store or a fresh one, and all its nodes or another one in place of a node that is down."""
    after = run(requeue(1.0, number, kind))
    started = records(after, JobStarted)
    assert [each.generation for each in started] == [0, 1]
    assert after.exit_code == 0
    assert len(set(started[1].expected) - set(started[0].expected)) == number
    assert records(after, RendezvousClosed)[-1].generation == 1


@pytest.mark.parametrize("kind", ["requeue", "requeue_lost"])
def test_restarts_of_the_generation_before_count(kind):
    """They count also for a controller that takes over in the second generation, from a store that is younger than
    the job."""
    acts = (fail(1.0), requeue(3.0, 0, kind))
    began_s = next(
        at_s for at_s, record in moments(run(*acts)) if isinstance(record, JobStarted) and record.generation
    )
    after = run(*acts, Act(at_s=began_s + 2.0, kind="kill_controller"), fail(began_s + 4.0))
    assert len(records(after, ControllerStarted)) == 3
    assert [each.restarts_left for each in records(after, RestartDecided)] == [COUNT - 1, COUNT - 2]


def test_job_that_was_requeued_too_often_ends():
    """`max_preemptions` counts over all generations."""
    after = run(requeue(1.0), max_preemptions=Allowance(count=0))
    assert after.exit_code == EXIT_FAILED
    assert [each.exit_code for each in records(after, Shutdown)] == [143, EXIT_FAILED]


def test_record_of_another_generation_is_not_accepted():
    """A record that the adversary posts during the requeue arrives in the next generation, and is not accepted there
    either."""
    after = run(requeue(1.0, 1, "requeue_lost"), Act(at_s=2.0, kind="repeat_record", number=1))
    assert after.exit_code == 0
