"""The events of the journal and their fields, as `records.py` has them, and what a flow says of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import msgspec

from nvrx_slurm.jobspec.reading import Misfit
from nvrx_slurm.journal.records import AnyRecord
from nvrx_slurm.lab.flow.language.patterns import Bindings, Pattern, Trial, binds, captures, shown
from nvrx_slurm.lab.flow.language.problems import nearest
from nvrx_slurm.report.words import event_name

EVENTS: dict[str, type[msgspec.Struct]] = {event_name(kind): kind for kind in get_args(AnyRecord)}
"""Every event's name → its record."""


def fields_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A record's fields, each with its type; without the bounds that hold for its values."""
    types = get_type_hints(kind)
    return {part.name: types[part.name] for part in msgspec.structs.fields(kind)}


FIELDS: dict[str, dict[str, Any]] = {event: fields_of(kind) for event, kind in EVENTS.items()}
"""Every event's name → its fields, each with its type."""


def check_event(event: str) -> None:
    """Raises Misfit for a name that no event has."""
    if event not in EVENTS:
        raise Misfit(f"is no event of the journal; {nearest(event, EVENTS)} (all are in docs/journal.md)")


def field_type(event: str, name: str) -> Any:
    """The type of an event's field. Raises Misfit for one that it does not have."""
    fields = FIELDS[event]
    if name not in fields:
        raise Misfit(f"is no field of {event}; {nearest(name, fields) if fields else 'it has none'}", name)
    return fields[name]


@dataclass(frozen=True, slots=True)
class EventPattern:
    """An event of the journal, and what its fields must be. `line`: where the flow file says so."""

    line: int
    event: str
    fields: tuple[tuple[str, Pattern], ...] = ()

    def __str__(self) -> str:
        return self.told({})

    def fits(self, record: AnyRecord, trial: Trial) -> bool:
        """Whether the record is meant; the trial then holds what its captures would stand for."""
        if event_name(record) != self.event:
            return False
        return all(pattern.fits(getattr(record, name), trial) for name, pattern in self.fields)

    def differences(self, told: Any, trial: Trial) -> Iterator[str]:
        """Which fields of the event are otherwise, a thing each: `cycle: 0, not 1`."""
        for name, pattern in self.fields:
            value = getattr(told, name, None)
            if not pattern.fits(value, trial):
                yield f"{name}: {shown(value)}, not {pattern.told(trial.known)}"

    def told(self, known: Bindings) -> str:
        """As the flow file says it, with what its captures stand for: `node_lost {node: n2 ($dead)}`."""
        said = ", ".join(f"{name}: {pattern.told(known)}" for name, pattern in self.fields)
        return f"{self.event} {{{said}}}" if said else self.event

    def captures(self) -> Iterator[str]:
        """Every capture that it uses."""
        return (name for _, pattern in self.fields for name in captures(pattern))

    def binds(self) -> Iterator[str]:
        """The captures that it can bind."""
        return (name for _, pattern in self.fields for name in binds(pattern))
