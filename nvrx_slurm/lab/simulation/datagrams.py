"""Datagrams: they may be lost; a kernel refuses those that nobody is there to take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from nvrx_slurm.lab.simulation.network import Network, Way


class Mailbox:
    """A bound datagram socket. After `close` its kernel refuses what comes."""

    def __init__(
        self, host: str, port: int, delivered: Callable[[bytes], object], closed: Callable[[], object]
    ) -> None:
        self.host, self.port, self.delivered, self.close = host, port, delivered, closed


class Dialled:
    """A datagram socket that was connect(2)ed: it hears when the other kernel refuses."""

    def __init__(self, network: Network, source: str, target: str, mailbox: Callable[[], Mailbox | None]) -> None:
        self._network, self._mailbox = network, mailbox
        self._there, self._back = network.way(source, target), network.way(target, source)
        self._refused = asyncio.Event()

    def send(self, data: bytes) -> None:
        """It may be lost. Raises ConnectionRefusedError if an earlier one was refused since."""
        self._raise_refused()
        self._fly(self._there, partial(self._arrive, data))

    async def receive(self) -> None:
        """Nothing ever comes; raises ConnectionRefusedError once one was refused."""
        await self._refused.wait()
        self._raise_refused()

    def _raise_refused(self) -> None:
        if self._refused.is_set():
            self._refused.clear()
            raise ConnectionRefusedError("Connection refused")

    def _arrive(self, data: bytes) -> None:
        if (mailbox := self._mailbox()) is None:
            self._fly(self._back, self._refused.set)  # ICMP: port unreachable
        else:
            mailbox.delivered(data)

    def _fly(self, way: Way, arrive: Callable[[], object]) -> None:
        network = self._network
        if not network.is_lost(way):
            network.loop.call_outside(network.delay_s(way), arrive)
