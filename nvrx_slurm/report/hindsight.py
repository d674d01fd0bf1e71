"""What would-be STOPs were worth: each verdict of a dry run beside what the restart then did. Only `stops_of`
reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Literal

from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.verdicts import Verdict
from nvrx_slurm.report import source
from nvrx_slurm.report.history import JobTimeline
from nvrx_slurm.report.jobs import read_plan
from nvrx_slurm.report.model import JobView, Value
from nvrx_slurm.report.tables import Mood, Row, Table
from nvrx_slurm.report.words import seconds

if TYPE_CHECKING:
    from nvrx_slurm.report.failure_replay import ReplayedFailure

# `right`: the restarted job failed again and had made no new step (where it reports none: it failed in the same
# way). `wrong`: it made new steps, or it completed. `open`: it was ended, or runs on, before either could be seen.
Outcome = Literal["right", "wrong", "open"]

MOODS: dict[str, Mood] = {"right": "good", "wrong": "bad", "open": "dim"}


class WouldBeStop(Value, frozen=True, kw_only=True):
    """One STOP that was not acted on. `rank_s`: seconds, times ranks, that the job then ran until its next failure or
    its end: saved by the stop if it was right, lost by it if it was wrong."""

    job: str
    replica: str
    generation: int
    cycle: int
    failed_at: float
    fault: str
    why: str
    outcome: Outcome
    rank_s: float


class Hindsight(Value, frozen=True, kw_only=True):
    """All of them. `precision`: right of right and wrong; None while neither has been seen."""

    stops: tuple[WouldBeStop, ...]
    acted: int  # STOPs that were acted on: what a restart would have done is not known
    failures: int
    precision: float | None
    rank_hours_saved: float
    rank_hours_lost: float
    unreadable: tuple[str, ...] = ()


def hindsight(
    jobs: Iterable[tuple[str, list[ReplayedFailure], JobView]], unreadable: Collection[str] = ()
) -> Hindsight:
    """`jobs`: id, failures, and the view after the last entry. `unreadable`: why other jobs are not among them, once
    all of `jobs` are read."""
    stops: list[WouldBeStop] = []
    acted = count = 0
    for job, failures, view in jobs:
        count += len(failures)
        for index, failure in enumerate(failures):
            judged, key = failure.timeline.judged, failure.inquiry.key
            if judged is None or judged.verdict is not Verdict.STOP:
                continue
            if judged.acted:
                acted += 1
                continue
            later = (each for each in failures[index + 1 :] if each.inquiry.key.replica == key.replica)
            after = next(later, None)
            # To the next failure, or to the end: so long the restart was worth, or was lost.
            ran_s = 0.0
            if failure.timeline.running_again_at(view) is not None:
                ran_s = max(0.0, (after.failed_at if after else view.t) - failure.failed_at)
            said = (answer.attribution for answer in failure.timeline.answers)
            cycle = view.cycles.get((key.replica, key.generation, key.cycle))
            stop = WouldBeStop(
                job=job,
                replica=key.replica,
                generation=key.generation,
                cycle=key.cycle,
                failed_at=failure.failed_at,
                fault=next((each.fault for each in said if each.verdict is Verdict.STOP), "unknown"),
                why=judged.why,
                outcome=_outcome(failure, after, view),
                rank_s=ran_s * cycle.world_size if cycle else 0.0,
            )
            stops.append(stop)
    return sum_up(stops, acted=acted, failures=count, unreadable=unreadable)


def sum_up(
    stops: Collection[WouldBeStop], *, acted: int, failures: int, unreadable: Collection[str] = ()
) -> Hindsight:
    """These STOPs, of any number of jobs, in one."""
    right, wrong = ([each for each in stops if each.outcome == kind] for kind in ("right", "wrong"))
    return Hindsight(
        stops=tuple(stops),
        acted=acted,
        failures=failures,
        precision=len(right) / (len(right) + len(wrong)) if right or wrong else None,
        rank_hours_saved=sum(each.rank_s for each in right) / 3600,
        rank_hours_lost=sum(each.rank_s for each in wrong) / 3600,
        unreadable=tuple(unreadable),
    )


def _outcome(failure: ReplayedFailure, after: ReplayedFailure | None, view: JobView) -> Outcome:
    """What the restart did until its next failure (`after`), if there was one."""
    if failure.timeline.running_again_at(view) is None:
        return "open"
    if after is None:
        return "wrong" if view.shutdown is not None and view.shutdown.exit_code == 0 else "open"
    if after.best_step is None:
        # No steps are reported: only the same class of failure again says that the restart got nowhere.
        before, again = ({answer.attribution.fault for answer in each.timeline.answers} for each in (failure, after))
        # In one cycle several sources answer: one fault that both failures share is enough. Of the failure that ended
        # the job no answer was waited for.
        is_same = before & again - {"unknown"} or (not again and _cause(failure) == _cause(after))
        return "right" if is_same else "open"
    return "wrong" if failure.best_step is None or after.best_step > failure.best_step else "right"


def _cause(failure: ReplayedFailure) -> str | None:
    failed = failure.inquiry.failed
    return None if failed is None else failed.cause


def stops_of(folder: JobFolder, history: JobTimeline) -> tuple[WouldBeStop, ...]:
    """What STOPs that were not acted on would have saved or lost. Only these need the core's replay."""
    plan = read_plan(folder)
    judged = (failure.judged for failure in history.failures)
    if plan is None or not any(each and each.verdict is Verdict.STOP and not each.acted for each in judged):
        return ()
    from nvrx_slurm.report.failure_replay import read_failures  # the core, which most reports need not load

    return hindsight([(folder.job_id, *read_failures(plan, folder, source.so_far(folder)))]).stops


# --------------------------------------------------------------------------------------------- screen


def facts(result: Hindsight) -> list[Row]:
    counts = ", ".join(f"{sum(each.outcome == kind for each in result.stops)} {kind}" for kind in MOODS)
    precision = "not known yet" if result.precision is None else f"{result.precision:.0%}"
    return [
        Row(("failures", str(result.failures))),
        Row(("would-be stops", f"{len(result.stops)}: {counts}")),
        Row(("acted on", str(result.acted))),
        Row(("precision", precision)),
        Row(("saved, if acted on", f"{result.rank_hours_saved:.2f} rank-hours (GPU-hours, with one GPU a rank)")),
        Row(("lost, if acted on", f"{result.rank_hours_lost:.2f} rank-hours")),
    ]


def table(result: Hindsight) -> Table:
    columns = ("JOB", "REPLICA", "CYCLE", "FAULT", "OUTCOME", "RANK-TIME", "WHY")
    rows = []
    for each in result.stops:
        ran = seconds(each.rank_s) if each.rank_s else "0 s"
        cells = (each.job, each.replica, str(each.cycle), each.fault, each.outcome, ran, each.why)
        rows.append(Row(cells, MOODS[each.outcome]))
    return Table(columns, tuple(rows), frozenset({"CYCLE", "RANK-TIME"}))
