"""A flow as it is run: frozen, checked, every part with the line of the file that says it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from nvrx_slurm.lab.flow.language.expected import Expectation
from nvrx_slurm.lab.flow.language.patterns import Bindings, shown
from nvrx_slurm.lab.flow.language.when import Trigger

StageName = Literal["local", "dev", "slurm"]
STAGES: tuple[StageName, ...] = get_args(StageName)
"""Where a flow can run: this machine, a Slurm started for it alone, the site's Slurm."""

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

    def captures(self) -> Iterator[str]:
        """The captures that its arguments use."""
        return (value[1:] for value in self.arguments.values() if isinstance(value, str) and value.startswith("$"))

    def resolved(self, bindings: Bindings) -> dict[str, Any]:
        """Its arguments, every capture replaced by what it stands for. Raises KeyError for one that nothing bound."""
        return {key: _resolved(value, bindings) for key, value in self.arguments.items()}


def _resolved(value: Any, bindings: Bindings) -> Any:
    return bindings[value[1:]] if isinstance(value, str) and value.startswith("$") else value


@dataclass(frozen=True, slots=True)
class Needs:
    """What a flow needs of a cluster. `nodes`: as many as the job asks for, where the file says nothing."""

    nodes: int
    settings: Mapping[str, str]
    disk_bytes: int | None = None
    own_network: bool = False
    attribution: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """`wall_s`: how long one attempt may take, its clean-up aside."""

    wall_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Flow:
    """One flow file. `job` exists and loads with `overrides` ((dotted key, value) each)."""

    name: str
    about: str
    file: Path
    line: int
    job: Path
    overrides: tuple[tuple[str, Any], ...]
    on: tuple[StageName, ...]
    needs: Needs
    faults: tuple[Fault, ...]
    expect: tuple[Expectation, ...]
    limits: Limits
