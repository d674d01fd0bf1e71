"""Free TCP ports that stay free: below the range from which the kernel serves outgoing connections."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable
from pathlib import Path

from nvrx_slurm.errors import NvrxError

_LOWEST = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES_PER_PORT = 200


def free_ports(count: int, taken: Iterable[int] = ()) -> list[int]:
    """`count` different ports on which nothing listens now, none of them in `taken`.

    A port of the kernel's ephemeral range would do for a moment, but a daemon that is restarted later on the same
    port could find it used by somebody's outgoing connection. Raises NvrxError when none is left.
    """
    refused, ports = set(taken), list[int]()
    for _ in range(count * _TRIES_PER_PORT):
        if len(ports) == count:
            return ports
        port = random.randrange(_LOWEST, _ephemeral_start())
        if port not in refused and _is_free(port):
            ports.append(port)
        refused.add(port)
    raise NvrxError(f"no {count} free TCP ports between {_LOWEST} and {_ephemeral_start()} on this machine")


def _ephemeral_start() -> int:
    try:
        start = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        start = 32_768
    return start if start > _LOWEST + 1_000 else 60_000


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the daemons do
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
