"""The simulated network, and the calls, connections and datagrams of processes on it."""

from __future__ import annotations

import asyncio
import errno
from random import Random

import pytest

from nvrx_slurm.lab.simulation.loop import BEGIN_S, VirtualLoop
from nvrx_slurm.lab.simulation.network import LONGEST_S, NetworkFault, SimulatedNetwork, apart, one_way
from nvrx_slurm.lab.simulation.process import SimulatedProcess
from nvrx_slurm.lab.simulation.sockets import Service, ServiceLink, Sockets

SOON_S = 5 * LONGEST_S
"""By then every packet has arrived that nothing holds up."""


@pytest.fixture
def network(loop):
    """A network of hosts a, b, …, without faults."""
    return SimulatedNetwork(loop, Random(1))


@pytest.fixture
def sockets(network):
    """The sockets of all hosts."""
    return Sockets(network)


def pass_time(loop: VirtualLoop, seconds: float) -> None:
    loop.run(asyncio.sleep(seconds))


class Echo:
    """A service on host b that replies with each request, and counts them."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self.loop, self.service = network.loop, Service(network, "b")
        self.taken: list[tuple[float, int]] = []
        self.start()

    def start(self) -> None:
        self.process = SimulatedProcess(self.loop, "echo")
        self.service.served_by(self.process)

    def call(self, number: int) -> asyncio.Future[int]:
        def serve(answer) -> None:
            self.taken.append((self.loop.time() - BEGIN_S, number))
            answer(number)

        return ServiceLink("a", self.service).call(serve)


@pytest.fixture
def echo(network):
    """The service, listening."""
    return Echo(network)


def test_calls_take_their_time_and_overtake_each_other(loop, echo):
    """Each call is answered by itself, after its own latency."""
    calls = [echo.call(number) for number in range(100)]
    pass_time(loop, SOON_S)
    assert [call.result() for call in calls] == list(range(100))
    taken = [number for _, number in echo.taken]
    assert sorted(taken) == list(range(100)) != taken
    assert all(0.0 < at < LONGEST_S for at, _ in echo.taken)


def test_call_on_a_cut_way_arrives_when_it_is_healed(loop, network, echo):
    """It is neither lost nor answered earlier, even if its caller has given up: that is the late duplicate."""
    heal = network.cut(apart(["a"]))
    call, given_up = echo.call(1), echo.call(2)
    pass_time(loop, 60.0)
    assert not call.done() and echo.taken == []
    given_up.cancel()
    heal()
    pass_time(loop, SOON_S)
    assert call.result() == 1
    assert {number for _, number in echo.taken} == {1, 2}


def test_cut_of_the_way_back_alone_keeps_the_reply(loop, network, echo):
    """The request was carried out, and its sender does not know this."""
    heal = network.cut(one_way(["b"], ["a"]))
    call = echo.call(1)
    pass_time(loop, 10.0)
    assert echo.taken and not call.done()
    heal()
    pass_time(loop, SOON_S)
    assert call.result() == 1


def test_cuts_add_up(loop, network, echo):
    """A way is open when the last cut is healed; healing a cut twice does not heal another one."""
    heal_all, heal_one = network.cut(apart(["a"])), network.cut(one_way(["a"], ["b"]))
    call = echo.call(1)
    for heal in (heal_all, heal_all):
        heal()
    pass_time(loop, SOON_S)
    assert not call.done()
    heal_one()
    pass_time(loop, SOON_S)
    assert call.done()


def test_slow_and_lossy_ways_are_late(loop, network, echo):
    """Both make calls slower, and lose none."""
    heal = network.begin(NetworkFault(apart(["a"]), slow_s=1.0))
    echo.call(1)
    pass_time(loop, 3.0)
    heal()
    network.begin(NetworkFault(apart(["a"]), loss=0.5))
    calls = [echo.call(number) for number in range(2, 50)]
    began = loop.time() - BEGIN_S
    pass_time(loop, 60.0)
    assert all(call.done() for call in calls)
    assert echo.taken[0][0] > 1.0
    assert any(at - began > 0.2 for at, _ in echo.taken[1:])


def test_connections_that_break_lose_the_request_or_the_reply(loop, network, echo):
    """The caller gets the same error in both cases, and cannot distinguish them."""
    network.begin(NetworkFault(apart(["a"]), breaks=1.0))
    calls = [echo.call(number) for number in range(50)]
    pass_time(loop, SOON_S)
    assert all(isinstance(call.exception(), ConnectionResetError) for call in calls)
    assert 10 < len(echo.taken) < 40


def test_dead_service_refuses_and_resets_and_its_successor_answers(loop, echo):
    """Requests that it had taken are reset, later ones are refused, at once."""
    echo.process.freeze()
    taken = echo.call(1)
    pass_time(loop, SOON_S)
    assert not taken.done()
    echo.process.kill()
    refused = echo.call(2)
    pass_time(loop, SOON_S)
    assert isinstance(taken.exception(), ConnectionResetError)
    assert isinstance(refused.exception(), ConnectionRefusedError)
    echo.start()
    answered = echo.call(3)
    pass_time(loop, SOON_S)
    assert answered.result() == 3
    assert [number for _, number in echo.taken] == [3]


def test_frozen_service_answers_after_its_thaw(loop, echo):
    """It answers in the order of the requests."""
    echo.process.freeze()
    calls = [echo.call(number) for number in range(3)]
    pass_time(loop, 30.0)
    assert not any(call.done() for call in calls)
    echo.process.thaw()
    pass_time(loop, SOON_S)
    assert all(call.done() for call in calls)
    assert all(at == 30.0 for at, _ in echo.taken)


class Server(asyncio.Protocol):
    """The accepted side of connections, and what it received."""

    def __init__(self, heard: list) -> None:
        self.heard = heard

    def connection_made(self, transport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(b"hello")

    def data_received(self, data: bytes) -> None:
        self.heard.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.heard.append(error)


class Connected:
    """A server on host b, and one connection to it from host a."""

    def __init__(self, sockets: Sockets, timeout_s: float | None = None) -> None:
        loop = sockets.network.loop
        self.sockets, self.heard = sockets, []
        self.process = SimulatedProcess(loop, "server")
        self.process.run(asyncio.Event().wait())
        self.listener = sockets.listen("b", self.process, self._accept)
        self.end = loop.run(sockets.connect("a", "b", self.listener.port, timeout_s=timeout_s))
        pass_time(loop, SOON_S)
        assert loop.run(self.end.receive()) == b"hello"

    def _accept(self) -> Server:
        self.server = Server(self.heard)
        return self.server


def test_bytes_keep_their_order(loop, sockets):
    """This holds for packets of any latency, also over a cut."""
    pair = Connected(sockets)
    for number in range(50):
        pair.end.send(b"%d," % number)
    heal = sockets.network.cut(apart(["b"]))
    for number in range(50, 100):
        pair.end.send(b"%d," % number)
    pass_time(loop, 1.0)
    assert len(b"".join(pair.heard).split(b",")) == 51
    heal()
    pass_time(loop, SOON_S)
    assert b"".join(pair.heard) == b"".join(b"%d," % number for number in range(100))


def test_close_is_received_after_the_sent_data(loop, sockets):
    """After an orderly close the server gets None; if the server closes, the client receives b""."""
    pair = Connected(sockets)
    pair.end.send(b"bye")
    pair.end.close()
    pass_time(loop, SOON_S)
    assert pair.heard == [b"bye", None]
    other = Connected(sockets)
    other.server.transport.close()
    assert loop.run(other.end.receive()) == b""
    assert other.heard == [None]
    with pytest.raises(OSError) as closed:
        pair.end.send(b"more")
    assert closed.value.errno == errno.EBADF


def test_death_of_a_server_closes_what_it_has_accepted(loop, sockets):
    """Its kernel closes them; later connections are refused."""
    pair = Connected(sockets)
    pair.process.kill()
    assert loop.run(pair.end.receive()) == b""
    assert pair.heard == []
    with pytest.raises(ConnectionRefusedError):
        loop.run(sockets.connect("a", "b", pair.listener.port))


def test_a_close_with_unread_data_is_a_reset(loop, sockets):
    """Linux does the same; sending to a closed end also resets."""
    pair = Connected(sockets)
    pair.server.transport.write(b"unread")
    pass_time(loop, SOON_S)
    pair.end.close()
    pass_time(loop, SOON_S)
    assert isinstance(pair.heard[-1], ConnectionResetError)


def test_frozen_server_receives_later_and_its_kernel_accepts(loop, sockets):
    """A connection to it is established, and the data arrives at the thaw."""
    pair = Connected(sockets)
    pair.process.freeze()
    pair.end.send(b"one")
    second = loop.run(sockets.connect("c", "b", pair.listener.port), until_s=SOON_S)
    pass_time(loop, 10.0)
    assert pair.heard == [] and pair.end.silence_s() == 0.0
    pair.process.thaw()
    pass_time(loop, SOON_S)
    assert pair.heard == [b"one"]
    assert loop.run(second.receive()) == b"hello"


def test_broken_connection_is_reset_at_both_ends(loop, sockets):
    """A device between them resets it."""
    pair = Connected(sockets)
    pair.end.reset()
    pass_time(loop, SOON_S)
    assert isinstance(pair.heard[-1], ConnectionResetError)
    with pytest.raises(ConnectionResetError):
        loop.run(pair.end.receive())
    with pytest.raises(ConnectionResetError):
        pair.end.send(b"x")


def test_silence_is_measured_and_ends_an_impatient_connection(loop, sockets):
    """A cut causes silence; an end with a timeout gives up after it, the other end never does."""
    pair = Connected(sockets, timeout_s=15.0)
    heal = sockets.network.cut(apart(["a"]))
    pass_time(loop, 14.0)
    assert pair.end.silence_s() == pytest.approx(14.0)
    heal()
    assert pair.end.silence_s() == 0.0
    sockets.network.cut(one_way(["b"], ["a"]))
    pass_time(loop, 14.9)
    pair.end.send(b"still here")
    pass_time(loop, 0.2)
    with pytest.raises(TimeoutError):
        loop.run(pair.end.receive())
    with pytest.raises(OSError) as closed:
        pair.end.silence_s()
    assert closed.value.errno == errno.EBADF
    pass_time(loop, 3600.0)
    assert pair.heard == [b"still here"]


def test_host_without_power_sends_nothing(loop, sockets):
    """Nothing that its kernel had still to send is sent, not even when power is back; this includes the deaths of its
    processes."""
    pair = Connected(sockets)
    power_on = sockets.network.power_off("a")
    pair.end.send(b"x")
    pair.end.close()
    pass_time(loop, 10.0)
    power_on()
    pass_time(loop, 10.0)
    assert pair.heard == []
    pair.server.transport.write(b"are you there?")
    pass_time(loop, SOON_S)
    assert isinstance(pair.heard[-1], ConnectionResetError)


def test_connect_over_a_cut_waits_until_it_is_healed(loop, sockets):
    """If the caller has given up meanwhile, its kernel closes the connection when it is established."""
    pair = Connected(sockets)
    heal = sockets.network.cut(apart(["c"]))

    async def impatient() -> None:
        async with asyncio.timeout(5.0):
            await sockets.connect("c", "b", pair.listener.port)

    with pytest.raises(TimeoutError):
        loop.run(impatient())
    heal()
    pass_time(loop, SOON_S)
    assert isinstance(pair.heard[-1], ConnectionResetError | None)


def test_datagram_reaches_its_kernel_without_the_process(loop, sockets):
    """It is delivered without a step of the process; refused after the socket is closed; lost silently on a cut
    way."""
    got: list[bytes] = []
    mailbox, channel = sockets.bind("b", got.append), None
    channel = sockets.dial("a", "b", mailbox.port)
    channel.send(b"key")
    pass_time(loop, SOON_S)
    assert got == [b"key"]
    mailbox.close()
    channel.send(b"?")
    with pytest.raises(ConnectionRefusedError):
        loop.run(channel.receive())
    channel.send(b"?")
    pass_time(loop, SOON_S)
    with pytest.raises(ConnectionRefusedError):
        channel.send(b"?")
    pass_time(loop, SOON_S)
    heal = sockets.network.cut(one_way(["b"], ["a"]))
    silent = sockets.dial("a", "b", mailbox.port)
    silent.send(b"?")
    pass_time(loop, 10.0)
    heal()
    silent.send(b"?")
    assert got == [b"key"]


def test_same_seed_gives_the_same_network():
    """Every packet is the same."""

    def run(seed: int) -> list[tuple[float, int]]:
        loop = VirtualLoop()
        echo = Echo(SimulatedNetwork(loop, Random(seed)))
        for number in range(20):
            echo.call(number)
        pass_time(loop, SOON_S)
        loop.close()
        return echo.taken

    assert run(3) == run(3) != run(4)
