"""Hits that count: placed on a rank, a node and the common clock, and judged by what followed them. Pure."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec
from msgspec.structs import replace

from nvrx_slurm.attribution.analyze.aftermath import (
    Aftermath,
    Finality,
    Nature,
    TailLine,
    aftermath,
    finality,
    nature,
)
from nvrx_slurm.attribution.scan import Hit, LogFile, Scan
from nvrx_slurm.attribution.scan.model import MOST_DIGITS
from nvrx_slurm.attribution.scan.prefixes import stamp_of
from nvrx_slurm.journal.verdicts import Evidence, Inquiry, Verdict

# Rules of a lower severity see that something failed, or what often follows; the others know a cause.
STRONG_FROM = 50

# Rules of this severity and less recognise any exception: what peers of a failed rank raise, too.
VAGUE_TO = 40

# A rank whose other file reports progress this long after an error has survived it.
GOES_ON_S = 30.0

# Nodes report a common event within this time of each other; a larger difference is one of their clocks.
SLACK_S = 3.0

# Kinds of files that no worker writes: they show no progress of a rank.
OF_THE_MACHINE = ("health", "stacks")

_LAST_LINES = 6
_NUMBERS = ("rank", "pid", "local_rank")


class Finding(msgspec.Struct, frozen=True):
    """A line that a rule recognised. `t` is on the clock that all nodes share; None: the line has none. `since`: the
    line was not written before this time. `stepped`: its rank had made steps before, as far as the tail shows."""

    hit: Hit
    rank: int | None
    node: str | None
    t: float | None
    finality: Finality
    since: float | None = None
    stepped: bool = False

    def is_after(self, moment: float, margin_s: float) -> bool:
        """Whether it was surely written later than that, by more than the margin."""
        known = self.t if self.t is not None else self.since
        return known is not None and known - moment > margin_s

    @property
    def evidence(self) -> Evidence:
        hit = self.hit
        return Evidence(
            file=hit.file.name,
            line=hit.line,
            text=hit.text,
            rule=hit.rule.name,
            rank=self.rank,
            node=self.node,
            t=hit.t,
        )

    @property
    def whose(self) -> int | str:
        """The rank; where that is not known, the file."""
        return self.rank if self.rank is not None else str(self.hit.file.path)

    @property
    def is_strong(self) -> bool:
        """Whether its rule knows a kind of failure, rather than that there was one."""
        return self.hit.rule.severity >= STRONG_FROM

    @property
    def non_fatal(self) -> str | None:
        """Why its traceback may have ended no process (scan/tracebacks.py)."""
        return self.hit.groups.get("non_fatal")

    @property
    def place(self) -> tuple[str, int]:
        return str(self.hit.file.path), self.hit.line


def findings(inquiry: Inquiry, scan: Scan, tails: Mapping[str, Sequence[TailLine]]) -> list[Finding]:
    """Hits of causes and consequences, one a line, in the order of files and lines.

    None of a line that noise matches.
    """
    lines: dict[tuple[str, int], list[Hit]] = defaultdict(list)
    for hit in scan.hits:
        lines[str(hit.file.path), hit.line].append(hit)

    def says_more(hit: Hit) -> tuple[bool, int]:
        # A vague rule recognises any exception: any other on the same line says more.
        rule = hit.rule
        is_vague = rule.role == "cause" and rule.verdict is Verdict.UNKNOWN and rule.severity <= VAGUE_TO
        return not is_vague, rule.severity

    hits = [
        max(on_line, key=says_more) for on_line in lines.values() if all(hit.rule.role != "noise" for hit in on_line)
    ]
    by_file: dict[str, list[Hit]] = defaultdict(list)
    for hit in hits:
        by_file[str(hit.file.path)].append(hit)
    begins = {name: last_run(own, scan.of(own[0].file).starts, tails.get(name, ())) for name, own in by_file.items()}
    hits = [hit for hit in hits if hit.offset >= begins[str(hit.file.path)]]
    # After the cut: the clocks of an earlier run say nothing about this one.
    ahead, progress, later = offsets(hits, inquiry), last_progress(scan), later_parts(scan)
    # Of several nodes' processes some have the same pid.
    with_pid: dict[int, list[int]] = defaultdict(list)
    for number, pid in inquiry.pids.items():
        with_pid[pid].append(number)
    found = []
    for hit in hits:
        rank = _rank(hit, inquiry, with_pid)
        node = hit.groups.get("node") or hit.node or (inquiry.node_of(rank) if rank is not None else None)
        since = None if hit.t is None else hit.t - ahead.get(domain(hit, inquiry) or "", 0.0)
        # A traceback has the time of the line above it, which may be hours older, unless a logger wrote both.
        is_dated = (
            hit.t is None
            or "frames" not in hit.groups
            or stamp_of(hit.text.encode(), hit.t) is not None
            or hit.groups.get("non_fatal") == "logged"
        )
        t = since if is_dated else None
        own, after = hit.rank if hit.rank is not None else rank, Aftermath()
        if hit.file.kind in OF_THE_MACHINE:
            final = Finality.ENDED
        elif own is not None and t is not None and progress.get(own, t) - t > GOES_ON_S:
            final = Finality.SURVIVED
        else:
            after = aftermath(hit.offset, own, tails.get(str(hit.file.path), ()))
            for part in later.get(hit.file.path, ()):
                more = aftermath(-1, own, tails.get(str(part.path), ()))
                after = replace(after, progress=after.progress + more.progress, calm=after.calm + more.calm)
            final = finality(
                after,
                shared=hit.file.kind == "mixed",
                non_fatal=hit.groups.get("non_fatal"),
                traceback="frames" in hit.groups,
                shell=hit.rule.shell,
            )
        found.append(Finding(hit, rank, node, t, final, since, after.stepped))
    return _without_scripts_that_went_on(found)


_ROTATED = re.compile(
    r"(?P<name>.+\.(?:log|out|err|txt))"
    r"(?:\.(?P<number>[1-9]\d{0,2})|[.-](?P<date>20\d\d-?\d\d-?\d\d(?:[._-]?\d\d){0,3}))(?:\.(?:gz|bz2|xz))?"
)


def later_parts(scan: Scan) -> dict[Path, tuple[LogFile, ...]]:
    """File → the parts of its log that were written after it, where the log was rotated: `train.log.1`, and after it
    `train.log`, for `train.log.2.gz`."""
    logs = {log.path: log for log in scan.files}
    older: dict[LogFile, list[tuple[str, LogFile]]] = defaultdict(list)
    for log in scan.files:
        if (named := _ROTATED.fullmatch(log.path.name)) is None:
            continue
        newest = logs.get(log.path.with_name(named["name"]))
        # Tasks are counted from 0, and parts from 1.
        if newest is None or log.path.with_name(f"{named['name']}.0") in logs:
            continue
        if (newest.rank, newest.node, newest.kind) == (log.rank, log.node, log.kind):
            age = named["date"] or f"{999 - int(named['number']):03}"
            older[newest].append((age, log))
    found: dict[Path, tuple[LogFile, ...]] = {}
    for newest, dated in older.items():
        parts = [*(log for _, log in sorted(dated, key=lambda part: part[0])), newest]
        reads = [scan.of(log) for log in parts]
        # Of a rotated log no part begins before the one before it ends.
        ends = [(read.last_t or -math.inf, after.first_t or math.inf) for read, after in itertools.pairwise(reads)]
        if all(end <= begin for end, begin in ends):
            found |= {log.path: tuple(parts[number:]) for number, log in enumerate(parts[:-1], 1)}
    return found


_REQUEUED = ("preemption.slurm", "node_failure.slurm")
_LEAST_OUTPUT = 5


def last_run(own: Sequence[Hit], starts: Sequence[int], tail: Sequence[TailLine]) -> int:
    """Where in a file the last of its runs begins: what stands before is history. 0: it holds one run. `own`: the
    file's hits, at least one. `starts`: where its first lines come again.

    A run has begun where the file's first lines come again after the end of one before.
    """
    requeues = [hit.offset for hit in own if hit.rule.name in _REQUEUED]
    if not starts and not requeues:
        return 0
    stepped = next((line.offset for line in tail if line.nature is Nature.PROGRESS), math.inf)
    # A run has ended where a launcher has reported how a task ended, where a rank that had made steps has failed, and
    # where Slurm has cancelled the job. Steps: a node that starts late prints its first lines after the failure of
    # another, too, but before the first step.
    ends = [hit.offset for hit in own if hit.rule.role == "consequence" and hit.rule.verdict is Verdict.UNKNOWN]
    ends += [hit.offset for hit in own if hit.offset > stepped or hit.file.rank is not None]
    ends += [*requeues, *(hit.offset for hit in own if hit.rule.fault == "time_limit")]
    begin = max((start for start in starts if any(end < start for end in ends)), default=0)
    # Slurm's own word, where the script prints something else the second time.
    for requeue in requeues:
        after = sum(line.times for line in tail if line.offset > requeue and line.nature is not Nature.CRASH)
        if after > _LEAST_OUTPUT:
            begin = max(begin, requeue + 1)
    return begin


def _without_scripts_that_went_on(found: list[Finding]) -> list[Finding]:
    """The same, with a shell's complaint as survived where a program failed after it: the script had gone on."""

    def is_of_a_program(each: Finding) -> bool:
        rule = each.hit.rule
        fails = rule.role == "cause" or rule.verdict is Verdict.RESTART
        return fails and not rule.shell and each.finality is not Finality.SURVIVED

    last_lines, with_causes = dict[str, int](), set[str]()
    for each in filter(is_of_a_program, found):
        file, line = each.place
        last_lines[file] = max(line, last_lines.get(file, 0))
        if each.hit.rule.role == "cause" and each.is_strong:
            with_causes.add(file)

    def went_on(shell: Finding) -> bool:
        file, line = shell.place
        # Of another file only what knows a cause: it may be that of a node on which the script did not fail.
        return last_lines.get(file, 0) > line or bool(with_causes - {file})

    return [
        replace(each, finality=Finality.SURVIVED) if each.hit.rule.shell and went_on(each) else each for each in found
    ]


def _rank(hit: Hit, inquiry: Inquiry, with_pid: Mapping[int, Sequence[int]]) -> int | None:
    """As the line says, or the pid that it names, or the file that it stands in. `with_pid`: pid → ranks."""
    numbers = {
        name: int(text)
        for name, text in hit.groups.items()
        if name in _NUMBERS and text.isdecimal() and len(text) <= MOST_DIGITS
    }
    if "rank" in numbers:
        return numbers["rank"]
    named = with_pid.get(numbers.get("pid", -1), ())
    there = [rank for rank in named if hit.node not in inquiry.nodes or inquiry.node_of(rank) == hit.node]
    if len(there) == 1:
        return there[0]
    if hit.rank is not None:
        return hit.rank
    local_rank, nodes = numbers.get("local_rank"), inquiry.nodes
    if local_rank is None or len(nodes) <= 1:
        return local_rank
    # On several nodes the rank within a node says which rank it is only with the node.
    return nodes.index(hit.node) * inquiry.workers_per_node + local_rank if hit.node in nodes else None


def last_progress(scan: Scan) -> dict[int, float]:
    """Rank → the time of its own file's last line, of ranks whose file ends with progress."""
    found: dict[int, float] = {}
    for file in scan.files:
        read = scan.of(file)
        steps = sum(nature(line) is Nature.PROGRESS for line in read.tail[-_LAST_LINES:])
        if file.rank is not None and steps >= _LAST_LINES // 2 and read.last_t is not None:
            found[file.rank] = max(read.last_t, found.get(file.rank, 0.0))
    return found


def domain(hit: Hit, inquiry: Inquiry) -> str | None:
    """Whose clock a line's time is from: its node's, or its rank's where the node is not known; None: neither is."""
    if hit.node is not None or hit.rank is None:
        return hit.node
    return inquiry.node_of(hit.rank) or f"rank {hit.rank}"


def offsets(hits: Iterable[Hit], inquiry: Inquiry) -> dict[str, float]:
    """Domain → seconds its clock is ahead of the middle of all. Domains without a common event are left out.

    A collective times out on every rank within the same second, and torchrun's agents report the same moment. Where
    two nodes report one such event at different times, their clocks differ by that much.
    """
    # Event → domain → when it was first reported there. An event: the rule, and the collective if the line names it.
    events: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for hit in hits:
        where = domain(hit, inquiry)
        if hit.rule.role == "consequence" and hit.t is not None and where is not None:
            event = (hit.rule.name, *(hit.groups.get(name, "") for name in ("seq", "collective")))
            events[event][where] = min(hit.t, events[event].get(where, hit.t))
    per_domain: dict[str, list[float]] = defaultdict(list)
    for times in events.values():
        if len(times) > 1:
            middle = median(times.values())
            for where, t in times.items():
                per_domain[where].append(t - middle)
    # The median makes up for the few common events that were not simultaneous.
    found = {where: median(ahead) for where, ahead in per_domain.items()}
    return {where: ahead for where, ahead in found.items() if abs(ahead) > SLACK_S}
