"""What stands before a log line proper: the label that says whose line it is, the time stamp, and a logger's level.

Labels are those of srun, torchrun, mpirun, pdsh, Ray, Kubernetes, Lightning, NCCL and syslog; stamps those of
training jobs, launchers, Slurm and kernels. A stamp without a zone is in this machine's, one without a year in the
latest not after the file's last change. A kernel's seconds since boot give no time without the time of the boot: such
a line has no stamp.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone, tzinfo

import msgspec

_SRUN = re.compile(rb" *(\d{1,6}): ?")
_PDSH = re.compile(rb"([A-Za-z][\w.-]*\d[\w.-]*): (?= *\d{1,6}: |\[)")
_RANKS = (
    re.compile(
        rb"\[(?!rank\d)[a-z][a-z_]*(?P<local>\d{1,9})\]: ?"
    ),  # torchrun: a role's name, the rank within the node
    re.compile(rb"\[rank(?P<rank>\d{1,9})\]: ?"),  # PyTorch, within torchrun's
    re.compile(rb"\[rank: (?P<rank>\d{1,9})\] "),  # Lightning
    re.compile(rb"\[[\w.-]+-\d+ (?P<rank>\d{1,9})\] "),  # our own job.log: the replica and its rank
    # mpirun --tag-output; with Open MPI 5 also `--output` tag-fullname, tag-detailed and rank (openpmix/prrte#1406).
    re.compile(rb"\[(?:(?:[\w.-]{1,160}@)?\d+,)?(?P<rank>\d{1,9})\](?:\[(?P<node>[\w.-]{1,160}):\w+\])?<std\w+>: ?"),
)
# What the Kubernetes log writer puts before each line of a container.
_STAMPED = re.compile(rb"20\d\d-\d\d-\d\dT[\d:.]{8,18}Z std(?:out|err) [FP] ")

_RAY = re.compile(rb"\((?P<process>[\w.: -]{0,80}\bpid=\d{1,9}(?:, ip=[\d.]{7,15})?)\) ")
_SAYS_RANK = re.compile(rb"\[(?:PG [^\]]{0,120})?Rank (\d{1,9})\]")
_NO_LEVEL = rb"(?!(?i:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b)"
_SAYS_NODE = (
    re.compile(rb"([A-Za-z][\w.-]*):\d+:\d+ \[\d+\] NCCL "),
    re.compile(rb"[A-Z][a-z]{2} [ \d]\d [\d:.]{8,18} ([A-Za-z][\w.-]*) [\w./-]+(?:\[\d+\])?: "),
    re.compile(rb"20\d\d-\d\d-\d\dT[\w:.+-]+ " + _NO_LEVEL + rb"([A-Za-z][\w.-]*) [\w./-]+(?:\[\d+\])?: "),
)
_GUTTER = re.compile(rb" +(?:\| |\|$|\+ (?=Exception Group ))")
# The indentation of an exception in torchrun's report on a worker that has written an error file.
_REPORTED = re.compile(rb"  (?=(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?:: |$))")
# What a logger puts before an exception that it reports as an error: `ERROR:train:`, `[2026-…][train][ERROR] - `.
_LOGGED = re.compile(
    rb"(?:[\w\[\](){}<>:.,/@+| -]{0,160}[\[| -])?(?:ERROR|CRITICAL|FATAL)"
    rb"(?:\]? - |\]?:? +|:[\w.]{1,120}:| *\| (?:[\w.:<>]{1,160} - )?)"
    rb"(?=(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): )"
)

_LEAST_LABELLED = 0.8
_LOOKED_AT = 100


class Label(msgspec.Struct, frozen=True):
    """What a line begins with. `begin`: where the line proper begins, after labels and an exception group's
    gutter. `local_rank`: a rank within its node. `process`: the one that Ray names."""

    rank: int | None
    node: str | None
    local_rank: int | None
    begin: int
    process: bytes | None = None

    @property
    def writer(self) -> tuple[int | None, str | None, int | None, bytes | None]:
        return self.rank, self.node, self.local_rank, self.process


def by_srun(head: bytes) -> bool:
    """Whether a file's first lines have the task numbers of `srun --label`, so that `3: ` is one."""
    lines = [line for line in head.split(b"\n")[:_LOOKED_AT] if line.strip()]
    numbered = sum(_SRUN.match(line) is not None or _PDSH.match(line) is not None for line in lines)
    return bool(lines) and numbered >= _LEAST_LABELLED * len(lines)


def label_of(line: bytes, *, srun: bool) -> Label:
    """`srun`: the file is labelled by `srun --label`."""
    at, rank, local, node, process = 0, None, None, None, None
    # From the outermost label to the innermost: Kubernetes, Ray, pdsh, srun, torchrun.
    if found := _STAMPED.match(line):
        at = found.end()
    if found := _RAY.match(line, at):
        at, process = found.end(), found["process"]
    if found := _PDSH.match(line, at):
        at, node, srun = found.end(), found[1].decode(), True
    if srun and (found := _SRUN.match(line, at)):
        at, rank = found.end(), int(found[1])
    for pattern in _RANKS:
        if found := pattern.match(line, at):
            at, parts = found.end(), found.groupdict()
            rank = int(parts["rank"]) if "rank" in parts else rank
            local = int(parts["local"]) if "local" in parts else local
            node = name.decode() if (name := parts.get("node")) and name != b"unknown" else node
    if found := _GUTTER.match(line, at) or _REPORTED.match(line, at):
        at = found.end()
    return Label(rank, node, local, at, process)


def logged_at(line: bytes, begin: int) -> int | None:
    """Where the exception begins that a logger reports as an error; None: the line is no such report. `begin`: where
    the line proper begins."""
    found = _LOGGED.match(line, begin)
    return found and found.end()


def named_in(line: bytes, begin: int) -> tuple[int | None, str | None]:
    """The rank and the node that a line itself names as its own, after its labels."""
    rank = _SAYS_RANK.search(line, begin, begin + 200)
    node = next((found for pattern in _SAYS_NODE if (found := pattern.match(line, begin))), None)
    return rank and int(rank[1]), node and node[1].decode()


_WITHIN_BYTES = 200
_TRIES = 50
_DAY_S = 86400.0

_ANY = re.compile(rb"\d:\d\d:\d\d|\b1[5-9]\d{8}")

_CLOCK = rb"(?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)(?:[.,](?P<f>\d{1,9}))?"
_MONTHS = (b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec")

_ISO = re.compile(
    rb"(?<!\d)(?P<y>20\d\d)([-/])(?P<mo>\d\d)\2(?P<d>\d\d)[T _]"
    + _CLOCK
    + rb"(?: ?(?P<z>Z|UTC|[+-]\d\d:?\d\d)(?![\w:]))?"
)
_AMERICAN = re.compile(rb"(?<!\d)(?P<mo>\d\d)/(?P<d>\d\d)/(?P<y>20\d\d|\d\d),? " + _CLOCK)
_GLOG = re.compile(rb"(?<!\w)[IWEFDC](?P<y>20\d\d)?(?P<mo>\d\d)(?P<d>\d\d) +" + _CLOCK)
_SYSLOG = re.compile(
    rb"(?<!\w)(?P<month>" + b"|".join(_MONTHS) + rb") +(?P<d>\d{1,2}) " + _CLOCK + rb"(?: (?P<y>20\d\d)(?!\d))?"
)
_EPOCH = re.compile(
    rb"(?:^\W?|\"(?:ts|time|timestamp|asctime|created)\": ?\"?)(?P<t>1[5-9]\d{8}(?:\d{3}|\.\d+)?)(?![\w.])"
)


def stamp_of(line: bytes, changed_at: float) -> float | None:
    """Seconds since the epoch, by the stamp near a line's beginning. `changed_at`: when its file last changed."""
    head = line[:_WITHIN_BYTES]
    # Most lines have no stamp: one cheap search instead of five.
    if not _ANY.search(head):
        return None
    for pattern, read in _FORMS:
        found = pattern.search(head)
        if found:
            try:
                return read(found, changed_at)
            except ValueError:  # 30 February: a number that only looks like a stamp
                continue
    return None


def first_stamp(lines: Iterable[bytes], changed_at: float) -> float | None:
    """The first stamp of the next lines that may have one."""
    stamps = (stamp_of(line, changed_at) for line in itertools.islice(lines, _TRIES))
    return next((stamp for stamp in stamps if stamp is not None), None)


def _dated(found: re.Match[bytes], changed_at: float) -> float:
    parts = found.groupdict()
    month = int(parts["mo"]) if "mo" in parts else _MONTHS.index(parts["month"]) + 1
    clock = int(parts["h"]), int(parts["mi"]), int(parts["s"])
    fraction = float(b"0." + (parts["f"] or b"0"))
    year = parts["y"] and int(parts["y"])
    if year:
        zone: tzinfo | None = None  # this machine's
        if text := parts.get("z"):
            ahead = timedelta() if text in (b"Z", b"UTC") else timedelta(hours=int(text[1:3]), minutes=int(text[-2:]))
            zone = timezone(-ahead if text.startswith(b"-") else ahead)
        year = year if year > 99 else year + 2000
        return datetime(year, month, int(parts["d"]), *clock, tzinfo=zone).timestamp() + fraction
    latest = datetime.fromtimestamp(changed_at).year
    this_year = datetime(latest, month, int(parts["d"]), *clock)
    # A day of grace: the zone and the clock of the writer may be ahead of those of the file server.
    if this_year.timestamp() > changed_at + _DAY_S:
        this_year = this_year.replace(year=latest - 1)
    return this_year.timestamp() + fraction


def _epoch(found: re.Match[bytes], changed_at: float) -> float:
    digits = found["t"]
    return float(digits) / (1000 if len(digits) == len("1795283000123") and b"." not in digits else 1)


_FORMS: tuple[tuple[re.Pattern[bytes], Callable[[re.Match[bytes], float], float]], ...] = (
    (_ISO, _dated),
    (_GLOG, _dated),
    (_AMERICAN, _dated),
    (_SYSLOG, _dated),
    (_EPOCH, _epoch),
)
