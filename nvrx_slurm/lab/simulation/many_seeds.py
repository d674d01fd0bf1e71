"""Thousands of seeds of any simulation, in several processes, until one breaks a promise."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from nvrx_slurm.lab.simulation.loop import collect_garbage, uncollected, unlogged
from nvrx_slurm.lab.simulation.monitors import Promise
from nvrx_slurm.lab.simulation.run import RunResult
from nvrx_slurm.util.clock import SystemClock

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.threads import HistoryResult

Say = Callable[[str], None]
T = TypeVar("T")
R = TypeVar("R", RunResult, "HistoryResult")
SAY_EVERY_S = 5.0
# Seeds that a process is given at a time.
CHUNK = 64


@dataclass(slots=True)
class ChunkResult(Generic[R]):
    """What the seeds of a chunk came to. `broken`: the first result that breaks a promise. No other is kept: the
    collector walks, after each run, all that the runs before have left."""

    runs: int = 0
    acts: int = 0
    happened: int = 0
    broken: R | None = None


def first_broken(run: Callable[[int], R], seeds: Sequence[int], jobs: int, say: Say, *, of: str) -> R | None:
    """The result of the first seed that breaks a promise, or None. `run`: one seed, for another process if there are
    several `jobs`; `of`: what is simulated, for what is said meanwhile."""
    clock = SystemClock()
    began = said = clock.monotonic()
    done = acts = happened = 0
    for chunk in _chunks(run, seeds, jobs):
        if chunk.broken is not None:
            say(f"seed {chunk.broken.seed}: {chunk.broken.broken}")
            return chunk.broken
        done, acts, happened = done + chunk.runs, acts + chunk.acts, happened + chunk.happened
        if (now := clock.monotonic()) - said > SAY_EVERY_S:
            said = now
            say(f"{done:,} of {len(seeds):,} {of}, {60 * done / (now - began):,.0f} a minute")
    took_s = clock.monotonic() - began
    share = f"; {happened / acts:.0%} of {acts:,} acts happened" if acts else ""
    say(f"{done:,} {of} in {took_s:.1f} s, {60 * done / took_s:,.0f} a minute: all promises kept{share}")
    return None


def _chunks(run: Callable[[int], R], seeds: Sequence[int], jobs: int) -> Iterator[ChunkResult[R]]:
    chunks = [(run, seeds[at : at + CHUNK]) for at in range(0, len(seeds), CHUNK)]
    if jobs == 1:
        yield from map(_run_chunk, chunks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        # In the order of the seeds: which one is reported does not depend on how fast each process is.
        yield from pool.imap(_run_chunk, chunks)


def _run_chunk(chunk: tuple[Callable[[int], R], Sequence[int]]) -> ChunkResult[R]:
    run, seeds = chunk
    came_to = ChunkResult[R]()
    with uncollected(), unlogged():
        for seed in seeds:
            result = run_and_collect(run, seed)
            came_to.runs += 1
            if isinstance(result, RunResult):
                came_to.acts, came_to.happened = came_to.acts + len(result.acts), came_to.happened + result.happened
            if result.broken:
                came_to.broken = result
                break
    return came_to


def run_and_collect(run: Callable[[T], R], of: T) -> R:
    """One run, and the collection of what it has left. A coroutine that was never awaited is in that garbage, and
    breaks a promise."""
    result = run(of)
    forgotten = collect_garbage()
    if result.broken or not forgotten:
        return result
    return dataclasses.replace(result, promise=Promise.SOUND, broken=f"{Promise.SOUND}: {forgotten[0]}")


def show(result: R, say: Say) -> None:
    """What was simulated, the acts, and what happened."""
    say(f"{result.what}\n")
    for act in result.acts:
        say(str(act))
    say("")
    for line in result.lines:
        say(line)


def show_again(result: R, came_to: str, say: Say) -> int:
    """A run that was repeated, whole, and what it came to; exit code 1 if it has broken a promise."""
    show(result, say)
    say(f"digest {result.digest}")
    say(came_to)
    return 1 if result.broken else 0
