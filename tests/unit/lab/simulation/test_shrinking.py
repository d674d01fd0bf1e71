"""A run that breaks a promise is reduced to the fewest acts, the smallest job and the roundest times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nvrx_slurm.lab.simulation.adversary import Act
from nvrx_slurm.lab.simulation.aims import Aim
from nvrx_slurm.lab.simulation.promises import Promise
from nvrx_slurm.lab.simulation.run import RunResult
from nvrx_slurm.lab.simulation.scenario import draw_scenario
from nvrx_slurm.lab.simulation.shrinking import shrink
from tests.still_clock import StillClock

FIRST, SECOND = Act(at_s=1.234, kind="kill_controller"), Act(at_s=2.5, kind="freeze_store", lasts_s=3.217)
OTHERS = tuple(Act(at_s=3.0 + index, kind="kill_worker", node="n03") for index in range(9))


class Runner:
    """Breaks a promise if `wanted` is true for the scenario, and takes a second for each run."""

    def __init__(self, wanted, clock: StillClock) -> None:
        self.wanted, self.clock, self.tried = wanted, clock, 0

    def __call__(self, scenario) -> RunResult:
        self.tried += 1
        self.clock.sleep(1.0)
        promise = Promise.RANKS if self.wanted(scenario) else None
        return RunResult(
            scenario, journal=(), exit_code=0, promise=promise, broken=promise and str(promise), digest=""
        )


def shrunk(acts, wanted, within_s: float = 1e6):
    clock = StillClock()
    scenario = replace(draw_scenario(11), acts=acts)
    runner = Runner(wanted, clock)
    return shrink(runner(scenario), within_s, runner, clock), runner


def kinds(scenario) -> list[str]:
    return [act.kind for act in scenario.acts]


def test_two_acts_that_matter_are_left_of_many():
    """Wherever they are, the two needed acts remain, with rounder times."""

    def needs_both(scenario) -> bool:
        return {"kill_controller", "freeze_store"} <= set(kinds(scenario))

    found, runner = shrunk((*OTHERS[:5], FIRST, *OTHERS[5:], SECOND), needs_both)
    simple = found.result.scenario
    assert simple.acts == (replace(FIRST, at_s=0.0), replace(SECOND, at_s=0.0, lasts_s=3.0))
    assert len(simple.shape.nodes) == simple.shape.plan.total_nodes == 1
    assert found.complete
    assert found.runs == runner.tried - 1 < 100


def test_nodes_that_matter_stay():
    """A job that breaks a promise only with three nodes or more ends with three."""
    found, _ = shrunk((), lambda scenario: len(scenario.shape.nodes) >= 3)
    assert len(found.result.shape.nodes) == 3


def test_aim_that_matters_keeps_its_event():
    """Parts of the aim that are not needed are removed: its number and its steps."""
    aim = Aim(event="rendezvous_closed", moment="after", nth=3, steps=2)
    found, _ = shrunk(
        (replace(FIRST, aim=aim),),
        lambda scenario: [act.aim and act.aim.event for act in scenario.acts] == [aim.event],
    )
    assert found.result.acts[0].aim == Aim(event="rendezvous_closed", moment="after")


@pytest.mark.parametrize("within_s", [0.0, 5.0])
def test_time_that_is_up(within_s):
    """The simplest scenario so far is returned, marked as possibly not the simplest."""
    found, runner = shrunk((FIRST, *OTHERS, SECOND), lambda scenario: "freeze_store" in kinds(scenario), within_s)
    assert not found.complete
    assert found.runs == within_s == runner.tried - 1
    assert found.result.promise is Promise.RANKS
