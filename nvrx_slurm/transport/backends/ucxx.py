"""UCX through its binding ucxx: RDMA where the system's UCX has it, TCP where there is none.

A connection begins as a socket of `tcp.py`, by which both ends learn where the other's worker is. Decision 0022 has
what UCX's own listener would cost here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nvrx_slurm.transport.backends.port import Door, Entry, Link
from nvrx_slurm.transport.backends.tcp import TcpBackend, TcpLink, TcpListener
from nvrx_slurm.transport.backends.ucx.engine import engine
from nvrx_slurm.transport.backends.ucx.hello import HelloDoor
from nvrx_slurm.transport.backends.ucx.link import accept, connect
from nvrx_slurm.transport.errors import TransportError
from nvrx_slurm.transport.handshake import pass_through
from nvrx_slurm.util.log import get_logger

SCHEME = "ucxx"

_log = get_logger("transport")


class UcxxBackend:
    """UCX starts with the first of these in a process, which takes some 0.3 s. It hears of nobody who does not know
    the `token`.

    Raises PeerRefused, which says what to install or to do, where it cannot be.
    """

    scheme = SCHEME

    def __init__(self, token: bytes) -> None:
        engine()
        self._token = token
        self._sockets = TcpBackend(SCHEME)

    def connect(self, address: str, deadline: float) -> Link:
        ours = engine()
        socket = self._sockets.connect(address, deadline)
        try:
            return connect(ours, socket, self._token, deadline)
        except BaseException:
            socket.close()
            raise

    def listen(self, host: str, port: int, serve: Callable[[Link], None], entry: Entry | None = None) -> TcpListener:
        """A connection passes two doors: one on its socket, and `entry` over UCX."""

        def admit(link: Link) -> None:
            try:
                is_in = entry is None or pass_through(link, entry.door(), time.monotonic() + entry.within_s)
            except TransportError as error:
                _log.debug("a connection came to nothing: %s", error)
            else:
                if is_in:
                    serve(link)

        def begin(socket: TcpLink, door: Door | None) -> None:
            assert isinstance(door, HelloDoor)
            accept(engine(), socket, door.hello, self._token, admit)

        return self._sockets.listen_behind(host, port, begin, Entry(lambda: HelloDoor(self._token)))
