"""A scenario is a value that can be written, read, changed, and aimed at events."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from nvrx_slurm.journal.records import RestartDecided
from nvrx_slurm.lab.simulation.adversary import Act
from nvrx_slurm.lab.simulation.aims import COMMITTED, READ, Aim
from nvrx_slurm.lab.simulation.run import SimulationRun, run_scenario
from nvrx_slurm.lab.simulation.scenario import draw_scenario, mutate, scenario_from_json, scenario_to_json


@pytest.mark.parametrize("seed", range(40))
def test_scenario_is_read_as_it_was_written(seed):
    """Every drawn scenario and every mutation of it is read back equal, with one act a line."""
    chance, scenario = Random(seed), draw_scenario(seed)
    for _ in range(10):
        text = scenario_to_json(scenario)
        assert scenario_from_json(text) == scenario
        assert sum('"kind"' in line for line in text.splitlines()) == len(scenario.acts)
        scenario = mutate(scenario, chance)
        assert len(scenario.shape.nodes) == scenario.shape.plan.total_nodes
        assert {act.node for act in scenario.acts} <= {"", *scenario.shape.nodes}


def test_read_scenario_runs_the_same():
    """The scenario of a run, written and read, gives the same digest."""
    scenario = draw_scenario(5, 4)
    again = scenario_from_json(scenario_to_json(scenario))
    assert run_scenario(again).digest == run_scenario(scenario).digest


def quiet(kind: str, **fields):
    """A plain job of two nodes and two spares on Slurm, with one aimed act."""
    scenario = next(
        each
        for each in (draw_scenario(seed, 4) for seed in range(1_000))
        if each.shape.plan.spares == 2
        and len(each.shape.plan.roles) == 1
        and each.shape.plan.roles[0].on_failure == "restart_replica"
        and each.shape.cluster == "slurm"
        and each.shape.plan.fault_tolerance.max_restarts.count >= 3
        and not each.shape.plan.fault_tolerance.attribution.acts
    )
    return replace(scenario, acts=(Act(at_s=0.0, kind=kind, **fields),))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_aimed_act_happens_at_the_commit(moment):
    """A controller killed a step before the commit never sees it accepted; one killed after it does."""
    run = SimulationRun(quiet("kill_controller", aim=Aim(event="rendezvous_closed", moment=moment)))
    committed = []

    def perform(act):
        committed.append(any(entry.record.__struct_config__.tag == "rendezvous_closed" for entry in run.copy))
        committed.append(bool(run.promises.closed))

    run.aims.arm(run.acts[0], perform)
    result = run.run()
    assert (result.broken, result.exit_code) == (None, 0)
    assert committed == [False, moment == "after"]


def test_aimed_act_finds_the_node_that_reads_the_order():
    """An act without a node is carried out on the node whose agent reads the order."""
    run = SimulationRun(quiet("power_off", aim=Aim(event="rendezvous_closed", moment="before receipt", nth=1)))
    result = run.run()
    assert (result.broken, result.exit_code) == (None, 0)
    [act] = run.performed
    assert act.node in run.nodes and not run.nodes[act.node].has_power


@pytest.mark.parametrize("event", ["node_lost", "attributed"])
def test_aimed_act_does_not_wait_for_ever(event):
    """The event needs the act itself: the act is carried out while the workers still run."""
    run = SimulationRun(quiet("power_off", aim=Aim(event=event, moment="before")))
    result = run.run()
    assert (result.broken, result.exit_code, result.happened) == (None, 0, 1)
    assert any(isinstance(entry.record, RestartDecided) for entry in result.journal)


def test_act_follows_the_one_before():
    """The second failure waits for the first, and then for the rendezvous that the first opens."""
    first = Act(at_s=1.0, kind="kill_worker", node="n01")
    second = Act(at_s=0.0, kind="power_off", aim=Aim(event="rendezvous_opened", moment="after receipt", follows=True))
    run = SimulationRun(replace(quiet("scancel"), acts=(first, second)))
    result = run.run()
    assert (result.broken, result.exit_code) == (None, 0)
    assert [act.kind for act in run.performed] == ["kill_worker", "power_off"]


def test_aims_name_events_of_the_journal():
    """Each aim is the tag of a record."""
    from nvrx_slurm.journal.records import AnyDecision, AnyFact

    tags = {kind.__struct_config__.tag for union in (AnyDecision, AnyFact) for kind in union.__args__}
    assert {*COMMITTED, *READ} <= tags
