"""UCX through its binding ucxx: RDMA where the system's UCX has it, TCP where there is none."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from nvrx_slurm.transport.backends.naming import forget, resolve
from nvrx_slurm.transport.backends.port import Link, host_and_port
from nvrx_slurm.transport.backends.ucx.engine import engine
from nvrx_slurm.transport.backends.ucx.link import SCHEME, UcxxListener, connect
from nvrx_slurm.transport.errors import PayloadTimeout, PeerReset, TransportError


class UcxxBackend:
    """UCX starts with the first of these in a process, which takes some 0.3 s.

    Raises PeerRefused, which says what to install or to do, where it cannot be.
    """

    scheme = SCHEME

    def __init__(self) -> None:
        engine()

    def connect(self, address: str, deadline: float) -> Link:
        try:
            host, port = host_and_port(address)
        except ValueError as error:
            raise PeerReset(str(error)) from None
        found = [where for family, where in resolve(host, port, deadline) if family is socket.AF_INET]
        if not found:
            raise PeerReset(f"host {host} has no IPv4 address, and UCX is used with no other")
        if time.monotonic() >= deadline:
            raise PayloadTimeout("there was no time left to connect")
        try:
            return connect(engine(), found[0][0], port, deadline)
        except TransportError:
            forget(host, port)
            raise

    def listen(self, host: str, port: int, serve: Callable[[Link], None]) -> UcxxListener:
        """On all interfaces, whatever `host` is: the binding knows no other way. IPv4 only, for the same reason."""
        return UcxxListener(engine(), host, port, serve)
