"""What a fault waits for: frozen, checked, every part with the line of the flow file that says it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nvrx_slurm.lab.flow.language.events import EventPattern
from nvrx_slurm.util.durations import words

JobStateName = Literal["pending", "running", "recovering", "shutting_down", "ended"]


@dataclass(frozen=True, slots=True)
class OnEvent:
    """The `times`-th entry that fits, and `after_s` more. Of `progress`, beats count as well."""

    pattern: EventPattern
    times: int = 1
    after_s: float = 0.0

    def __str__(self) -> str:
        nth = "" if self.times == 1 else f", {self.times} times"
        return f"{self.pattern}{nth}{_after(self.after_s)}"


@dataclass(frozen=True, slots=True)
class OnState:
    """The job's first moment in this state."""

    line: int
    state: JobStateName
    after_s: float = 0.0

    def __str__(self) -> str:
        return f"the job {self.state.replace('_', ' ')}{_after(self.after_s)}"


@dataclass(frozen=True, slots=True)
class OnFault:
    """The moment in which another fault of the same file has struck."""

    line: int
    number: int
    after_s: float = 0.0

    def __str__(self) -> str:
        return f"fault {self.number}{_after(self.after_s)}"


@dataclass(frozen=True, slots=True)
class OnAll:
    """The last of several."""

    line: int
    of: tuple[Trigger, ...]
    after_s: float = 0.0

    def __str__(self) -> str:
        return f"all of ({'; '.join(map(str, self.of))}){_after(self.after_s)}"


@dataclass(frozen=True, slots=True)
class OnAny:
    """The first of several."""

    line: int
    of: tuple[Trigger, ...]
    after_s: float = 0.0

    def __str__(self) -> str:
        return f"any of ({'; '.join(map(str, self.of))}){_after(self.after_s)}"


Trigger = OnEvent | OnState | OnFault | OnAll | OnAny


def leaves(trigger: Trigger) -> Iterator[OnEvent | OnState | OnFault]:
    """The triggers that others are made of, in the order of the file."""
    if isinstance(trigger, (OnAll, OnAny)):
        for part in trigger.of:
            yield from leaves(part)
    else:
        yield trigger


def _after(after_s: float) -> str:
    return f" and {words(after_s)} more" if after_s else ""
