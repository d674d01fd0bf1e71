"""Which line is the cause: what can be, and of these the first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from nvrx_slurm.attribution.analyze.aftermath import TOLD_BESIDE, Finality, may_have_gone_on
from nvrx_slurm.attribution.analyze.findings import GOES_ON_S, OF_THE_MACHINE, VAGUE_TO, Finding
from nvrx_slurm.journal.verdicts import Failed, Verdict

LONG_BEFORE_S = 300.0
"""A kernel's message that is older than this when a worker fails by itself has nothing to do with it."""


def causes(found: Sequence[Finding]) -> list[Finding]:
    """Lines that can be where it began: the strong ones; without any, the weak ones, but of ranks to which something
    happened from outside none that says little. What was survived is none."""
    fatal = _without_survived([each for each in _recent(found) if each.finality is not Finality.SURVIVED])
    possible = [each for each in fatal if each.hit.rule.role == "cause"]
    strong = [each for each in possible if each.is_strong]
    struck = {each.whose for each in fatal if each.hit.rule.role == "consequence"}
    return strong or [each for each in possible if each.hit.rule.severity > VAGUE_TO or each.whose not in struck]


def _without_survived(fatal: Sequence[Finding]) -> list[Finding]:
    """Without what a program told of and went on: later its rank still noticed what others did."""
    noticed: dict[int | str, list[Finding]] = defaultdict(list)
    for each in fatal:
        if each.hit.rule.role == "consequence" and _is_of_others(each):
            noticed[each.whose].append(each)
    doubtful = [each for each in fatal if may_have_gone_on(each.aside)]
    survived = {each.place for each in doubtful if any(_went_on(each, later) for later in noticed[each.whose])}
    return [each for each in fatal if each.place not in survived]


def _is_of_others(each: Finding) -> bool:
    """Not a launcher's word on how this one ended."""
    return each.hit.rule.verdict is Verdict.RESTART


def _went_on(told: Finding, later: Finding) -> bool:
    """A rank that is ending may notice something in passing; half a minute later, or where no time is known, it
    lived."""
    if told.since is not None and later.since is not None:
        return later.is_after(told.since, GOES_ON_S)
    return later.place[0] != told.place[0] or later.hit.line > told.hit.line


def _recent(found: Sequence[Finding]) -> list[Finding]:
    """Without what the machine said long before a worker failed by itself: that passed. Before workers that only
    waited it counts, however long they did."""
    own = [each.t for each in found if each.t is not None and each.is_strong and not _is_of_the_machine(each)]
    if not own:
        return list(found)
    bound = min(own) - LONG_BEFORE_S
    return [each for each in found if each.t is None or each.t >= bound or not _is_of_the_machine(each)]


def _is_of_the_machine(each: Finding) -> bool:
    return each.hit.file.kind in OF_THE_MACHINE


def beside(found: Iterable[Finding]) -> list[Finding]:
    """Exceptions that ended a thread or a child process, and no rank: they may matter."""
    return [each for each in found if each.aside in TOLD_BESIDE]


def consequences(found: Iterable[Finding]) -> list[Finding]:
    """Those that happen because something else did."""
    return [each for each in found if each.hit.rule.role == "consequence" and each.finality is not Finality.SURVIVED]


SAME_TIME_S = 5.0
"""Lines this near to each other are of one moment: clocks agree no better. Severity then tells which is the cause."""

BURST_LINES = 120
"""Lines of a rank this near to each other tell of one failure: a native stack trace is as long."""


def first(candidates: Sequence[Finding], failed: Failed | None) -> Finding | None:
    """The line where it began; None: no candidate. `failed` tells which rank was seen to fail first."""
    of_rank: dict[int | str, list[Finding]] = {}
    for each in candidates:
        of_rank.setdefault(each.whose, []).append(each)
    return _earliest([_first_of_rank(lines) for lines in of_rank.values()], failed)


def _first_of_rank(lines: Sequence[Finding]) -> Finding:
    """Of one rank: among the lines that surely ended it, the nearest to the cause."""
    surest = min(each.finality for each in lines)
    sure = [each for each in lines if each.finality is surest]
    start = _earliest_known(sure)
    together = [each for each in sure if _is_near(each, start)]
    return max(together, key=lambda each: (each.hit.rule.severity, -each.hit.line))


def _earliest_known(lines: Sequence[Finding]) -> Finding:
    return min(lines, key=lambda each: (each.t is None, each.t or 0.0, each.place))


def _is_near(each: Finding, start: Finding) -> bool:
    """Told at one moment, or, in one file, within one burst of lines; of another file without times nobody knows."""
    if start.t is not None and (each.t is not None or each.is_after(start.t, SAME_TIME_S)):
        return not each.is_after(start.t, SAME_TIME_S)
    if each.place[0] == start.place[0]:
        return abs(each.hit.line - start.hit.line) <= BURST_LINES
    return True


def _earliest(winners: Sequence[Finding], failed: Failed | None) -> Finding | None:
    """Across ranks: whatever lies before all others by more than the clocks' error; else by severity."""
    if not winners:
        return None
    surest = min(each.finality for each in winners)
    sure = [each for each in winners if each.finality is surest]
    times = [each.t for each in sure if each.t is not None]
    start = min(times, default=0.0)
    near = [each for each in sure if not times or not each.is_after(start, SAME_TIME_S)]
    return min(near, key=lambda each: _order(each, failed))


def _order(each: Finding, failed: Failed | None) -> tuple[float, ...]:
    is_seen = failed is not None and each.rank == failed.rank and each.rank is not None
    unknown = float("inf")
    return (
        -each.hit.rule.severity,
        not is_seen,
        each.t if each.t is not None else unknown,
        each.rank if each.rank is not None else unknown,
        each.hit.line,
    )
