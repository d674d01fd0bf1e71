"""The contacts of agents, compared with the nodes that the controller gives up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from nvrx_slurm.jobspec.model import HeartbeatSpec
from nvrx_slurm.journal.records import ControllerStarted, Entry, JobStarted, NodeJoined, NodeLost
from nvrx_slurm.lab.simulation.adversary import Act
from nvrx_slurm.lab.simulation.contact import Contact
from nvrx_slurm.lab.simulation.monitors import Promise
from nvrx_slurm.lab.simulation.run import run_scenario
from nvrx_slurm.lab.simulation.scenario import Scenario, draw_scenario
from tests.unit.core.fleet import plain

# No node is given up within 8 s of the last sign of any node.
PLAN = plain(heartbeat=HeartbeatSpec(interval=1.0, timeout=4.0), fence_timeout=8.0, control_plane_grace=8.0)
GRACE_S = PLAN.fault_tolerance.gives_away_after_s


def is_plain(scenario: Scenario) -> bool:
    """A job on Slurm, with a spare, whose agents outlast a store outage of more than a node's timeout."""
    plan, bounds = scenario.shape.plan, scenario.shape.plan.fault_tolerance
    lasts_s = min(bounds.control_plane_grace, bounds.fence_timeout)
    return (
        scenario.shape.cluster == "slurm" and plan.spares > 0 and len(plan.roles) == 1
    ) and lasts_s > 1.8 * bounds.heartbeat.timeout


PLAIN = next(each for each in (draw_scenario(seed, 4) for seed in range(1_000)) if is_plain(each))


class Run:
    """A run in which the test decides what happens at what time."""

    HOST = "host"

    def __init__(self) -> None:
        self.plan, self.performed, self.loop = PLAN, [], SimpleNamespace(now_s=0.0)
        self.store_clock = SimpleNamespace(wall=lambda: self.loop.now_s)
        self.nodes = {"n1": SimpleNamespace(is_trapped_by=lambda key: False)}
        self.address = SimpleNamespace(token="token")
        self.broken: list[Promise] = []
        self.contact = Contact(self, lambda promise, _: self.broken.append(promise))

    def enter(self, *records) -> None:
        for record in records:
            self.contact.entered(Entry(n=1, t=self.loop.now_s, record=record))


@pytest.fixture
def run():
    """A job whose first agent has joined."""
    run = Run()
    run.enter(
        ControllerStarted(epoch=1, host="host", pid=1),
        JobStarted(job="1", name="t", expected=("n1",)),
        joined("n1", "a"),
    )
    return run


def joined(node: str, incarnation: str) -> NodeJoined:
    return NodeJoined(node=node, incarnation=incarnation, seq=1, addr=node, port=1)


def lose(run: Run) -> list[Promise]:
    """`n1` is given up some seconds after its only sign, and 5 s after a sign of another agent."""
    run.loop.now_s = GRACE_S + 1.0
    run.contact.heard("b")
    run.loop.now_s += 5.0
    run.enter(NodeLost(node="n1", incarnation="a", cause="heartbeat_timeout", safe_after_s=0.1))
    return run.broken


def test_node_is_not_given_up_while_all_are_silent(run):
    """When all nodes are silent, the store or the controller may be the cause for a while."""
    run.enter(joined("n2", "b"))
    assert lose(run) == [Promise.SILENT]


def test_agent_that_has_not_joined_is_no_node_that_was_seen(run):
    """The controller does not know this agent, which may have found at its join that the job has ended."""
    assert lose(run) == []


def test_agent_of_the_generation_before_is_no_node_that_was_seen(run):
    """The agent is back from a partition, and its store is that of the current generation."""
    run.enter(joined("n2", "b"), JobStarted(job="1", name="t", expected=("n1",), generation=1), joined("n1", "a"))
    assert lose(run) == []


def test_agent_that_was_replaced_is_no_node_that_was_seen(run):
    """The heartbeat of the replaced agent arrives late."""
    run.enter(joined("n2", "b"), joined("n2", "c"))
    assert lose(run) == []


def test_controller_leads_until_the_next_one_has_taken_over():
    """The next one waits for the store. Meanwhile the first one thaws, and gets signs of life from the agents. As
    soon as it can read the heartbeats it gives up the dead node."""
    outage_s = 1.5 * PLAIN.shape.plan.fault_tolerance.heartbeat.timeout
    acts = (
        Act(at_s=1.0, kind="restart_store", lasts_s=outage_s),
        Act(at_s=1.2, kind="power_off", node=PLAIN.shape.nodes[-1]),
        Act(at_s=1.5, kind="freeze_controller", lasts_s=1.0),
        Act(at_s=2.0, kind="overtake", lasts_s=2 * outage_s),
    )
    result = run_scenario(replace(PLAIN, shape=replace(PLAIN.shape, work_s=2 * outage_s), acts=acts))
    assert (result.broken, result.exit_code) == (None, 0)
