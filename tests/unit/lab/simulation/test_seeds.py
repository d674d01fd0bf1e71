"""The report on the runs of many seeds, and on the first that breaks a promise."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Coroutine
from typing import Any

from click.testing import CliRunner

from nvrx_slurm.cli.ci import simulate
from nvrx_slurm.lab.simulation import many_seeds, seeds
from nvrx_slurm.lab.simulation.adversary import Act
from nvrx_slurm.lab.simulation.monitors import Promise
from nvrx_slurm.lab.simulation.run import run_scenario
from nvrx_slurm.lab.simulation.scenario import draw_scenario

NODES = 4
FATAL = Act(at_s=0.5, kind="kill_controller")
HARMLESS = Act(at_s=0.4, kind="kill_worker", node="n01")


def mistrustful(scenario):
    """Runs a scenario, and reports every death of a controller as a broken promise."""
    if scenario == draw_scenario(scenario.seed, NODES):
        scenario = dataclasses.replace(scenario, acts=(HARMLESS, FATAL, HARMLESS))
    result = run_scenario(scenario)
    if not any(act.kind == FATAL.kind for act in result.acts):
        return result
    return dataclasses.replace(result, promise=Promise.DECIDER, broken="one decider: it is dead")


def test_failure_is_reported_with_the_fewest_acts_and_how_to_replay_it():
    """The report has the seed, the promise, the one act that matters, the journal, and the command that replays
    it."""
    said: list[str] = []
    assert seeds.run_seeds(range(7, 9), NODES, 1, said.append, mistrustful) == 1
    text = "\n".join(said)
    assert "seed 7: one decider: it is dead" in text
    assert "with 1 of 3 acts" in text
    assert "kill the controller" in text and "kill a worker" not in text
    assert '"event":"job_started"' in text
    assert said[-1].endswith("nvrx-slurm ci simulate --seed 7 --nodes 4")


def test_runs_without_a_failure_are_counted():
    """All runs are counted, also in two processes."""
    said: list[str] = []
    assert seeds.run_seeds(range(4), NODES, 2, said.append) == 0
    assert said[-1].startswith("4 runs of up to 4 nodes")


def test_progress_counts_the_runs_that_are_over(monkeypatch):
    """A process returns its results in chunks: each line counts whole chunks."""
    monkeypatch.setattr(many_seeds, "SAY_EVERY_S", -1.0)
    monkeypatch.setattr(many_seeds, "CHUNK", 2)
    said: list[str] = []
    assert seeds.run_seeds(range(5), NODES, 1, said.append) == 0
    assert [line.split(" runs")[0] for line in said[:-1]] == ["2 of 5", "4 of 5", "5 of 5"]


LEFT: weakref.WeakSet[Coroutine[Any, Any, None]] = weakref.WeakSet()


async def never() -> None:
    pass


def leave_one() -> None:
    """Leaves a coroutine in a reference cycle. It has its own frame, because an error in a script of the store keeps
    the frames below it until the next run."""
    cycle: list[Any] = [never()]
    LEFT.add(cycle[0])
    cycle.append(cycle)


def forgetful(scenario):
    """Leaves a coroutine in the garbage of one seed, where only the cycle collector finds it."""
    if scenario.seed == 2:
        leave_one()
    return run_scenario(scenario)


def test_coroutine_that_was_never_awaited_fails_its_run():
    """The report names the seed that left it."""
    said: list[str] = []
    assert seeds.run_seeds(range(4), NODES, 1, said.append, forgetful) == 1
    found = [line for line in said if line.startswith("seed 2: ")]  # lines about progress may come first
    assert found[0].startswith("seed 2: nothing crashes: coroutine 'never' was never awaited")
    for each in list(LEFT):
        each.close()  # otherwise the warning would appear in another test


def test_runs_leave_nothing_that_is_never_collected():
    """A soak test of an hour has tens of thousands of runs in one process."""

    def run(seed):
        return run_scenario(draw_scenario(seed, NODES))

    many_seeds.run_and_collect(run, 0)
    frozen = gc.get_freeze_count()
    for seed in range(1, 4):
        many_seeds.run_and_collect(run, seed)
    assert gc.get_freeze_count() == frozen > 0


def test_one_seed_is_reported_whole():
    """`--seed` prints the shape, the acts and the journal; a second time they are the same."""
    once, again = (CliRunner().invoke(simulate, ["--seed", "3", "--nodes", "4"], standalone_mode=False) for _ in "ab")
    assert once.return_value == 0
    assert '"event":"job_ended"' in once.output
    assert once.output == again.output
