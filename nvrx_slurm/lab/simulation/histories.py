"""Histories of thousands of seeds, of any simulation: the report of the first broken promise, and one seed again."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nvrx_slurm.lab.simulation.history_result import HistoryResult
from nvrx_slurm.lab.simulation.inprocess.history import run_group
from nvrx_slurm.lab.simulation.loop import uncollected
from nvrx_slurm.lab.simulation.transport.history import run_payloads
from nvrx_slurm.util.clock import SystemClock

Say = Callable[[str], None]
SAY_EVERY_S = 5.0
CHUNK = 64


HistoryRunner = Callable[[int, tuple[Any, ...] | None], HistoryResult]
"""One seed, with its own faults or with these."""

RUNNERS: Mapping[str, HistoryRunner] = {"inprocess": run_group, "transport": run_payloads}


def run_histories(of: str, seeds: Sequence[int], jobs: int, say: Say) -> int:
    """Run every seed; exit code 0, or 1 with a report of the first broken promise."""
    clock, runner = SystemClock(), RUNNERS[of]
    began = said = clock.monotonic()
    done = 0
    for result in _all(runner, seeds, jobs):
        done += 1
        if result.broken:
            say(f"seed {result.seed}: {result.broken}")
            shortest = fewest_acts(runner, result)
            say(f"\nwith {len(shortest.acts)} of {len(result.acts)} acts it is still broken: {shortest.broken}\n")
            _tell(shortest, say)
            say(f"\nthe whole history again: nvrx-slurm ci simulate --of {of} --seed {result.seed}")
            return 1
        if (now := clock.monotonic()) - said > SAY_EVERY_S:
            said = now
            say(f"{done:,} of {len(seeds):,} histories, {60 * done / (now - began):,.0f} a minute")
    took_s = clock.monotonic() - began
    say(f"{done:,} histories of {of} in {took_s:.1f} s, {60 * done / took_s:,.0f} a minute: all promises kept")
    return 0


def replay_history(of: str, seed: int, say: Say) -> int:
    """One seed again, whole."""
    result = RUNNERS[of](seed, None)
    _tell(result, say)
    say(f"digest {result.digest}")
    say(f"seed {seed}: {result.broken or 'no promise broken'}")
    return 1 if result.broken else 0


def fewest_acts(runner: HistoryRunner, result: HistoryResult) -> HistoryResult:
    """The same history with as few acts as still break the same promise: they are left out one by one, until none
    can be."""
    kept, is_shorter = result, True
    while is_shorter:
        is_shorter = False
        for act in kept.acts:
            acts = tuple(other for other in kept.acts if other is not act)
            if (again := runner(result.seed, acts)).promise == result.promise:
                kept, is_shorter = again, True
    return kept


def _all(runner: HistoryRunner, seeds: Sequence[int], jobs: int) -> Iterator[HistoryResult]:
    chunks = [(runner, seeds[at : at + CHUNK]) for at in range(0, len(seeds), CHUNK)]
    if jobs == 1:
        for chunk in chunks:
            yield from _run_chunk(chunk)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for results in pool.imap(_run_chunk, chunks):
            yield from results


def _run_chunk(chunk: tuple[HistoryRunner, Sequence[int]]) -> list[HistoryResult]:
    runner, seeds = chunk
    results = []
    with uncollected():
        for seed in seeds:
            results.append(runner(seed, None))
            if results[-1].broken:
                break
        gc.collect()
    return results


def _tell(result: HistoryResult, say: Say) -> None:
    say(f"{result.what}\n")
    for act in result.acts:
        say(str(act))
    say("")
    for line in result.lines:
        say(line)
