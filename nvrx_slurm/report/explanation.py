"""One failure on one screen: what failed first, what followed, who said what of it, and what was decided. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from nvrx_slurm.jobspec.model import FaultToleranceSpec
from nvrx_slurm.journal.records import AttributionJudged, ControllerStarted, RestartDecided, Shutdown
from nvrx_slurm.journal.verdicts import Attribution, Evidence, Inquiry, Verdict
from nvrx_slurm.report.failures import FailureTimeline
from nvrx_slurm.report.model import Value
from nvrx_slurm.report.sentences import backoff
from nvrx_slurm.report.tables import Mood, Row, Table
from nvrx_slurm.report.words import at_step, names, plural, ranks_of, seconds

MOODS: dict[Verdict, Mood] = {
    Verdict.STOP: "bad",
    Verdict.RESTART: "good",
    Verdict.UNKNOWN: "dim",
    Verdict.TIMEOUT: "busy",
}
MOST_FOLLOWING = 6


class Answered(Value, frozen=True, kw_only=True):
    """One source's answer; `at` in seconds since the epoch. `late`: after the verdicts had been read. `now`: it was
    asked just now, not while the job ran."""

    attribution: Attribution
    at: float | None = None
    late: bool = False
    now: bool = False


class Explanation(Value, frozen=True, kw_only=True):
    """What `explain --json` prints. Times are seconds since the epoch by the store's clock."""

    job: str
    name: str
    generation: int
    replica: str
    cycle: int
    failed_at: float
    inquiry: Inquiry
    answers: tuple[Answered, ...]
    judged: AttributionJudged | None
    decided: RestartDecided | None
    decided_at: float | None
    decider: ControllerStarted | None
    shutdown: Shutdown | None
    running_again_at: float | None
    best_step_before: int | None
    best_step: int | None
    in_process: int = 0
    last_in_process: str = ""


def explanation(timeline: FailureTimeline, *, job: str, name: str, now: Attribution | None = None) -> Explanation:
    """The failure as a value. `now`: an answer that was requested since."""
    key = timeline.inquiry.key
    answers = [
        Answered(attribution=answer.attribution, at=answer.at, late=answer.late) for answer in timeline.answers
    ]
    if now is not None:
        answers.append(Answered(attribution=now, now=True))
    return Explanation(
        job=job,
        name=name,
        generation=key.generation,
        replica=key.replica,
        cycle=key.cycle,
        failed_at=timeline.failed_at,
        inquiry=timeline.inquiry,
        answers=tuple(answers),
        judged=timeline.judged,
        decided=timeline.decided,
        decided_at=timeline.decided_at,
        decider=timeline.decider,
        shutdown=timeline.shutdown,
        running_again_at=timeline.running_again_at,
        best_step_before=timeline.best_before,
        best_step=timeline.best_step,
        in_process=timeline.in_process,
        last_in_process=timeline.last_in_process,
    )


def as_json(failure: Explanation) -> str:
    return msgspec.json.format(msgspec.json.encode(failure), indent=2).decode()


# --------------------------------------------------------------------------------------------- screen


def facts(failure: Explanation, bounds: FaultToleranceSpec, folder: str) -> list[Row]:
    """Label and text, in the order in which one asks."""
    again = f", generation {failure.generation}" if failure.generation else ""
    rows = [Row(("job", f"{failure.job} ({failure.name}), {failure.replica} cycle {failure.cycle}{again}"))]
    if failure.in_process:
        rows.append(Row(("before", _in_process(failure)), mood="dim"))
    rows += _first(failure, folder)
    rows += _then(failure, folder)
    rows += [Row(("read", text), mood=mood) for text, mood in _read(failure, bounds)]
    rows.append(Row(("progress", _progress(failure, bounds))))
    rows.append(Row(("budget", _budget(failure))))
    rows += [Row((label, text)) for label, text in _decision(failure)]
    return rows


def verdicts(failure: Explanation) -> Table:
    """Every source's answer: what, how sure, of which kind, how long it took, and why."""
    columns = ("SOURCE", "VERDICT", "SURE", "FAULT", "SCOPE", "TOOK", "WHY")
    rows = tuple(Row(_verdict_cells(each), MOODS[each.attribution.verdict]) for each in failure.answers)
    return Table("verdicts", columns, rows, frozenset({"SURE", "TOOK"}))


def _verdict_cells(each: Answered) -> tuple[str, ...]:
    said = each.attribution
    when = " (asked just now)" if each.now else " (too late: dropped)" if each.late else ""
    cached = ", cached" if said.cached else ""
    return (
        said.source,
        f"{said.verdict}{when}",
        f"{said.confidence:.0%}" if said.problem is None and said.confidence else "-",
        said.fault,
        said.scope.replace("_", " "),
        f"{seconds(said.latency_s)}{cached}",
        said.problem or said.explanation or "-",
    )


def best(failure: Explanation) -> Attribution | None:
    """The answer that says most: the surest with a line of evidence."""
    said = [each.attribution for each in failure.answers if each.attribution.primary is not None]
    return max(said, key=lambda said: said.confidence, default=None)


def _first(failure: Explanation, folder: str) -> Iterator[Row]:
    failed, said = failure.inquiry.failed, best(failure)
    at = f"{_clock(failure.failed_at)}, " if failure.failed_at else ""
    if failed is not None:
        yield Row(("first", f"{at}{failed.cause}{at_step(failed.step, said=failed.cause)}"), mood="bad")
    if said is None or said.primary is None:
        return
    yield Row(("", _place(said.primary, folder)), mood="dim")
    yield Row(("", said.primary.text.strip()), mood="bad")
    if said.ranks or said.nodes:
        whose = [ranks_of(said.ranks)] if said.ranks else []
        yield Row(("blamed", " on ".join([*whose, names(said.nodes)] if said.nodes else whose)))
    if said.missing:
        yield Row(
            (
                "missing",
                f"{ranks_of(said.missing)}: the others waited for {'it' if len(said.missing) == 1 else 'them'}",
            )
        )
    for label, text in (("hint", said.hint), ("see", said.reference)):
        if text:
            yield Row((label, text))


def _then(failure: Explanation, folder: str) -> Iterator[Row]:
    said = best(failure)
    following = said.secondary if said else ()
    for index, line in enumerate(following[:MOST_FOLLOWING]):
        label = "" if index else "then"
        yield Row((label, f"{_place(line, folder)}  {line.text.strip()}"), mood="dim")
    if len(following) > MOST_FOLLOWING:
        yield Row(("", f"… and {plural(len(following) - MOST_FOLLOWING, 'line')} more"), mood="dim")


def _read(failure: Explanation, bounds: FaultToleranceSpec) -> Iterator[tuple[str, Mood]]:
    settings = bounds.attribution
    if not settings.sources:
        yield "no source of attribution is set up", "dim"
    elif failure.judged is None:
        yield "the verdicts were not read: the job ended first", "dim"
    else:
        judged = failure.judged
        acted = "acted on" if judged.acted else "dry run, not acted on" if settings.dry_run else "no reason to stop"
        if judged.verdict is Verdict.STOP and not (judged.acted or settings.dry_run):
            acted = "not acted on"
        waited = f", waited for {seconds(judged.waited_s)}" if judged.waited_s else ""
        asked = plural(len(settings.sources), "source")
        yield f"{judged.verdict} ({settings.aggregation} of {asked}; {acted}{waited})", MOODS[judged.verdict]
        if judged.blamed:
            yield f"{names(judged.blamed)} passed over where another node is left", "plain"


def _in_process(failure: Explanation) -> str:
    count = plural(failure.in_process, "restart")
    return f"{count} in process in this cycle; the last for {failure.last_in_process}"


def _progress(failure: Explanation, bounds: FaultToleranceSpec) -> str:
    limit = bounds.progress.max_no_progress_cycles
    judged = f"stop after {plural(limit, 'cycle')} without" if limit else "not judged"
    if failure.best_step is None:
        return f"no step is known ({judged})"
    before = (
        "" if failure.best_step_before is None else f", {max(0, failure.best_step - failure.best_step_before)} new"
    )
    stuck = f"; {failure.decided.no_progress} in a row" if failure.decided and failure.decided.no_progress else ""
    return f"step {failure.best_step}{before} ({judged}{stuck})"


def _budget(failure: Explanation) -> str:
    if failure.decided is None:
        return "not asked"
    return f"{plural(failure.decided.restarts_left, 'restart')} left for failed workers"


def _decision(failure: Explanation) -> Iterator[tuple[str, str]]:
    decided = failure.decided
    if decided is None:
        yield "decision", failure.shutdown.reason if failure.shutdown else "none yet"
        return
    by = (
        ""
        if failure.decider is None
        else f", by the controller on {failure.decider.host} (epoch {failure.decider.epoch})"
    )
    why = "the role's policy" if decided.by == "policy" else decided.by
    yield "decision", f"{decided.action.replace('_', ' ')}, on account of {why}{by}"
    if failure.decided_at is not None:
        took_s = max(0.0, failure.decided_at - failure.failed_at)
        yield "", f"{_clock(failure.decided_at)}, {seconds(took_s)} after the failure"
    if decided.delay_s:
        yield "back-off", backoff(decided).removeprefix("; ")
    if failure.shutdown is not None:
        yield "end", f"exit code {failure.shutdown.exit_code}: {failure.shutdown.reason}"
    elif failure.running_again_at is not None:
        yield (
            "then",
            f"the next rendezvous closed {seconds(failure.running_again_at - failure.failed_at)} after the failure",
        )


def _place(line: Evidence, folder: str) -> str:
    """`rank 5 on n3  logs/main-0/gen-0/cycle-3/rank-5.err:218`"""
    who = " on ".join(
        part for part in (None if line.rank is None else f"rank {line.rank}", line.node) if part is not None
    )
    file = line.file.removeprefix(folder.rstrip("/") + "/")
    where = f"{file}:{line.line}" if line.line else file
    return f"{who}  {where}" if who else where


def _clock(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + "Z"
