"""What a flow expects of its job's journal: frozen, checked, every part with the line of the file that says it."""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_slurm.lab.flow.language.events import EventPattern
from nvrx_slurm.lab.flow.language.patterns import Bindings, Pattern
from nvrx_slurm.util.durations import words


class _Told:
    """Its text is what `told` says where no capture is bound."""

    __slots__ = ()

    def told(self, known: Bindings) -> str:
        """In words, with what is known of the captures."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.told({})


@dataclass(frozen=True, slots=True)
class Happens(_Told):
    """The event comes; what follows in the list comes after it."""

    line: int
    event: EventPattern
    within_s: float | None = None

    def told(self, known: Bindings) -> str:
        return f"{self.event.told(known)}{_within(self.within_s)}"


@dataclass(frozen=True, slots=True)
class Eventually(_Told):
    """The event comes somewhere from here on; what follows in the list does not wait for it."""

    line: int
    event: EventPattern
    within_s: float | None = None

    def told(self, known: Bindings) -> str:
        return f"eventually {self.event.told(known)}{_within(self.within_s)}"


@dataclass(frozen=True, slots=True)
class Never(_Told):
    """The event does not come from here until `until`, or to the end."""

    line: int
    event: EventPattern
    until: EventPattern | None = None

    def told(self, known: Bindings) -> str:
        return f"never {self.event.told(known)}{_until(self.until, known)}"


@dataclass(frozen=True, slots=True)
class Count(_Told):
    """From here until `until`, or to the end, the event comes as often as `wanted` says."""

    line: int
    event: EventPattern
    wanted: Pattern
    until: EventPattern | None = None

    def told(self, known: Bindings) -> str:
        return f"count of {self.event.told(known)} is {self.wanted.told(known)}{_until(self.until, known)}"


@dataclass(frozen=True, slots=True)
class AnyOrder:
    """Branches side by side, each a sequence of its own; done when all are."""

    line: int
    branches: tuple[tuple[Expectation, ...], ...]


Expectation = Happens | Eventually | Never | Count | AnyOrder


def _within(within_s: float | None) -> str:
    return "" if within_s is None else f" within {words(within_s)}"


def _until(until: EventPattern | None, known: Bindings) -> str:
    return "" if until is None else f" until {until.told(known)}"
