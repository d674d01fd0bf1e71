"""A client's quarantine of sick ports, over real sockets, with a clock that the test advances."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from nvrx_slurm.transport import fetching
from nvrx_slurm.transport.client import PayloadClient
from nvrx_slurm.transport.errors import PeerReset
from nvrx_slurm.transport.protocol import PeerLink
from nvrx_slurm.transport.retrying import GROWTH, JITTER, QUARANTINE_S
from nvrx_slurm.transport.ring import SharedRing
from nvrx_slurm.transport.server import PayloadServer
from nvrx_slurm.transport.tcp import TcpBackend
from tests.transport.harness import TOKEN

READS = 4
LONGEST_FIRST_S = QUARANTINE_S * (1 + JITTER)


class CountingBackend(TcpBackend):
    """Records which ports are asked, and refuses those in `down`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.down: set[str] = set()

    def connect(self, address: str, deadline: float) -> PeerLink:
        self.asked.append(address)
        if address in self.down:
            raise PeerReset("it is down")
        return super().connect(address, deadline)


class Reader:
    """A client of one server with two ports, which connects for each read."""

    def __init__(self, server: PayloadServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + self.ahead_s)
        monkeypatch.setattr(fetching, "time", clock)
        self._server = server
        self.client = PayloadClient(token=TOKEN, transports=("tcp",), keep_s=0.0)
        self.backend = CountingBackend()
        self.client._fetcher._backends["tcp"] = self.backend

    def ports_asked(self) -> set[str]:
        """The ports that some reads asked; each of these reads succeeds."""
        self.backend.asked.clear()
        for number in range(READS):
            ref = self._server.write(bytes([number]))
            assert self.client._fetcher.read(ref, time.monotonic() + self.ahead_s + 30.0) == bytes([number])
        return set(self.backend.asked)


@pytest.fixture
def server() -> Iterator[PayloadServer]:
    with SharedRing.create(4, 64) as ring, PayloadServer(ring, ports=2, host="127.0.0.1", token=TOKEN) as server:
        yield server


@pytest.fixture
def reader(server: PayloadServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    reader = Reader(server, monkeypatch)
    yield reader
    reader.client.close()


def test_a_port_is_asked_again_when_its_quarantine_is_over(reader: Reader, server: PayloadServer) -> None:
    """Until then it is not asked, although it is healthy again."""
    sick, well = server.ports
    reader.backend.down = {sick}
    assert reader.ports_asked() == {sick, well}
    reader.backend.down = set()
    assert reader.ports_asked() == {well}
    reader.ahead_s += LONGEST_FIRST_S
    assert reader.ports_asked() == {sick, well}


def test_a_success_ends_the_history_of_a_port(reader: Reader, server: PayloadServer) -> None:
    """Its next quarantine is as short as a first one, however many there were before."""
    sick, well = server.ports
    for failures in range(3):
        reader.backend.down = {sick}
        assert reader.ports_asked() == {sick, well}, failures
        reader.backend.down = set()
        reader.ahead_s += LONGEST_FIRST_S
        assert reader.ports_asked() == {sick, well}, failures


def test_a_port_that_fails_again_is_left_alone_for_longer(reader: Reader, server: PayloadServer) -> None:
    """The quarantine is twice as long after each failure without a success in between."""
    sick, well = server.ports
    reader.backend.down = {sick}
    reader.ports_asked()
    reader.ahead_s += LONGEST_FIRST_S
    assert reader.ports_asked() == {sick, well}
    reader.backend.down = set()
    reader.ahead_s += LONGEST_FIRST_S
    assert reader.ports_asked() == {well}
    reader.ahead_s += GROWTH * LONGEST_FIRST_S
    assert reader.ports_asked() == {sick, well}
