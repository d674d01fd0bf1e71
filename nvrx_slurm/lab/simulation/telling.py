"""Histories by the thousand: who is told, in how many processes, and what is said of the first that goes wrong."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
from collections.abc import Callable, Iterator, Sequence

from nvrx_slurm.journal.records import entry_to_json
from nvrx_slurm.lab.simulation.acts import Act
from nvrx_slurm.lab.simulation.adversary import in_words
from nvrx_slurm.lab.simulation.history import Told, tell
from nvrx_slurm.lab.simulation.loop import uncollected
from nvrx_slurm.util.clock import SystemClock

Say = Callable[[str], None]
Teller = Callable[[int, int, tuple[Act, ...] | None], Told]
SAY_EVERY_S = 5.0
CHUNK = 64
"""Seeds that are told before their remains are cleared away, or that a process is given at a time."""


def tell_many(seeds: Sequence[int], nodes: int, jobs: int, say: Say, teller: Teller = tell) -> int:
    """Tell every seed's history; exit code 0, or 1 with a report of the first broken promise."""
    clock = SystemClock()
    began = said = clock.monotonic()
    done = 0
    for told in _all(seeds, nodes, jobs, teller):
        done += 1
        if told.broken:
            say(f"seed {told.seed}: {told.broken}")
            _report(told, nodes, say, teller)
            return 1
        if (now := clock.monotonic()) - said > SAY_EVERY_S:
            said = now
            say(f"{done:,} of {len(seeds):,} histories, {done / (now - began):.1f} a second")
    took_s = clock.monotonic() - began
    say(f"{done:,} histories of up to {nodes} nodes in {took_s:.1f} s, {done / took_s:.1f} a second: all kept")
    return 0


def tell_one(seed: int, nodes: int, say: Say) -> int:
    """Tell one history again, whole: what the adversary did, the journal, and its digest."""
    with _unlogged():
        told = tell(seed, nodes)
    _history(told, say)
    say(f"digest {told.digest}")
    if not told.broken:
        say(f"seed {seed}: no promise broken; exit code {told.exit_code}")
        return 0
    say(f"seed {seed}: {told.broken}")
    return 1


def fewest(told: Told, nodes: int, teller: Teller = tell) -> Told:
    """The same history with as few acts as still break the same promise: they are left out one by one."""
    kept = told
    for act in told.acts:
        acts = tuple(other for other in kept.acts if other is not act)
        if (again := teller(told.seed, nodes, acts)).promise == told.promise:
            kept = again
    return kept


def _all(seeds: Sequence[int], nodes: int, jobs: int, teller: Teller) -> Iterator[Told]:
    chunks = [(seeds[at : at + CHUNK], nodes, teller) for at in range(0, len(seeds), CHUNK)]
    if jobs == 1:
        told = map(_tell_chunk, chunks)
        yield from (each for chunk in told for each in chunk)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from (each for chunk in pool.imap(_tell_chunk, chunks) for each in chunk)


def _tell_chunk(chunk: tuple[Sequence[int], int, Teller]) -> list[Told]:
    """Tell some, and clear them away together: what is no garbage by then need not be looked through each time."""
    seeds, nodes, teller = chunk
    with uncollected(), _unlogged():
        told = [teller(seed, nodes, None) for seed in seeds]
        gc.collect()
        gc.freeze()
    return told


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """What thousands of agents have to say helps nobody: the journal tells it."""
    logger = logging.getLogger("nvrx")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _report(told: Told, nodes: int, say: Say, teller: Teller) -> None:
    with _unlogged():
        shortest = fewest(told, nodes, teller)
    say(f"\nwith {len(shortest.acts)} of {len(told.acts)} acts it is still broken: {shortest.broken}\n")
    _history(shortest, say)
    say(f"\nthe whole history again: nvrx-slurm ci simulate --seed {told.seed} --nodes {nodes}")


def _history(told: Told, say: Say) -> None:
    say(f"{told.shape.cluster}, {told.shape.work_s:.1f} s of work: {told.shape.plan}\n")
    for act in told.acts:
        say(in_words(act))
    say("")
    for entry in told.journal:
        say(entry_to_json(entry).decode())
