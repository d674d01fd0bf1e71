"""Which findings can be where it began, which followed from it, and which only stand beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from nvrx_slurm.attribution.analyze.aftermath import TOLD_BESIDE, Finality, may_have_gone_on
from nvrx_slurm.attribution.analyze.findings import GOES_ON_S, OF_THE_MACHINE, VAGUE_TO, Finding
from nvrx_slurm.journal.verdicts import Verdict

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
