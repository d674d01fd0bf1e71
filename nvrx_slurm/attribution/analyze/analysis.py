"""One analysis in the calling thread, from an inquiry to its attribution."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from nvrx_slurm.attribution.analyze.aftermath import of_another
from nvrx_slurm.attribution.analyze.attributing import attribute, judged
from nvrx_slurm.attribution.analyze.evidence import EvidenceReader
from nvrx_slurm.attribution.analyze.verdict import CycleEnding
from nvrx_slurm.attribution.rules.catalogue import Catalogue, Rule
from nvrx_slurm.attribution.scan import Hit, LogFile, Scan, find_logs, scan
from nvrx_slurm.errors import MalformedRecord, UsageError
from nvrx_slurm.journal.records import Record, RoundClosed, WorkerFailed, entry_from_json
from nvrx_slurm.journal.verdicts import Attribution, Failed, FailureKey, Inquiry
from nvrx_slurm.util.files import JobFiles, journal_parts


def inquiry_for(paths: Sequence[Path]) -> Inquiry:
    """An inquiry about logs of which nothing is known: no exit code, no node, no earlier cycle."""
    absolute = tuple(str(path.absolute()) for path in paths)
    return Inquiry(key=FailureKey(job="", generation=0, replica="", cycle=0), paths=absolute)


MOST_EARLIER = 3
"""Cycles before this one that are looked at: a second repeat says hardly more than the first."""


@dataclass(frozen=True, slots=True)
class AnalysisResult:
    """An attribution, the last lines of the files (those of the blamed rank first), and what could not be read."""

    attribution: Attribution
    tails: Mapping[str, tuple[str, ...]]
    problems: tuple[str, ...] = ()

    def with_latency(self, seconds: float) -> AnalysisResult:
        """The same, with how long it took."""
        return replace(self, attribution=msgspec.structs.replace(self.attribution, latency_s=seconds))


def logs_of(inquiry: Inquiry) -> list[LogFile]:
    """The inquiry's files. Raises UsageError where there is none, unless something is known of the failure anyway."""
    try:
        return find_logs([Path(path) for path in inquiry.paths], inquiry)
    except UsageError:
        if inquiry.failed is None:
            raise
        return []


def analyze_logs(
    inquiry: Inquiry,
    catalogue: Catalogue,
    *,
    logs: Sequence[LogFile] | None = None,
    ranks: Collection[int] = (),
    stop: threading.Event | None = None,
) -> AnalysisResult:
    """Read, recognise, reason. `ranks`: leave out what others say. Raises UsageError as `logs_of`.

    `stop` ends it early, with what was read until then.
    """
    stop = stop or threading.Event()
    read = scan(logs_of(inquiry) if logs is None else logs, catalogue, stop=stop)
    scanned = _only_of(ranks, with_told(read, inquiry, catalogue))
    gathered = EvidenceReader(scanned, stop).all(_earlier(inquiry, catalogue, stop))
    attribution = attribute(inquiry, scanned, gathered)
    return AnalysisResult(attribution, _telling_first(scanned, attribution), (*scanned.problems, *gathered.problems))


def _only_of(ranks: Collection[int], scanned: Scan) -> Scan:
    """Without lines and files that are another rank's; what is nobody's stays."""
    if not ranks:
        return scanned
    hits = tuple(hit for hit in scanned.hits if hit.rank is None or hit.rank in ranks)
    files = tuple(log for log in scanned.files if log.rank is None or log.rank in ranks)
    return replace(scanned, hits=hits, files=files)


def _telling_first(scanned: Scan, attribution: Attribution) -> dict[str, tuple[str, ...]]:
    telling = [log for log in scanned.files if log.rank in attribution.ranks]
    others = [log for log in scanned.files if log.rank not in attribution.ranks]
    names = [str(log.path) for log in (*telling, *others)]
    return {name: scanned.tails[name] for name in names if scanned.tails.get(name)}


def _earlier(inquiry: Inquiry, catalogue: Catalogue, stop: threading.Event) -> Iterator[CycleEnding]:
    """How the cycles before ended, newest first; no further back than one that left nothing."""
    for folder in inquiry.earlier[:MOST_EARLIER]:
        before = inquiry_about(Path(folder), inquiry)
        try:
            logs = logs_of(before)
        except UsageError:
            return
        scanned = with_told(scan(logs, catalogue, stop=stop), before, catalogue)
        yield judged(before, scanned, EvidenceReader(scanned, stop).all())[1]


_CYCLE = re.compile(r"(?P<replica>[^/]+)/gen-(?P<generation>\d+)/cycle-(?P<cycle>\d+)$")
_TELLING = (b'"round_closed"', b'"worker_failed"')
_Name = tuple[str, int, int]
"""Replica, generation, cycle."""


def inquiry_about(folder: Path, now: Inquiry) -> Inquiry:
    """About the cycle whose logs lie in `folder`. Of a folder that is in no job's, only its files are known."""
    key = msgspec.structs.replace(now.key, rank=None)
    asked = Inquiry(key=key, paths=(str(folder),), workers_per_node=now.workers_per_node)
    named = _CYCLE.search(str(folder))
    if named is None:
        return asked
    name = named["replica"], int(named["generation"]), int(named["cycle"])
    for record in _records(Path(now.key.job)):
        if not isinstance(record, (RoundClosed, WorkerFailed)) or _name(record) != name:
            continue
        if isinstance(record, RoundClosed):
            asked = msgspec.structs.replace(asked, nodes=record.nodes)
        elif asked.failed is None:
            asked = msgspec.structs.replace(asked, failed=_failed(record))
    return asked


def _name(record: RoundClosed | WorkerFailed) -> _Name:
    return record.replica, record.generation, record.cycle


def _failed(record: WorkerFailed) -> Failed:
    return Failed(
        cause="worker failed",
        node=record.node,
        rank=record.rank,
        exit_code=record.exit_code,
        signal=record.signal,
        error=record.error,
    )


def _records(job: Path) -> Iterator[Record]:
    """Rounds and failures of a job's journal, oldest first; a line that is torn is left out."""
    current = JobFiles(job).events_path
    for path in (*journal_parts(current), current):
        try:
            lines = path.read_bytes().splitlines() if path.exists() else []
        except OSError:
            continue
        for line in lines:
            if any(kind in line for kind in _TELLING):
                try:
                    yield entry_from_json(line).record
                except MalformedRecord:
                    continue


NO_FILE = Path("uncaught exception")
"""What stands for a file's name in the evidence."""


def with_told(scan: Scan, inquiry: Inquiry, catalogue: Catalogue) -> Scan:
    """The scan with the failed worker's exception as a line of its own, unless its output has it already."""
    failed = inquiry.failed
    if failed is None or failed.error is None or _is_written(failed.error, failed, scan):
        return scan
    return replace(scan, hits=(*scan.hits, *_hits(failed.error, failed, catalogue)))


def _is_written(error: str, failed: Failed, scan: Scan) -> bool:
    own = (hit for hit in scan.hits if hit.rank in (failed.rank, None) and not of_another(hit.groups.get("aside")))
    return any(error in hit.text for hit in own)


def _hits(error: str, failed: Failed, catalogue: Catalogue) -> Iterator[Hit]:
    line = error.encode()
    log = LogFile(NO_FILE, failed.rank, failed.node, "err")
    for rule in catalogue.rules:
        if _may_match(rule, line) and (match := rule.pattern.search(line)):
            groups = {name: text.decode() for name, text in match.groupdict().items() if text}
            yield Hit(log, 0, error, rule, failed.rank, failed.node, failed.t, groups, 0)


def _may_match(rule: Rule, line: bytes) -> bool:
    """The cheap question first: most patterns are never compiled."""
    text = line.lower() if rule.ignore_case else line
    return any(literal in text for literal in rule.literals)
