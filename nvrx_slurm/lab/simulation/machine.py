"""The real agent in a run, and the simulated machine that it touches: what `agent/machine.py` asks for."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nvrx_slurm.agent.agent import Agent
from nvrx_slurm.agent.events import Cycle, StacksOnFile
from nvrx_slurm.agent.hangs import NS
from nvrx_slurm.agent.workers import WorkerEvent
from nvrx_slurm.jobspec.budgets import grace_within
from nvrx_slurm.journal.records import AnyOrder, Assignment, ControllerUp, NodeJoined, Shutdown
from nvrx_slurm.journal.restarts import InProcessRestart
from nvrx_slurm.lab.simulation.process import Held, SimulatedProcess
from nvrx_slurm.lab.simulation.sockets import ConnectionEnd, HandshakeStream, SimulatedFenceSocket
from nvrx_slurm.lab.simulation.supervisor import SupervisedWorkers
from nvrx_slurm.lab.simulation.workers import SimulatedWorker
from nvrx_slurm.liveness import connection as liveness
from nvrx_slurm.store.client import StoreClient, place_of
from nvrx_slurm.workload.slot import Reading

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.node import SimulatedNode
    from nvrx_slurm.lab.simulation.run import SimulationRun

_NOTHING = Reading()
DUMP_S = 0.05
READ_BYTES = 256


async def agent_main(run: SimulationRun, node: SimulatedNode, machine: SimulatedMachine) -> int:
    """As `python -m nvrx_slurm.agent` runs it; returns its exit code."""
    bounds, kill_wait_s = run.plan.fault_tolerance, run.info.kill_wait_s
    grace_s = bounds.teardown.grace
    node.agent_store = store = AgentStore(run, node)
    agent = Agent(
        plan=run.plan,
        folder=run.folder,
        node=node.name,
        addr=node.name,
        generation=run.info.generation,
        store=store,
        token=run.address.token,
        machine=machine,
        clock=node.clock,
        ending_grace_s=grace_s if kill_wait_s is None else min(grace_s, grace_within(kill_wait_s)),
        shares_signals=run.info.cluster == "slurm",
    )
    return await agent.run()


class AgentStore(StoreClient):
    """The agent's store client, which shows the adversary each order that the agent reads.

    `incarnation`: as which the agent has joined last; `began_at`: the id behind which it has begun to read;
    `read_to`: the last order that it has read."""

    incarnation = ""
    began_at: str | None = None
    read_to = "0-0"

    def __init__(self, run: SimulationRun, node: SimulatedNode) -> None:
        super().__init__(
            run.address,
            clock=node.clock,
            patience_s=run.plan.fault_tolerance.control_plane_grace,
            generation=run.info.generation,
            connection=run.store.client(node.name),
            key=run.key,
        )
        self._run, self._node = run, node.name
        # Rendezvous → the agent that asked for its ranks last, and the newest order by then.
        self._answers: dict[tuple[str, int], tuple[str, str]] = {}

    async def join(self, fact: NodeJoined) -> tuple[str, Shutdown | None, ControllerUp | None]:
        self.incarnation = fact.incarnation
        return await super().join(fact)

    async def assignment(
        self, replica: str, cycle: int, node: str, incarnation: str = ""
    ) -> tuple[Assignment | None, str]:
        assignment, newest = await super().assignment(replica, cycle, node, incarnation)
        self._answers[replica, cycle] = incarnation, newest
        return assignment, newest

    def check_ranks(self, replica: str, cycle: int) -> None:
        """The agent is about to start workers by what it was answered."""
        asked_by, newest = self._answers[replica, cycle]
        if asked_by != self.incarnation:
            self._run.promises.acted_for(self._node, replica, cycle, asked_by)
        if place_of(self.read_to) < place_of(newest) and place_of(newest) > place_of(self.began_at or "0-0"):
            self._run.promises.acted_early(self._node, replica, cycle)

    async def orders(self, after: str) -> list[tuple[str, AnyOrder | None]]:
        items = await super().orders(after)
        self.began_at = self.began_at or after
        self.read_to = items[-1][0] if items else self.read_to
        if self._run.copied:
            self._check_copies(items)
        if self._run.aims.armed:
            orders = [order for _, order in items if order is not None]
            if self._run.aims.sees(orders, "before receipt", self._node):
                await asyncio.sleep(0)  # the act comes first
            self._run.aims.sees(orders, "after receipt", self._node)
        return items

    def _check_copies(self, items: Sequence[tuple[str, AnyOrder | None]]) -> None:
        """An order that this agent has read at its place has no effect when it comes again as a copy."""
        stream = self.keys.orders
        for identity, order in items:
            [(_, fields)] = self._run.store.data.xrange(stream, identity, identity)
            for sealed, original in self._run.copied:
                is_copy = fields[1] == sealed and identity != original
                if order is not None and is_copy and place_of(original) > place_of(self.began_at or "0-0"):
                    self._run.promises.obeyed_twice(self._node, order)


class SimulatedMachine:
    """One node, for one agent process on it."""

    def __init__(self, node: SimulatedNode, process: SimulatedProcess, pid: int) -> None:
        self._node, self._process, self.pid = node, process, pid
        self._token = node.run.address.token  # of its generation
        self.output, self.stacks = SimulatedOutput(), SimulatedStacks()
        self.health, self.step_files = SimulatedHealth(), SimulatedStepFiles()
        self.log_reader = SimulatedLogReader()

    def workers(self, post: Callable[[WorkerEvent], None]) -> SupervisedWorkers:
        return SupervisedWorkers(self._node, self._process, post)

    def board(
        self,
        on_first_step: Callable[[int, int], None],
        on_failing: Callable[[int, int, str, float | None], None],
        on_restart: Callable[[InProcessRestart], None],
    ) -> SimulatedBoard:
        return SimulatedBoard(self._node, on_first_step, on_failing, on_restart)

    def open_fence_socket(self, key: bytes, addr: str) -> SimulatedFenceSocket:
        return self._node.open_fence_socket(key, self._process)

    def hold_port(self) -> SimulatedPort:
        return SimulatedPort(next(self._node.ports))

    async def connect(self, controller: ControllerUp, incarnation: str) -> AgentConnection:
        """As `liveness.connect` does it."""
        node, run = self._node, self._node.run
        run.promises.connected(node.name, incarnation, controller.epoch)
        timeout_s = run.plan.fault_tolerance.heartbeat.timeout
        async with asyncio.timeout(liveness.HANDSHAKE_S):
            end = await run.sockets.connect(node.name, run.HOST, controller.port, timeout_s=max(1.0, timeout_s))
            connection = AgentConnection(end, self._process)
            try:
                connection.session = await liveness.introduce(
                    connection,
                    token=self._token,
                    node=node.name,
                    incarnation=incarnation,
                    port=controller.port,
                )
            except BaseException:
                connection.close()
                raise
        node.connection = connection
        return connection

    def new_incarnation(self) -> str:
        return f"{self._node.chance.getrandbits(48):012x}"

    def random_s(self, most_s: float) -> float:
        return self._node.chance.uniform(0.0, most_s)

    def on_signal(self, number: signal.Signals, callback: Callable[[str], None]) -> None:
        self._node.loop.add_signal_handler(number, callback, number.name)


class AgentConnection(Held, HandshakeStream):
    """The agent's end. The supervisor holds it too; it closes when both have let go of it or have died."""

    def __init__(self, end: ConnectionEnd, agent: SimulatedProcess) -> None:
        Held.__init__(self, end.close)
        HandshakeStream.__init__(self, end)
        self._agent = agent
        self.session: liveness.Session | None = None  # once both ends have proven themselves
        self.held_by(agent)

    def fileno(self) -> int:
        return 0

    def close(self) -> None:
        self.release(self._agent)

    def say(self, word: bytes) -> None:
        assert self.session is not None
        self.end.send(self.session.put(word))

    async def hear(self) -> bytes:
        assert self.session is not None
        while data := await self.receive(READ_BYTES):
            if words := self.session.take(data):
                return words
        return b""

    def silence_s(self) -> float:
        return self.end.silence_s()


class SimulatedBoard:
    """The slots of this node's workers. What stands in them follows from how long their world has run."""

    def __init__(
        self,
        node: SimulatedNode,
        on_first_step: Callable[[int, int], None],
        on_failing: Callable[[int, int, str, float | None], None],
        on_restart: Callable[[InProcessRestart], None],
    ) -> None:
        self._node, self._on_first_step, self._on_failing = node, on_first_step, on_failing
        self.on_restart = on_restart
        self._ranks: set[int] = set()
        self._last: dict[int, Reading] = {}  # of ranks that have ended: what they reported stays in their slots

    def open(self) -> None:
        self._node.board = self

    def close(self) -> None:
        self._ranks.clear()

    def prepare(self, rank: int, cycle: int) -> dict[str, str]:
        self._ranks.add(rank)
        self._last.pop(rank, None)
        return {}

    def clear(self) -> None:
        self._ranks.clear()
        self._last.clear()

    def ended(self, worker: SimulatedWorker) -> None:
        """A worker is about to be gone."""
        if worker.rank in self._ranks:
            self._last[worker.rank] = self._reading(worker)

    def first_step(self, worker: SimulatedWorker) -> None:
        """Its datagram arrives."""
        if worker.rank in self._ranks:
            self._on_first_step(worker.rank, 1)

    def failing(self, worker: SimulatedWorker, what: str, at: float) -> None:
        """The datagram of a worker that is about to end with an exception."""
        if worker.rank in self._ranks:
            self._on_failing(worker.rank, worker.pid, what, at)

    def recorded_error(self, rank: int) -> str | None:
        return None  # simulated workers write no file; their datagrams name the exception

    def steps(self) -> dict[int, int]:
        return {rank: reading.step for rank, reading in self.readings().items() if reading.step is not None}

    def readings(self) -> dict[int, Reading]:
        readings = {rank: self._last.get(rank, _NOTHING) for rank in sorted(self._ranks)}
        for worker in self._node.workers:
            if worker.rank in readings:
                readings[worker.rank] = self._reading(worker)
        return readings

    def _reading(self, worker: SimulatedWorker) -> Reading:
        steps, last_at = worker.world.steps()
        seen = {"checkpoint": (worker.saved, 0.1)} if worker.saved else {}
        if steps == 0:
            return Reading(seen=seen)
        sign_ns = round(self._node.clock.at(last_at) * NS)
        return Reading(step=steps, beats=steps, sign_ns=sign_ns, seen=seen)


class SimulatedLogReader:
    """Simulated workers write no logs."""

    def begin(self, logs: Path, assignment: Assignment, found: Callable[[bool, bytes], None]) -> None: ...
    def whole(self) -> None: ...
    async def close(self) -> None: ...


class SimulatedOutput:
    """Simulated workers print nothing."""

    def capture(self, path: Path, prefix: str, rank: int = 0) -> int:
        return 0

    def last_at(self, rank: int) -> None: ...
    def close(self, timeout_s: float) -> None: ...

    def last_lines(self, rank: int) -> str:
        return ""


class SimulatedStacks:
    """A dump takes a moment, and its stacks are empty."""

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        return {}

    def clear(self) -> None: ...

    async def dump(
        self,
        cycle: Cycle,
        *,
        why: str,
        timeout_s: float,
        ranks: Collection[int] | None = None,
        may_pause: bool = False,
    ) -> StacksOnFile:
        await asyncio.sleep(min(DUMP_S, timeout_s))
        return StacksOnFile({}, {})


class SimulatedHealth:
    """A simulated node has no health records."""

    def begin(self) -> None: ...
    def look(self, out: Path, why: str) -> None: ...
    def look_for_news(self, out: Path) -> None: ...
    async def close(self) -> None: ...


class SimulatedStepFiles:
    """Simulated workers report their steps through the slots, never in files."""

    are_named = False

    async def last_step(self, logs: Path, ranks: set[int]) -> int | None:
        return None


class SimulatedPort:
    """A port held free."""

    def __init__(self, number: int) -> None:
        self.number = number

    def release(self) -> None: ...
