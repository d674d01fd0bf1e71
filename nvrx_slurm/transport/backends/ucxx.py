"""UCX through its binding ucxx: RDMA where the system's UCX has it, TCP where there is none.

A connection begins as a socket of `tcp.py`, by which both ends learn where the other's worker is. Decision 0022 has
what UCX's own listener would cost here.
"""

from __future__ import annotations

from collections.abc import Callable

from nvrx_slurm.transport.backends.port import Link
from nvrx_slurm.transport.backends.tcp import TcpBackend, TcpListener
from nvrx_slurm.transport.backends.ucx.engine import engine
from nvrx_slurm.transport.backends.ucx.link import accept, connect

SCHEME = "ucxx"


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

    def listen(self, host: str, port: int, serve: Callable[[Link], None]) -> TcpListener:
        return self._sockets.listen(host, port, lambda socket: accept(engine(), socket, self._token, serve))
