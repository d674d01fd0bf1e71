"""Histories of thousands of seeds, of any simulation: the report of the first broken promise, and one seed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nvrx_slurm.lab.simulation.inprocess.history import run_group
from nvrx_slurm.lab.simulation.many_seeds import Say, first_broken, show, show_again
from nvrx_slurm.lab.simulation.threads import HistoryResult
from nvrx_slurm.lab.simulation.transport.history import run_payloads

# Of a seed, and of the faults in place of its own.
HistoryRunner = Callable[..., HistoryResult]

RUNNERS: Mapping[str, HistoryRunner] = {"inprocess": run_group, "transport": run_payloads}


def run_histories(of: str, seeds: Sequence[int], jobs: int, say: Say) -> int:
    """Run every seed; exit code 0, or 1 with a report of the first broken promise."""
    result = first_broken(RUNNERS[of], seeds, jobs, say, of=f"runs of {of}")
    if result is None:
        return 0
    shortest = fewest_acts(RUNNERS[of], result)
    say(f"\nwith {len(shortest.acts)} of {len(result.acts)} acts it is still broken: {shortest.broken}\n")
    show(shortest, say)
    say(f"\nthe whole history again: nvrx-slurm ci simulate --of {of} --seed {result.seed}")
    return 1


def replay_history(of: str, seed: int, say: Say) -> int:
    """One seed again, whole."""
    result = RUNNERS[of](seed)
    return show_again(result, f"seed {seed}: {result.broken or 'no promise broken'}", say)


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
