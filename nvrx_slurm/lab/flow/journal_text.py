"""A finished journal as its files have it, read strictly: what is missing is an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import get_args

import msgspec

from nvrx_slurm.errors import ConfigError, MalformedRecord
from nvrx_slurm.jobspec.plan import Plan, plan_from_json
from nvrx_slurm.journal.records import AnyRecord, Entry, entry_from_json
from nvrx_slurm.report.words import event_name
from nvrx_slurm.util.files import journal_parts

NAME = "events.jsonl"
_EVENTS = frozenset(map(event_name, get_args(AnyRecord)))


@dataclass(frozen=True, slots=True)
class JournalText:
    """A journal as its files have it. `notes`: what was left out, a sentence each."""

    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()


def read_journal(path: Path) -> JournalText:
    """Every entry of `events.jsonl` and of the older parts beside it, from the first on. `path`: the file, or its
    folder.

    Raises ConfigError, which names file and line: no journal, a part or an entry missing, a line that is none, an
    event that only a newer version knows.
    """
    file = path / NAME if path.is_dir() else path
    found: dict[int, Entry] = {}
    notes: list[str] = []
    older = journal_parts(file) if file.name == NAME else []
    for part in [*older, file]:
        for number, line, whole in _lines(part):
            entry = _entry(line, part, number) if whole else None
            if entry is None:
                notes.append(f"{part}:{number}: this line is torn; left out")
            else:
                found[entry.n] = entry
    _check_gapless(sorted(found), file, notes)
    return JournalText(tuple(found[n] for n in sorted(found)), tuple(notes))


def read_plan(path: Path) -> Plan:
    """The plan that a `plan.json` holds. Raises ConfigError."""
    try:
        return plan_from_json(path.read_bytes())
    except OSError as error:
        remedy = "a journal is replayed with the plan of its job: name that with --plan"
        raise ConfigError(f"cannot be read ({error.strerror}); {remedy}", file=str(path)) from None
    except MalformedRecord as error:
        raise ConfigError(f"is no plan.json: {error}", file=str(path)) from None


def _lines(part: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Number (from 1), text, and whether it is whole: a writer that dies leaves a last line without its end."""
    try:
        data = part.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", file=str(part)) from None
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        if line.strip():
            yield number, line, line.endswith(b"\n") or _is_json(line)


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return True


def _entry(line: bytes, part: Path, number: int) -> Entry | None:
    """The line's entry. None: it is torn, and its number is missing unless it was written again."""
    try:
        return entry_from_json(line)
    except MalformedRecord as error:
        if _is_json(line):
            raise _wrong(line, str(error), part, number) from None
        return None


def _wrong(line: bytes, error: str, part: Path, number: int) -> ConfigError:
    value = msgspec.json.decode(line)
    event = value.get("event") if isinstance(value, dict) else None
    if event is None:
        problem = "is no entry of a journal (no `event`); name an events.jsonl, or a job's folder"
    elif event in _EVENTS:
        problem = f"`{event}`: {error}"
    else:
        problem = f"holds the event `{event}`, which this version does not know; replay it with a newer nvrx-slurm"
    return ConfigError(problem, file=str(part), line=number)


def _check_gapless(numbers: Sequence[int], file: Path, notes: Sequence[str]) -> None:
    if not numbers:
        raise ConfigError("holds no entry of a journal; name an events.jsonl, or a job's folder", file=str(file))
    if numbers[0] != 1:
        parts = "its older parts (events.1.jsonl, …) belong beside it"
        raise ConfigError(f"begins with entry {numbers[0]}; {parts}: a replay needs all from 1 on", file=str(file))
    for before, after in pairwise(numbers):
        if after != before + 1:
            lost = f"entry {before + 1} is" if after == before + 2 else f"entries {before + 1} to {after - 1} are"
            torn = "".join(f" ({note})" for note in notes)
            raise ConfigError(f"{lost} missing{torn}; a replay needs all from 1 on", file=str(file))
