"""UCX's own TCP sockets, found among the descriptors of this process: UCX has no way to ask for them.

What UCX's listener has accepted keeps a pointer to it until it has said who it is. UCX destroys a listener without
looking for these, and what they say next kills the process. So it is destroyed when there are none of them.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
_ADDRESS = struct.Struct("=H2s12x")

# A socket.socket of a descriptor that is not ours could make it a non-blocking one: socket.setdefaulttimeout.
_libc = ctypes.CDLL(None)


def has_connections(port: int) -> bool:
    """Whether UCX has any that was accepted on `port`, however broken."""
    return any(not _option(descriptor, socket.SO_ACCEPTCONN) for descriptor in _bound_to(port))


def _bound_to(port: int) -> Iterator[int]:
    """TCP sockets over IPv4, in whatever state they are."""
    where = ctypes.create_string_buffer(_ADDRESS.size)
    for descriptor in _descriptors():
        size = ctypes.c_uint(_ADDRESS.size)
        if _libc.getsockname(descriptor, where, ctypes.byref(size)):
            continue  # no socket, or closed just now
        is_here = _ADDRESS.unpack(where) == (socket.AF_INET, port.to_bytes(2, "big"))
        if is_here and _option(descriptor, socket.SO_TYPE) == socket.SOCK_STREAM:
            yield descriptor


def _option(descriptor: int, name: int) -> int:
    value, size = ctypes.c_int(), ctypes.c_uint(ctypes.sizeof(ctypes.c_int))
    _libc.getsockopt(descriptor, socket.SOL_SOCKET, name, ctypes.byref(value), ctypes.byref(size))
    return value.value


def _descriptors() -> list[int]:
    return [int(path.name) for path in _DESCRIPTORS.iterdir()]
