"""Callbacks that free the main thread of a rank when an iteration has failed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import functools
import itertools
import os
import resource
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvrx_slurm.inprocess.callback_support import bounded
from nvrx_slurm.inprocess.exception import TimeoutError
from nvrx_slurm.inprocess.own_sockets import duplicate
from nvrx_slurm.inprocess.state import Callback, FrozenState
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.threads import in_thread

log = get_logger("inprocess")


class Abort(Callback):
    """Frees the main thread, which may wait in a collective for a rank that is gone: only then can it be restarted.

    Called once an iteration has failed, in another thread than the main one, while no atomic section is open. What it
    raises is logged, and the restart goes on. `Compose` makes one of several.
    """


@dataclass(frozen=True)
class AbortTorchDistributed(Abort):
    """Aborts the collectives of all process groups of torch.distributed, at once, and destroys the groups.

    NCCL: each communicator is aborted, in a thread of its own, since one may wait for another. Gloo: all connections
    of this process are cut, so that a thread that waits in a collective gets a RuntimeError. The groups' objects are
    kept until nothing of the function is left: see `drop_aborted_groups`. A main thread that waits for others in
    `init_process_group` or `new_group` is freed after the abort: see `store_wait`.

    Does nothing unless this process has imported torch and has a process group. Raises TimeoutError when aborting, or
    destroying, takes longer than `timeout`; the groups are then left as they are.
    """

    timeout: datetime.timedelta = datetime.timedelta(seconds=30)

    def __call__(self, state: FrozenState) -> FrozenState:
        distributed = _distributed()
        if distributed is not None:
            world = distributed.distributed_c10d._world
            if cut_gloo_connections() is None and any("gloo" in str(backend) for backend, _ in world.pg_map.values()):
                log.warning("the threads of Gloo cannot be seen: only the timeout of a collective ends a wait in it")
            groups = list(world.pg_names)
            _aborted.extend(groups)
            work = [
                in_thread(functools.partial(_abort, group), f"abort-{place}") for place, group in enumerate(groups)
            ]
            concurrent.futures.wait(work, self.timeout.total_seconds())
            if stuck := sum(not each.done() for each in work):
                seconds = self.timeout.total_seconds()
                raise TimeoutError(f"{stuck} of {len(work)} process groups are not aborted after {seconds:g} s")
            for error in filter(None, (each.exception() for each in work)):
                log.warning("aborting a process group failed: %s", error)
            bounded(
                distributed.destroy_process_group, self.timeout, f"destroying the process groups of rank {state.rank}"
            )
        # torch names groups by a count in this process, which it resets only when an initialised group is destroyed.
        # A rank that was interrupted inside of `init_process_group` would be ahead of the others, and would wait for
        # them under another name for ever.
        world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
        if world is not None and _distributed() is None:
            world.group_count = 0
        return state


_aborted: list[Any] = []  # the process groups of an iteration that has failed


def drop_aborted_groups() -> None:
    """Drop the process groups that were aborted, once nothing of the function is left, from any thread.

    The destructor of a Gloo group waits for the group's threads, which may wait for the GIL to clean up after a
    collective. The group's Python object releases the GIL for that. Other holders do not: if a
    DistributedDataParallel held the last reference, the process would hang. Seen in torch 2.13, about once in a
    hundred restarts.
    """
    _aborted.clear()


class AbortTransformerEngine(Abort):
    """Frees the user buffers of TransformerEngine. Does nothing unless this process has imported it."""

    def __call__(self, state: FrozenState) -> FrozenState:
        engine = sys.modules.get("transformer_engine.pytorch")
        if engine is not None:
            engine.module.base.destroy_ub()
        return state


def has_process_group() -> bool:
    """Whether this process has a process group of torch.distributed."""
    return _distributed() is not None


def _distributed() -> Any | None:
    """torch.distributed, if this process has it loaded to its end, and has a process group."""
    distributed = sys.modules.get("torch.distributed")
    is_initialized = getattr(distributed, "is_initialized", None)
    return distributed if is_initialized is not None and is_initialized() else None


def _abort(group: Any) -> None:
    if hasattr(group, "abort"):  # torch 2.6 and later
        group.abort()
        return
    backend = group._get_backend(sys.modules["torch"].device("cuda"))
    if hasattr(backend, "_shutdown"):
        # NCCL's: it aborts, in these versions.
        backend._shutdown()


# ---- Gloo
#
# Gloo cannot abort. A collective ends by its timeout (half an hour), or when a connection ends: Gloo takes that for a
# dead peer, and raises. So each connection is shut down for reading, and Gloo's loop reads its end at once.
#
# It is left open for writing, and a duplicate of it stays open until all ranks are out of the function: while a write
# fails with EPIPE or ECONNRESET, Gloo keeps the send in a queue, and does not tell that send of the end that it reads
# then (`tx_` in pair.cc). A rank that found its peer's connections closed waited for such a send until the timeout.
#
# Gloo keeps the file descriptor, and closes it. Its listening sockets are left alone: an error on one ends the
# process.
#
# Gloo's sockets are those that its loops wait for. Each loop is a thread named `gloo_tcp_loop`, nearly always in
# epoll_wait, whose first argument is the file descriptor of the loop's set. Seen in torch 2.13; source:
# gloo/transport/tcp/{loop,pair,listener}.cc, proc_pid_syscall(5), proc_pid_fdinfo(5).

_LOOP = "gloo_tcp_loop"
# A loop that handles an event is back in epoll_wait after some microseconds, but may first wait for a processor.
_LOOKED_FOR_S = 5.0
# A loop that has run for so long meanwhile does not wait. It spins when data comes for a collective that has failed.
_SPUN_FOR_S = 0.2
_PAUSE_S = 0.0002

# For the kernel's answer: the peer is in this process.
_CONNECTED_WITHIN_S = 1.0

_cut: list[socket.socket] = []
_answered: set[int] = set()  # the inodes of listening sockets, once in an interruption


def cut_gloo_connections() -> int | None:
    """Shut down all Gloo connections of this process, from any thread. Returns how many; None if Gloo was not found,
    or one of its loops was not.

    A thread that waits for one of them gets a RuntimeError from Gloo within milliseconds. The call takes a few
    milliseconds; on a machine that gives Gloo's loop no processor, up to five seconds. The peers do not see it before
    `close_cut_connections`.
    """
    loops = _loops()
    watched = [_watched(loop) for loop in loops]
    members = itertools.chain.from_iterable(filter(None, watched))
    cut = list(filter(None, itertools.starmap(_shut_down, members)))
    _cut.extend(cut)
    return None if not loops or None in watched else len(cut)


def connect_to_gloo(peers: int) -> None:
    """Connect to each of Gloo's listening sockets of this process, as so many peers would, from any thread.

    A rank that has written its address into the store, and has died before it connected, is waited for on a condition
    variable, which only a connection ends. Each of these is closed at once, so the thread that waits gets a
    RuntimeError. A peer says first, in eight bytes, for which of the expected connections it has come: they are
    numbered from 0 on. Gloo keeps one that it does not expect until the group is destroyed. Where the process may not
    have so many open files, nothing is done: without a file descriptor Gloo's loop would end it.
    """
    free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(list(Path("/proc/self/fd").iterdir()))
    for number, inode in itertools.chain.from_iterable(filter(None, map(_watched, _loops()))):
        if inode in _answered or 2 * peers > free or (listener := duplicate(number)) is None:
            continue
        with contextlib.suppress(OSError), listener:
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                _answered.add(inode)
                free -= peers
                for place in range(peers):
                    with socket.create_connection(listener.getsockname()[:2], _CONNECTED_WITHIN_S) as peer:
                        peer.sendall(place.to_bytes(8, sys.byteorder))


def close_cut_connections() -> None:
    """Close the connections that were cut, once no rank is in the function any more."""
    _answered.clear()
    while _cut:
        _cut.pop().close()


def _loops() -> list[Path]:
    return [task for task in Path("/proc/self/task").iterdir() if _name(task) == _LOOP]


def _name(task: Path) -> str:
    with contextlib.suppress(OSError):  # it has ended
        return (task / "comm").read_text().strip()
    return ""


def _ran_s(task: Path) -> float:
    """The processor time of a thread."""
    with contextlib.suppress(OSError):  # it has ended
        user, system = (task / "stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _watched(loop: Path) -> list[tuple[int, int]] | None:
    """The file descriptors that a loop waits for, each with its inode. None if that cannot be seen."""
    end, ran_s = time.monotonic() + _LOOKED_FOR_S, _ran_s(loop)
    while time.monotonic() < end and _ran_s(loop) < ran_s + _SPUN_FOR_S:
        try:
            call = (loop / "syscall").read_text().split()
        except OSError:
            # It has ended, or the kernel does not show what a thread waits for.
            return None if _name(loop) else []
        with contextlib.suppress(OSError):  # the descriptor was closed
            if len(call) > 1:
                lines = Path(f"/proc/self/fdinfo/{int(call[1], 16)}").read_text().splitlines()
                # Of an epoll set the kernel writes a line for each member, and for any other descriptor none:
                # tfd:       20 events:       19 data:     55dc37a95a60  pos:0 ino:a24d9d sdev:9
                members = [line.replace(":", ": ").split() for line in lines if line.startswith("tfd:")]
                if members:
                    return [(int(words[1]), int(words[words.index("ino:") + 1], 16)) for words in members]
        time.sleep(_PAUSE_S)
    return None


def _shut_down(number: int, inode: int) -> socket.socket | None:
    """Shut a connection down for reading. Returns a duplicate of it, or None if it was none: a descriptor that is
    another file by now is left alone."""
    connection = duplicate(number)
    if connection is None:
        return None
    with contextlib.suppress(OSError):  # it is not connected yet, or no longer
        is_same = os.fstat(connection.fileno()).st_ino == inode
        if is_same and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RD)
            return connection
    connection.close()
    return None
