"""What processes use of the network beside calls: connections, listeners and datagrams, as their kernels have them.

A socket belongs to a host, not to a process. Whoever knows that its last holder is dead closes it
(`process.on_death(end.close)`); a listener, and what it has accepted, close with their process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvrx_slurm.lab.faults.futures import settle
from nvrx_slurm.lab.simulation.connections import End, Listener
from nvrx_slurm.lab.simulation.datagrams import Dialled, Mailbox
from nvrx_slurm.lab.simulation.network import Network
from nvrx_slurm.lab.simulation.process import Process


class Sockets:
    """Every host's sockets."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._listeners: dict[tuple[str, int], Listener] = {}
        self._mailboxes: dict[tuple[str, int], Mailbox] = {}
        self._impatient: list[End] = []
        network.when_cut(self._watch_silence)

    def listen(self, host: str, process: Process, protocol: Callable[[], asyncio.Protocol]) -> Listener:
        """Accept connections for a process, as `loop.create_server` does."""
        at = host, self.network.new_port()
        self._listeners[at] = listener = Listener(at[1], process, protocol, lambda: self._listeners.pop(at, None))
        process.on_death(listener.close)
        return listener

    async def connect(self, source: str, host: str, port: int, *, timeout_s: float | None = None) -> End:
        """A connection from `source`. Raises ConnectionRefusedError where nobody listens; waits while a way is cut.

        `timeout_s`: after so long without a sign of the other host its kernel gives the connection up
        (TCP_USER_TIMEOUT); None: never.
        """
        network = self.network
        there, back = network.way(source, host), network.way(host, source)
        future: asyncio.Future[End] = network.loop.create_future()

        def arrive(delay_s: float) -> None:
            network.loop.call_outside(delay_s, accept)

        def accept() -> None:
            if (listener := self._listeners.get((host, port))) is None:
                reply(ConnectionRefusedError("Connection refused"))
                return
            near, far = End(network, there), End(network, back)
            near.peer, far.peer = far, near
            listener.accept(far)
            reply(near)

        def reply(result: End | OSError) -> None:
            network.carry(back, lambda delay_s: network.loop.call_outside(delay_s, land, result))

        def land(result: End | OSError) -> None:
            if future.done() and isinstance(result, End):
                result.close()
            settle(future, result)

        network.carry(there, arrive)
        end = await future
        if timeout_s is not None:
            end.timeout_s = timeout_s
            self._impatient = [each for each in self._impatient if not (each.closed or each.is_over)]
            self._impatient.append(end)
        return end

    def bind(self, host: str, delivered: Callable[[bytes], object]) -> Mailbox:
        """Take datagrams: `delivered` is called with each by the kernel, whoever is frozen, until it is closed."""
        at = host, self.network.new_port()
        self._mailboxes[at] = mailbox = Mailbox(*at, delivered, lambda: self._mailboxes.pop(at, None))
        return mailbox

    def dial(self, source: str, host: str, port: int) -> Dialled:
        """A datagram socket that was connect(2)ed to a port."""
        return Dialled(self.network, source, host, lambda: self._mailboxes.get((host, port)))

    def _watch_silence(self) -> None:
        for end in self._impatient:
            end.watch_silence()
