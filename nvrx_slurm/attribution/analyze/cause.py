"""Which finding is the cause: those that can be, and of these the first. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from nvrx_slurm.attribution.analyze.aftermath import BESIDE_THE_RANK, Finality, may_have_gone_on
from nvrx_slurm.attribution.analyze.findings import GOES_ON_S, OF_THE_MACHINE, VAGUE_TO, Finding
from nvrx_slurm.journal.verdicts import Failed, Inquiry, Scope, Verdict

# A kernel message this much older than a worker's own failure has nothing to do with it.
LONG_BEFORE_S = 300.0

# Lines this near to each other are of one moment: clocks agree no better. Severity then decides.
SAME_TIME_S = 5.0

# Lines of a rank this near to each other report one failure: a native stack trace is as long.
BURST_LINES = 120

# Of these faults the kernel's message names the process that it is about. An Xid of another fault is the GPU's,
# whichever process it names.
_XIDS = ("gpu_application_fault", "gpu_cleanup")
_CRASHES = ("segfault", "host_oom")

# What a rank reports after such an Xid of its own, or after such an end of its child.
_OF_THE_CONTEXT = ("cuda_error", "cuda_illegal_access", "cuda_launch_failure", "cublas_error", "cudnn_error")
_OF_A_CHILD = ("data_worker_killed", "killed", *_CRASHES)


def without_other_processes(found: Sequence[Finding], inquiry: Inquiry) -> Sequence[Finding]:
    """Without what the kernel reports of processes that are no rank's, where the job's own lines explain the failure.

    The node may be shared with another job. But such a process may also be a child of a rank. So an Xid stays if
    nothing else can be the cause, and a crash or a kill if nothing else is a strong one. Both stay if a rank reports
    what follows from them (`_OF_THE_CONTEXT`, `_OF_A_CHILD`), unless the kernel reports the same of a rank's own
    process.
    """
    if not inquiry.pids:
        return found
    for faults, reported in ((_XIDS, _OF_THE_CONTEXT), (_CRASHES, _OF_A_CHILD)):
        named = [each for each in found if _is_of_one_process(each, faults)]
        others = {id(each) for each in named if each.rank is None}
        if not others:
            continue
        own = [each for each in found if id(each) not in others]
        if faults is _XIDS:
            noticed = any(each.hit.rule.verdict is _NOTICED for each in consequences(own))
            is_explained = noticed or bool(causes(own))
        else:
            is_explained = any(each.is_strong for each in causes(own))
        is_reported = any(each.hit.rule.fault in reported for each in own) and len(others) == len(named)
        if is_explained and not is_reported:
            found = own
    return found


def _is_of_one_process(each: Finding, faults: Sequence[str]) -> bool:
    rule = each.hit.rule
    return (
        rule.fault in faults
        and "pid" in each.hit.groups
        and each.hit.file.kind in OF_THE_MACHINE
        and rule.scope is not Scope.NODE
    )


def causes(found: Sequence[Finding]) -> list[Finding]:
    """Findings that can be the cause, without those that the rank survived.

    The strong ones, if there are any. Else the weak ones; but a rank that also reports a consequence counts only with
    rules that say more than that there was an exception.
    """
    # What the machine reported long before a worker failed by itself does not count. Before workers that only waited
    # it counts, however long they waited.
    machine = {id(each) for each in found if each.hit.file.kind in OF_THE_MACHINE}
    own = [each.t for each in found if each.t is not None and each.is_strong and id(each) not in machine]
    bound = min(own) - LONG_BEFORE_S if own else -math.inf
    recent = [each for each in found if each.t is None or each.t >= bound or id(each) not in machine]
    fatal = _without_handled([each for each in recent if each.finality is not Finality.SURVIVED])
    possible = [each for each in fatal if each.hit.rule.role == "cause"]
    strong = [each for each in possible if each.is_strong]
    reactions = [each for each in fatal if each.hit.rule.role == "consequence" and each.hit.rule.verdict is _NOTICED]

    # By rank and by file: of a thousand ranks each may have reacted.
    of_whom: dict[int | str, list[Finding]] = defaultdict(list)
    in_file: dict[str, list[Finding]] = defaultdict(list)
    for each in reactions:
        of_whom[each.whose].append(each)
        in_file[each.place[0]].append(each)

    def is_reaction(vague: Finding) -> bool:
        # The rank, or the unlabelled file, has reported before that another one failed.
        return any(not _precedes(vague, each) for each in of_whom[vague.whose]) or (
            vague.rank is None and any(_precedes(each, vague) for each in in_file[vague.place[0]])
        )

    return strong or [each for each in possible if each.hit.rule.severity > VAGUE_TO or not is_reaction(each)]


# The verdict of rules for what a rank notices of others. A launcher's report on how a rank ended has another.
_NOTICED = Verdict.RESTART


def _precedes(one: Finding, other: Finding) -> bool:
    """Whether a line surely stands before another: in the same file, or by times far enough apart."""
    if one.place[0] == other.place[0]:
        return one.hit.line < other.hit.line
    return one.t is not None and other.t is not None and other.t - one.t > SAME_TIME_S


def consequences(found: Iterable[Finding]) -> list[Finding]:
    """Findings that happen because something else did."""
    fatal = [each for each in found if each.hit.rule.role == "consequence" and each.finality is not Finality.SURVIVED]
    # Slurm cancels the step after a task has exited: no cause then.
    exits: dict[str, int] = {}
    for each in fatal:
        if each.hit.rule.scope is not Scope.SCHEDULER:
            exits[each.place[0]] = min(each.hit.line, exits.get(each.place[0], each.hit.line))
    return [
        each
        for each in fatal
        if each.hit.rule.scope is not Scope.SCHEDULER or exits.get(each.place[0], each.hit.line) >= each.hit.line
    ]


def beside(found: Iterable[Finding]) -> list[Finding]:
    """Exceptions that ended a thread or a child process, but no rank: they may matter."""
    return [each for each in found if each.non_fatal in BESIDE_THE_RANK]


def first(candidates: Sequence[Finding], failed: Failed | None) -> Finding | None:
    """The line where it began; None: no candidate. `failed` says which rank was seen to fail first."""
    of_rank: dict[int | str, list[Finding]] = defaultdict(list)
    for each in candidates:
        of_rank[each.whose].append(each)
    winners = _surest([_first_of_rank(lines) for lines in of_rank.values()])
    if not winners:
        return None
    # Across ranks: what lies before all others by more than the clocks' error; among these the most severe.
    times = [each.t for each in winners if each.t is not None]
    start = min(times, default=0.0)
    near = [each for each in winners if not times or not each.is_after(start, SAME_TIME_S)]
    # In one file its order is known, between files the rank decides.
    in_one_file = len({each.place[0] for each in near}) == 1

    def order(each: Finding) -> tuple[float, ...]:
        is_seen = failed is not None and each.rank == failed.rank and each.rank is not None
        unknown = float("inf")
        return (
            -each.hit.rule.severity,
            not is_seen,
            each.t if each.t is not None else unknown,
            each.hit.line if in_one_file else 0,
            each.rank if each.rank is not None else unknown,
            each.hit.line,
        )

    return min(near, key=order)


def _surest(found: Sequence[Finding]) -> list[Finding]:
    """Those that most surely ended their rank."""
    surest = min((each.finality for each in found), default=None)
    return [each for each in found if each.finality is surest]


def _first_of_rank(lines: Sequence[Finding]) -> Finding:
    """The most severe of one rank's lines in the burst that begins with the earliest."""
    sure = _surest(lines)
    start = min(sure, key=lambda each: (each.t is None, each.t or 0.0, each.place))

    def is_near(each: Finding) -> bool:
        if start.t is not None and (each.t is not None or each.is_after(start.t, SAME_TIME_S)):
            return not each.is_after(start.t, SAME_TIME_S)
        # Without times the distance in a file decides; between two files it is unknown.
        return each.place[0] != start.place[0] or abs(each.hit.line - start.hit.line) <= BURST_LINES

    return max(filter(is_near, sure), key=lambda each: (each.hit.rule.severity, -each.hit.line))


def _without_handled(fatal: Sequence[Finding]) -> list[Finding]:
    """Without errors that a program logged and survived: later its rank still noticed what other ranks did."""
    noticed: dict[int | str, list[Finding]] = defaultdict(list)
    for each in fatal:
        # A launcher's report on how this rank ended is no such notice; its verdict is not RESTART.
        if each.hit.rule.role == "consequence" and each.hit.rule.verdict is Verdict.RESTART:
            noticed[each.whose].append(each)

    def went_on(logged: Finding, later: Finding) -> bool:
        # A rank that is ending may notice something in passing; half a minute later, or without times, it lived.
        if logged.since is not None and later.since is not None:
            return later.is_after(logged.since, GOES_ON_S)
        return later.place[0] != logged.place[0] or later.hit.line > logged.hit.line

    doubtful = [each for each in fatal if may_have_gone_on(each.non_fatal)]
    survived = {each.place for each in doubtful if any(went_on(each, later) for later in noticed[each.whose])}
    return [each for each in fatal if each.place not in survived]
