"""One analysis from files to attribution, in the calling thread."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from nvrx_slurm.attribution.analyze import attribute
from nvrx_slurm.attribution.analyze.attributing import judged
from nvrx_slurm.attribution.analyze.history import Earlier
from nvrx_slurm.attribution.analyze.told import with_told
from nvrx_slurm.attribution.earlier_cycles import inquiry_about
from nvrx_slurm.attribution.gathering import Gathering
from nvrx_slurm.attribution.rules.catalogue import Catalogue
from nvrx_slurm.attribution.scan import LogFile, Scan, find_logs, scan
from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.verdicts import Attribution, Inquiry

MOST_EARLIER = 3
"""Cycles before this one that are looked at: a second repeat says hardly more than the first."""


@dataclass(frozen=True, slots=True)
class Examination:
    """An attribution, the last lines of the files (those of the blamed rank first), and what could not be read."""

    attribution: Attribution
    tails: Mapping[str, tuple[str, ...]]
    problems: tuple[str, ...] = ()

    def with_latency(self, seconds: float) -> Examination:
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


def examine(
    inquiry: Inquiry,
    catalogue: Catalogue,
    *,
    logs: Sequence[LogFile] | None = None,
    ranks: Collection[int] = (),
    stop: threading.Event | None = None,
) -> Examination:
    """Read, recognise, reason. `ranks`: leave out what others say. Raises UsageError as `logs_of`.

    `stop` ends it early, with what was read until then.
    """
    stop = stop or threading.Event()
    read = scan(logs_of(inquiry) if logs is None else logs, catalogue, stop=stop)
    scanned = _only_of(ranks, with_told(read, inquiry, catalogue))
    gathered = Gathering(scanned, stop).all(_earlier(inquiry, catalogue, stop))
    attribution = attribute(inquiry, scanned, gathered)
    return Examination(attribution, _telling_first(scanned, attribution), (*scanned.problems, *gathered.problems))


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


def _earlier(inquiry: Inquiry, catalogue: Catalogue, stop: threading.Event) -> Iterator[Earlier]:
    """How the cycles before ended, newest first; no further back than one that left nothing."""
    for folder in inquiry.earlier[:MOST_EARLIER]:
        before = inquiry_about(Path(folder), inquiry)
        try:
            logs = logs_of(before)
        except UsageError:
            return
        scanned = with_told(scan(logs, catalogue, stop=stop), before, catalogue)
        yield judged(before, scanned, Gathering(scanned, stop).all())[1]
