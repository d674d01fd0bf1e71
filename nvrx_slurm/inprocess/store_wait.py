"""Frees a main thread that waits for a TCPStore of torch.distributed.

`init_process_group`, `new_group` and the first collective of NCCL wait, in native code, for what the other ranks
write into the store. For a rank that has died meanwhile they wait until a timeout of torch: no signal ends that, and
a TCPStore has no way to abort.

The connection that the thread waits for is shut down: the store's client raises a DistNetworkError then. The store
may be older than the iteration, and be used in the next one, but it cannot connect again. So it is given the
connection of another client, under the same file descriptor, once the main thread is out of the function. That the
server answers this client also shows that the connection is a store's: any other is left alone.

A thread that waits in no system call for a connection may wait for a peer of Gloo: `abort.connect_to_gloo`.

Seen in torch 2.13; source: torch/csrc/distributed/c10d/TCPStore.cpp, proc_pid_syscall(5).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvrx_slurm.inprocess.abort import connect_to_gloo
from nvrx_slurm.inprocess.own_sockets import duplicate, sockets
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.threads import in_thread

log = get_logger("inprocess")

# The numbers of poll(2) and ppoll(2), and of recvfrom(2).
_CALLS = {"x86_64": (("7", "271"), "45"), "aarch64": (("73",), "207")}
# A thread that waits for the number of workers asks the store every 10 ms, and sleeps in between.
_LOOKED_FOR_S = 0.3
_PAUSE_S = 0.0002
# For the server's first answers.
_ANSWERS_WITHIN = datetime.timedelta(seconds=2)
_LOOK_S = 0.02
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
_refused: set[Any] = set()  # addresses of servers that do not answer as a store: asked once in each interruption


def free_main_thread(is_free: Callable[[], bool]) -> None:
    """Cut the connection to a TCPStore that the main thread waits for; where it waits for none, stand in for peers of
    Gloo. From another thread, and only once the main one is to leave the function. Takes up to 0.3 s; up to 2 s more
    while a store does not answer and the thread is not free; for Gloo as long as `abort.cut_gloo_connections`."""
    try:
        _free_main_thread(is_free)
    except Exception:  # without it the thread waits until a timeout, as it would have
        log.exception("the main thread was not freed from native code")


def mend_stores() -> None:
    """Give the stores whose connection was cut, and which are still there, another one: when the main thread is out
    of the function, and no thread frees it."""
    _refused.clear()
    while _cut:
        cut = _cut.pop()
        with cut.kept, contextlib.suppress(OSError):  # the store then raises whenever it is used
            if not _is_open(cut.number, cut.kept):
                continue
            if (new := duplicate(cut.its_number)) is not None:
                with new:
                    for level, option in _OPTIONS:
                        new.setsockopt(level, option, cut.kept.getsockopt(level, option, 16))
                os.dup2(cut.its_number, cut.number, inheritable=False)


def _free_main_thread(is_free: Callable[[], bool]) -> None:
    store = getattr(sys.modules.get("torch.distributed"), "TCPStore", None)
    if store is None:
        return
    if (number := _awaited(is_free)) is None:
        if not is_free():
            connect_to_gloo(int(os.environ.get("WORLD_SIZE", "1")))
        return
    if any(_is_open(number, cut.kept) for cut in _cut) or (kept := _connection(number)) is None:
        return
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(kept).getpeername()
        if peer in _refused:
            return
        before = sockets()
        client = _client(store, peer, is_free)
        new = [each for name, each in sockets().items() if name not in before and _is_connected(each, peer)]
        if client is None or len(new) != 1 or not _is_open(number, kept):
            return
        _cut.append(_Cut(number, kept, client, new[0]))
        stack.pop_all()
        with contextlib.suppress(OSError):  # the server has ended it
            kept.shutdown(socket.SHUT_RDWR)
    log.info("restart in process: the main thread waits no longer for the store at %s:%d", *peer[:2])


def _client(store: Any, peer: Any, is_free: Callable[[], bool]) -> Any:
    """Another client of the store at this address; None if none answers there, or the main thread is free."""

    def connect() -> Any:
        made = store(peer[0], peer[1], is_master=False, wait_for_workers=False, timeout=_ANSWERS_WITHIN)
        made.check(["nvrx-slurm"])  # not all versions of torch ask the server anything before that
        return made

    future = in_thread(connect, "nvrx-store-client")
    end = time.monotonic() + _ANSWERS_WITHIN.total_seconds()
    while not concurrent.futures.wait([future], _LOOK_S).done and time.monotonic() < end:
        if is_free():
            return None
    if future.done() and future.exception() is None:
        return future.result()
    _refused.add(peer)
    why = future.exception() if future.done() else "it says nothing"
    log.warning("the main thread waits for %s:%d, which does not answer as a store: %s", *peer[:2], why)
    return None


def _awaited(is_free: Callable[[], bool]) -> int | None:
    """The file descriptor of the socket that the main thread waits for, in a system call."""
    polls, receive = _CALLS.get(platform.machine(), ((), ""))
    shown = Path(f"/proc/self/task/{threading.main_thread().native_id}/syscall")
    end = time.monotonic() + _LOOKED_FOR_S
    with contextlib.suppress(OSError), Path("/proc/self/mem").open("rb", 0) as memory:
        while not is_free() and time.monotonic() < end:
            text = shown.read_text()
            call = text.split()
            if call[0] == receive:
                return int(call[1], 16)
            if call[0] in polls and int(call[2], 16) == 1:
                # The first field of the only `struct pollfd`, unless the call has returned meanwhile.
                field = os.pread(memory.fileno(), 4, int(call[1], 16))
                number = int.from_bytes(field, sys.byteorder, signed=True)
                if number >= 0 and shown.read_text() == text:
                    return number
            time.sleep(_PAUSE_S)
    return None


def _connection(number: int) -> socket.socket | None:
    """A duplicate of a TCP connection; None if it is none."""
    connection = duplicate(number)
    if connection is None:
        return None
    with contextlib.suppress(OSError):  # it is not connected
        if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.getpeername()
            return connection
    connection.close()
    return None


def _is_connected(number: int, peer: Any) -> bool:
    connection = _connection(number)
    if connection is None:
        return False
    with connection:
        return bool(connection.getpeername() == peer)


def _is_open(number: int, connection: socket.socket) -> bool:
    """Whether the file descriptor is this connection's."""
    try:
        return os.path.samestat(os.fstat(number), os.fstat(connection.fileno()))
    except OSError:
        return False
