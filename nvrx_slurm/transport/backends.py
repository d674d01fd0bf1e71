"""How bytes get from one process to another. `protocol.Backend` is the interface; all pass one contract suite.

shm.py     the ring itself, on the same node
tcp.py     sockets; no dependency
ucxx.py    UCX: RDMA, or TCP where there is none; ucxx_engine.py and ucxx_peer.py are its one thread
"""

from __future__ import annotations

from nvrx_slurm.errors import UsageError
from nvrx_slurm.transport.protocol import Backend

SCHEMES = ("tcp", "ucxx")  # what a server can listen with


def by_scheme(scheme: str, token: bytes = b"") -> Backend:
    """The backend of that name. `token`: what both ends know; some prove it before the protocol's own hello. Raises
    UsageError for a name that is none, PeerRefused where its library is not installed."""
    if scheme == "tcp":
        from nvrx_slurm.transport.tcp import TcpBackend

        return TcpBackend()
    if scheme == "ucxx":
        from nvrx_slurm.transport.ucxx import UcxxBackend

        return UcxxBackend(token)
    raise UsageError(f"transport {scheme!r} is none of {', '.join(SCHEMES)}")
