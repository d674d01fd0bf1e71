"""What is known beside the lines that rules recognised: read from the files once, then reasoned about without any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nvrx_slurm.attribution.analyze.aftermath import TailLine
from nvrx_slurm.attribution.analyze.flight_recorder import Dump
from nvrx_slurm.attribution.analyze.history import Earlier


@dataclass(frozen=True, slots=True)
class Gathered:
    """`tails`: file → its last lines. `stacks`: rank → innermost frame of its main thread. `dumps`: of the flight
    recorder. `earlier`: what ended the cycles before, newest first. `problems`: files that could not be read."""

    tails: Mapping[str, tuple[TailLine, ...]] = field(default_factory=dict)
    stacks: Mapping[int, str] = field(default_factory=dict)
    dumps: tuple[Dump, ...] = ()
    earlier: tuple[Earlier, ...] = ()
    problems: tuple[str, ...] = ()
