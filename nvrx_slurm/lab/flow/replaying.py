"""A finished journal: read strictly from its files, and fed through the pure core again, which decides the same, or
here is where the two part."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from nvrx_slurm.core.job import step
from nvrx_slurm.core.state import new_job
from nvrx_slurm.errors import ConfigError, MalformedRecord
from nvrx_slurm.jobspec.plan import Plan, plan_from_json
from nvrx_slurm.journal.records import ControllerStarted, Decision, Entry, FirstStepReached, entry_from_json
from nvrx_slurm.lab.flow.patterns import EVENTS
from nvrx_slurm.report.sentences import Lines
from nvrx_slurm.util.files import journal_parts
from nvrx_slurm.util.signals import signal_name

# Durations in decisions are differences of exact times; the file has those times to the microsecond.
CLOSE_S = 1e-4

# In the causes of older journals, which name a signal by its number.
_SIGNAL = re.compile(r"(?<=was killed by )signal (\d+)")

MOST_BEFORE = 8


@dataclass(frozen=True, slots=True)
class Parting:
    """Where journal and core part: at `entry`, the journal says `recorded` and the core decides `decided`.

    None: nothing. `refused`: why the core would not even take the fact of `entry`.
    """

    entry: Entry
    recorded: Decision | None = None
    decided: Decision | None = None
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a replay. It ends at the first parting: what follows from another state says nothing.

    `unwritten`: decisions that a controller made and could not write down any more before it died.
    """

    entries: int
    decisions: int
    unwritten: int = 0
    parting: Parting | None = None


def replay(plan: Plan, journal: Iterable[Entry]) -> Replayed:
    """Feed a journal, from its first entry on, through the core as it is now. Pure."""
    job = new_job(plan)
    due: list[Decision] = []
    entries = decisions = unwritten = 0
    has_first_steps = False  # controllers up to 0.1 did not record them, and one may have begun this journal
    for entry in journal:
        entries += 1
        record = entry.record
        if isinstance(record, Decision):
            decisions += 1
            has_first_steps = has_first_steps or isinstance(record, FirstStepReached)
            decided = due.pop(0) if due else None
            if decided is None or type(record) is not type(decided) or differences(record, decided):
                return Replayed(entries, decisions, unwritten, Parting(entry, recorded=record, decided=decided))
            continue
        if isinstance(record, ControllerStarted):
            # The controller before this one may have died between a decision and its entry.
            unwritten, due = unwritten + len(due), []
        if not has_first_steps:
            due = [decision for decision in due if not isinstance(decision, FirstStepReached)]
        if due:  # the journal has a fact where the core has decided something
            return Replayed(entries, decisions, unwritten, Parting(entry, decided=due[0]))
        refused = "it is stale, or of a node that this job does not know"
        try:
            made = step(job, record, entry.t)
        except Exception as error:  # a journal from elsewhere, perhaps with another job's plan
            made, refused = None, f"it cannot be: {type(error).__name__}: {error}"
        if made is None:
            return Replayed(entries, decisions, unwritten, Parting(entry, refused=refused))
        # What the core decides now must stand next in the journal, before any other fact.
        due = made
    return Replayed(entries, decisions, unwritten + len(due))


def differences(recorded: Decision, decided: Decision) -> list[str]:
    """The fields in which two decisions of one kind differ: `action: stop in the journal, restart_replica now`.

    Durations are compared to a tenth of a millisecond.
    """
    found = []
    for name in recorded.__struct_fields__:
        old, new = (msgspec.to_builtins(getattr(one, name), str_keys=True) for one in (recorded, decided))
        if not _equal(old, new):
            found.append(f"{name}: {old!r} in the journal, {new!r} now")
    return found


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=CLOSE_S)
    if isinstance(one, str) and isinstance(other, str):
        return one == other or _SIGNAL.sub(lambda found: signal_name(int(found[1])), one) == other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other)


def explain(parting: Parting, journal: Sequence[Entry]) -> list[str]:
    """The parting for people: what stands there, what the core decides, in what they differ, and what came before."""
    lines = Lines()
    lines_shown = [lines.in_words(entry) for entry in journal[: parting.entry.n]]
    here = msgspec.structs.replace
    said = [f"entry {parting.entry.n} is where they part:"]
    if parting.refused is not None:
        said += [f"  the journal:  {lines_shown[-1]}", f"  the core now refuses this fact: {parting.refused}"]
    else:
        decided = parting.decided and lines.in_words(here(parting.entry, record=parting.decided))
        said += [f"  the journal:  {lines_shown[-1] if parting.recorded else 'no decision'}"]
        said += [f"  the core now: {decided or 'no decision'}"]
    if parting.recorded and type(parting.recorded) is type(parting.decided):
        said += [f"    {difference}" for difference in differences(parting.recorded, parting.decided)]
    before = lines_shown[:-1][-MOST_BEFORE:]
    return [*said, "  before it:", *(f"    {line}" for line in before or ["nothing: it is the first entry"])]


NAME = "events.jsonl"


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
    for part in [*(journal_parts(file) if file.name == NAME else []), file]:
        try:
            lines = part.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}", file=str(part)) from None
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = entry_from_json(line)
            except MalformedRecord as error:
                try:
                    value = msgspec.json.decode(line)
                except (msgspec.DecodeError, ValueError, RecursionError):
                    # A controller that dies may leave part of a line; its successor writes the entry again, or never.
                    notes.append(f"{part}:{number}: this line is torn; left out")
                    continue
                event = value.get("event") if isinstance(value, dict) else None
                if event is None:
                    why = "is no entry of a journal (no `event`); name an events.jsonl, or a job's folder"
                elif event in EVENTS:
                    why = f"`{event}`: {error}"
                else:
                    newer = "which this version does not know; replay it with a newer nvrx-slurm"
                    why = f"holds the event `{event}`, {newer}"
                raise ConfigError(why, file=str(part), line=number) from None
            # A later line of the same number wins: it is the one that the successor wrote again.
            found[entry.n] = entry

    numbers = sorted(found)
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
    return JournalText(tuple(found[n] for n in numbers), tuple(notes))


def read_plan(path: Path) -> Plan:
    """The plan that a `plan.json` holds. Raises ConfigError."""
    try:
        return plan_from_json(path.read_bytes())
    except OSError as error:
        remedy = "a journal is replayed with the plan of its job: name that with --plan"
        raise ConfigError(f"cannot be read ({error.strerror}); {remedy}", file=str(path)) from None
    except MalformedRecord as error:
        raise ConfigError(f"is no plan.json: {error}", file=str(path)) from None
