"""What would-be STOPs were worth: each verdict of a dry run beside what the restart then did. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from nvrx_slurm.journal.verdicts import Verdict
from nvrx_slurm.report.failures import Failures, FailureTimeline
from nvrx_slurm.report.model import Value
from nvrx_slurm.report.tables import Mood, Row, Table
from nvrx_slurm.report.words import plural, seconds

Outcome = Literal["right", "wrong", "open"]
"""`right`: the restarted job failed again and had made no new step (where it reports none: it failed in the same
way). `wrong`: it made new steps, or it completed. `open`: it was ended, or runs on, before either could be seen."""

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


def hindsight(jobs: Iterable[tuple[str, Failures, float | None]]) -> Hindsight:
    """`jobs`: id, failures, and the time of its last entry."""
    stops: list[WouldBeStop] = []
    acted = failures = 0
    for job, history, last_at in jobs:
        failures += len(history.timelines)
        for index, timeline in enumerate(history.timelines):
            judged = timeline.judged
            if judged is None or judged.verdict is not Verdict.STOP:
                continue
            acted += judged.acted
            if not judged.acted:
                stops.append(_would_be(job, history, timeline, _next(history.timelines, index), last_at))
    right, wrong = ([each for each in stops if each.outcome == kind] for kind in ("right", "wrong"))
    return Hindsight(
        stops=tuple(stops),
        acted=acted,
        failures=failures,
        precision=len(right) / (len(right) + len(wrong)) if right or wrong else None,
        rank_hours_saved=sum(each.rank_s for each in right) / 3600,
        rank_hours_lost=sum(each.rank_s for each in wrong) / 3600,
    )


def _next(timelines: Sequence[FailureTimeline], index: int) -> FailureTimeline | None:
    replica = timelines[index].inquiry.key.replica
    return next((timeline for timeline in timelines[index + 1 :] if timeline.inquiry.key.replica == replica), None)


def _would_be(
    job: str, history: Failures, timeline: FailureTimeline, after: FailureTimeline | None, last_at: float | None
) -> WouldBeStop:
    generation, replica, cycle = timeline.key
    until = after.failed_at if after else last_at
    ran_s = 0.0 if until is None or timeline.running_again_at is None else max(0.0, until - timeline.failed_at)
    faults = [answer.attribution.fault for answer in timeline.answers if answer.attribution.verdict is Verdict.STOP]
    return WouldBeStop(
        job=job,
        replica=replica,
        generation=generation,
        cycle=cycle,
        failed_at=timeline.failed_at,
        fault=faults[0] if faults else "unknown",
        why=timeline.judged.why if timeline.judged else "",
        outcome=_outcome(history, timeline, after),
        rank_s=ran_s * timeline.world_size,
    )


def _outcome(history: Failures, timeline: FailureTimeline, after: FailureTimeline | None) -> Outcome:
    if timeline.running_again_at is None:
        return "open"
    if after is None:
        return "wrong" if history.exit_code == 0 else "open"
    if (
        after.best_step is None
    ):  # no steps are reported: only the same class of failure again says that it got nowhere
        return "right" if _faults(timeline) & _faults(after) else "open"
    return "wrong" if timeline.best_step is None or after.best_step > timeline.best_step else "right"


def _faults(timeline: FailureTimeline) -> set[str]:
    return {answer.attribution.fault for answer in timeline.answers} - {"unknown"}


# --------------------------------------------------------------------------------------------- screen


def facts(result: Hindsight) -> list[Row]:
    precision = "not known yet" if result.precision is None else f"{result.precision:.0%}"
    counts = {kind: sum(each.outcome == kind for each in result.stops) for kind in MOODS}
    return [
        Row(("failures", str(result.failures))),
        Row(
            (
                "would-be stops",
                f"{len(result.stops)}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()),
            )
        ),
        Row(("acted on", str(result.acted))),
        Row(("precision", precision)),
        Row(("saved, if acted on", f"{result.rank_hours_saved:.2f} rank-hours (GPU-hours, with one GPU a rank)")),
        Row(("lost, if acted on", f"{result.rank_hours_lost:.2f} rank-hours")),
    ]


def table(result: Hindsight) -> Table:
    columns = ("JOB", "REPLICA", "CYCLE", "FAULT", "OUTCOME", "THEN RAN", "WHY")
    rows = tuple(Row(_cells(each), MOODS[each.outcome]) for each in result.stops)
    return Table("would-be stops", columns, rows, frozenset({"CYCLE", "THEN RAN"}))


def _cells(each: WouldBeStop) -> tuple[str, ...]:
    ran = f"{seconds(each.rank_s)} × ranks" if each.rank_s else plural(0, "second")
    return each.job, each.replica, str(each.cycle), each.fault, each.outcome, ran, each.why
