"""Calls to a service of another host, each on a connection of its own: what the store's client needs."""

from __future__ import annotations

import asyncio
from typing import Any

from nvrx_slurm.lab.faults.futures import settle
from nvrx_slurm.lab.faults.valkey.client import Request
from nvrx_slurm.lab.simulation.network import Network, Way
from nvrx_slurm.lab.simulation.process import Process

RESET = "Connection reset by peer"


class Service:
    """Listens on a host while a process serves it: alive, it answers; frozen, after its thaw; dead, its kernel
    refuses. A call that it has taken and not answered when it dies is reset."""

    def __init__(self, network: Network, host: str) -> None:
        self.network, self.host = network, host
        self.process: Process | None = None
        self.open: dict[Call, None] = {}  # in the order in which they were taken

    def served_by(self, process: Process) -> None:
        """This process listens from now on, until it dies."""
        self.process = process
        process.on_death(self._reset_all)

    def _reset_all(self) -> None:
        for call in list(self.open):
            call.answer(ConnectionResetError(RESET))


class ServiceLink:
    """The way from one host to a service, and back (a `testing.valkey.Link`)."""

    def __init__(self, source: str, service: Service) -> None:
        self._service, self._network = service, service.network
        self._there, self._back = self._network.way(source, service.host), self._network.way(service.host, source)

    def call(self, request: Request) -> asyncio.Future[Any]:
        """The answer, or OSError where the connection is refused or breaks; on a cut way nothing, until it heals."""
        network, there = self._network, self._there
        call = Call(self._service, request, self._back)
        if there.breaks and network.chance.random() < there.breaks:
            call.is_broken = True
            if network.chance.random() < 0.5:
                call.answer(None)  # before it has arrived
                return call.future
        network.carry(there, call.leave)
        return call.future


class Call:
    """One request on its way there, and the reply on its way back. `is_broken`: no reply comes through."""

    __slots__ = ("_back", "_process", "_reply", "_request", "_service", "future", "is_broken")

    def __init__(self, service: Service, request: Request, back: Way) -> None:
        self._service, self._request, self._back = service, request, back
        self._process = service.process
        self._reply: Any = None
        self.future: asyncio.Future[Any] = service.network.loop.create_future()
        self.is_broken = False

    def leave(self, delay_s: float) -> None:
        """The request is under way."""
        process = self._process
        if process is None or not process.alive:
            self.answer(ConnectionRefusedError("Connection refused"))
        else:
            self._service.open[self] = None
            process.call_later(delay_s, self._request, self.answer)

    def answer(self, reply: Any) -> None:
        """Send the reply, or the exception that stands for one."""
        self._service.open.pop(self, None)
        self._reply = ConnectionResetError(RESET) if self.is_broken else reply
        self._service.network.carry(self._back, self._return)

    def _return(self, delay_s: float) -> None:
        self._service.network.loop.call_outside(delay_s, settle, self.future, self._reply)
