"""Which address of the batch host the other nodes can use."""

from __future__ import annotations

import ipaddress
import socket

from nvrx_slurm.journal.folder import LOOPBACK
from nvrx_slurm.liveness.connection import address_towards

_ANY_OUTSIDE = "10.255.255.255"  # never sent to: it only makes the kernel choose the interface that leads outside


def advertised_address() -> str:
    """The IPv4 address that this host's name stands for; else that of the default route; else loopback."""
    for address in _addresses_of(socket.gethostname()):
        if not ipaddress.ip_address(address).is_loopback:
            return address
    return default_route_address()


def default_route_address() -> str:
    """The IPv4 address of the interface that leads outside; else loopback."""
    try:
        return address_towards(_ANY_OUTSIDE)
    except OSError:
        return LOOPBACK


def _addresses_of(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]) for entry in found]
