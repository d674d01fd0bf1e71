"""The fence: the controller has a node's workers killed by that node's own kernel, even while every process on it is
frozen.

The supervisor of a node holds a fence socket at one port number, for two protocols.

UDP kills: the socket's filter lets nothing through but the node's 32-byte fence key, and its owner is sent SIGKILL by
the kernel when a datagram arrives (fcntl(2), F_SETSIG). Workers die with their supervisor (prctl(2),
PR_SET_PDEATHSIG). No process needs to be scheduled for this, so it reaches a node on which every process is stopped:
its workers never take another step.

TCP proves a death: a listening socket that is never accepted from. The kernel answers for it while the supervisor
lives, frozen or not, and refuses connections (RST) once the supervisor has ended. The port does not become free then,
so no other user's process can answer in its place: the fence socket also holds both ends of one connection to the
port, of which the end at the port was shut down first. When both are closed, by any death, that end enters TIME_WAIT,
and for 60 s the kernel lets no process bind the port.

The key is derived from the job's token and the agent's incarnation, so it never travels before it is used, and is
worth nothing afterwards. Standard library only: the supervisor runs this without site-packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hmac
import socket
import struct

# For the key: ask only whether the supervisor is dead.
PROBE = b"?"

BACKLOG = 16
# A TCP port that the kernel gives may be taken for UDP.
TRIES = 16

# Bounds a connection of this host to itself.
OWN_CONNECTION_S = 5.0

_SO_ATTACH_FILTER = 26
_UDP_HEADER_BYTES = 8
# Classic BPF (linux/filter.h): code, jump if true, jump if false, operand.
_LOAD_LENGTH, _LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x80, 0x20, 0x15, 0x06
_DROP, _ACCEPT = 0, 0xFFFFFFFF


def key_of(token: str, incarnation: str) -> bytes:
    """The fence key of one agent process."""
    return hmac.digest(token.encode(), b"fence\0" + incarnation.encode(), "sha256")


class FenceSocket:
    """The sockets of a fence. They kill no process before the supervisor arms the first of them."""

    def __init__(self, datagrams: socket.socket, others: tuple[socket.socket, ...]) -> None:
        self._sockets = (datagrams, *others)

    def getsockname(self) -> tuple[str, int]:
        """Where it is reached."""
        host, port = self._sockets[0].getsockname()
        return str(host), int(port)

    def filenos(self) -> list[int]:
        """The socket to arm comes first."""
        return [each.fileno() for each in self._sockets]

    def close(self) -> None:
        for each in self._sockets:
            each.close()


def open_fence_socket(key: bytes, addr: str) -> FenceSocket:
    """A fence socket for `key` at a free port of `addr`, where the controller reaches it. Raises OSError."""
    for _ in range(TRIES - 1):
        try:
            return _open_once(key, addr)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return _open_once(key, addr)


def _open_once(key: bytes, addr: str) -> FenceSocket:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
        listener.bind((addr, 0))  # without SO_REUSEADDR: with it, others may bind a port that is in TIME_WAIT
        listener.listen(BACKLOG)
        datagrams = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC))
        # Filtered before it is bound: nothing may arrive before the filter is there.
        _let_only(datagrams, key)
        datagrams.bind(listener.getsockname())
        there = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
        there.settimeout(OWN_CONNECTION_S)
        there.connect(listener.getsockname())
        here = stack.enter_context(_accept_from(listener, there.getsockname()))
        here.shutdown(socket.SHUT_WR)  # this end first: so it is the one at the port that enters TIME_WAIT
        stack.pop_all()
        return FenceSocket(datagrams, (listener, here, there))


def _accept_from(listener: socket.socket, peer: tuple[str, int]) -> socket.socket:
    """The connection of that peer: others may connect at the same moment."""
    listener.settimeout(OWN_CONNECTION_S)
    while True:
        accepted, source = listener.accept()
        if source == peer:
            return accepted
        accepted.close()


def _let_only(datagrams: socket.socket, key: bytes) -> None:
    """Attach the filter: the datagram is as long as the key, and equal to it word by word; else it is dropped."""
    words = struct.unpack(f">{len(key) // 4}I", key)
    to_drop = 2 * len(words) + 1  # instructions from the first comparison to the last return
    program = [(_LOAD_LENGTH, 0, 0, 0), (_JUMP_IF_EQUAL, 0, to_drop, _UDP_HEADER_BYTES + len(key))]
    for index, word in enumerate(words):
        program.append((_LOAD_WORD, 0, 0, _UDP_HEADER_BYTES + 4 * index))
        program.append((_JUMP_IF_EQUAL, 0, to_drop - 2 * (index + 1), word))
    program += [(_RETURN, 0, 0, _ACCEPT), (_RETURN, 0, 0, _DROP)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    datagrams.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(code))
    )
