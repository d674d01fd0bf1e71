"""`nvrx-slurm ci simulate`"""

from __future__ import annotations

import click


@click.command()
@click.option("--seeds", type=click.IntRange(1), default=10_000, show_default=True, help="How many runs.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="The first of their seeds.")
@click.option("--nodes", type=click.IntRange(1), default=16, show_default=True, help="Nodes of a job, at most.")
@click.option("--seed", type=click.IntRange(0), help="Run this one again, and print its journal.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes that run them.")
def simulate(seeds: int, first: int, nodes: int, seed: int | None, jobs: int) -> int:
    """Run controller and agents against an adversary, in virtual time, and check the promises after every step.

    Exits with 1 on the first promise that is broken: prints the seed, the fewest faults that still break it, the
    journal, and the line that replays it.
    """
    from nvrx_slurm.lab.simulation import seeds as simulation

    if seed is not None:
        return simulation.replay_seed(seed, nodes, click.echo)
    return simulation.run_seeds(range(first, first + seeds), nodes, jobs, click.echo)
