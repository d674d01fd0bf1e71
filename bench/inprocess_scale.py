"""The restart protocol at the size of a fleet: its time and its store operations, a rank.

The store is the real one. The members are simulated, in a few processes; each does there what a rank does, and they
take turns at their process's connection: the time is an upper bound, and most of it is theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import Process
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import redis.asyncio as client

from bench import usage
from bench.inprocess_group import Valkey, valkey
from bench.processes import temporary_folder
from bench.stage import read_line, send_line, start_fleet
from bench.tables import growth_exponent, print_target
from nvrx_slurm.util.clock import SystemClock

SIZES = (256, 1024, 4096, 16384)
FLEETS = 2
TARGET_EXPONENT = 1.1
GROWING = ("wall_s", "store_cpu_s", "operations", "bytes_out")
HEAD = "   ranks        s   µs a rank  CPU, theirs  and store's   operations   bytes read"
STEPS = {
    "join": "all call the function for the first time",
    "raise": "a rank raises: a restart",
    "kill": "a rank's process dies: a restart",
    "lose": "a rank is found unfit while all others wait for it: they go on",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What one step took."""

    wall_s: float
    members_cpu_s: float
    store_cpu_s: float
    operations: int
    bytes_out: int


def scale(runs: int, peers: Path) -> None:
    """Every size, once a run; the largest last."""
    taken: dict[str, dict[int, list[Cost]]] = {step: defaultdict(list) for step in STEPS}
    for _ in range(runs):
        for size in SIZES:
            for step, cost in asyncio.run(measure(size)).items():
                taken[step][size].append(cost)
    for step, by_size in taken.items():
        print(f"\n{STEPS[step]}\n{HEAD}")
        for size, costs in by_size.items():
            print(_row(size, costs))
        for what in GROWING:
            values = [_median(costs, what) for costs in by_size.values()]
            exponent = growth_exponent(list(by_size), values)
            print_target(f"growth of {what}: exponent ≤ {TARGET_EXPONENT}", exponent, at_most=TARGET_EXPONENT)


def _row(size: int, costs: Sequence[Cost]) -> str:
    wall_s = _median(costs, "wall_s")
    cpu_us = [_median(costs, what) / size * 1e6 for what in ("members_cpu_s", "store_cpu_s")]
    each = [_median(costs, what) / size for what in ("operations", "bytes_out")]
    times = f"{wall_s:>8.2f} {wall_s / size * 1e6:>11.1f} {cpu_us[0]:>12.1f} {cpu_us[1]:>12.1f}"
    return f"{size:>8} {times} {each[0]:>12.2f} {each[1]:>12.0f}"


def _median(costs: Sequence[Cost], what: str) -> float:
    return float(median(getattr(cost, what) for cost in costs))


async def measure(size: int) -> dict[str, Cost]:
    """One call of so many ranks, step by step."""
    with temporary_folder() as room:
        async with contextlib.AsyncExitStack() as stack:
            store = await stack.enter_async_context(valkey(room))
            share = size // FLEETS
            arguments = (store.url, str(store.password_file), str(size))
            fleets = [
                await start_fleet(stack, "bench.inprocess_members", *arguments, str(part * share), str(share))
                for part in range(FLEETS)
            ]
            observer = await stack.enter_async_context(
                client.Redis.from_url(store.url, password=store.password_file.read_text())
            )
            costs = {}
            for order, who in (("join", ""), ("raise", "1"), ("kill", "2"), ("unfit", "3"), ("lose", "3")):
                costs[order] = await _step(fleets, f"{order} {who}", store, observer)
            return {step: costs[step] for step in STEPS}


async def _step(fleets: Sequence[Process], order: str, store: Valkey, observer: client.Redis) -> Cost:
    clock = SystemClock()
    processes = [store.process, *fleets]
    operations, sent = await _operations(observer)
    before = [usage.of(process.pid, clock) for process in processes]
    for fleet in fleets:
        send_line(fleet, order)
    ended = max([float(await read_line(fleet)) for fleet in fleets])
    after = [usage.of(process.pid, clock) for process in processes]
    operations_after, sent_after = await _operations(observer)
    cpu_s = [last.cpu_s - first.cpu_s for first, last in zip(before, after, strict=True)]
    return Cost(ended - before[0].at_s, sum(cpu_s[1:]), cpu_s[0], operations_after - operations, sent_after - sent)


async def _operations(observer: client.Redis) -> tuple[int, int]:
    """How many commands the store has carried out so far, and how many bytes it has sent."""
    commands = await observer.info("commandstats")
    return sum(each["calls"] for each in commands.values()), (await observer.info("stats"))["total_net_output_bytes"]
