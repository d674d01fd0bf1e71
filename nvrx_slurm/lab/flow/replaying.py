"""A journal fed through the pure core again: it decides the same, or here is where the two part. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from nvrx_slurm.core.job import step
from nvrx_slurm.core.state import Job, new_job
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.records import ControllerStarted, Decision, Entry, Fact
from nvrx_slurm.report.sentences import Lines

CLOSE_S = 1e-4
"""Durations in decisions are differences of exact times; the file has those times to the microsecond."""

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
    for entry in journal:
        entries += 1
        parting = None
        if isinstance(entry.record, Decision):
            decisions += 1
            decided = due.pop(0) if due else None
            if decided is None or not same(entry.record, decided):
                parting = Parting(entry, recorded=entry.record, decided=decided)
        else:
            if isinstance(entry.record, ControllerStarted):
                unwritten, due = unwritten + len(due), []
            if due:
                parting = Parting(entry, decided=due[0])
            else:
                due, refused = _decide(job, entry.record, entry.t)
                parting = Parting(entry, refused=refused) if refused else None
        if parting is not None:
            return Replayed(entries, decisions, unwritten, parting)
    return Replayed(entries, decisions, unwritten + len(due))


def _decide(job: Job, fact: Fact, t: float) -> tuple[list[Decision], str | None]:
    try:
        decisions = step(job, fact, t)
    except Exception as error:  # a journal from elsewhere, perhaps with another job's plan
        return [], f"it cannot be: {type(error).__name__}: {error}"
    return (
        (decisions, None) if decisions is not None else ([], "it is stale, or of a node that this job does not know")
    )


def same(recorded: Decision, decided: Decision) -> bool:
    """Whether two decisions are one, durations compared to a tenth of a millisecond."""
    return type(recorded) is type(decided) and not differences(recorded, decided)


def differences(recorded: Decision, decided: Decision) -> list[str]:
    """The fields in which two decisions of one kind differ: `action: stop in the journal, restart_replica now`."""
    return [
        f"{name}: {old!r} in the journal, {new!r} now"
        for name in recorded.__struct_fields__
        if not _equal(old := _plain(getattr(recorded, name)), new := _plain(getattr(decided, name, None)))
    ]


def _plain(value: object) -> Any:
    return msgspec.to_builtins(value, str_keys=True)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=CLOSE_S)
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
