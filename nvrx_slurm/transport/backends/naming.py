"""The addresses of a host, in time: the system's resolver knows no deadline, and may be silent for a minute."""

from __future__ import annotations

import concurrent.futures
import os
import socket
import time
from functools import partial
from typing import Any

from nvrx_slurm.transport.errors import PayloadTimeout, PeerReset
from nvrx_slurm.util.threads import in_thread

KEPT_S = 300.0
MOST_HOSTS = 4096

Address = tuple[socket.AddressFamily, tuple[Any, ...]]
"""A family, and what its sockets connect to."""

_known: dict[tuple[str, int], tuple[float, list[Address]]] = {}
_asked: dict[tuple[str, int], concurrent.futures.Future[list[Address]]] = {}
"""Lookups that nobody has had the answer of: whoever comes next waits for the same one."""


def resolve(host: str, port: int, deadline: float) -> list[Address]:
    """Those of a host, one at least; kept for a while. Raises PayloadTimeout, and PeerReset where it has none."""
    until, addresses = _known.get((host, port), (0.0, []))
    if time.monotonic() < until:
        return addresses
    if len(_asked) >= MOST_HOSTS:
        _asked.clear()
    try:
        lookup = _asked.get((host, port)) or in_thread(partial(_look_up, host, port), f"look up {host}")
        _asked[host, port] = lookup
        addresses = lookup.result(max(0.0, deadline - time.monotonic()))
    except concurrent.futures.TimeoutError:
        raise PayloadTimeout(f"the address of host {host} could not be found in time") from None
    except (OSError, UnicodeError, RuntimeError) as error:  # the last one: there are no more threads
        _asked.pop((host, port), None)
        raise PeerReset(f"host {host} is not known here: {getattr(error, 'strerror', None) or error}") from None
    _asked.pop((host, port), None)
    if len(_known) >= MOST_HOSTS:
        _known.clear()
    _known[host, port] = time.monotonic() + KEPT_S, addresses
    return addresses


def forget(host: str, port: int) -> None:
    """Nobody has answered there: the name may be another machine's by now."""
    _known.pop((host, port), None)


def _look_up(host: str, port: int) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]


os.register_at_fork(after_in_child=_asked.clear)  # who looks up is not in the child
