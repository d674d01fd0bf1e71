"""What an agent has found in its node's logs, as it is sent to the broker: findings, not text. Pure.

    scan, tails, stacks of one node ── found_in ──▶ NodeFindings ── encoded ──▶ bytes
    Scan, SideEvidence              ◀── restored ── NodeFindings ◀── decoded ── bytes

What is restored leads to the same verdict as the logs themselves. Its size depends on the lines that rules have
recognised, not on the length of the logs, and has a bound.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from nvrx_slurm.attribution.analyze.aftermath import Nature, TailLine, nature
from nvrx_slurm.attribution.analyze.attributing import SideEvidence
from nvrx_slurm.attribution.rules.catalogue import Catalogue, Rule
from nvrx_slurm.attribution.scan import Hit, LogFile, Scan
from nvrx_slurm.attribution.scan.files import log_file
from nvrx_slurm.attribution.scan.model import KEPT, LONGEST_TEXT, TAIL_LINES, FileScan
from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.journal.records import Count, FileName, PathBelow, Step
from nvrx_slurm.journal.verdicts import MOST_FINDINGS_BYTES, Inquiry, Wire
from nvrx_slurm.util.decoding import decode

# Grows when the same logs no longer give the same findings, or these no longer the same verdict.
FORMAT = 3

MOST_FILES = 4096
MOST_PROBLEMS = 20
LONGEST_PROBLEM = 1000
LONGEST_GROUP = 1000

KindLetter = Literal["p", "c", "r", "-"]
KINDS: dict[KindLetter, Nature] = {"p": Nature.PROGRESS, "c": Nature.CRASH, "r": Nature.RECOVERED, "-": Nature.CALM}
_LETTERS = {kind: letter for letter, kind in KINDS.items()}

# A line of each kind: it stands for one of a file's last lines, of which only the kind matters.
SAMPLES = {
    Nature.PROGRESS: "step 1",
    Nature.CRASH: "",
    Nature.RECOVERED: "retry succeeded",
    Nature.CALM: "-",
}

# Those of a hit that the analysis looks at.
_GROUPS = ("rank", "node", "pid", "local_rank", "seq", "collective", "non_fatal", "frames")

_Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]
_Finite = Annotated[float, Meta(ge=-1e15, le=1e15)]


class FoundLine(Wire, frozen=True, kw_only=True):
    """A `Hit`, without its file. `rule`: its name."""

    line: Count
    text: _Text
    rule: str
    offset: Step
    rank: int | None = None
    node: str | None = None
    t: _Finite | None = None
    groups: dict[str, Annotated[str, Meta(max_length=LONGEST_GROUP)]] = msgspec.field(default_factory=dict)


class FileFindings(Wire, frozen=True, kw_only=True):
    """What is kept of one file. `name`: below the cycle's folder. `ending`: its last lines, all but the last one as
    `SAMPLES`. `after`: its tail, condensed (offset, kind, rank, lines). `head`: its first line, as a sample. `start`:
    the last place at which its first lines come again; 0: none. `frame`: of a file of stacks, where its rank was."""

    name: PathBelow
    size_bytes: Step = 0
    lines: tuple[FoundLine, ...] = ()
    ending: Annotated[tuple[_Text, ...], Meta(max_length=TAIL_LINES)] = ()
    after: tuple[tuple[Step, KindLetter, int | None, Count], ...] = ()
    head: _Text = ""
    first_t: _Finite | None = None
    last_t: _Finite | None = None
    start: Step = 0
    frame: str | None = None


class NodeFindings(Wire, frozen=True, kw_only=True):
    """All files of one node in one cycle. `rules`: `digest_of` the catalogue that they were read with."""

    node: FileName
    rules: str
    files: Annotated[tuple[FileFindings, ...], Meta(max_length=MOST_FILES)] = ()
    problems: Annotated[tuple[str, ...], Meta(max_length=MOST_PROBLEMS)] = ()


_K = TypeVar("_K")
_V = TypeVar("_V")

_packer = msgspec.msgpack.Encoder()
_unpack = msgspec.msgpack.Decoder(NodeFindings)


def digest_of(catalogue: Catalogue) -> str:
    """Of what decides which lines are found: findings by other rules are not comparable."""
    # Without verdict and severity: the broker evaluates the lines by its own rules.
    parts = [repr(FORMAT)]
    parts += (
        repr((each.name, each.pattern.pattern, each.ignore_case, each.role, each.below)) for each in catalogue.rules
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def found_in(node: str, folder: Path, scan: Scan, side: SideEvidence, catalogue: Catalogue) -> NodeFindings:
    """What a scan of this node's files below the folder has found, and what was read beside it."""
    hits: dict[str, list[Hit]] = defaultdict(list)
    for hit in scan.hits:
        hits[str(hit.file.path)].append(hit)
    frames = {
        log.path: side.stacks.get(log.rank) for log in scan.files if log.kind == "stacks" and log.rank is not None
    }
    files = []
    for log in scan.files:
        path, read = str(log.path), scan.of(log)
        # Of the last lines the kinds; of the last one that is not blank, the text.
        last = max((number for number, line in enumerate(read.tail) if line.strip()), default=-1)
        ending = (line if number == last else SAMPLES[nature(line)] for number, line in enumerate(read.tail))
        files.append(
            FileFindings(
                name=str(log.path.relative_to(folder)),
                size_bytes=read.size_bytes,
                lines=tuple(_found_line(hit) for hit in hits[path]),
                ending=tuple(ending),
                after=tuple(
                    (line.offset, _LETTERS[line.nature], line.rank, line.times) for line in side.tails.get(path, ())
                ),
                head=SAMPLES[nature(read.head)] if read.head else "",
                first_t=read.first_t,
                last_t=read.last_t,
                # The last one suffices: a run that has ended before any of them has ended before the last one, too.
                start=max(read.starts, default=0),
                frame=frames.get(log.path),
            )
        )
    problems = tuple(problem[:LONGEST_PROBLEM] for problem in (*scan.problems, *side.problems)[:MOST_PROBLEMS])
    return NodeFindings(node=node, rules=digest_of(catalogue), files=tuple(files), problems=problems)


def _found_line(hit: Hit) -> FoundLine:
    # Of the frames the innermost is what makes two failures the same.
    groups = {name: hit.groups[name] for name in _GROUPS if name in hit.groups}
    if "frames" in groups:
        groups["frames"] = groups["frames"].rpartition("|")[2]
    return FoundLine(
        line=hit.line,
        text=hit.text,
        rule=hit.rule.name,
        offset=hit.offset,
        rank=hit.rank,
        node=hit.node,
        t=hit.t if hit.t is not None and math.isfinite(hit.t) else None,
        groups={name: value[:LONGEST_GROUP] for name, value in groups.items()},
    )


def encoded(found: NodeFindings) -> bytes | None:
    """At most MOST_FINDINGS_BYTES: where there is more, fewer of each rule's lines are kept, from the beginning and
    from the end of each file. None: there is more even so."""
    kept = KEPT
    while len(data := _packer.encode(found)) > MOST_FINDINGS_BYTES:
        kept //= 2
        if not kept:
            return None
        files = []
        for each in found.files:
            by_rule: dict[str, list[FoundLine]] = defaultdict(list)
            for line in each.lines:
                by_rule[line.rule].append(line)
            chosen = {id(line) for of_one in by_rule.values() for line in (*of_one[:kept], *of_one[-kept:])}
            fewer = tuple(line for line in each.lines if id(line) in chosen)
            files.append(msgspec.structs.replace(each, lines=fewer))
        found = msgspec.structs.replace(found, files=tuple(files))
    return data


def decoded(data: bytes) -> NodeFindings:
    """Raises MalformedRecord for any defect, and for what is too long to be looked at."""
    if len(data) > MOST_FINDINGS_BYTES:
        raise MalformedRecord(f"findings of {len(data)} bytes: at most {MOST_FINDINGS_BYTES} are read")
    return decode(_unpack.decode, data, "findings")


class KnownRules(msgspec.Struct, frozen=True):
    """A catalogue as the findings of many nodes are compared with it. `by_name`: its rules."""

    digest: str
    by_name: Mapping[str, Rule]

    @classmethod
    def of(cls, catalogue: Catalogue) -> KnownRules:
        return cls(digest_of(catalogue), {rule.name: rule for rule in catalogue.rules})


def restored(
    found: NodeFindings, node: str | None, folder: Path, inquiry: Inquiry, known: KnownRules
) -> tuple[Scan, SideEvidence]:
    """The scan and the side evidence that they stand for. `node`: whose files they may be about; None: files of no
    node. Raises MalformedRecord: they were read with other rules, or are about another node's files."""
    if found.rules != known.digest:
        raise MalformedRecord("findings of other rules than the broker has")
    logs, hits = list[LogFile](), list[Hit]()
    reads: dict[Path, FileScan] = {}
    tails: dict[str, tuple[TailLine, ...]] = {}
    stacks: dict[int, str] = {}
    for each in found.files:
        log = log_file(folder / each.name, inquiry)
        if log.node != node:
            raise MalformedRecord(f"findings of {node} about {each.name}, which is {log.node}'s")
        logs.append(log)
        reads[log.path] = FileScan(
            size_bytes=each.size_bytes,
            tail=each.ending,
            head=each.head,
            first_t=each.first_t,
            last_t=each.last_t,
            starts=(each.start,) if each.start else (),
        )
        for line in each.lines:
            if (rule := known.by_name.get(line.rule)) is None:
                raise MalformedRecord(f"findings by a rule {line.rule!r}, which the broker does not have")
            hits.append(Hit(log, line.line, line.text, rule, line.rank, line.node, line.t, line.groups, line.offset))
        if each.after:
            tails[str(log.path)] = tuple(
                TailLine(offset, "", rank, times, KINDS[letter]) for offset, letter, rank, times in each.after
            )
        if each.frame is not None and log.rank is not None and log.kind == "stacks":
            stacks[log.rank] = each.frame
    return Scan(tuple(hits), tuple(logs), reads, found.problems), SideEvidence(tails=tails, stacks=stacks)


def joined(parts: Iterable[tuple[Scan, SideEvidence]], problems: Iterable[str] = ()) -> tuple[Scan, SideEvidence]:
    """What several parts of a cycle's logs hold, in the order in which one scan of all of them has it."""
    parts = list(parts)
    files = sorted((log for scan, _ in parts for log in scan.files), key=lambda log: log.path)
    hits: dict[Path, list[Hit]] = defaultdict(list)
    for scan, _ in parts:
        for hit in scan.hits:
            hits[hit.file.path].append(hit)
    scan = Scan(
        hits=tuple(hit for log in files for hit in hits[log.path]),
        files=tuple(files),
        reads=_merged(each.reads for each, _ in parts),
        problems=(*(problem for each, _ in parts for problem in each.problems), *problems),
    )
    side = SideEvidence(
        tails=_merged(each.tails for _, each in parts),
        stacks=_merged(each.stacks for _, each in parts),
        dumps=tuple(dump for _, each in parts for dump in each.dumps),
        problems=tuple(problem for _, each in parts for problem in each.problems),
    )
    return scan, side


def _merged(maps: Iterable[Mapping[_K, _V]]) -> dict[_K, _V]:
    return {key: value for each in maps for key, value in each.items()}
