"""A batch host in virtual time: real controllers on it, one after the other, and a store that outlives them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvrx_slurm.controller.controller import Controller
from nvrx_slurm.controller.environment import NodeCallback
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.folder import JobInfo, StoreAddress
from nvrx_slurm.journal.records import Entry, Heartbeat, NodeJoined
from nvrx_slurm.lab.simulation.controller import SimulatedMirror
from nvrx_slurm.lab.simulation.loop import VirtualClock, VirtualLoop
from nvrx_slurm.lab.simulation.valkey_client import MemoryClient, StoreRequest
from nvrx_slurm.lab.simulation.valkey_server import MemoryServer
from nvrx_slurm.report.failure_replay import NoBroker
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.store.heartbeat_reader import HeartbeatReader
from nvrx_slurm.util.files import JobFiles
from nvrx_slurm.util.ids import succeeding
from nvrx_slurm.util.tasks import end, settle

ADDRESS = StoreAddress(url="redis://nowhere", job="1", token="t")

# How long a node's kernel takes to answer a probe.
PROBED_S = 0.01


class SlowLink:
    """The controller's way to the store: requests take `host.asks_after_s`, answers `host.answers_after_s`."""

    def __init__(self, host: VirtualHost) -> None:
        self._host = host

    def call(self, request: StoreRequest) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def answered(reply: Any) -> None:
            future.get_loop().call_later(self._host.answers_after_s, settle, future, reply)

        if self._host.asks_after_s:
            future.get_loop().call_later(self._host.asks_after_s, request, answered)
        else:
            request(answered)
        return future


class Connections:
    """The controller's end of all liveness connections; `lost` is called when one closes."""

    def __init__(self, lost: NodeCallback) -> None:
        self.lost = lost

    async def start(self, bind: str) -> int:
        return 1

    def fence(self, node: str, incarnation: str) -> None: ...

    async def close(self) -> None: ...


class VirtualHost:
    """`kernels_refuse`: whether a probe proves that a node is dead."""

    def __init__(self, plan: Plan, *, answers_after_s: float = 0.0) -> None:
        self.plan, self.loop = plan, VirtualLoop()
        self.clock = VirtualClock(self.loop)
        self._began = self.clock.wall()
        self.server = MemoryServer(self.clock)
        self.asks_after_s, self.answers_after_s = 0.0, answers_after_s
        self.store = StoreClient(ADDRESS, clock=self.clock, connection=MemoryClient(self.server))
        self.nodes = tuple(f"n{index}" for index in range(1, plan.total_nodes + 1))
        self.kernels_refuse = False
        self.connections: Connections | None = None
        self.generation = 0
        self._copy: list[Entry] = []
        self._mirror = SimulatedMirror(self._copy)
        self.reported: list[tuple[str, bool]] = []  # node, whether the batch host got it as lost
        self._running: asyncio.Task[Any] | None = None
        self._beating: dict[str, asyncio.Task[None]] = {}

    def play(self, story: Callable[[VirtualHost], Coroutine[Any, Any, None]]) -> None:
        """Run the story to its end."""

        async def main() -> None:
            try:
                await story(self)
            finally:
                await self.kill_controller()
                await end(self._beating.values())

        try:
            self.loop.run(main())
        finally:
            self.loop.close()

    # ---- what happens

    async def later(self, seconds: float) -> None:
        """Let virtual time pass."""
        await asyncio.sleep(seconds)

    async def requeue(self, *nodes: str, fresh_store: bool) -> None:
        """Slurm requeues the job on these nodes; it has no controller until one is started."""
        await self.kill_controller()
        for node in list(self._beating):
            await self.fall_silent(node)
        self.generation, self.nodes = self.generation + 1, nodes
        if fresh_store:
            self.server = MemoryServer(self.clock)
            self.store = StoreClient(ADDRESS, clock=self.clock, connection=MemoryClient(self.server))

    @property
    def has_controller(self) -> bool:
        """Whether a controller runs."""
        return self._running is not None and not self._running.done()

    async def start_controller(self) -> None:
        """A new controller takes over."""
        client = MemoryClient(self.server, link=SlowLink(self))
        store = StoreClient(ADDRESS, clock=self.clock, connection=client, generation=self.generation)
        environment: Any = SimpleNamespace(
            host="head",
            pid=1,
            files=JobFiles(Path("/jobs/1")),
            mirror=self._mirror,
            read_copy=lambda: list(self._copy),
            liveness_server=self._listen,
            attribution_broker=lambda _: NoBroker(),
            is_dead=self._is_dead,
            node_state=self._node_state,
            on_signal=lambda *_: None,
            write_result=lambda _: None,
            report_node=self._reported,
        )
        controller = Controller(
            plan=self.plan,
            info=JobInfo(
                job_id="1",
                name="t",
                cluster="local",
                generation=self.generation,
                started_at=self._began,
                addr="127.0.0.1",
                nodes=self.nodes,
            ),
            environment=environment,
            store=store,
            heartbeats=HeartbeatReader(
                ADDRESS, store.keys.beats, clock=self.clock, connection=MemoryClient(self.server)
            ),
            token="t",
            bind="127.0.0.1",
            clock=self.clock,
        )
        self._running = asyncio.get_running_loop().create_task(controller.run())

    async def kill_controller(self) -> None:
        if self._running is not None:
            await end([self._running])
            self._running = None

    async def join(self, *nodes: str, fence_port: int = 2) -> None:
        """Agents join, and send a heartbeat each interval from now on."""
        for node in nodes:
            await self._join(node, f"{node}.{self.generation}", fence_port)
            self.beat(node)

    async def join_again(self, node: str) -> None:
        """The same agent joins, under its next incarnation. It sends no heartbeat."""
        await self._join(node, succeeding(f"{node}.{self.generation}", 1), 2)

    def beat(self, node: str) -> None:
        self._beating[node] = asyncio.get_running_loop().create_task(self._beat(node))

    async def fall_silent(self, node: str) -> None:
        await end([self._beating.pop(node)])

    def break_connection(self, node: str) -> None:
        assert self.connections is not None
        self.connections.lost(node, f"{node}.{self.generation}")

    async def journal(self, kind: type[Any]) -> list[Any]:
        """Every record of this kind in the journal."""
        return [entry.record for entry in await self.store.journal() if isinstance(entry.record, kind)]

    async def _join(self, node: str, incarnation: str, fence_port: int) -> None:
        where = {"node": node, "addr": node, "port": 1, "fence_port": fence_port}
        await self.store.join(NodeJoined(incarnation=incarnation, seq=1, generation=self.generation, **where))

    # ---- what a controller uses

    async def _beat(self, node: str) -> None:
        while True:
            incarnation = f"{node}.{self.generation}"
            await self.store.send_heartbeat(Heartbeat(node=node, incarnation=incarnation))
            await asyncio.sleep(self.plan.fault_tolerance.heartbeat.interval)

    def _listen(self, token: str, alive: NodeCallback, lost: NodeCallback) -> Connections:
        self.connections = Connections(lost)
        return self.connections

    async def _is_dead(self, *_: Any, **__: Any) -> bool:
        await asyncio.sleep(PROBED_S)
        return self.kernels_refuse

    async def _node_state(self, node: str) -> None:
        return None

    def _reported(self, node: str, *, is_lost: bool) -> None:
        self.reported.append((node, is_lost))
