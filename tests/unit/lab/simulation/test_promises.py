"""A violation of each promise is found, and none where there is no violation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.records import (
    ControllerStarted,
    ControllerUp,
    Entry,
    Fence,
    JobEnded,
    JobStarted,
    NodeJoined,
    NodeLeft,
    NodeLost,
    Progress,
    RendezvousClosed,
    RendezvousOpened,
    Shutdown,
    Signalled,
    pack,
)
from nvrx_slurm.lab.plans import plain_bounds
from nvrx_slurm.lab.simulation.loop import VirtualLoop
from nvrx_slurm.lab.simulation.monitors import Promise
from nvrx_slurm.lab.simulation.promises import Promises
from nvrx_slurm.lab.simulation.shapes import WorkerBehaviour
from nvrx_slurm.lab.simulation.workers import SimulatedWorker, SimulatedWorld

PLAN = Plan(
    name="t",
    roles=(RolePlan(name="main", command=("x",), nodes_per_replica=2),),
    workdir="/",
    folder="/",
    fault_tolerance=plain_bounds(),
)
OPENED = RendezvousOpened(replica="main-0", cycle=0)
CLOSED = RendezvousClosed(
    replica="main-0",
    cycle=0,
    nodes=("n1", "n2"),
    active=2,
    standby=0,
    world_size=2,
    master_addr="n1",
    master_port=1,
)
LOST = NodeLost(node="n1", incarnation="a", cause="heartbeat_timeout")
STARTED = JobStarted(job="1", name="t", expected=("n1", "n2"))
CANCELLED = Signalled(reason="cancel")
STOPPED = Shutdown(exit_code=143, reason="cancelled")


class Court:
    """Promises, and those that were reported as broken."""

    def __init__(self) -> None:
        self.broken: list[Promise] = []
        self.promises = Promises(PLAN, lambda promise, _: self.broken.append(promise), lambda _: None)
        self.number = 0
        self.loop = VirtualLoop()
        self.promises.acquired(1)

    def begin(self) -> None:
        """The job has started, and its first rendezvous has closed."""
        self.commit(STARTED, OPENED)
        self.commit(joined("n2", "b"), joined(), CLOSED)

    def commit(self, *records, epoch: int = 1) -> None:
        entries = []
        for record in records:
            self.number += 1
            entries.append(pack(Entry(n=self.number, t=float(self.number), record=record)))
        self.promises.committed(epoch, entries)

    def start(self, node: str, rank: int, cycle: int = 0) -> SimulatedWorker:
        """A worker starts."""
        behaviour = WorkerBehaviour(step_s=1.0, leaves_s=None, obeys_s=None)
        run = SimpleNamespace(loop=self.loop, shape=SimpleNamespace(behaviour=behaviour))
        world = SimulatedWorld(run, "main-0", cycle, 2)
        kernel = SimpleNamespace(name=node, worker_ended=lambda worker, *_: self.promises.worker_ended(worker))
        worker = SimulatedWorker(kernel, None, 1, world, rank)
        world.members[rank] = worker
        self.promises.worker_started(worker)
        return worker


def joined(node: str = "n1", incarnation: str = "a") -> NodeJoined:
    return NodeJoined(node=node, incarnation=incarnation, seq=1, addr=node, port=1)


@pytest.fixture
def court():
    """A court before the job has started."""
    return Court()


@pytest.mark.parametrize(
    ("numbers", "broken"),
    [
        ([(2 << 32) + 1, (2 << 32) + 2], []),
        ([(1 << 32) + 9], [Promise.DECIDER]),  # of an older controller
        ([(2 << 32) + 2, (2 << 32) + 1], [Promise.DECIDER]),  # agents would ignore the second
    ],
)
def test_orders_are_numbered_upwards_by_the_controller_that_leads(court, numbers, broken):
    """The number has the epoch first."""
    court.promises.acquired(2)
    for number in numbers:
        court.promises.numbered(number)
    assert court.broken == broken


def test_agent_never_goes_back_to_an_older_controller(court):
    """The agent may connect again to the same or a newer controller; another agent on the node may know only an older
    one."""
    for incarnation, epoch in [("a", 1), ("a", 1), ("a", 3), ("b", 2)]:
        court.promises.connected("n1", incarnation, epoch)
    assert court.broken == []
    court.promises.connected("n1", "a", 2)
    assert court.broken == [Promise.DECIDER]


def test_good_history_breaks_nothing(court):
    """A join, a rendezvous, workers one after the other on one rank, a shutdown and the end break no promise."""
    court.begin()
    court.promises.ordered(pack(OPENED), [])
    court.promises.ordered(pack(ControllerUp(epoch=1, host="h", port=1)), [])
    court.start("n1", 0).kill()
    court.start("n1", 0)
    court.start("n2", 1)
    court.commit(CANCELLED, STOPPED)
    court.commit(LOST, Fence(node="n1", incarnation="a"))
    court.commit(
        NodeLeft(node="n2", incarnation="b", seq=2, reason="cancelled"), JobEnded(exit_code=143, reason="cancelled")
    )
    court.promises.left("n2", 143)
    assert court.broken == []


def test_commit_of_an_older_epoch(court):
    """A newer controller has taken over, but the old one's commit was accepted."""
    court.promises.acquired(2)
    court.commit(STARTED, OPENED)
    assert court.broken == [Promise.DECIDER]


def test_rank_with_two_live_workers(court):
    """Two workers of one rank are alive, in the same cycle or in two."""
    court.begin()
    court.start("n1", 0)
    court.start("n1", 0)
    assert court.broken == [Promise.RANKS]


def test_rendezvous_that_closes_while_an_old_worker_lives(court):
    """Its rank could be given to another node."""
    court.commit(STARTED, OPENED)
    court.commit(joined(), joined("n2", "b"))
    court.start("n2", 1)
    court.broken.clear()  # no rendezvous had closed
    court.commit(CLOSED)
    assert court.broken == [Promise.RANKS]


def test_worker_that_may_not_live(court):
    """Its node was cut off for more than half of the lease, and is still cut off."""
    half_s = PLAN.fault_tolerance.fence_timeout / 2
    court.promises.worker_wanted("n1", 0, half_s)
    assert court.broken == []
    court.promises.worker_wanted("n1", 0, 0.8 * half_s)
    assert court.broken == [Promise.LEASE]


def test_worker_without_a_round(court):
    """The journal has no rendezvous, or one that gives the rank to another node."""
    court.start("n1", 0).kill()
    court.begin()
    court.start("n1", 1)
    assert court.broken == [Promise.JOURNAL_FIRST, Promise.JOURNAL_FIRST]


def test_order_before_its_journal_entry(court):
    """Agents could act on an order that the journal does not have."""
    court.promises.ordered(pack(OPENED), [])
    assert court.broken == [Promise.JOURNAL_FIRST]


def test_rendezvous_closed_before_its_ranks_are_stored(court):
    """An agent that reads the order would find no rank."""
    court.begin()
    [packed] = list(court.promises._closing)
    court.promises.ordered(packed, [1])
    assert court.broken == [Promise.JOURNAL_FIRST]


def test_reap_of_an_agent_that_never_registered(court):
    """Only an agent that has registered can be given up."""
    court.commit(STARTED, OPENED)
    court.commit(LOST, Fence(node="n1", incarnation="a"))
    assert court.broken == [Promise.REGISTERED]


def test_reap_without_a_fence(court):
    """An agent that is given up is fenced in the same commit."""
    court.commit(STARTED, OPENED)
    court.commit(joined())
    court.commit(LOST)
    assert court.broken == [Promise.FENCED]


def test_second_shutdown(court):
    """The first reason counts, also in the store."""
    court.commit(STARTED, OPENED)
    court.commit(CANCELLED, STOPPED)
    court.commit(CANCELLED, Shutdown(exit_code=1, reason="other"))
    court.promises.shutdown_stands(pack(Shutdown(exit_code=1, reason="other")))
    court.commit(JobEnded(exit_code=1, reason="other"))
    assert court.broken.count(Promise.SHUTDOWN) == 3


def test_agent_that_leaves_with_another_code(court):
    """An agent leaves with the job's code, or because it could reach neither store nor controller, and with no other
    code."""
    court.commit(STARTED, OPENED)
    court.commit(CANCELLED, STOPPED)
    court.promises.left("n1", 69)
    court.promises.left("n1", 1)
    assert court.broken == [Promise.LEAVING]


@pytest.mark.parametrize(
    ("deaths", "broken"),
    [
        ([1.0, 2.0, 3.0, 4.0, 50.0], []),
        ([1.0, 2.0, 3.0, 4.0], [Promise.LEAVING]),
        ([1.0, 2.0, 3.0, 4.0, 70.0], [Promise.LEAVING]),
    ],
)
def test_agent_leaves_where_its_supervisors_die_again_and_again(court, deaths, broken):
    """It leaves with 1, before any shutdown, and after no fewer deaths."""
    court.commit(STARTED, OPENED)
    court.promises.left("n1", 1, deaths)
    assert court.broken == broken


@pytest.mark.parametrize(
    ("came", "knows_times", "broken"),
    [
        (5.0, True, [Promise.ARRIVAL]),  # dated by its reading
        (5.8, True, []),
        (5.0, False, []),  # the store's clock was set, and differs from the journal's
    ],
)
def test_fact_counts_from_its_arrival(court, came, knows_times, broken):
    """A controller that was frozen dates the facts of that time by their arrival."""
    court.begin()  # the last entry is at 5.0
    fact = Progress(node="n2", incarnation="b", seq=2, replica="main-0", cycle=0, rank=1, step=1)
    court.promises.arrived(pack(fact), came)
    court.promises.knows_times = knows_times
    court.commit(fact)
    assert court.broken == broken


@pytest.mark.parametrize(("waited_s", "broken"), [(3.0, []), (4.0, [Promise.ARRIVAL])])
def test_deadline_is_judged_when_the_inbox_is_read(court, waited_s, broken):
    """The controller may wait for a fact on its way, for as long as one read takes."""
    court.promises.judged(7.0, waited_s)
    assert court.broken == broken


def test_controller_that_leaves_for_none(court):
    """A controller is fenced only by a newer one: the one that took over last, not the one that was started last."""
    court.commit(ControllerStarted(epoch=1, host="host", pid=102))
    court.promises.acquired(2)
    court.promises.controller_left(102)
    assert court.broken == []
    court.commit(ControllerStarted(epoch=2, host="host", pid=101), epoch=2)
    court.promises.controller_left(102)
    assert court.broken == []
    court.promises.controller_left(101)
    assert court.broken == [Promise.DECIDER]
