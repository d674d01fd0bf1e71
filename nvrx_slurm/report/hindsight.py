"""What would-be STOPs were worth: each verdict of a dry run beside what the restart then did. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from nvrx_slurm.journal.verdicts import Verdict
from nvrx_slurm.report.failures import Failures, Story
from nvrx_slurm.report.model import Value
from nvrx_slurm.report.tables import Mood, Row, Table
from nvrx_slurm.report.words import plural, seconds

Outcome = Literal["right", "wrong", "open"]
"""`right`: the restarted job failed again and had made no new step (where it tells none: it failed in the same way).
`wrong`: it made new steps, or it completed. `open`: it was ended, or runs on, before either could be seen."""

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
    acted: int  # STOPs that were acted on: what a restart would have done nobody knows
    failures: int
    precision: float | None
    rank_hours_saved: float
    rank_hours_lost: float


def hindsight(jobs: Iterable[tuple[str, Failures, float | None]]) -> Hindsight:
    """`jobs`: id, failures, and the time of its last entry."""
    stops: list[WouldBeStop] = []
    acted = failures = 0
    for job, told, last_at in jobs:
        failures += len(told.stories)
        for index, story in enumerate(told.stories):
            judged = story.judged
            if judged is None or judged.verdict is not Verdict.STOP:
                continue
            acted += judged.acted
            if not judged.acted:
                stops.append(_would_be(job, told, story, _next(told.stories, index), last_at))
    right, wrong = ([each for each in stops if each.outcome == kind] for kind in ("right", "wrong"))
    return Hindsight(
        stops=tuple(stops),
        acted=acted,
        failures=failures,
        precision=len(right) / (len(right) + len(wrong)) if right or wrong else None,
        rank_hours_saved=sum(each.rank_s for each in right) / 3600,
        rank_hours_lost=sum(each.rank_s for each in wrong) / 3600,
    )


def _next(stories: Sequence[Story], index: int) -> Story | None:
    replica = stories[index].inquiry.key.replica
    return next((story for story in stories[index + 1 :] if story.inquiry.key.replica == replica), None)


def _would_be(job: str, told: Failures, story: Story, after: Story | None, last_at: float | None) -> WouldBeStop:
    generation, replica, cycle = story.key
    until = after.failed_at if after else last_at
    ran_s = 0.0 if until is None or story.running_again_at is None else max(0.0, until - story.failed_at)
    faults = [answer.attribution.fault for answer in story.answers if answer.attribution.verdict is Verdict.STOP]
    return WouldBeStop(
        job=job,
        replica=replica,
        generation=generation,
        cycle=cycle,
        failed_at=story.failed_at,
        fault=faults[0] if faults else "unknown",
        why=story.judged.why if story.judged else "",
        outcome=_outcome(told, story, after),
        rank_s=ran_s * story.world_size,
    )


def _outcome(told: Failures, story: Story, after: Story | None) -> Outcome:
    if story.running_again_at is None:
        return "open"
    if after is None:
        return "wrong" if told.exit_code == 0 else "open"
    if after.best_step is None:  # no steps are told: only the same class of failure again says that it got nowhere
        return "right" if _faults(story) & _faults(after) else "open"
    return "wrong" if story.best_step is None or after.best_step > story.best_step else "right"


def _faults(story: Story) -> set[str]:
    return {answer.attribution.fault for answer in story.answers} - {"unknown"}


# --------------------------------------------------------------------------------------------- screen


def facts(told: Hindsight) -> list[Row]:
    precision = "not known yet" if told.precision is None else f"{told.precision:.0%}"
    counts = {kind: sum(each.outcome == kind for each in told.stops) for kind in MOODS}
    return [
        Row(("failures", str(told.failures))),
        Row(
            (
                "would-be stops",
                f"{len(told.stops)}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()),
            )
        ),
        Row(("acted on", str(told.acted))),
        Row(("precision", precision)),
        Row(("saved, if acted on", f"{told.rank_hours_saved:.2f} rank-hours (GPU-hours, with one GPU a rank)")),
        Row(("lost, if acted on", f"{told.rank_hours_lost:.2f} rank-hours")),
    ]


def table(told: Hindsight) -> Table:
    columns = ("JOB", "REPLICA", "CYCLE", "FAULT", "OUTCOME", "THEN RAN", "WHY")
    rows = tuple(Row(_cells(each), MOODS[each.outcome]) for each in told.stops)
    return Table("would-be stops", columns, rows, frozenset({"CYCLE", "THEN RAN"}))


def _cells(each: WouldBeStop) -> tuple[str, ...]:
    ran = f"{seconds(each.rank_s)} × ranks" if each.rank_s else plural(0, "second")
    return each.job, each.replica, str(each.cycle), each.fault, each.outcome, ran, each.why
