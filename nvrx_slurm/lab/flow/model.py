"""A flow as it is run: frozen, checked, every part with the line of the file that says it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from nvrx_slurm.lab.flow.patterns import Bindings, Described, EventPattern, Pattern, shown
from nvrx_slurm.util.durations import words

if TYPE_CHECKING:
    from nvrx_slurm.lab.flow.load import ClusterNeeds


@dataclass(frozen=True, slots=True)
class Happens(Described):
    """The event comes; what follows in the list comes after it."""

    line: int
    event: EventPattern
    within_s: float | None = None

    def describe(self, known: Bindings) -> str:
        within = "" if self.within_s is None else f" within {words(self.within_s)}"
        return f"{self.event.describe(known)}{within}"


@dataclass(frozen=True, slots=True)
class Eventually(Happens):
    """The event comes somewhere from here on; what follows in the list does not wait for it."""

    def describe(self, known: Bindings) -> str:
        return f"eventually {Happens.describe(self, known)}"


@dataclass(frozen=True, slots=True)
class Never(Described):
    """The event does not come from here until `until`, or to the end."""

    line: int
    event: EventPattern
    until: EventPattern | None = None

    def describe(self, known: Bindings) -> str:
        until = "" if self.until is None else f" until {self.until.describe(known)}"
        return f"never {self.event.describe(known)}{until}"


@dataclass(frozen=True, slots=True)
class Count(Described):
    """From here until `until`, or to the end, the event comes as often as `wanted` says."""

    line: int
    event: EventPattern
    wanted: Pattern
    until: EventPattern | None = None

    def describe(self, known: Bindings) -> str:
        until = "" if self.until is None else f" until {self.until.describe(known)}"
        return f"count of {self.event.describe(known)} is {self.wanted.describe(known)}{until}"


@dataclass(frozen=True, slots=True)
class AnyOrder:
    """Branches side by side, each a sequence of its own; done when all are."""

    line: int
    branches: tuple[tuple[Expectation, ...], ...]


Expectation = Happens | Eventually | Never | Count | AnyOrder


# The event that heartbeats carry too.
PROGRESS = "progress"

# The fields of it that a heartbeat carries.
BEAT_FIELDS = ("replica", "cycle", "node", "rank", "step")

JobStateName = Literal["pending", "running", "recovering", "shutting_down", "ended"]


@dataclass(frozen=True, slots=True)
class OnEvent:
    """The `times`-th entry that fits, and `after_s` more. Of `progress`, heartbeats count as well."""

    pattern: EventPattern
    times: int = 1
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OnState:
    """The job's first moment in this state."""

    state: JobStateName
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OnFault:
    """The moment in which another fault of the same file has happened."""

    number: int
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OnSeveral:
    """The last of several triggers if it `needs_all`, else the first."""

    of: tuple[Trigger, ...]
    needs_all: bool
    after_s: float = 0.0


Trigger = OnEvent | OnState | OnFault | OnSeveral


def leaves(trigger: Trigger) -> Iterator[OnEvent | OnState | OnFault]:
    """The triggers that others are made of, in the order of the file."""
    if isinstance(trigger, OnSeveral):
        for part in trigger.of:
            yield from leaves(part)
    else:
        yield trigger


StageName = Literal["local", "dev", "slurm"]
# Where a flow can run: this machine, a Slurm started for it alone, the site's Slurm.
STAGES: tuple[StageName, ...] = get_args(StageName)

_TARGET_WORDS = {
    "node": "{}",
    "of_rank": "of rank {}",
    "rank": "of rank {}",
    "of_node": "on {}",
    "spare": "of hot spare {}",
    "batch_host": "of the batch host",
    "replica": "in {}",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that really happens to the job. `number` counts from 1 in the file's order; `arguments` are those of
    its kind (`flow.faults`), defaults left out, a capture as the text `$name`; `binds`: the capture that it names."""

    number: int
    line: int
    when: Trigger
    action: str
    arguments: Mapping[str, Any]
    binds: str | None = None

    def describe(self) -> str:
        """`kill_node of rank 2`, `slow_link n3, delay 0.2`."""
        target = [_TARGET_WORDS[key].format(value) for key, value in self.arguments.items() if key in _TARGET_WORDS]
        rest = [f"{key} {shown(value)}" for key, value in self.arguments.items() if key not in _TARGET_WORDS]
        return ", ".join([" ".join([self.action, *target]), *rest])

    def restores(self, other: Fault) -> bool:
        """Whether its node is one that the other fault kills, as far as the file tells."""
        is_it = self.arguments == other.arguments or self.arguments.get("node") == f"${other.binds}"
        return other.action == "kill_node" and is_it

    def captures(self) -> Iterator[str]:
        """The captures that its arguments use."""
        return (value[1:] for value in self.arguments.values() if isinstance(value, str) and value.startswith("$"))


@dataclass(frozen=True, slots=True)
class Flow:
    """One flow file. `job` exists and loads with `overrides` ((dotted key, value) each). `nodes`: of the cluster; as
    many as the job asks for, where the file says nothing. `lines`: of `on`, `cluster` and what stands below it."""

    name: str
    about: str
    file: Path
    job: Path
    overrides: tuple[tuple[str, Any], ...]
    on: tuple[StageName, ...]
    nodes: int
    cluster: ClusterNeeds
    faults: tuple[Fault, ...]
    expect: tuple[Expectation, ...]
    wall_s: float  # how long one attempt may take, its clean-up aside
    lines: Mapping[str, int]
