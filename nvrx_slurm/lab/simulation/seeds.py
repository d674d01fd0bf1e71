"""Seeds of the whole job's simulation: many of them, the report of a broken promise, and one run again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from nvrx_slurm.errors import UsageError
from nvrx_slurm.lab.simulation.loop import unlogged
from nvrx_slurm.lab.simulation.many_seeds import Say, first_broken, show, show_again
from nvrx_slurm.lab.simulation.run import RunResult, run_scenario
from nvrx_slurm.lab.simulation.scenario import Scenario, draw_scenario, scenario_from_json, scenario_to_json
from nvrx_slurm.lab.simulation.shrinking import Runner, shrink
from nvrx_slurm.util.clock import SystemClock

# A failure is shrunk for so long at most before it is shown.
SHRINK_S = 60.0


def run_seeds(seeds: Sequence[int], nodes: int | None, jobs: int, say: Say, runner: Runner = run_scenario) -> int:
    """Run every seed; exit code 0, or 1 with a report of the first broken promise. `nodes`: of a job, at most."""
    size = f"runs of up to {nodes} nodes" if nodes else "runs"
    result = first_broken(partial(_run_seed, nodes=nodes, runner=runner), seeds, jobs, say, of=size)
    if result is None:
        return 0
    show_broken(result, say, runner)
    at_most = f" --nodes {nodes}" if nodes else ""
    say(f"\nthe whole run again: nvrx-slurm ci simulate --seed {result.seed}{at_most}")
    return 1


def _run_seed(seed: int, nodes: int | None, runner: Runner) -> RunResult:
    return runner(draw_scenario(seed, nodes))


def show_broken(result: RunResult, say: Say, runner: Runner = run_scenario) -> RunResult:
    """Shrink a run that broke a promise, and print it; returns the simplest one."""
    with unlogged():
        shrunk = shrink(result, SHRINK_S, runner, SystemClock())
    simple, how = shrunk.result, "" if shrunk.complete else f"; stopped after {SHRINK_S:g} s"
    say(
        f"\nwith {len(simple.acts)} of {len(result.acts)} acts and {len(simple.shape.nodes)} of"
        f" {len(result.shape.nodes)} nodes it is still broken ({shrunk.runs} runs{how}): {simple.broken}\n"
    )
    show(simple, say)
    say(f"\nas a file for `nvrx-slurm ci simulate --scenario FILE`:\n\n{scenario_to_json(simple.scenario)}")
    return simple


def replay_seed(seed: int, nodes: int | None, say: Say) -> int:
    """Run one seed again, and print it whole."""
    return replay(draw_scenario(seed, nodes), f"seed {seed}", say)


def replay_file(path: Path, say: Say) -> int:
    """The same for the scenario of a file."""
    return replay(read_scenario(path), path.name, say)


def read_scenario(path: Path) -> Scenario:
    """Raises UsageError for a file that cannot be read, MalformedRecord for one that is no scenario."""
    try:
        return scenario_from_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def replay(scenario: Scenario, name: str, say: Say) -> int:
    """Run one scenario, and print what the adversary did, the journal, and the digest of all that happened."""
    with unlogged():
        result = run_scenario(scenario)
    return show_again(result, f"{name}: {result.broken or f'no promise broken; exit code {result.exit_code}'}", say)
