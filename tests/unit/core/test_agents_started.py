"""Slurm ends the step of all agents, and the batch host starts them again."""

from __future__ import annotations

from nvrx_slurm.core.rendezvous import EMPTY_S, SHORT_S
from nvrx_slurm.core.state import NodeState
from nvrx_slurm.journal.records import AgentsStarted, NodeLeft, RendezvousClosed, RestartDecided, Shutdown
from tests.unit.core.fleet import plain, running

ALL = ("n1", "n2", "n3")


def without_agents():
    """A fleet of two nodes and a spare whose agents have all ended, one by one."""
    fleet = running(plain(nodes=2, spares=1))
    for node in ALL:
        fleet.lose(node)
    return fleet


def test_no_agent_left_is_the_batch_hosts_to_judge():
    """The job does not stop for lack of nodes while the batch host may start the agents again."""
    fleet = without_agents()
    fleet.later(EMPTY_S - 1.0)
    assert fleet.said(Shutdown) == []
    fleet.later(1.0)
    assert [shutdown.exit_code for shutdown in fleet.said(Shutdown)] == [75]


def test_deaths_that_arrive_one_by_one_are_taken_together():
    """Many deaths may arrive one by one: too few nodes are no reason to stop yet; a moment later they are."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.lose("n3")
    fleet.lose("n1")
    fleet.ready("n2")
    fleet.later(SHORT_S / 2)
    assert fleet.said(Shutdown) == []
    fleet.later(SHORT_S / 2)
    assert [shutdown.exit_code for shutdown in fleet.said(Shutdown)] == [75]


def test_agents_that_were_started_again_are_waited_for():
    """The rendezvous waits for the new agents beyond the moment at which it would stop, closes with those that join,
    and costs no restart."""
    fleet = without_agents()
    fleet.later(3.0)
    fleet.tell(AgentsStarted(nodes=("n1", "n3"), missing=("n2",), step_ended=True))
    fleet.later(2 * EMPTY_S)
    fleet.rejoin("n3")
    fleet.later(1.0)
    assert fleet.said(Shutdown) == []
    fleet.rejoin("n1")
    assert set(fleet.said(RendezvousClosed)[-1].nodes) == {"n1", "n3"}
    assert {decided.restarts_left for decided in fleet.said(RestartDecided)} == {3}


def test_agents_that_never_join_do_not_hold_the_job_for_ever():
    """The wait ends with `join_timeout`, counted from the start of the agents."""
    fleet = without_agents()
    fleet.tell(AgentsStarted(nodes=ALL, step_ended=True))
    fleet.later(fleet.plan.fault_tolerance.rendezvous.join_timeout)
    assert [shutdown.exit_code for shutdown in fleet.said(Shutdown)] == [75]


def test_end_of_the_step_is_no_fault_of_its_nodes():
    """Its deaths do not count for the quarantine, neither those that are known already nor those that are reported
    later."""
    fleet = running(plain(nodes=2, spares=1, quarantine_after=1))
    fleet.lose("n1")
    fleet.lose("n2")
    fleet.tell(AgentsStarted(nodes=ALL, step_ended=True))
    for node in ALL:
        fleet.rejoin(node)
    assert {fleet.job.nodes[node].deaths for node in ALL} == {0}
    fleet.lose("n3")
    fleet.tell(AgentsStarted(nodes=("n3",)))
    fleet.rejoin("n3")
    assert fleet.state("n3") is NodeState.QUARANTINED  # it was lost by itself


def test_start_of_another_generation_is_stale():
    """A batch host that Slurm has requeued meanwhile decides nothing for the job."""
    fleet = without_agents()
    assert fleet.tell(AgentsStarted(nodes=ALL, generation=7)) is None


def test_end_of_a_step_lifts_no_quarantine():
    """The node has left, with a process that no signal ends: no death was counted that the end of the step could
    excuse."""
    fleet = running()
    fleet.tell(NodeLeft(**fleet.by("n2"), reason="processes are left", survivors=(1,)))
    fleet.ready("n1")
    fleet.leave("n1", "n3")
    fleet.tell(AgentsStarted(nodes=ALL, step_ended=True))
    fleet.rejoin("n2")
    assert fleet.job.nodes["n2"].state is NodeState.QUARANTINED
