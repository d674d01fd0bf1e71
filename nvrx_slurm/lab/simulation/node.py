"""One simulated node: its kernel, and the processes on it.

What the kernel guarantees holds here too, and nothing more: what a process held is closed when its last holder is
dead; a fence key kills the supervisor that armed the fence socket, even while all is frozen; a port that no process
holds refuses; a node without power sends nothing at all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from nvrx_slurm.lab.simulation.loop import VirtualClock
from nvrx_slurm.lab.simulation.machine import (
    AgentConnection,
    AgentStore,
    SimulatedBoard,
    SimulatedMachine,
    agent_main,
)
from nvrx_slurm.lab.simulation.process import SimulatedProcess
from nvrx_slurm.lab.simulation.sockets import SimulatedFenceSocket
from nvrx_slurm.lab.simulation.supervisor import SimulatedSupervisor
from nvrx_slurm.lab.simulation.workers import SimulatedWorker, SimulatedWorld

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.run import SimulationRun


FIRST_PORT = 20_000
MOST_DRIFT = 0.005
MOST_AHEAD_S = 500.0
BOOT_S = 0.5
MOST_LATE_S = 0.5
# How long after the end of what was done to it a node is taken for well again.
RECOVERED_S = 30.0


class SimulatedNode:
    """A node of the allocation. `starts_after_s`: when its agent starts, None: never."""

    def __init__(self, run: SimulationRun, name: str) -> None:
        self.run, self.name, self.loop = run, name, run.loop
        self.chance = run.chance(name)
        rate = 1.0 + self.chance.uniform(-MOST_DRIFT, MOST_DRIFT)
        self.clock = VirtualClock(self.loop, rate=rate, ahead_s=self.chance.uniform(-MOST_AHEAD_S, MOST_AHEAD_S))
        self.starts_after_s: float | None = self.chance.uniform(0.0, MOST_LATE_S)
        self.has_power = True
        self.agent: SimulatedProcess | None = None
        self.supervisor: SimulatedSupervisor | None = None
        self.supervisor_deaths: list[float] = []  # when those of the present agent were killed
        self.board: SimulatedBoard | None = None
        self.agent_store: AgentStore | None = None
        self.connection: AgentConnection | None = None
        self._fence_socket: SimulatedFenceSocket | None = None
        self.weak_until_s = -math.inf  # something lasting was done to it, and it may not do what it should until then
        self.workers: list[SimulatedWorker] = []  # those that live
        self.fails_cycles, self.fails_after_s = 0, 0.0  # in so many cycles to come a worker fails, after so long
        self._newest_world: SimulatedWorld | None = None
        self._awaited = 0  # agents that are yet to start
        self._plug_in: Callable[[], None] = lambda: None
        self.ports, self._pids = itertools.count(FIRST_PORT), itertools.count(100)

    # ---- processes

    def start(self) -> None:
        """The step begins, sooner here than there."""
        if self.starts_after_s is not None:
            self._awaited += 1
            self.loop.call_outside(self.starts_after_s, self._start)

    def start_again(self) -> None:
        """The same for the next generation, in which the agent is not late."""
        self.starts_after_s = self.chance.uniform(0.0, MOST_LATE_S)
        self.start()

    def _start(self) -> None:
        self._awaited -= 1
        self.start_agent()
        self.run.look_for_agents()

    @property
    def has_agent(self) -> bool:
        """As far as srun knows: a node without power sends it nothing, so its agent counts as running."""
        lives = self.agent is not None and (self.agent.alive or not self.has_power)
        return lives or self._awaited > 0

    @property
    def is_well(self) -> bool:
        """Whether it can be relied on to do what it should."""
        return self.has_power and self.loop.now_s > self.weak_until_s + RECOVERED_S

    @property
    def is_reachable(self) -> bool:
        return self.has_power and not self.run.is_cut(self.name)

    def start_agent(self) -> None:
        """Slurm, or an operator, starts an agent, unless there is one."""
        if not self.has_power or (self.agent is not None and self.agent.alive):
            return
        if self.run.requeue.waits or self.name not in self.run.info.nodes:
            return  # no job of Slurm's runs here
        process = self.agent = SimulatedProcess(self.loop, f"agent of {self.name}")
        self.supervisor_deaths.clear()
        pid = next(self._pids)
        generation = self.run.info.generation
        process.on_death(lambda: self.run.agent_ended(self, process, generation))
        process.run(agent_main(self.run, self, SimulatedMachine(self, process, pid)))

    def fork(self, supervisor: SimulatedSupervisor, rank: int, env: Mapping[str, str]) -> SimulatedWorker:
        """A worker begins, in the world that its environment names."""
        generation, cycle = int(env["NVRX_GENERATION"]), int(env["NVRX_CYCLE"])
        world = self.run.world(generation, env["NVRX_REPLICA"], cycle, int(env["WORLD_SIZE"]), rank)
        worker = SimulatedWorker(self, supervisor, next(self._pids), world, rank)
        self.workers.append(worker)
        self.run.promises.worker_started(worker)
        world.enter(worker, lambda: self._first_step(worker))
        if self.fails_cycles and world is not self._newest_world:
            self.fails_cycles -= 1
            self.loop.call_outside(self.fails_after_s, self._fail, worker)
        self._newest_world = world
        return worker

    def _fail(self, worker: SimulatedWorker) -> None:
        if worker.alive:
            self.run.disturbed_until_s = max(self.run.disturbed_until_s, self.loop.now_s)
            worker.exit(1)

    def worker(self, number: int) -> SimulatedWorker | None:
        return self.workers[number % len(self.workers)] if self.workers else None

    def worker_ended(self, worker: SimulatedWorker, code: int | None, number: int | None) -> None:
        """With its exit code, or the signal that ended it."""
        self.workers.remove(worker)
        if self.board is not None:
            self.board.ended(worker)
        self.run.promises.worker_ended(worker)
        worker.parent.child_ended(worker, code, number)

    def worker_raised(self, worker: SimulatedWorker, what: str) -> None:
        """Its interpreter sends this to the agent before the process ends."""
        agent, board = self.agent, self.board
        if agent is not None and board is not None:
            agent.call_later(0.0, board.failing, worker, what, self.clock.monotonic())

    def _first_step(self, worker: SimulatedWorker) -> None:
        agent, board = self.agent, self.board
        if worker.alive and worker.world.steps()[0] and agent is not None and board is not None:
            agent.call_later(0.0, board.first_step, worker)

    # ---- what the kernel holds

    def open_fence_socket(self, key: bytes, agent: SimulatedProcess) -> SimulatedFenceSocket:
        self._fence_socket = SimulatedFenceSocket(self.run.sockets, self.name, key, agent)
        return self._fence_socket

    def is_trapped_by(self, key: bytes) -> bool:
        """Whether a living supervisor's fence socket waits for this key."""
        there = self._fence_socket
        return there is not None and there.key == key and there.armed_by is not None and there.armed_by.alive

    # ---- what is done to it

    def kill(self) -> None:
        """Every process at once. The kernel lives."""
        for each in self._processes():
            each.kill()

    def freeze(self) -> None:
        for each in self._processes():
            each.freeze()

    def thaw(self) -> None:
        for each in self._processes():
            each.thaw()

    def signal(self, number: int) -> None:
        """As Slurm suspends and resumes a job's step: SIGTSTP, SIGSTOP, SIGCONT."""
        for each in self._processes():
            each.signal(number)

    def power_off(self) -> None:
        """It sends nothing any more, not even that its connections are closed."""
        if self.has_power:
            self.has_power = False
            self._plug_in = self.run.network.power_off(self.name)
            self.kill()

    def power_on(self) -> None:
        """It boots: its kernel answers, and knows nothing of what was."""
        if not self.has_power:
            self.has_power = True
            self._plug_in()
            self.loop.call_outside(BOOT_S, self.start_agent)

    def break_connection(self) -> None:
        """A device in between, such as a firewall, drops the agent's liveness connection."""
        if self.connection is not None:
            self.connection.end.reset()

    def _processes(self) -> list[SimulatedWorker | SimulatedProcess]:
        # Workers first: a supervisor that is killed would leave them to its kernel, which kills them a moment later.
        return [*self.workers, *(each for each in (self.supervisor, self.agent) if each is not None)]
