"""The fence: how the controller has a node's workers killed by that node's own kernel, even while all on it is
frozen.

The supervisor of a node holds a *trap*: a UDP socket whose filter lets nothing through but the node's 32-byte fence
key, and whose owner the kernel sends SIGKILL when a datagram arrives (fcntl(2), F_SETSIG). Workers die with their
supervisor (prctl(2), PR_SET_PDEATHSIG). No process needs to be scheduled for this, so it reaches a node on which
every process is stopped: its workers never take another step.

It also proves a death: the trap closes when the supervisor ends, and from then on the kernel refuses datagrams for
that port (ICMP port unreachable, which connect(2)ed senders see as ECONNREFUSED). Anything but the key is dropped
unseen, so a probe harms nobody.

The key is derived from the job's token and the agent's incarnation, so it never travels before it is used, and is
worth nothing afterwards. Standard library only: the supervisor runs this without site-packages.
"""

from __future__ import annotations

import ctypes
import hmac
import socket
import struct

KEY_BYTES = 32
PROBE = b"?"

_SO_ATTACH_FILTER = 26
_UDP_HEADER_BYTES = 8
# Classic BPF (linux/filter.h): code, jump if true, jump if false, operand.
_LOAD_LENGTH, _LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x80, 0x20, 0x15, 0x06
_DROP, _ACCEPT = 0, 0xFFFFFFFF


def key_of(token: str, incarnation: str) -> bytes:
    """The fence key of one agent process."""
    return hmac.digest(token.encode(), b"fence\0" + incarnation.encode(), "sha256")


def open_trap(key: bytes) -> socket.socket:
    """A bound UDP socket that lets only `key` through. It kills nobody before the supervisor arms it. Raises
    OSError."""
    trap = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        _let_only(trap, key)
        trap.bind(("", 0))
    except OSError:
        trap.close()
        raise
    return trap


def _let_only(trap: socket.socket, key: bytes) -> None:
    """Attach the filter: the datagram is as long as the key, and equal to it word by word; else it is dropped."""
    words = struct.unpack(f">{len(key) // 4}I", key)
    to_drop = 2 * len(words) + 1  # instructions from the first comparison to the last return
    program = [(_LOAD_LENGTH, 0, 0, 0), (_JUMP_IF_EQUAL, 0, to_drop, _UDP_HEADER_BYTES + len(key))]
    for index, word in enumerate(words):
        program.append((_LOAD_WORD, 0, 0, _UDP_HEADER_BYTES + 4 * index))
        program.append((_JUMP_IF_EQUAL, 0, to_drop - 2 * (index + 1), word))
    program += [(_RETURN, 0, 0, _ACCEPT), (_RETURN, 0, 0, _DROP)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    trap.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(code)))
