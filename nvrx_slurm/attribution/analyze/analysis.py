"""One analysis in the calling thread: from an inquiry to its attribution."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from nvrx_slurm.attribution.analyze.aftermath import never_ends_the_rank
from nvrx_slurm.attribution.analyze.attributing import SideEvidence, attribute, attribute_cycle
from nvrx_slurm.attribution.analyze.collectives import known_ranks
from nvrx_slurm.attribution.analyze.evidence import read_logs
from nvrx_slurm.attribution.analyze.verdict import CycleEnding
from nvrx_slurm.attribution.rules.catalogue import Catalogue
from nvrx_slurm.attribution.scan import Hit, LogFile, Scan, find_logs
from nvrx_slurm.attribution.scan.blocks import LONGEST_LINE_BYTES, decoded, excerpt
from nvrx_slurm.attribution.scan.model import LONGEST_TEXT
from nvrx_slurm.errors import MalformedRecord, UsageError
from nvrx_slurm.journal.records import Record, RendezvousClosed, WorkerFailed, entry_from_json
from nvrx_slurm.journal.verdicts import Attribution, Failed, FailureKey, Inquiry, LogsRead
from nvrx_slurm.util.files import JobFiles, journal_parts

# Cycles before this one that are analyzed: a second repeat says hardly more than the first.
MOST_EARLIER = 3

# Of ranks without a log, and of files that could not be read.
MOST_NAMED = 20

# In the evidence, in place of a file's name.
NO_FILE = Path("uncaught exception")

CYCLE = re.compile(r"(?P<replica>[^/]+)/gen-(?P<generation>\d+)/cycle-(?P<cycle>\d+)$")
_WANTED_RECORDS = (b'"rendezvous_closed"', b'"round_closed"', b'"worker_failed"')  # the second: up to 0.1


# Reads the logs of the cycle that an inquiry is about. Raises UsageError for an earlier one that there is no time to
# read.
Read = Callable[[Inquiry, Sequence[LogFile]], tuple[Scan, SideEvidence]]


class AnalysisResult(msgspec.Struct, frozen=True):
    """An attribution, the last lines of the files (those of the blamed rank first), and what could not be read."""

    attribution: Attribution
    tails: Mapping[str, tuple[str, ...]]
    problems: tuple[str, ...] = ()

    def with_latency(self, seconds: float) -> AnalysisResult:
        return replace(self, attribution=msgspec.structs.replace(self.attribution, latency_s=seconds))


def inquiry_for(paths: Sequence[Path]) -> Inquiry:
    """An inquiry about logs of which nothing is known: no exit code, no node, no earlier cycle."""
    absolute = tuple(str(path.absolute()) for path in paths)
    return Inquiry(key=FailureKey(job="", generation=0, replica="", cycle=0), paths=absolute)


def logs_of(inquiry: Inquiry) -> list[LogFile]:
    """The inquiry's files. Raises UsageError where there are none and nothing else is known of the failure."""
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
    read: Read | None = None,
) -> AnalysisResult:
    """Why the cycle ended. `ranks`: leave out the lines of others. `stop` ends it early, with what was read until
    then. `read`: how a cycle's logs are read; None: here, all of them. Raises UsageError as `logs_of`."""
    stop = stop or threading.Event()
    read = read or (lambda _, logs: read_logs(logs, catalogue, stop, ranks))
    scanned, side = read(inquiry, logs_of(inquiry) if logs is None else logs)
    scanned = with_reported(scanned, inquiry, catalogue)
    side = replace(side, earlier=tuple(_earlier_endings(inquiry, catalogue, read)))
    attribution = attribute(inquiry, scanned, side)
    problems = (*scanned.problems, *side.problems)
    with_logs = scanned.ranks
    # Where neither a file nor a line names a rank, all ranks would count as silent.
    silent = sorted(known_ranks(inquiry, scanned) - with_logs) if with_logs else []
    attribution = msgspec.structs.replace(
        attribution,
        read=LogsRead(
            files=len(scanned.files),
            size_bytes=scanned.bytes_read,
            ranks=len(with_logs),
            silent=tuple(silent[:MOST_NAMED]),
            problems=problems[:MOST_NAMED],
        ),
    )
    blamed_first = sorted(scanned.files, key=lambda log: log.rank not in attribution.ranks)
    tails = {log.name: tail for log in blamed_first if (tail := scanned.of(log).tail)}
    return AnalysisResult(attribution, tails, problems)


def with_reported(scanned: Scan, inquiry: Inquiry, catalogue: Catalogue) -> Scan:
    """The scan with the exception that the failed worker reported to its agent, unless its output has it already: the
    report comes before the output is in any file."""
    failed = inquiry.failed
    if failed is None or failed.error is None:
        return scanned
    # As long as a line of a log at most: the patterns take seconds for a message of a megabyte.
    line = failed.error.encode()[:LONGEST_LINE_BYTES]
    error = decoded(line)[: LONGEST_TEXT // 2]  # a hit of the output keeps this much of it, behind any label
    own = (hit for hit in scanned.hits if hit.rank in (failed.rank, None))
    if any(error in hit.text and not never_ends_the_rank(hit.groups.get("non_fatal")) for hit in own):
        return scanned
    log = LogFile(NO_FILE, failed.rank, failed.node, "err")
    hits = []
    for rule in catalogue.rules:
        # Literals first: so most patterns are never compiled.
        text = line.lower() if rule.ignore_case else line
        if any(literal in text for literal in rule.literals) and (match := rule.pattern.search(line)):
            groups = {name: decoded(value) for name, value in match.groupdict().items() if value}
            hits.append(
                Hit(log, 0, excerpt(line, match.start()), rule, failed.rank, failed.node, failed.t, groups, 0)
            )
    return replace(scanned, hits=(*scanned.hits, *hits))


# ---- the cycles before


def _earlier_endings(inquiry: Inquiry, catalogue: Catalogue, read: Read) -> Iterator[CycleEnding]:
    """How the cycles before ended, newest first, up to one that left no logs."""
    for folder in inquiry.earlier[:MOST_EARLIER]:
        before = inquiry_about(Path(folder), inquiry)
        try:
            logs = logs_of(before)
            scanned, side = read(before, logs)
        except UsageError:
            return  # a repeat counts only without a break
        yield attribute_cycle(before, with_reported(scanned, before, catalogue), side)[1]


def inquiry_about(folder: Path, now: Inquiry) -> Inquiry:
    """About the cycle whose logs lie in `folder`, with what the job's journal says of it: where its ranks were, and
    how the first worker ended. Of a folder that is in no job's, only its files are known."""
    key = msgspec.structs.replace(now.key, rank=None)
    asked = Inquiry(key=key, paths=(str(folder),), workers_per_node=now.workers_per_node)
    named = CYCLE.search(str(folder))
    if named is None:
        return asked
    cycle = named["replica"], int(named["generation"]), int(named["cycle"])
    for record in _records(Path(now.key.job)):
        if not isinstance(record, (RendezvousClosed, WorkerFailed)):
            continue
        if (record.replica, record.generation, record.cycle) != cycle:
            continue
        if isinstance(record, RendezvousClosed):
            asked = msgspec.structs.replace(asked, nodes=record.nodes)
        elif asked.failed is None:  # the first that failed: later ones may follow from it
            failed = Failed(
                cause="worker failed",
                node=record.node,
                rank=record.rank,
                exit_code=record.exit_code,
                signal=record.signal,
                error=record.error,
            )
            asked = msgspec.structs.replace(asked, failed=failed)
    return asked


def _records(job: Path) -> Iterator[Record]:
    """Rendezvous and failures of a job's journal, oldest first, without lines that are torn."""
    current = JobFiles(job).events_path
    for path in (*journal_parts(current), current):
        try:
            lines = path.read_bytes().splitlines() if path.exists() else []
        except OSError:
            continue
        for line in lines:
            # Most lines of a journal are of other kinds, and a search of their bytes costs less than decoding them.
            if any(kind in line for kind in _WANTED_RECORDS):
                try:
                    yield entry_from_json(line).record
                except MalformedRecord:
                    continue
