"""What the journal still knows of a cycle before: where its ranks were, and how the first worker ended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.journal.records import Record, RoundClosed, WorkerFailed, entry_from_json
from nvrx_slurm.journal.verdicts import Failed, Inquiry
from nvrx_slurm.util.files import JobFiles, journal_parts

_CYCLE = re.compile(r"(?P<replica>[^/]+)/gen-(?P<generation>\d+)/cycle-(?P<cycle>\d+)$")
_TELLING = (b'"round_closed"', b'"worker_failed"')
_Name = tuple[str, int, int]
"""Replica, generation, cycle."""


def inquiry_about(folder: Path, now: Inquiry) -> Inquiry:
    """About the cycle whose logs lie in `folder`. Of a folder that is in no job's, only its files are known."""
    key = replace(now.key, rank=None)
    asked = Inquiry(key=key, paths=(str(folder),), workers_per_node=now.workers_per_node)
    named = _CYCLE.search(str(folder))
    if named is None:
        return asked
    name = named["replica"], int(named["generation"]), int(named["cycle"])
    for record in _records(Path(now.key.job)):
        if not isinstance(record, (RoundClosed, WorkerFailed)) or _name(record) != name:
            continue
        if isinstance(record, RoundClosed):
            asked = replace(asked, nodes=record.nodes)
        elif asked.failed is None:
            asked = replace(asked, failed=_failed(record))
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
