"""Each situation causes the event of its name, and breaks no promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

import pytest

from nvrx_slurm.journal.records import (
    Attributed,
    ControllerStarted,
    DecisionsLate,
    Entry,
    JobStarted,
    JobSuspended,
    NodeJoined,
    NodeLost,
    Record,
    ReplicaEnded,
    RestartDecided,
    WorkerFailed,
)
from nvrx_slurm.lab.simulation import situations
from nvrx_slurm.lab.simulation.adversary import Act
from nvrx_slurm.lab.simulation.run import RunResult, run_scenario
from nvrx_slurm.lab.simulation.scenario import Scenario
from nvrx_slurm.lab.simulation.shapes import draw_shape

SEEDS = range(4)


def runs(situation: Callable[..., situations.Staged]) -> list[RunResult]:
    """Some runs of the situation, each with its own job."""
    results = []
    for seed in SEEDS:
        shape, acts = situation(Random(seed), draw_shape(Random(seed), 8))
        results.append(run_scenario(Scenario(seed, shape, acts)))
    return results


def records(results: Iterable[RunResult], kind: type[Record]) -> list[Record]:
    return [entry.record for result in results for entry in result.journal if isinstance(entry.record, kind)]


def entries(result: RunResult, kind: type[Record]) -> list[Entry]:
    return [entry for entry in result.journal if isinstance(entry.record, kind)]


def restarts(results: Iterable[RunResult]) -> list[RestartDecided]:
    return records(results, RestartDecided)  # type: ignore[return-value]


def forgets(results: list[RunResult]) -> bool:
    """A run had more restarts than its rate allows within its time."""
    bounds = [result.shape.plan.fault_tolerance for result in results]
    rates = [each.max_job_restarts or each.max_restarts for each in bounds]
    restarted = [sum(each.action != "stop" for each in restarts([result])) for result in results]
    return any(times > rate.count for times, rate in zip(restarted, rates, strict=True))


def opens_late(results: list[RunResult]) -> bool:
    """The late decision is the one on the failure, not the first one of the job."""
    late = [
        (mark.record.since, entries(result, WorkerFailed)[0].t)  # type: ignore[union-attr]
        for result in results
        for mark in entries(result, DecisionsLate)
    ]
    return bool(late) and all(since >= failed_at for since, failed_at in late)


def joins_again(results: list[RunResult]) -> bool:
    return any(len(entries(result, NodeJoined)) > len(result.shape.nodes) for result in results)


SHOWS: dict[Callable[..., situations.Staged], Callable[[list[RunResult]], object]] = {
    situations.crash_loop: lambda results: any(each.delay_s for each in restarts(results)),
    situations.failure_rate: forgets,
    situations.job_budget: lambda results: any(each.by == "budget" for each in restarts(results)),
    situations.late_exit: lambda results: any("finished" in each.cause for each in restarts(results)),
    situations.late_verdict: lambda results: records(results, Attributed) and restarts(results),
    situations.takeover_after_requeue: lambda results: all(
        len(entries(result, JobStarted)) == 2 and len(entries(result, ControllerStarted)) == 3 for result in results
    ),
    situations.suspended_late: lambda results: any(len(entries(result, JobSuspended)) == 2 for result in results),
    situations.former_join: joins_again,
    situations.former_proof: joins_again,
    situations.lossy_joins: lambda results: all(entries(result, NodeJoined) for result in results),
    situations.dead_with_the_controller: lambda results: all(
        entries(result, NodeLost) and len(entries(result, ControllerStarted)) == 2 for result in results
    ),
    situations.cut_at_the_close: lambda results: any(entries(result, NodeLost) for result in results),
    situations.replaced_at_the_close: joins_again,
    situations.cut_without_spares: joins_again,
    situations.frozen_past_a_deadline: lambda results: all(restarts([result]) for result in results),
    situations.opened_late: opens_late,
    situations.backlog_past_a_deadline: lambda results: all(
        len(entries(result, ControllerStarted)) == 2 and entries(result, ReplicaEnded) for result in results
    ),
    situations.older_cycle: lambda results: all(restarts([result]) for result in results),
    situations.copied_orders: lambda results: all(restarts([result]) for result in results),
}


@pytest.mark.parametrize("situation", situations.SITUATIONS, ids=lambda situation: situation.__name__)
def test_situation_comes_about_and_breaks_nothing(situation: Callable[..., situations.Staged]) -> None:
    """Most of its acts happen, and the journal has the events that they were to cause."""
    results = runs(situation)
    assert [result.broken for result in results] == [None] * len(results)
    assert sum(result.happened for result in results) > 0.7 * sum(len(result.acts) for result in results)
    assert SHOWS[situation](results)


def test_situations_are_in_quiet_runs_alone() -> None:
    """A run with drawn acts is not changed; a few quiet runs get no situation."""
    shape = draw_shape(Random(1), 8)
    acts = (Act(at_s=1.0, kind="kill_controller"),)
    staged = [situations.stage(Random(seed), shape, ()) for seed in range(200)]
    assert all(situations.stage(Random(seed), shape, acts) == (shape, acts) for seed in range(200))
    assert 0.8 < sum(bool(acts) for _, acts in staged) / len(staged) < 1.0


def test_shapes_of_situations_are_valid_configurations() -> None:
    """Each of their jobs has time limits that job.yaml allows, and its acts are on its own nodes."""
    for situation in situations.SITUATIONS:
        for seed in range(20):
            shape, acts = situation(Random(seed), draw_shape(Random(seed), 8))
            bounds = shape.plan.fault_tolerance
            assert len(shape.nodes) == shape.plan.total_nodes
            assert {act.node for act in acts} <= {"", *shape.nodes}
            assert bounds.heartbeat.interval < bounds.heartbeat.timeout <= bounds.heartbeat.startup_timeout
            assert bounds.heartbeat.timeout <= bounds.fence_timeout <= bounds.control_plane_grace
