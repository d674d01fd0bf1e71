"""Runs of thousands of seeds in several processes, the report of the first broken promise, and one seed again."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
from collections.abc import Callable, Iterator, Sequence

from nvrx_slurm.journal.records import entry_to_json
from nvrx_slurm.lab.simulation.adversary import Act
from nvrx_slurm.lab.simulation.loop import uncollected
from nvrx_slurm.lab.simulation.run import RunResult, run_seed
from nvrx_slurm.util.clock import SystemClock

Say = Callable[[str], None]
SeedRunner = Callable[[int, int, tuple[Act, ...] | None], RunResult]
SAY_EVERY_S = 5.0
CHUNK = 64
"""Seeds that are run before garbage is collected, or that a process is given at a time."""


def run_seeds(seeds: Sequence[int], nodes: int, jobs: int, say: Say, runner: SeedRunner = run_seed) -> int:
    """Run every seed; exit code 0, or 1 with a report of the first broken promise."""
    clock = SystemClock()
    began = said = clock.monotonic()
    done = 0
    for result in _all(seeds, nodes, jobs, runner):
        done += 1
        if result.broken:
            say(f"seed {result.seed}: {result.broken}")
            with _unlogged():
                shortest = fewest(result, nodes, runner)
            say(f"\nwith {len(shortest.acts)} of {len(result.acts)} acts it is still broken: {shortest.broken}\n")
            _run(shortest, say)
            say(f"\nthe whole run again: nvrx-slurm ci simulate --seed {result.seed} --nodes {nodes}")
            return 1
        if (now := clock.monotonic()) - said > SAY_EVERY_S:
            said = now
            say(f"{done:,} of {len(seeds):,} runs, {done / (now - began):.1f} a second")
    took_s = clock.monotonic() - began
    say(f"{done:,} runs of up to {nodes} nodes in {took_s:.1f} s, {done / took_s:.1f} a second: all kept")
    return 0


def replay_seed(seed: int, nodes: int, say: Say) -> int:
    """Run one seed again, and print it whole: what the adversary did, the journal, and its digest."""
    with _unlogged():
        result = run_seed(seed, nodes)
    _run(result, say)
    say(f"digest {result.digest}")
    if not result.broken:
        say(f"seed {seed}: no promise broken; exit code {result.exit_code}")
        return 0
    say(f"seed {seed}: {result.broken}")
    return 1


def fewest(result: RunResult, nodes: int, runner: SeedRunner = run_seed) -> RunResult:
    """The same run with as few acts as still break the same promise: they are left out one by one."""
    kept = result
    for act in result.acts:
        acts = tuple(other for other in kept.acts if other is not act)
        if (again := runner(result.seed, nodes, acts)).promise == result.promise:
            kept = again
    return kept


def _all(seeds: Sequence[int], nodes: int, jobs: int, runner: SeedRunner) -> Iterator[RunResult]:
    chunks = [(seeds[at : at + CHUNK], nodes, runner) for at in range(0, len(seeds), CHUNK)]
    if jobs == 1:
        result = map(_run_chunk, chunks)
        yield from (each for chunk in result for each in chunk)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from (each for chunk in pool.imap(_run_chunk, chunks) for each in chunk)


def _run_chunk(chunk: tuple[Sequence[int], int, SeedRunner]) -> list[RunResult]:
    """Run some, and collect their garbage together: what outlives them is then not scanned each time."""
    seeds, nodes, runner = chunk
    with uncollected(), _unlogged():
        result = [runner(seed, nodes, None) for seed in seeds]
        gc.collect()
        gc.freeze()
    return result


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Without the log lines of thousands of agents: the journal has the facts."""
    logger = logging.getLogger("nvrx")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _run(result: RunResult, say: Say) -> None:
    say(f"{result.shape.cluster}, {result.shape.work_s:.1f} s of work: {result.shape.plan}\n")
    for act in result.acts:
        say(str(act))
    say("")
    for entry in result.journal:
        say(entry_to_json(entry).decode())
