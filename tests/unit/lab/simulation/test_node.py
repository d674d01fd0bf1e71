"""A simulated node keeps the kernel's guarantees and the supervisor's rules, and no others."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace

import pytest

from nvrx_slurm.agent.supervisor import SELF_FENCE_S
from nvrx_slurm.agent.teardown import KILL_S
from nvrx_slurm.agent.workers import Exited, Spawned, Stopped, SupervisorDied, Tearing
from nvrx_slurm.lab.simulation.process import SimulatedProcess
from nvrx_slurm.lab.simulation.run import SimulationRun
from nvrx_slurm.lab.simulation.scenario import draw_scenario
from nvrx_slurm.lab.simulation.shapes import WorkerBehaviour
from nvrx_slurm.lab.simulation.supervisor import DEATH_S, SupervisedWorkers
from nvrx_slurm.lab.simulation.workers import EXEC_S
from nvrx_slurm.liveness import fence

KEY = fence.key_of("token", "incarnation")
ENVIRONMENT = {"NVRX_GENERATION": "0", "NVRX_REPLICA": "main-0", "NVRX_CYCLE": "0", "WORLD_SIZE": "2"}
SOON_S = 0.1


class Bench:
    """A node with an idle agent, and the events that its supervisor has reported."""

    def __init__(self) -> None:
        self.run = SimulationRun(replace(draw_scenario(1, 4), acts=()))
        self.loop = self.run.loop
        self.node = self.run.nodes[self.run.shape.nodes[0]]
        self.agent = SimulatedProcess(self.loop, "agent")
        self.told: list[object] = []
        self.workers = SupervisedWorkers(self.node, self.agent, self.told.append)
        self.workers.start()

    @property
    def supervisor(self):
        return self.node.supervisor

    def spawn(self) -> None:
        self.workers.spawn(0, (), ENVIRONMENT, "/", 0, 0)

    def after(self, seconds: float) -> None:
        """Lets this much virtual time pass."""
        self.loop.run(asyncio.sleep(seconds))

    def kinds(self) -> list[type]:
        return [type(event) for event in self.told]


@pytest.fixture
def bench():
    """A node on which one worker runs."""
    bench = Bench()
    bench.spawn()
    bench.after(SOON_S)
    assert bench.kinds() == [Spawned]
    yield bench
    bench.loop.close()


def test_workers_are_killed_when_the_lease_lapses(bench):
    """The supervisor reports that they were killed."""
    bench.workers.lease(2.0)
    bench.after(1.5)
    assert bench.node.workers
    bench.after(1.0)
    assert not bench.node.workers
    assert bench.told[-1] == Stopped(survivors=(), lapsed=True)


def test_worker_loses_no_peer_before_it_executes_its_program(bench):
    """Its exception reaches the agent after the report of its start."""
    bench.run.world(0, "main-0", 0, 2, 1).behaviour = WorkerBehaviour(step_s=0.1, leaves_s=0.0, obeys_s=None)
    bench.workers.spawn(1, (), ENVIRONMENT, "/", 0, 0)
    while len(bench.node.workers) < 2:
        bench.after(EXEC_S / 1000)
    bench.node.workers[0].kill()
    bench.after(SOON_S)
    about = [(type(event), event.rank) for event in bench.told if isinstance(event, Spawned | Exited)]
    assert about.index((Spawned, 1)) < about.index((Exited, 1))


def test_frozen_supervisor_dies_of_a_lapsed_lease(bench):
    """The kernel's timer does not wait for a thaw."""
    bench.workers.lease(2.0)
    bench.after(SOON_S)
    bench.node.freeze()
    bench.after(2.0 + SELF_FENCE_S)
    assert not bench.supervisor.alive
    assert not bench.node.workers


def test_thawed_supervisor_looks_at_its_lease_first(bench):
    """It carries out no order that a lapsed lease forbids."""
    bench.workers.lease(1.0)
    bench.after(SOON_S)
    bench.supervisor.freeze()
    bench.workers.lease(100.0)
    bench.after(1.0)
    bench.supervisor.thaw()
    bench.after(SOON_S)
    assert not bench.node.workers


def test_fence_key_kills_while_all_is_frozen(bench):
    """The fence socket ignores other datagrams; the key kills supervisor and workers, and then the port refuses."""
    fence_socket = bench.node.open_fence_socket(KEY, bench.agent)
    bench.workers.fence(fence_socket)
    bench.after(SOON_S)
    bench.node.freeze()
    channel = bench.run.sockets.dial(bench.run.HOST, *fence_socket.getsockname())
    channel.send(fence.PROBE)
    bench.after(SOON_S)
    assert bench.supervisor.alive
    channel.send(KEY)
    bench.after(SOON_S)
    assert not bench.supervisor.alive and not bench.node.workers
    channel.send(fence.PROBE)
    bench.after(SOON_S)
    with pytest.raises(ConnectionRefusedError):
        channel.send(fence.PROBE)


def test_workers_die_a_moment_after_their_supervisor(bench):
    """The supervisor's sockets close first; the agent gets the report when no worker is left."""
    bench.supervisor.kill()
    assert bench.node.workers
    bench.after(DEATH_S)
    assert not bench.node.workers
    bench.after(SOON_S)
    assert bench.told[-1] == SupervisorDied()


def test_workers_and_supervisor_end_with_the_agent(bench):
    """The supervisor kills the workers, and ends."""
    bench.agent.kill()
    bench.after(SOON_S)
    assert not bench.node.workers and not bench.supervisor.alive


def test_teardown_ends_with_the_kill(bench):
    """A worker that hangs does not handle SIGTERM: it is killed when the grace is over."""
    bench.node.workers[0].hang()
    bench.workers.stop(2.0, signal.SIGTERM)
    bench.after(1.9)
    assert bench.node.workers
    bench.after(KILL_S)
    assert bench.told[-1] == Stopped(survivors=())
    assert [event.signal for event in bench.told if isinstance(event, Exited)] == [signal.SIGKILL]
    assert {event.phase for event in bench.told if isinstance(event, Tearing)} >= {"ask", "dump", "terminate"}


def test_nothing_is_started_without_a_lease(bench):
    """After a lease has lapsed no worker starts, until there is a new lease."""
    bench.workers.lease(0.0)
    bench.after(SOON_S)
    bench.spawn()
    bench.after(SOON_S)
    assert not bench.node.workers and bench.told[-1] == Stopped(survivors=(), lapsed=True)
