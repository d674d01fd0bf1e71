"""Which line was first: of all that could be the cause, the earliest that ended its rank."""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_slurm.attribution.analyze.findings import Finding
from nvrx_slurm.journal.verdicts import Failed

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
