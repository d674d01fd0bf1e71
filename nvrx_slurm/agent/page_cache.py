"""Files that a worker of this node would load, read into the page cache beforehand (`prewarm.read`).

A look lists the files that match, newest first, takes as many as fit into `memory`, and reads those that it has not
read before. It runs in a thread that nothing waits for, one at a time: where a file system does not answer, that
thread stays behind and there are no more looks.

**A promoted node stops reading** (`stop` when it gets its ranks). Its workers now load the same files, in an order
that only they know. What is in the page cache serves them; every further read delays theirs. The idle I/O priority
does not prevent that: it is an order among the requests to a local disk, and network file systems do not have it.
When `stop` returns, at most one read of `CHUNK_BYTES` is under way, and what the kernel reads ahead of it. For the
same reason a node that has ranks does not look before its workers have ended a checkpoint: until then they load.

**When to look.** A node with ranks learns from its workers that a section named `checkpoint…` has ended
(`workload.section`). A standby node does not: no agent reports checkpoints, and inotify does not see what other nodes
write. So it lists the files every `EVERY_S`, and less often where listing takes long: the pause is at least 20 times
as long as the look, so that spare nodes load a metadata server with 5 % of a process at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import glob
import os
import platform
import random
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec

from nvrx_slurm.diagnostics.resources import available_bytes, format_size, memory_cgroup
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.threads import awaitable_thread
from nvrx_slurm.workload.slot import Reading

log = get_logger("agent")

# How often a standby node looks, and a node with ranks after a look that found something new.
EVERY_S = 30.0

# All nodes of a replica end a checkpoint at once; they look within so many seconds, each at a moment of its own.
SPREAD_S = 5.0

# How many times as long as a look the pause after it is, at least.
REST = 20

# What is read between two questions whether to stop.
CHUNK_BYTES = 1 << 20

# Without a bound: a fourth of the memory that the node has available.
DEFAULT_SHARE = 4

# Of one look. A pattern that matches more is a mistake, as `/**` is.
MOST_FILES = 100_000

# What `{rank}` is for a node that has no ranks.
ANY_RANK = "[0-9]*"

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
_IOPRIO_WHO_PROCESS, _IOPRIO_CLASS_IDLE, _IOPRIO_CLASS_SHIFT = 1, 3, 13

# Device, inode, time of the last change in ns, size.
_Key = tuple[int, int, int, int]


class _Order(msgspec.Struct):
    """What to read. `is_over`: set by the loop, read by the thread between two chunks."""

    patterns: tuple[str, ...]
    workdir: Path
    memory: int | None
    ranks: tuple[int, ...] | None
    is_over: bool = False


class Found(msgspec.Struct, frozen=True):
    """A file that matches."""

    path: str
    key: _Key

    @property
    def changed_ns(self) -> int:
        return self.key[2]

    @property
    def size(self) -> int:
        return self.key[3]


class Look(msgspec.Struct):
    """What one look has read. `problem`: of the first file that could not be read."""

    files: int = 0
    size: int = 0
    took_s: float = 0.0
    problem: str = ""


class PageCache(msgspec.Struct):
    """Every method is called from the event loop, and returns at once. `every_s`, `spread_s`: for tests."""

    clock: Clock
    every_s: float = EVERY_S
    spread_s: float = SPREAD_S
    files: int = 0  # read so far, by all looks
    size: int = 0
    _order: _Order | None = None
    _running: asyncio.Future[Look] | None = None
    _again: bool = False  # look again when the thread has ended
    _timer: asyncio.TimerHandle | None = None
    _checkpoints: int = 0
    _read: set[_Key] = set()  # the thread's own: there is only one

    def begin(
        self, patterns: Sequence[str], workdir: str | Path, memory: int | None, ranks: Iterable[int] | None = None
    ) -> None:
        """Read from now on what matches, at most `memory` bytes of it. `ranks` None: this node is standby, and looks
        now and every 30 s; with ranks it looks after a checkpoint only.

        A pattern is a glob (`**` too), relative to `workdir` or absolute; `{rank}` in it is each of the ranks.
        """
        self.stop()
        self._checkpoints = 0
        if patterns:
            numbers = None if ranks is None else tuple(sorted(ranks))
            self._order = _Order(tuple(patterns), Path(workdir), memory, numbers)
            if ranks is None:
                self.look()

    def saw(self, readings: Mapping[int, Reading]) -> None:
        """Look soon if the workers have ended another checkpoint."""
        ended = sum(
            count
            for reading in readings.values()
            for name, (count, _) in reading.seen.items()
            if name.startswith("checkpoint")
        )
        if ended > self._checkpoints and self._order is not None:
            self._look_in(random.uniform(0.0, self.spread_s))
        self._checkpoints = ended

    def look(self) -> None:
        """Look now; after the look that is under way, if there is one."""
        order = self._order
        if order is None:
            return
        self._cancel_timer()
        self._again = self._running is not None
        if self._running is None:
            self._running = awaitable_thread(partial(self._look, order), "page cache")
            self._running.add_done_callback(partial(self._looked, order))

    def stop(self) -> None:
        """Read no more, until the next `begin`. A thread that is in the middle of a read holds up nothing."""
        self._cancel_timer()
        self._again = False
        if self._order is not None:
            self._order.is_over = True
            self._order = None

    def _look_in(self, seconds: float) -> None:
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.look)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _looked(self, order: _Order, done: asyncio.Future[Look]) -> None:
        self._running = None
        look = Look(problem=repr(error)) if (error := done.exception()) is not None else done.result()
        self.files += look.files
        self.size += look.size
        if look.problem:
            log.warning("prewarm.read: %s", look.problem)
        if look.files:
            log.info("page cache: read %d files, %s, in %.1f s", look.files, format_size(look.size), look.took_s)
        if self._again:
            self.look()
        elif order is self._order and self._timer is None and (order.ranks is None or look.files):
            # With ranks: another node may not have written its part of the checkpoint yet.
            self._look_in(max(self.every_s, REST * look.took_s))

    # ---- in a thread

    def _look(self, order: _Order) -> Look:
        began, look = self.clock.monotonic(), Look()
        _be_idle()
        found = []
        for each in matching(order.patterns, order.workdir, order.ranks):
            if order.is_over:
                return look
            found.append(each)
        found.sort(key=lambda each: (-each.changed_ns, each.path))
        self._read.intersection_update([each.key for each in found])  # forget what is there no more
        left = available_bytes(memory_cgroup()) // DEFAULT_SHARE if order.memory is None else order.memory
        for each in found:
            if left <= 0 or order.is_over:
                break
            size = min(left, each.size)
            left -= size
            if each.key not in self._read:
                try:
                    if not _read_into_cache(each.path, size, order):
                        break
                    look.files += 1
                    look.size += size
                except OSError as error:
                    look.problem = look.problem or f"{each.path}: {error.strerror}"
                self._read.add(each.key)  # one that cannot be read is not tried again before it changes
        look.took_s = self.clock.monotonic() - began
        return look


def matching(patterns: Iterable[str], workdir: Path, ranks: Sequence[int] | None) -> Iterator[Found]:
    """Each file that matches, once; by the path under which it was found first. `ranks` None: any rank's."""
    seen = set()
    numbers = (ANY_RANK,) if ranks is None else ranks
    written = dict.fromkeys(pattern.replace("{rank}", str(rank)) for pattern in patterns for rank in numbers)
    base = glob.escape(str(workdir))
    paths = (path for each in written for path in glob.iglob(os.path.join(base, each), recursive=True))  # noqa: PTH118, PTH207  pathlib's glob takes no absolute pattern
    for path in islice(paths, MOST_FILES):
        with contextlib.suppress(OSError):  # a checkpoint that is being removed
            about = os.stat(path)  # noqa: PTH116  as above
            key = (about.st_dev, about.st_ino, about.st_mtime_ns, about.st_size)
            if stat.S_ISREG(about.st_mode) and key not in seen:
                seen.add(key)
                yield Found(path, key)


def _read_into_cache(path: str, size: int, order: _Order) -> bool:
    """Read the file's first bytes, and drop them. False: the order is over. Raises OSError."""
    # Reads, not POSIX_FADV_WILLNEED: that returns while the kernel still reads, so a stop would leave up to gigabytes
    # of requests in the queue that the workers' own reads then wait in.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may be a FIFO by now
    try:
        buffer = bytearray(min(CHUNK_BYTES, size))
        at = 0
        while at < size:
            if order.is_over:
                return False
            got = os.preadv(descriptor, [memoryview(buffer)[: size - at]], at)  # releases the GIL
            if got == 0:  # it has become shorter
                break
            at += got
    finally:
        os.close(descriptor)
    return True


def _be_idle() -> None:
    """This thread's reads are served when the disk has no others (ioprio_set(2)): by BFQ and mq-deadline."""
    # Not its share of the processor: a thread of low priority that holds the interpreter's lock holds up the agent.
    if (number := _IOPRIO_SET.get(platform.machine())) is not None:
        priority = _IOPRIO_CLASS_IDLE << _IOPRIO_CLASS_SHIFT
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, priority)  # refused: it reads at the usual one
