"""One failure on one screen: what failed first, what followed, who said what of it, and what was decided. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from nvrx_slurm.jobspec.model import FaultToleranceSpec
from nvrx_slurm.journal.records import (
    AttributionJudged,
    ControllerStarted,
    FirstStepReached,
    RestartDecided,
    Shutdown,
)
from nvrx_slurm.journal.verdicts import Attribution, Evidence, Inquiry, Verdict
from nvrx_slurm.report.failure_replay import ReplayedFailure
from nvrx_slurm.report.failures import FailureTimeline, RecordedAnswer, surest
from nvrx_slurm.report.model import JobView, Value
from nvrx_slurm.report.sentences import action_of, describe, gets_ranks_last, pause_of
from nvrx_slurm.report.tables import Mood, Row, Table
from nvrx_slurm.report.words import (
    asked_for,
    at_last_step,
    by_consequence,
    names,
    others_lost_it,
    phases_in_words,
    plural,
    ranks_of,
    seconds,
)

MOODS: dict[Verdict, Mood] = {
    Verdict.STOP: "bad",
    Verdict.RESTART: "good",
    Verdict.UNKNOWN: "dim",
    Verdict.TIMEOUT: "busy",
}
MOST_FOLLOWING = 6


class Explanation(Value, frozen=True, kw_only=True):
    """What `explain --json` prints. Times are seconds since the epoch by the store's clock."""

    job: str
    name: str
    generation: int
    replica: str
    cycle: int
    failed_at: float
    inquiry: Inquiry
    answers: tuple[RecordedAnswer, ...]
    judged: AttributionJudged | None
    decided: RestartDecided | None
    decided_at: float | None
    decider: ControllerStarted | None
    shutdown: Shutdown | None
    running_again_at: float | None
    best_step_before: int | None
    best_step: int | None
    last_step: int | None
    """The last step that any rank reported in the cycle; `best_step` may be of an earlier one."""
    in_process: int = 0
    last_in_process: str = ""
    peers_lost: tuple[int, ...] = ()
    """Other ranks that lost their connection to a peer."""
    restarts_asked: int = 0
    """How many restarts of the job were no failure's: users asked for them."""
    resumed_from: int | None = None
    """The first step that a rank reported after the restart."""
    steps_lost: int | None = None
    """How many steps the replica had to make again, as `status` and the page count them."""
    first_step: FirstStepReached | None = None
    """When every node had reported its first step, and what took how long until then."""
    verdict: Verdict | None = None
    """What was read from all answers; where none were, what the surest of them says. None: there is no answer."""
    meaning: str = ""
    """What that verdict means for this job, and what was done."""


def explanation(
    failure: ReplayedFailure, view: JobView, *, job: str, name: str, now: Attribution | None = None
) -> Explanation:
    """The failure as a value. `now`: an answer that was requested since."""
    key, timeline = failure.inquiry.key, failure.timeline
    ended = view.cycles.get((key.replica, key.generation, key.cycle))
    after, recovery = timeline.next_cycle(view), timeline.recovery(view)
    answers = (*timeline.answers, *([RecordedAnswer(attribution=now, now=True)] if now is not None else []))
    verdict = timeline.verdict
    if verdict is None and answers:  # never read: the job had ended, or the rules are asked only now
        verdict = max((each.attribution for each in answers), key=lambda each: each.confidence).verdict
    return Explanation(
        job=job,
        name=name,
        generation=key.generation,
        replica=key.replica,
        cycle=key.cycle,
        failed_at=failure.failed_at,
        inquiry=failure.inquiry,
        answers=answers,
        judged=timeline.judged,
        decided=timeline.decided,
        decided_at=timeline.decided_at,
        decider=timeline.decider,
        shutdown=timeline.shutdown,
        running_again_at=after.closed_at if after else None,
        best_step_before=failure.best_before,
        best_step=failure.best_step,
        last_step=failure.last_step,
        in_process=ended.restarts_in_process if ended else 0,
        last_in_process=failure.last_in_process,
        resumed_from=after.first_step if after else None,
        steps_lost=recovery.steps_lost if recovery else None,
        first_step=timeline.stepped,
        restarts_asked=view.restarts_asked,
        peers_lost=tuple(sorted(rank for rank in failure.peers_lost if rank != key.rank)),
        verdict=verdict,
        meaning="" if verdict is None else _meaning(timeline, verdict),
    )


# --------------------------------------------------------------------------------------------- screen


def facts(failure: Explanation, bounds: FaultToleranceSpec, folder: str) -> list[Row]:
    """Label and text, in the order in which one asks."""
    again = f", generation {failure.generation}" if failure.generation else ""
    verdict = failure.verdict
    rows = [
        *([Row(("in short", f"{verdict}: {failure.meaning}"), mood=MOODS[verdict])] if verdict else []),
        Row(("job", f"{failure.job} ({failure.name}), {failure.replica} cycle {failure.cycle}{again}")),
    ]
    if failure.in_process:
        times = plural(failure.in_process, "time")
        before = (
            f"its ranks restarted in process {times} in this cycle, the last time after {failure.last_in_process}"
        )
        rows.append(Row(("before", before), mood="dim"))
    rows += _evidence(failure, folder)
    rows += _verdict(failure, bounds)
    # Progress and budget: what the controller looks at after the verdict.
    limit, decided = bounds.progress.max_no_progress_cycles, failure.decided
    progress = "no step is known"
    if failure.best_step is not None:
        progress = f"step {failure.best_step} was reached"
        if failure.best_step_before is not None:
            new = plural(max(0, failure.best_step - failure.best_step_before), "new step")
            progress += f", {new} in this cycle"
    if not limit:
        progress += "; progress is not judged"
    else:
        stuck = f" ({decided.no_progress} so far)" if decided and decided.no_progress else ""
        progress += f"; the job stops after {plural(limit, 'cycle')} without progress{stuck}"
    left = decided.restarts_left if decided else 0
    are = "is" if left == 1 else "are"
    budget = f"{plural(left, 'restart')} {are} left for failed workers" if decided else "the budget was not asked"
    if failure.restarts_asked:
        budget += f"; {asked_for(failure.restarts_asked)}"
    return [*rows, Row(("progress", progress)), Row(("budget", budget)), *_decision(failure)]


_MEANINGS = {
    Verdict.STOP: "a restart would fail the same way",
    Verdict.RESTART: "it need not happen again",
    Verdict.UNKNOWN: "it is not known whether it happens again",
    Verdict.TIMEOUT: "no source answered in time",
}


def _meaning(failure: FailureTimeline, verdict: Verdict) -> str:
    """What the verdict means for this job, and what was done: `it need not happen again; restarted without n5`."""
    judged, decided, done = failure.judged, failure.decided, "nothing was decided yet"
    if decided is not None and decided.action == "ignore":
        return f"{_MEANINGS[verdict]}; went on without the replica"
    if failure.shutdown is not None:
        done = "the job ended"
    elif decided is not None and decided.action in ("restart_replica", "restart_job"):
        done = "restarted"
        if judged is not None and judged.blamed:
            done = f"restarted without {names(judged.blamed)}, unless no other node was left"
    elif decided is not None:
        done = action_of(decided)
    if verdict is Verdict.STOP and failure.shutdown is None and judged is not None and not judged.acted:
        done = f"{done} all the same, in a dry run"
    return f"{_MEANINGS[verdict]}; {done}"


def verdicts(failure: Explanation) -> Table:
    """Every source's answer: what, how sure, of which kind, how long it took, and why."""
    rows = []
    for each in failure.answers:
        answer = each.attribution
        when = " (asked just now)" if each.now else " (too late: dropped)" if each.late else ""
        cells = (
            answer.source,
            f"{answer.verdict}{when}",
            f"{answer.confidence:.0%}" if answer.problem is None and answer.confidence else "-",
            answer.fault,
            answer.scope.replace("_", " "),
            f"{seconds(answer.latency_s)}{', cached' if answer.cached else ''}",
            answer.problem or answer.explanation or "-",
        )
        rows.append(Row(cells, MOODS[answer.verdict]))
    columns = ("SOURCE", "VERDICT", "SURE", "FAULT", "SCOPE", "TOOK", "WHY")
    return Table(columns, tuple(rows), frozenset({"SURE", "TOOK"}))


def _evidence(failure: Explanation, folder: str) -> Iterator[Row]:
    """What failed first, and what followed, by the surest answer that names a line."""
    failed = failure.inquiry.failed
    if failed is not None:
        at = f"{_clock(failure.failed_at)}, " if failure.failed_at else ""
        yield Row(("first", f"{at}{failed.cause}{at_last_step(failed, failure.last_step)}"), mood="bad")
        if followed := others_lost_it(failure.peers_lost):
            yield Row(("", f"{followed}: {ranks_of(failure.peers_lost)}"), mood="dim")
    best = surest(failure.answers)
    if best is None or best.primary is None:
        return
    rule = f"  (rule {best.primary.rule})" if best.primary.rule else ""
    yield Row(("", _place(best.primary, folder)), mood="dim", cut=True, end=rule)
    yield Row(("", best.primary.text.strip()), mood="bad", cut=True)
    if blamed := [part for part in (best.ranks and ranks_of(best.ranks), best.nodes and names(best.nodes)) if part]:
        yield Row(("blamed", " on ".join(blamed)))
    if best.missing:
        them = "it" if len(best.missing) == 1 else "them"
        yield Row(("missing", f"{ranks_of(best.missing)}: the others waited for {them}"))
    for label, text in (("hint", best.hint), ("see", best.reference)):
        if text:
            yield Row((label, text))
    for index, (line, more) in enumerate(by_consequence(best.secondary)[:MOST_FOLLOWING]):
        text = f"{_place(line, folder)}  {line.text.strip()}"
        yield Row(("" if index else "then", text), mood="dim", cut=True, end=f"  (and {more} more)" if more else "")
    if (other := best.runner_up) is not None:
        text = f"{_place(other, folder)}  {other.text.strip()}"
        yield Row(("or else", text), mood="dim", cut=True, end=f"  (rule {other.rule})")
    if best.settle:
        yield Row(("settle", best.settle))
    if (read := best.read) is not None:
        silent = f"; no log of {ranks_of(read.silent)}" if read.silent else ""
        cut = f"; {plural(len(read.problems), 'file')} not read to the end" if read.problems else ""
        agents = f", those of {plural(read.agents, 'node')} by their agents" if read.agents else ""
        yield Row(("read", f"{plural(read.files, 'file')}{agents}{silent}{cut}"), mood="dim")


def _verdict(failure: Explanation, bounds: FaultToleranceSpec) -> Iterator[Row]:
    """What the answers came to, and whether the controller acted on it."""
    settings, judged = bounds.attribution, failure.judged
    if not settings.sources:
        yield Row(("verdict", "no source of attribution is configured"), mood="dim")
    elif judged is None or (judged.verdict is Verdict.TIMEOUT and failure.shutdown is not None):
        yield Row(("verdict", "the job ended before the answers were read"), mood="dim")
    else:
        if judged.acted:
            so = "the controller acted on it"
        elif settings.dry_run:
            so = "the controller did not act on it, in a dry run"
        elif judged.verdict is Verdict.STOP:  # the job was ending already
            so = "the controller did not act on it"
        else:
            so = "it was no reason to stop"
        waited = f"; the rendezvous waited {seconds(judged.waited_s)} for it" if judged.waited_s else ""
        how = f"{settings.aggregation} of {plural(len(settings.sources), 'source')}"
        yield Row(("verdict", f"{judged.verdict} ({how}); {so}{waited}"), mood=MOODS[judged.verdict])
        if judged.blamed:
            yield Row(("", gets_ranks_last(judged.blamed)))


def _decision(failure: Explanation) -> Iterator[Row]:
    decided, decider = failure.decided, failure.decider
    if decided is None:
        yield Row(("decision", failure.shutdown.reason if failure.shutdown else "none yet"))
        return
    by = "the controller" if decider is None else f"the controller on {decider.host} (epoch {decider.epoch})"
    yield Row(("decision", f"{by} {action_of(decided)}"))
    if failure.decided_at is not None:
        took_s = max(0.0, failure.decided_at - failure.failed_at)
        yield Row(("", f"{_clock(failure.decided_at)}, {seconds(took_s)} after the failure"))
    if decided.delay_s:
        yield Row(("back-off", pause_of(decided)))
    if failure.shutdown is not None:
        yield Row(("end", describe(failure.shutdown)))
    elif failure.running_again_at is not None:
        took = seconds(failure.running_again_at - failure.failed_at)
        steps = ""
        if failure.resumed_from is not None:
            steps = f"; the workers resumed from step {failure.resumed_from}"
            steps += "" if failure.steps_lost is None else f", {plural(failure.steps_lost, 'step')} lost"
        yield Row(("then", f"the next rendezvous closed {took} after the failure{steps}"))
        if (reached := failure.first_step) is not None:
            took = f"{seconds(reached.total_s)} after the failure: {phases_in_words(reached.phases)}"
            yield Row(("", f"every node had stepped {took}"))


def _place(line: Evidence, folder: str) -> str:
    """`rank 5 on n3  logs/main-0/gen-0/cycle-3/rank-5.err:218`"""
    who = [part for part in (None if line.rank is None else f"rank {line.rank}", line.node) if part is not None]
    file = line.file.removeprefix(folder.rstrip("/") + "/")
    where = f"{file}:{line.line}" if line.line else file
    return f"{' on '.join(who)}  {where}" if who else where


def _clock(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + "Z"
