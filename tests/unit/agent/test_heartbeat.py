"""The agent's heartbeats and the lease of its workers, with a real store."""

from __future__ import annotations

import asyncio
import os
import signal
from urllib.parse import urlsplit

import msgspec
import pytest
from redis.exceptions import ReadOnlyError

from nvrx_slurm.agent.heartbeat import OUTLIVE_S, ControllerSilent, HeartbeatSender, LivenessClient
from nvrx_slurm.journal.folder import StoreAddress
from nvrx_slurm.journal.records import Heartbeat
from nvrx_slurm.lab.plans import plain_bounds
from nvrx_slurm.lab.simulation.loop import VirtualClock, VirtualLoop
from nvrx_slurm.liveness.connection import ALIVE
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.store.embedded import EmbeddedStore
from nvrx_slurm.store.heartbeat_reader import IDLE_S, HeartbeatReader
from nvrx_slurm.util.clock import SystemClock
from tests.contract.servers import RealServer


async def nobody_listens(*_) -> None:
    raise ConnectionRefusedError


class Relay:
    """A relay in front of the store. `cut` silences the present connections; new ones get through."""

    def __init__(self, port: int) -> None:
        self.to = port
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_store, to_store = await asyncio.open_connection("127.0.0.1", self.to)
        self._writers += [writer, to_store]
        for source, target in ((reader, to_store), (from_store, writer)):
            self._pumps.append(asyncio.create_task(self._pump(source, target)))

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            target.write(data)

    def cut(self) -> None:
        for pump in self._pumps:
            pump.cancel()

    async def close(self) -> None:
        self.cut()
        for writer in self._writers:
            writer.close()
        self._server.close()


class Harness:
    """A heartbeat sender with a store that can be stopped; its leases and events can be awaited."""

    def __init__(self, store: StoreClient, server_pid: int, relay: Relay, **bounds: float) -> None:
        self.store, self.server_pid, self.relay = store, server_pid, relay
        self.leases: asyncio.Queue[float] = asyncio.Queue()
        self.said: asyncio.Queue[ControllerSilent] = asyncio.Queue()
        self.liveness = LivenessClient(
            nobody_listens, lambda most_s: 0.0, hold=lambda line: None, fenced=lambda incarnation: None
        )
        self.sender = HeartbeatSender(
            bounds=plain_bounds(**{"heartbeat__interval": 0.05, "heartbeat__timeout": 0.3, **bounds}),
            nodes=1,
            store=store,
            liveness=self.liveness,
            clock=SystemClock(),
            make=lambda: Heartbeat(node="n1", incarnation="a"),
            lease=lambda seconds, grant=None: self.leases.put_nowait(seconds),
            post=self.said.put_nowait,
        )

    async def next_lease(self, wanted) -> float:
        async with asyncio.timeout(20.0):
            while not wanted(lease := await self.leases.get()):
                pass
            return lease


@pytest.fixture
async def start_sender(tmp_path):
    server = EmbeddedStore(tmp_path / "store", bind="127.0.0.1", password="secret")
    process = await server.start()
    relay = Relay(server.port)
    address = StoreAddress(url=f"redis://127.0.0.1:{await relay.start()}", password="secret", job="j", token="t")
    store = StoreClient(address, clock=SystemClock())
    running: list[asyncio.Task] = []

    def begin(**bounds: float) -> Harness:
        harness = Harness(store, process.pid, relay, **bounds)
        running.append(asyncio.create_task(harness.sender.run()))
        return harness

    yield begin
    for task in running:
        task.cancel()
    await store.close()
    await relay.close()
    os.kill(process.pid, signal.SIGCONT)
    process.kill()
    await process.wait()


class AheadClock(SystemClock):
    """A clock that can be set forward."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


async def test_heartbeats_and_leases_go_to_the_primary_after_a_failover(tmp_path):
    """After a failover of a site's store, heartbeats and leases go to the new primary, although connections to the
    old server, now a replica, still work. The reader, which writes nothing, connects again once it was idle for
    long."""
    old, new = RealServer(tmp_path / "old"), RealServer(tmp_path / "new")
    await old.start()
    await new.start()
    relay = Relay(urlsplit(old.address().url).port)
    url = f"redis://127.0.0.1:{await relay.start()}"
    address, clock = msgspec.structs.replace(old.address(), url=url), AheadClock()
    agent, controller = (StoreClient(address, clock=clock) for _ in range(2))
    reader = HeartbeatReader(address, agent.keys.beats, clock=clock)
    await agent.send_heartbeat(Heartbeat(node="n1", incarnation="a"))
    assert len((await reader.read()).beats) == 1
    await controller.renew("host:1", 60.0)
    raw_old, raw_new = old.raw(), new.raw()
    await raw_old.execute_command("REPLICAOF", "127.0.0.1", "1")
    relay.to = urlsplit(new.address().url).port
    with pytest.raises(ReadOnlyError):
        await agent.send_heartbeat(Heartbeat(node="n1", incarnation="a"))
    await agent.send_heartbeat(Heartbeat(node="n1", incarnation="a"))
    for _ in range(2):
        await controller.renew("host:1", 60.0)
    assert await raw_new.xlen(agent.keys.beats) == 1
    assert (await reader.read()).beats == []
    clock.ahead_s = IDLE_S + 1.0
    assert [(await reader.read()).beats, len((await reader.read()).beats)] == [[], 1]
    assert await raw_new.exists(controller.keys.lease)
    for client in (agent, controller, reader):
        await client.close()
    for raw in (raw_old, raw_new):
        await raw.aclose()
    await relay.close()
    for server in (old, new):
        await server.end()


class SlowStore:
    """Takes 3.5 s to accept a heartbeat."""

    def __init__(self) -> None:
        self.begun = self.accepted = 0

    async def send_heartbeat(self, beat: Heartbeat, keep: int | None) -> None:
        self.begun += 1
        await asyncio.sleep(3.5)
        self.accepted += 1

    async def controller_lives(self) -> bool:
        return True


class RecordingLiveness:
    """A liveness client without a connection; it records what it is asked to send."""

    def __init__(self) -> None:
        self.said: list[bytes] = []

    def say(self, word: bytes) -> None:
        self.said.append(word)

    def silence_s(self) -> None: ...


def test_heartbeat_that_takes_long_is_not_cancelled():
    """A heartbeat that takes several intervals is not cancelled: "alive" is sent at each interval until it arrives,
    and the lease follows the last contact.

    The next heartbeat is sent after the interval in which the slow one arrived.
    """
    loop, store, client, leases = VirtualLoop(), SlowStore(), RecordingLiveness(), list[float]()
    sender = HeartbeatSender(
        bounds=plain_bounds(heartbeat__interval=1.0, heartbeat__timeout=8.0, fence_timeout=8.0),
        nodes=1,
        store=store,
        liveness=client,
        clock=VirtualClock(loop),
        make=lambda: Heartbeat(node="n1", incarnation="a"),
        lease=lambda seconds, grant=None: leases.append(round(seconds, 3)),
        post=lambda silent: None,
    )

    async def run() -> None:
        running = asyncio.create_task(sender.run())
        await asyncio.sleep(3.9)
        running.cancel()
        await asyncio.wait([running])

    loop.run(run())
    loop.close()
    assert (store.begun, store.accepted, client.said) == (1, 1, [ALIVE] * 3)
    assert leases == [7.0, 6.0, 5.0, 4.5]


async def test_lease_is_whole_while_the_store_answers(start_sender):
    """Each heartbeat that arrives sets the lease to the fence timeout, counted from when it was sent."""
    harness = start_sender(fence_timeout=5.0)
    for _ in range(3):
        await harness.next_lease(lambda lease: 4.0 < lease < 5.0)


async def test_lease_runs_out_while_nobody_answers(start_sender):
    """Without store and liveness connection the lease shrinks to zero; it is full again once the store answers."""
    harness = start_sender(fence_timeout=2.0)
    await harness.store.renew("host:1", 600.0)
    await harness.next_lease(lambda lease: lease > 1.5)
    os.kill(harness.server_pid, signal.SIGSTOP)
    await harness.next_lease(lambda lease: lease == 0.0)
    os.kill(harness.server_pid, signal.SIGCONT)
    await harness.next_lease(lambda lease: lease > 1.5)


async def test_node_that_was_cut_off_is_in_touch_when_the_store_has_answered(start_sender):
    """After a partition the agent is in touch only once the store has answered; workers started earlier would have an
    expired lease."""
    harness = start_sender(fence_timeout=2.0)
    await harness.store.renew("host:1", 600.0)
    await harness.next_lease(lambda lease: lease > 1.5)
    assert harness.sender.is_in_touch
    os.kill(harness.server_pid, signal.SIGSTOP)
    await harness.next_lease(lambda lease: lease == 0.0)
    waiting = asyncio.create_task(harness.sender.touch())
    await harness.next_lease(lambda lease: True)
    assert not waiting.done() and not harness.sender.is_in_touch
    os.kill(harness.server_pid, signal.SIGCONT)
    await asyncio.wait_for(waiting, 20.0)
    await harness.next_lease(lambda lease: lease > 1.0)


class NextGeneration:
    """A store that fails for a while, and then serves the controller of the next generation."""

    def __init__(self, loop: VirtualLoop, away_until_s: float) -> None:
        self._loop, self._back_at = loop, loop.now_s + away_until_s
        self.controller_lives_at = float("inf")

    async def send_heartbeat(self, beat: Heartbeat, keep: int | None) -> None:
        if self._loop.now_s < self._back_at:
            raise OSError("no route to host")

    async def controller_lives(self) -> bool:
        return self._loop.now_s >= self.controller_lives_at


def test_node_whose_lease_lapsed_is_in_touch_only_with_a_controller_of_its_generation():
    """A node whose lease lapsed is in touch again only when a controller of its generation is alive: if the job was
    requeued without the node, its ranks run elsewhere, and no order that it can read says so."""
    loop = VirtualLoop()
    store = NextGeneration(loop, away_until_s=12.0)
    sender = HeartbeatSender(
        bounds=plain_bounds(heartbeat__interval=1.0, heartbeat__timeout=4.0, fence_timeout=8.0),
        nodes=1,
        store=store,
        liveness=RecordingLiveness(),
        clock=VirtualClock(loop),
        make=lambda: Heartbeat(node="n1", incarnation="a"),
        lease=lambda seconds, grant=None: None,
        post=lambda silent: None,
    )
    in_touch = []

    async def run() -> None:
        running = asyncio.create_task(sender.run())
        await asyncio.sleep(16.5)
        in_touch.append(sender.is_in_touch)
        store.controller_lives_at = loop.now_s
        await asyncio.sleep(2.0)
        in_touch.append(sender.is_in_touch)
        running.cancel()
        await asyncio.wait([running])

    loop.run(run())
    loop.close()
    assert in_touch == [False, True]


class FreezableClock(VirtualClock):
    """The clock of a process that was frozen for `frozen_s`."""

    frozen_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.frozen_s


def test_controller_is_not_silent_while_the_agent_is_frozen():
    """After a freeze of the whole job the controller's lapsed lease is no silence: the controller may resume a moment
    after the agent."""
    loop = VirtualLoop()
    store, clock, silences = NextGeneration(loop, away_until_s=0.0), FreezableClock(loop), list[float]()
    store.controller_lives_at = loop.now_s
    sender = HeartbeatSender(
        bounds=plain_bounds(heartbeat__interval=1.0, heartbeat__timeout=4.0, control_plane_grace=20.0),
        nodes=1,
        store=store,
        liveness=RecordingLiveness(),
        clock=clock,
        make=lambda: Heartbeat(node="n1", incarnation="a"),
        lease=lambda seconds, grant=None: None,
        post=lambda silent: silences.append(silent.for_s),
    )

    async def run() -> None:
        running = asyncio.create_task(sender.run())
        await asyncio.sleep(5.5)
        clock.frozen_s = 1000.0
        store.controller_lives_at = loop.now_s + 3.0
        await asyncio.sleep(19.0)
        store.controller_lives_at = float("inf")
        assert silences == []
        await asyncio.sleep(26.0)
        running.cancel()
        await asyncio.wait([running])

    loop.run(run())
    loop.close()
    assert silences
    assert 20.0 < silences[0] < 22.0


async def test_heartbeat_on_a_cut_connection_is_given_up_for_a_new_one(start_sender):
    """When an order shows that the store is reachable, the agent gives up the heartbeat on the cut connection and
    sends a new one: the old one would block for half of the timeout."""
    harness = start_sender(fence_timeout=2.0, heartbeat__timeout=600.0)
    await harness.store.renew("host:1", 600.0)
    await harness.next_lease(lambda lease: lease > 1.5)
    harness.relay.cut()
    await harness.next_lease(lambda lease: lease == 0.0)
    await asyncio.wait_for(harness.sender.touch(), 20.0)
    await harness.next_lease(lambda lease: lease > 1.0)


async def test_controller_that_never_appears_is_reported_after_its_grace(start_sender):
    """Without a lease in the store and without a liveness connection, the controller counts as silent after its
    grace."""
    harness = start_sender(control_plane_grace=0.6)
    async with asyncio.timeout(20.0):
        assert (await harness.said.get()).for_s > 0.6


async def test_controller_whose_lease_is_valid_is_not_silent(start_sender, caplog):
    """A controller that renews its lease is not reported as silent; the log has one line when it falls silent and one
    when it answers again."""
    caplog.set_level("INFO")
    harness = start_sender(control_plane_grace=60.0)
    async with asyncio.timeout(20.0):
        while "has been silent" not in caplog.text:
            await harness.next_lease(lambda lease: True)
        await harness.store.renew("host:1", 60.0)
        while "answers again" not in caplog.text:
            await harness.next_lease(lambda lease: True)
    assert caplog.text.count("has been silent") == 1
    assert harness.said.empty()


async def test_workers_outlive_their_lease_until_a_heartbeat_arrives_after_the_suspension(start_sender):
    """After a suspension workers keep the long lease until a heartbeat arrives: the store may be resumed seconds
    after this node."""
    harness = start_sender(fence_timeout=2.0)
    await harness.next_lease(lambda lease: lease > 1.5)
    harness.sender.hold(0)
    assert await harness.next_lease(lambda lease: lease > 2.0) == OUTLIVE_S
    os.kill(harness.server_pid, signal.SIGSTOP)
    harness.sender.release(10.0)
    for _ in range(3):
        assert await harness.next_lease(lambda lease: True) == OUTLIVE_S
    os.kill(harness.server_pid, signal.SIGCONT)
    assert await harness.next_lease(lambda lease: lease < OUTLIVE_S) > 1.0
