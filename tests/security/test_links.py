"""What another user of the host can do at the ports between agents and controller: connect, and take freed ports."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import resource
import select
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from nvrx_slurm.agent.heartbeat import LivenessClient
from nvrx_slurm.agent.linux import ProvenConnection
from nvrx_slurm.agent.supervisor import descendants
from nvrx_slurm.journal.records import ControllerUp, NodeJoined, NodeLost
from nvrx_slurm.liveness import connection as liveness
from nvrx_slurm.liveness.connection import ALIVE, LivenessServer
from nvrx_slurm.util.admission import MOST_UNPROVEN
from nvrx_slurm.util.processes import MOST_DESCRIPTORS, is_alive
from tests.fault_harness import child_of
from tests.harness import gate_plan

TOKEN = "the job's own key"
QUICK = {"heartbeat__interval": 0.2, "heartbeat__timeout": 3.0}
BOUND_S = 30.0
LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp
LIES = ("accepts at once", "old controller", "random proof", "gives the agent's proof back", "closes", "noise")


# ---- what bob does


def take_port(address: str, port: int) -> str:
    """Try for two seconds, in every way that the kernel offers, to listen on a port that is about to become free."""
    deadline = time.monotonic() + 2.0
    ways = [(socket.AF_INET, address), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
    print("trying", flush=True)
    while time.monotonic() < deadline:
        for family, host in ways:
            thief = socket.socket(family)
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                thief.setsockopt(socket.SOL_SOCKET, option, 1)
            try:
                if family == socket.AF_INET6:
                    thief.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                thief.bind((host, port))
                thief.listen(100)
            except OSError:
                thief.close()
            else:
                return f"listens at {host}"
    return "could not have it"


def take_datagrams(port: int) -> None:
    """Bind a UDP port as soon as it is free, and keep it."""
    print("trying", flush=True)
    while True:
        thief = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with suppress(OSError):
            thief.bind(("0.0.0.0", port))
            print("has it", flush=True)
            signal.pause()
        thief.close()


def dial(port: int) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(5.0)
    connection.connect(("127.0.0.1", port))
    return connection


def pose_as_controller() -> None:
    """Listen at the address that agents have for their controller, and answer each connection with another lie."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(100)
    print(server.getsockname()[1], flush=True)
    for number in range(10_000):
        connection, _ = server.accept()
        with suppress(OSError):
            lie = LIES[number % len(LIES)]
            print(lie, flush=True)
            _lie(connection, lie)
        connection.close()


def _lie(connection: socket.socket, lie: str) -> None:
    fenced = b"+" + 40 * b"x"
    connection.settimeout(1.0)
    if lie == "accepts at once":
        connection.sendall(fenced)
    elif lie == "old controller":
        connection.sendall(bytes(16))
        with suppress(TimeoutError):
            connection.recv(4096)
        connection.sendall(fenced)
    elif lie in ("random proof", "gives the agent's proof back"):
        connection.sendall(os.urandom(32))
        hello = connection.recv(4096)
        connection.sendall((hello[-32:] if "back" in lie else os.urandom(32)) + b"x" + os.urandom(16))
    elif lie == "noise":
        connection.sendall(os.urandom(100_000))
    if lie != "closes":
        with suppress(TimeoutError):
            while connection.recv(4096):
                pass


def connect_and_say_nothing(port: int, count: int) -> int:
    """Open `count` connections and send nothing. Returns how many are still open after the server has closed the
    excess."""
    held = []
    for _ in range(count):
        held.append(dial(port))
    print("connected", flush=True)
    poller = select.poll()
    for each in held:
        poller.register(each, select.POLLHUP | select.POLLRDHUP)
    deadline = time.monotonic() + 10.0
    while (still_open := count - len(poller.poll(0))) > MOST_UNPROVEN and time.monotonic() < deadline:
        time.sleep(0.01)
    print("settled", flush=True)
    return still_open


def keep_connecting(port: int) -> None:
    """Open connections as fast as possible, without end."""
    held: list[socket.socket] = []
    print("begins", flush=True)
    while True:
        with suppress(OSError):
            held.append(dial(port))
        if len(held) > 500:
            held.pop(0).close()


def send_noise(port: int, count: int, seed: int) -> int:
    """Send `count` random messages, each on a connection of its own; returns that number."""
    chance = random.Random(seed)
    for _ in range(count):
        with suppress(OSError), dial(port) as connection:
            size = chance.choice((0, 1, 2, 17, 64, 200, 5000))
            body = chance.randbytes(size)
            framed = size.to_bytes(2, "big") + body
            connection.sendall(chance.choice((body, framed, framed[:-1], b"\xff\xff" + body)))
    return count


# ---- alice


class Ears:
    """The controller's server of liveness connections, which records its callbacks."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, ...]] = []
        self.news = asyncio.Event()
        self.server = LivenessServer(
            TOKEN, lambda *who: self._note("alive", *who), lambda *who: self._note("lost", *who)
        )

    def _note(self, *what: str) -> None:
        self.heard.append(what)
        self.news.set()

    async def until(self, *what: str) -> None:
        async with asyncio.timeout(BOUND_S):
            while what not in self.heard:
                self.news.clear()
                await self.news.wait()


@pytest.fixture
async def ears():
    ears = Ears()
    ears.port = await ears.server.start("127.0.0.1")
    yield ears
    await ears.server.close()


async def tie(port: int, incarnation: str = "a") -> ProvenConnection:
    connection = await liveness.connect(
        "127.0.0.1", port, token=TOKEN, node="n1", incarnation=incarnation, interval_s=1.0, timeout_s=15.0
    )
    return ProvenConnection(*connection)


async def test_agent_trusts_no_process_that_cannot_prove_itself(bob, ears, caplog):
    """Bob answers at the address of a controller that was killed. None of his lies fences the agent or becomes its
    liveness connection, and the log has one line about it. The real controller that follows is accepted at once."""
    impostor = bob.start(pose_as_controller)
    fenced: asyncio.Queue[str] = asyncio.Queue()
    held: asyncio.Queue[object] = asyncio.Queue()
    agent = LivenessClient(
        lambda up, incarnation: tie(up.port, incarnation),
        lambda most_s: 0.0,
        hold=held.put_nowait,
        fenced=fenced.put_nowait,
    )
    with caplog.at_level(logging.INFO, "nvrx.agent"):
        up = ControllerUp(epoch=1, host="127.0.0.1", port=int(impostor.line()))
        agent.controller_is(up, "a")
        for lie in LIES:
            assert await asyncio.to_thread(impostor.line) == lie
        assert fenced.empty()
        assert held.empty()
        up = ControllerUp(epoch=2, host="127.0.0.1", port=ears.port)
        agent.controller_is(up, "a")
        await asyncio.wait_for(held.get(), BOUND_S)
    ears.server.fence("n1", "a")
    assert await asyncio.wait_for(fenced.get(), BOUND_S) == "a"
    await agent.close(goodbye=True)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "does not prove that it is this job's controller" in told[0]


def test_port_of_a_killed_controller_cannot_be_taken(bob, run_local, gate, tmp_path):
    """Its connections leave the port in TIME_WAIT, so bob cannot bind it while alice's agents look for the next
    controller."""
    job = run_local(gate_plan(gate, tmp_path, spares=0, **QUICK))
    before = gate.wait(4, cycle=0)
    job.all_joined("n1", "n2")
    controller = child_of(job.process.pid, "nvrx_slurm.controller")
    ((_, port),) = receiving(controller)
    thief = bob.start(take_port, "127.0.0.1", port)
    assert thief.line() == "trying"
    os.kill(controller, signal.SIGKILL)
    assert thief.result() == "could not have it"
    assert all(is_alive(worker.pid) for worker in before.values())
    gate.open()
    assert job.finish() == 0


def test_squatted_fence_port_delays_no_proof(bob, run_local, gate, tmp_path):
    """Bob takes the UDP port of a fence as soon as its node is dead, and tries for the TCP port. The kernel still
    proves the death by TCP: the ranks move at once, without waiting for a timeout."""
    job = run_local(gate_plan(gate, tmp_path))
    gate.wait(4, cycle=0)
    job.agent_pid("n2")
    joined = job.expect(NodeJoined, node="n2")
    thieves = [bob.start(take_port, joined.addr, joined.fence_port), bob.start(take_datagrams, joined.fence_port)]
    assert [thief.line() for thief in thieves] == ["trying", "trying"]
    job.kill_node("n2")
    assert job.expect(NodeLost, node="n2").safe_after_s == 0.0
    gate.wait(4, cycle=1)
    assert thieves[1].line() == "has it"


async def test_forged_messages_only_break_the_connection(ears):
    """A message that is replayed or forged on a proven connection breaks it, and counts neither as a heartbeat nor as
    a fence."""
    line = await tie(ears.port)
    await ears.until("alive", "n1", "a")
    raw = socket.socket(fileno=os.dup(line.fileno()))
    said = line._session.put(ALIVE)
    raw.send(said)
    await ears.until("alive", "n1", "a")
    raw.send(said)  # a replay of the same message
    await ears.until("lost", "n1", "a")
    raw.close()
    line.close()
    other = await tie(ears.port, "b")
    await ears.until("alive", "n1", "b")
    ears.server.proven["n1", "b"]._transport.write(b"x" + bytes(16))
    with pytest.raises(liveness.UnprovenPeer):
        await other.hear()
    other.close()


async def test_proof_for_another_port_is_not_accepted(ears):
    """Bob cannot relay an agent that was made to connect to his port to the controller."""
    connection = dial(ears.port)
    connection.setblocking(False)
    stream = liveness._SocketStream(connection)
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(ConnectionError) as refused:
            await liveness.introduce(stream, token=TOKEN, node="n1", incarnation="a", port=ears.port + 1)
    assert not isinstance(refused.value, liveness.UnprovenPeer)  # the controller has closed it, without a proof
    connection.close()
    assert ears.heard == []


async def test_silent_connections_are_few_and_an_agent_gets_through(bob, ears, caplog):
    """Bob opens 2,000 connections and sends nothing. At most 64 stay open, an agent connects meanwhile, and one line
    is logged."""
    with caplog.at_level(logging.WARNING, "nvrx.liveness"):
        flood = bob.start(connect_and_say_nothing, ears.port, 2000)
        assert await asyncio.to_thread(flood.line) == "connected"
        line = await tie(ears.port)
        await ears.until("alive", "n1", "a")
        assert len(ears.server.connections) <= MOST_UNPROVEN + 1
        assert await asyncio.to_thread(flood.line) == "settled"
        assert await asyncio.to_thread(flood.result) <= MOST_UNPROVEN
    line.close()
    assert len(caplog.records) == 1
    assert "a connection from 127.0.0.1 was closed" in caplog.text


async def test_agent_gets_through_a_flood(bob, ears):
    """Bob connects as fast as he can. An agent that retries still gets its liveness connection."""
    flood = bob.start(keep_connecting, ears.port)
    assert await asyncio.to_thread(flood.line) == "begins"
    agent = LivenessClient(
        lambda up, incarnation: tie(up.port, incarnation),
        lambda most_s: most_s / 2,
        hold=lambda line: None,
        fenced=lambda incarnation: None,
    )
    up = ControllerUp(epoch=1, host="127.0.0.1", port=ears.port)
    agent.controller_is(up, "a")
    await ears.until("alive", "n1", "a")
    assert len(ears.server.connections) <= MOST_UNPROVEN + 1
    await agent.close(goodbye=True)


async def test_agent_gets_in_once_descriptors_are_free_again(bob, caplog):
    """Bob's connections use up the controller's descriptors. It logs that once, does not spin, and accepts an agent
    once his silent connections are closed."""
    accepting: list[None] = []

    class Server(LivenessServer):
        def _accept(self) -> None:
            accepting.append(None)
            super()._accept()

    server = Server(TOKEN, lambda *who: None, lambda *who: None)
    port = await server.start("127.0.0.1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    flood = bob.start(connect_and_say_nothing, port, 60)
    highest = os.dup(0)
    os.close(highest)
    with caplog.at_level(logging.WARNING):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, hard))
            assert await asyncio.to_thread(flood.line) == "connected"
            async with asyncio.timeout(BOUND_S):
                while "Too many open files" not in caplog.text or server.connections:  # noqa: ASYNC110  no event
                    await asyncio.sleep(0.05)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    line = await tie(port)
    line.close()
    await server.close()
    assert len(caplog.records) == 1
    assert len(accepting) < 1000


def test_workers_keep_the_descriptor_limit_of_their_user(run_local, gate, tmp_path):
    """The job's own processes may open as many descriptors as the kernel allows; its workers as many as the user's
    shell may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        job = run_local(gate_plan(gate, tmp_path, nodes=1, spares=0))
        workers = gate.wait(2, cycle=0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    own = [job.process.pid, child_of(job.process.pid, "nvrx_slurm.controller"), job.agent_pid("n1")]
    assert [soft_limit(pid) for pid in own] == [min(hard, MOST_DESCRIPTORS)] * 3
    assert {soft_limit(worker.pid) for worker in workers.values()} == {1024}
    gate.open()
    assert job.finish() == 0


def test_local_job_is_reachable_from_this_host_only(run_local, gate, tmp_path):
    """Every port on which a process of the job accepts connections or datagrams is bound to loopback."""
    job = run_local(gate_plan(gate, tmp_path, nodes=1, spares=1))
    gate.wait(2, cycle=0)
    fences = {job.expect(NodeJoined, node=node).fence_port for node in ("n1", "n2")}
    everybody = [job.process.pid, *descendants(job.process.pid)]
    open_to = {address for pid in everybody for address in receiving(pid)}
    assert fences <= {port for _, port in open_to}
    assert {host for host, _ in open_to} == {"0100007F"}
    gate.open()
    assert job.finish() == 0


def receiving(pid: int) -> list[tuple[str, int]]:
    """The addresses of a process's listening TCP sockets and unconnected UDP sockets: the kernel's hexadecimal host,
    and the port."""
    held = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            held.add(str(descriptor.readlink()))
    found = []
    for name, state in (("tcp", LISTENS), ("tcp6", LISTENS), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            row = line.split()
            if row[3] == state and f"socket:[{row[9]}]" in held:
                host, port = row[1].split(":")
                found.append((host, int(port, 16)))
    return found


def soft_limit(pid: int) -> int:
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]


async def test_noise_kills_nothing(bob, ears):
    """After 10,000 random messages, none of which counts, the controller still accepts an agent."""
    noise = bob.start(send_noise, ears.port, 10_000, 18)
    assert await asyncio.to_thread(noise.result) == 10_000
    assert ears.heard == []
    line = None
    while line is None:  # retry as an agent does: the controller may still be reading the noise
        with suppress(TimeoutError):
            line = await tie(ears.port)
    await ears.until("alive", "n1", "a")
    line.close()
    await ears.until("lost", "n1", "a")
