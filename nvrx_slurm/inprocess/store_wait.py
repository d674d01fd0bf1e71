"""Frees a main thread that waits for a TCPStore of torch.distributed.

`init_process_group`, `new_group` and the first collective of NCCL wait, in native code, for what the other ranks
write into the store. For a rank that has died meanwhile they wait until a timeout of torch: no signal ends that, and
a TCPStore has no way to abort.

The connection that the thread waits for is shut down for reading: the store's client raises a DistNetworkError then.
The store may be older than the iteration, and be used in the next one, but it cannot connect again. So it is given
the connection of another client, under the same file descriptor, once all ranks are out of the function. That the
server takes this client also shows that the connection is a store's: any other is left alone.

Seen in torch 2.13; source: torch/csrc/distributed/c10d/TCPStore.cpp, proc_pid_syscall(5).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvrx_slurm.inprocess.callback_support import bounded
from nvrx_slurm.util.log import get_logger

log = get_logger("inprocess")

# The numbers of poll(2) and ppoll(2), and of recvfrom(2).
_CALLS = {"x86_64": (("7", "271"), "45"), "aarch64": (("73",), "207")}
# A thread that waits for the number of workers asks the store every 10 ms, and sleeps in between.
_LOOKED_FOR_S = 0.3
_PAUSE_S = 0.0002
# For the server's first answer.
_CONNECTED_WITHIN = datetime.timedelta(seconds=2)
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_RCVTIMEO),
    (socket.SOL_SOCKET, socket.SO_SNDTIMEO),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY),
)


@dataclass(frozen=True)
class _Cut:
    """A store's connection that was cut. `kept`: a duplicate of it; `client`: the one that has `its_number` open."""

    number: int
    kept: socket.socket
    client: Any
    its_number: int


_cut: list[_Cut] = []


def free_main_thread(is_free: Callable[[], bool]) -> None:
    """Cut the connection to a TCPStore that the main thread waits for, if any; from another thread, and only once the
    main one is to leave the function. Takes up to 0.3 s, and 2 s more where a store does not answer."""
    store = getattr(sys.modules.get("torch.distributed"), "TCPStore", None)
    if store is None or (number := _awaited(is_free)) is None or (kept := _connection(number)) is None:
        return
    host, port = kept.getpeername()[:2]
    try:
        before = _connections_to(kept)
        client = bounded(
            lambda: store(host, port, is_master=False, wait_for_workers=False, timeout=_CONNECTED_WITHIN),
            _CONNECTED_WITHIN,
            f"connecting to the store at {host}:{port}",
        )
        (its_number,) = _connections_to(kept) - before
    except Exception as error:
        log.warning("the main thread waits for %s:%d, which does not answer as a store: %s", host, port, error)
        kept.close()
        return
    if _is_open(number, kept):
        with contextlib.suppress(OSError):  # the server has ended it
            kept.shutdown(socket.SHUT_RD)
    _cut.append(_Cut(number, kept, client, its_number))
    log.info("restart in process: the main thread waits no longer for the store at %s:%d", host, port)


def mend_stores() -> None:
    """Give the stores whose connection was cut, and which are still there, another one; once the main thread is out
    of the function."""
    while _cut:
        cut = _cut.pop()
        with cut.kept:
            if _is_open(cut.number, cut.kept):
                with socket.socket(fileno=os.dup(cut.its_number)) as new:
                    for level, option in _OPTIONS:
                        new.setsockopt(level, option, cut.kept.getsockopt(level, option, 16))
                os.dup2(cut.its_number, cut.number, inheritable=False)


def _awaited(is_free: Callable[[], bool]) -> int | None:
    """The file descriptor of the socket that the main thread waits for, in a system call."""
    polls, receive = _CALLS.get(platform.machine(), ((), ""))
    task = Path(f"/proc/self/task/{threading.main_thread().native_id}")
    end = time.monotonic() + _LOOKED_FOR_S
    with contextlib.suppress(OSError), Path("/proc/self/mem").open("rb", 0) as memory:
        while not is_free() and time.monotonic() < end:
            call = (task / "syscall").read_text().split()
            if call[0] == receive:
                return int(call[1], 16)
            if call[0] in polls and int(call[2], 16) == 1:
                # The first field of the only `struct pollfd`.
                return int.from_bytes(os.pread(memory.fileno(), 4, int(call[1], 16)), sys.byteorder)
            time.sleep(_PAUSE_S)
    return None


def _connection(number: int) -> socket.socket | None:
    """A duplicate of a TCP connection; None if it is none."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # it is closed, or not connected
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            connection = stack.enter_context(socket.socket(fileno=os.dup(number)))
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()
                stack.pop_all()
                return connection
    return None


def _connections_to(other: socket.socket) -> set[int]:
    """The connections of this process to the same server."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        if (connection := _connection(int(path.name))) is not None:
            with connection:
                if connection.getpeername() == other.getpeername():
                    found.add(int(path.name))
    return found


def _is_open(number: int, connection: socket.socket) -> bool:
    """Whether the file descriptor is this connection's."""
    try:
        return os.fstat(number).st_ino == os.fstat(connection.fileno()).st_ino
    except OSError:
        return False
