"""A full round: simulated nodes, the real store, the real controller, each in processes of their own.

`join` is the first round: from the first join sent to the last assignment read, with every node's first
heartbeat beside its join. `restart` is the second: from one worker's failure reported, over each node's `node_ready`,
to the last assignment read. Connections are no part of a round; but real agents connect at the moment of the first
one, to the process that is deciding it, so that is measured too.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.processes import temporary_folder
from bench.stage import CONTROLLER, read_line, send_line, set_up, start_controller, start_fleet
from bench.tables import growth_exponent, print_rows, print_target
from nvrx_slurm.lab.plans import plain_bounds

SIZES = (256, 512, 1000, 2000)
FLEETS = 2
TARGET_SIZE, TARGET_S, TARGET_EXPONENT = 1000, 0.25, 1.1


@dataclass(frozen=True, slots=True)
class Setting:
    """What one measurement runs with."""

    size: int
    connected: bool = False
    controller: tuple[str, ...] = CONTROLLER


def rounds(runs: int, peers: Path) -> None:
    """Every size, `runs` times; then once more at the size that has a target, with liveness connections."""
    measured: dict[int, list[tuple[float, float]]] = {size: [] for size in SIZES}
    for _ in range(runs):  # in turns, so that noise meets all sizes alike
        for size, taken in measured.items():
            taken.append(asyncio.run(measure(Setting(size))))
    for index, name in enumerate(("join", "restart")):
        _print(f"round, {name}", {size: [run[index] for run in taken] for size, taken in measured.items()})
    connected = [asyncio.run(measure(Setting(TARGET_SIZE, connected=True)))[0] for _ in range(runs)]
    _print("round, join, while every node also connects", {TARGET_SIZE: connected})


def _print(title: str, samples: Mapping[int, Sequence[float]]) -> None:
    print_rows(title, {_row(size): taken for size, taken in samples.items()}, unit="ms", first=_row(TARGET_SIZE))
    middles = {size: median(taken) for size, taken in samples.items()}
    at_target = middles[TARGET_SIZE]
    print_target(f"≤ {TARGET_S * 1000:.0f} ms at {TARGET_SIZE}", at_target * 1000, at_most=TARGET_S * 1000)
    if len(middles) > 1:
        exponent = growth_exponent(list(middles), list(middles.values()))
        print_target(f"growth exponent ≤ {TARGET_EXPONENT}", exponent, at_most=TARGET_EXPONENT)


def _row(size: int) -> str:
    return f"{size:5d} nodes"


async def measure(setting: Setting) -> tuple[float, float]:
    """Seconds of the first round, and of a restart."""
    with temporary_folder() as room:
        async with contextlib.AsyncExitStack() as stack:
            # A restart has no deadline here, since these nodes send heartbeats from a loop that is busy.
            bounds = plain_bounds(heartbeat__timeout=120.0)
            stage = await set_up(stack, room, size=setting.size, bounds=bounds)
            await start_controller(stack, stage, setting.controller)
            fleets, count = list[Process](), setting.size // FLEETS
            for part in range(FLEETS):
                words = (
                    str(stage.folder.path),
                    str(1 + part * count),
                    str(count),
                    *["connected"] * setting.connected,
                )
                fleets.append(await start_fleet(stack, "bench.fleet", *words))
            join = await _one_round(fleets, "begin", to=fleets)
            restart = await _one_round(fleets, "fail", to=fleets[:1])
            return join, restart


async def _one_round(fleets: Sequence[Process], order: str, *, to: Sequence[Process]) -> float:
    for fleet in to:
        send_line(fleet, order)
    results = [(await read_line(fleet)).split() for fleet in fleets]
    began = min(float(words[1]) for words in results if float(words[1]))
    return max(float(words[2]) for words in results) - began
