"""Virtual time: our loop against looptime's, and how many histories of a whole fleet a core simulates in a minute."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.errors import PeerFailed
from bench.tables import Target, in_turns, print_rows, print_target, print_targets
from nvrx_slurm.lab.simulation.loop import VirtualLoop
from nvrx_slurm.lab.simulation.seeds import run_seeds
from nvrx_slurm.util.clock import SystemClock

OURS, PEER = "VirtualLoop", "looptime 0.9"
BEATERS, BEATS = 16, 500
"""As many tasks sleep for a virtual second, so often: 8,000 sleeps, 500 virtual seconds."""

NODES, SEEDS_A_RUN, LEAST_A_MINUTE = 16, 100, 1000


def simulation(runs: int, peers: Path) -> None:
    """The same coroutine on both loops, in turns; then histories, on one core."""
    if importlib.util.find_spec("looptime") is None:
        raise PeerFailed("looptime is not here: pip install looptime==0.9")
    samples = in_turns(runs, {OURS: partial(_timed, _on_ours), PEER: partial(_timed, _on_looptime)})
    print_rows(f"{BEATERS * BEATS:,} sleeps of a virtual second", samples, unit="ms", first=OURS)
    print_targets(samples, [Target("≥ 2 × faster than looptime", OURS, (PEER,), at_least=2.0)])
    seeds = range(SEEDS_A_RUN * runs)
    took_s = _timed(lambda: run_seeds(seeds, NODES, 1, lambda line: None))
    a_minute = 60 * len(seeds) / took_s
    print_target(f"≥ {LEAST_A_MINUTE} histories of {NODES} nodes a minute", a_minute, at_least=LEAST_A_MINUTE)


async def _beat() -> None:
    for _ in range(BEATS):
        await asyncio.sleep(1.0)


async def _fleet() -> None:
    await asyncio.gather(*(_beat() for _ in range(BEATERS)))


def _on_ours() -> None:
    loop = VirtualLoop()
    with contextlib.closing(loop):
        loop.run(_fleet())


def _on_looptime() -> None:
    import looptime

    loop = looptime.new_event_loop(start=0)
    with contextlib.closing(loop):
        loop.run_until_complete(_fleet())


def _timed(run: Callable[[], object]) -> float:
    clock = SystemClock()
    began = clock.monotonic()
    run()
    return clock.monotonic() - began
