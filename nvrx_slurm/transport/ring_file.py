"""The file of a ring in shared memory: made whole or not at all, mapped, removed; and where everything lies in it.

Any user of the host may put files into /dev/shm. A file is a ring of this user only if the kernel says so of the
open descriptor: a regular file, owned by this user, with no rights for others. Only then are its bytes read (decision
0026).

A slot is stored in two moves: into the bank that is not in use, then, by one aligned store of 8 bytes, the word that
says which bank it is. A process that is killed between any two instructions leaves the slot in its old or its new
state.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import struct
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from msgspec.structs import astuple

from nvrx_slurm.transport import arguments, ring_locks
from nvrx_slurm.transport.errors import ForeignRing, RingError
from nvrx_slurm.transport.ref import LONGEST_SCHEMA, is_ring_name
from nvrx_slurm.transport.ring_locks import Lock, holding, initialize, namespace
from nvrx_slurm.transport.slots import FREE, READY, Counts, RingSlot, SlotOwner, SlotState
from nvrx_slurm.util.processes import runs

SHM = Path("/dev/shm")
_KIND = "shared_memory"
# What was registered with the resource tracker by this process, or by the one that it was forked from.
_tracked: set[str] = set()
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)


def make(folder: Path, name: str, size: int, fill: Callable[[mmap.mmap], None]) -> mmap.mmap:
    """Make a file of that name, 0600, with all its memory, and have `fill` write into it. Raises RingError."""
    # The file has no name until it has all its memory and its header: no process ever sees half a ring, and a creator
    # that is killed before leaves nothing. A creator that is killed later leaves the ring to the next `sweep`, or to
    # multiprocessing's resource tracker, once all of its family have ended.
    with _described(f"a ring of {size} bytes cannot be made in {folder}"):
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # With a umask such as 0277 the mode is less, and then no process can attach.
            os.fchmod(descriptor, 0o600)
            # All memory now: a page that tmpfs cannot give later would be a SIGBUS in the middle of a write.
            try:
                os.posix_fallocate(descriptor, 0, size)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                room = os.statvfs(folder)
                free = room.f_bavail * room.f_frsize
                raise RingError(
                    f"a ring of {size} bytes does not fit in {folder}, which has {free} free: make fewer or smaller "
                    f"slots, or give the node more (mount -o remount,size=... {folder})"
                ) from None
            memory = mmap.mmap(descriptor, size)
            fill(memory)
            # The resource tracker learns of the name first: at each moment the tracker or this process removes it.
            if folder == SHM:
                resource_tracker.register(f"/{name}", _KIND)
                _tracked.add(name)
            try:
                # Python passes AT_SYMLINK_FOLLOW only with a descriptor for the source; the path is absolute.
                source = f"/proc/self/fd/{descriptor}"
                os.link(source, folder / name, follow_symlinks=True, src_dir_fd=descriptor)
            except OSError:
                _untrack(name)
                raise
        finally:
            os.close(descriptor)
    return memory


def open_(folder: Path, name: str) -> tuple[mmap.mmap, Header]:
    """A ring that another process of this user has made. Raises RingError."""
    if not is_ring_name(name):
        raise RingError(f"{name!r} is no name of a ring")
    with _described(f"ring {name} cannot be attached"), _opened(folder / name, os.O_RDWR) as (descriptor, size):
        header = Header.unpack(os.pread(descriptor, HEADER_BYTES, 0), name)
        if header.creator.namespace != namespace():
            raise RingError(
                f"ring {name} was made in another namespace of process ids (another container): its locks and "
                "owners mean nothing here; read it through its server, or share the namespace"
            )
        # A lock is an address, which no view checks: in a file that is too short it may lie beyond the mapping.
        expected = checked(header.shape.slots, header.shape.slot_bytes).total_bytes
        if size != expected:
            raise RingError(f"ring {name} has {size} bytes where its header says {expected}: it was changed")
        return mmap.mmap(descriptor, size), header


@contextlib.contextmanager
def _opened(path: Path, access: int) -> Iterator[tuple[int, int]]:
    """The file's descriptor, and its size. Raises ForeignRing where `foreign` says so.

    Before that is asked, nothing is read from the file, mapped, or locked. O_NONBLOCK: to open a FIFO waits.
    """
    descriptor = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if (why := foreign(status)) is not None:
            raise ForeignRing(f"{path} is not used: {why}; a ring is a file of this user, mode 0600")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def foreign(status: os.stat_result) -> str | None:
    """Why a file may hold what another user has written; None where it cannot."""
    if not stat.S_ISREG(status.st_mode):
        return "it is no regular file"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    # With POSIX ACLs the group's bits are what the ACL grants at most.
    if status.st_mode & 0o077:
        return f"its mode {stat.S_IMODE(status.st_mode):04o} lets other users read or write it"
    if status.st_nlink > 1:
        return f"it has {status.st_nlink} names"
    return None


def remove(folder: Path, name: str, *, forget: bool) -> None:
    """Remove the ring's name. A process that has it mapped keeps its memory. `forget`: this process has made it."""
    (folder / name).unlink(missing_ok=True)
    if forget:
        _untrack(name)


def is_gone(name: str, folder: Path = SHM) -> bool:
    """Whether the ring has no name any more, or its creator is dead."""
    return not (folder / name).exists() or _is_orphan(folder / name)


def sweep(folder: str | Path = SHM) -> list[str]:
    """Remove the rings of this user whose creator is dead. Returns their names."""
    folder = arguments.folder(folder)
    paths, removed = list[Path](), list[str]()
    with contextlib.suppress(OSError):  # no descriptor is left, say: the next sweep removes them
        paths = sorted(folder.glob("nvrx-ring-*"))
    for path in paths:
        # Another process may sweep at the same time.
        with contextlib.suppress(OSError):
            # By its look first: files of others are not even opened.
            if foreign(path.lstat()) is None and _is_orphan(path):
                path.unlink()
                removed.append(path.name)
    return removed


def _untrack(name: str) -> None:
    # Only once: the tracker prints a traceback over a name that it does not know.
    if name in _tracked:
        _tracked.discard(name)
        resource_tracker.unregister(f"/{name}", _KIND)


def _is_orphan(path: Path) -> bool:
    with contextlib.suppress(OSError, ForeignRing):
        with _opened(path, os.O_RDONLY) as (descriptor, _):
            creator, _ = made_by(os.pread(descriptor, HEADER_BYTES, 0))
        # In another namespace this pid may be a different process, or none, while the creator lives.
        if creator is not None and creator.namespace == namespace():
            return not runs(creator.pid, creator.started_ticks)
    return False


@contextlib.contextmanager
def _described(what: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        why = "; was it unlinked, or did its creator die?" if is_ring_name(Path(error.filename).name) else ""
        raise RingError(f"{what}: there is no {error.filename}{why}") from None
    except OSError as error:
        raise RingError(f"{what}: {error}") from None


T = TypeVar("T")

_BANK = struct.Struct("=QQQQQQII6Q")  # owner (3), lease, size, checksum, whether there is one, schema, counts (6)
_BANK_QUADS = _BANK.size // 8
_SIZE, _CONSUMED, _RELEASED = 4, 8, 10  # where they are in it, in steps of 8 bytes
_STATE, _BANK_BIT, _GENERATION_SHIFT = 3, 4, 3
_STATES = tuple(SlotState)


class Glance(msgspec.Struct, frozen=True, gc=False):
    """What a slot's word says, read without the slot's lock: it was true a moment ago."""

    state: SlotState
    generation: int
    slot: int


class Memory:
    """One mapping of one ring: its slots as `slots.RingSlot` and back, its payloads, and the word that grows with
    each change.

    The mapping goes when the last object that looks at it has gone: a copy, a step of another thread, a user's array.
    Nothing unmaps it under them.
    """

    def __init__(self, mapped: mmap.mmap, layout: Layout, name: str) -> None:
        self.layout = layout
        self.view = memoryview(mapped)
        # While this object exists, the mapping cannot move or go.
        self._anchor = ctypes.c_char.from_buffer(mapped)
        start = ctypes.addressof(self._anchor)
        self.changes_address = start + CHANGES_AT
        self._changes = self.view[CHANGES_AT : CHANGES_AT + 4].cast("I")
        self._waiting = self.view[WAITING_AT : WAITING_AT + 4].cast("I")
        self._words = self.view[WORDS_AT : WORDS_AT + layout.slots * WORD_BYTES].cast("Q")
        self._quads = self.view[: layout.areas_at].cast("Q")
        self._locks = [Lock(start + layout.mutex_at(index), (name, index)) for index in range(layout.slots)]
        self._banks = [layout.banks_at(index) for index in range(layout.slots)]
        self._schemas = [layout.schema_at(index) for index in range(layout.slots)]
        self._payloads = [layout.payload_at(index) for index in range(layout.slots)]

    def initialize(self) -> None:
        """Make the mutexes, once, before the ring has a name. All else is zeros: slots are free."""
        for lock in self._locks:
            initialize(lock.address)

    def holding(self, index: int, act: Callable[[], T], patience_s: float) -> T:
        """What `act` returns under the slot's lock. Raises Contended."""
        return holding(self._locks[index], act, patience_s)

    def load(self, index: int) -> RingSlot:
        """Under its lock."""
        word = self._words[index]
        bank = self._banks[index] + BANK_BYTES * (word >> 2 & 1)
        found = _BANK.unpack_from(self.view, bank)
        lease_ns, size, checksum, has_checksum, schema_bytes = found[3:8]
        return RingSlot(
            _STATES[word & _STATE],
            word >> _GENERATION_SHIFT,
            SlotOwner(*found[:3]),
            lease_ns,
            size,
            checksum if has_checksum else None,
            schema_bytes,
            Counts(*found[8:]),
        )

    def store(self, index: int, slot: RingSlot) -> None:
        """Under its lock."""
        bit = ~self._words[index] & _BANK_BIT
        _BANK.pack_into(
            self.view,
            self._banks[index] + BANK_BYTES * (bit >> 2),
            *astuple(slot.owner),
            slot.lease_ns,
            slot.size,
            slot.checksum or 0,
            slot.checksum is not None,
            slot.schema_bytes,
            *astuple(slot.counts),
        )
        # The bank first, then the word: one aligned store of 8 bytes makes all of it visible at once. x86-64 keeps
        # the order of stores; on aarch64 the release of the mutex orders them for the next holder.
        self._words[index] = slot.generation << _GENERATION_SHIFT | bit | slot.state

    def take(self, index: int, generation: int, size: int, consumed: bool, patience_s: float) -> bool:
        """`slots.take` under the slot's lock, of the bytes as they lie there: a small read is hardly more than that.
        Raises Contended."""
        taken = holding(self._locks[index], partial(self._take, index, generation, size, consumed), patience_s)
        if taken and consumed:
            self.wake_waiting()
        return taken

    def _take(self, index: int, generation: int, size: int, consumed: bool) -> bool:
        word, quads = self._words[index], self._quads
        bit = word & _BANK_BIT
        here = self._banks[index] + BANK_BYTES * (bit >> 2) >> 3
        if word ^ bit != generation << _GENERATION_SHIFT | READY or quads[here + _SIZE] != size:
            return False
        bit ^= _BANK_BIT
        there = self._banks[index] + BANK_BYTES * (bit >> 2) >> 3
        quads[there : there + _BANK_QUADS] = quads[here : here + _BANK_QUADS]
        quads[there + (_CONSUMED if consumed else _RELEASED)] += 1
        self._words[index] = generation << _GENERATION_SHIFT | bit | (FREE if consumed else READY)
        return True

    def look(self, index: int) -> RingSlot:
        """Read the slot without its lock, which a stopped process may keep: the state that was last made visible."""
        # A bank is only written while the word names the other one. If the word is the same before and after, the
        # bank that was read was not written meanwhile.
        while True:
            word = self._words[index]
            slot = self.load(index)
            if self._words[index] == word:
                return slot

    def is_ready(self, index: int, generation: int) -> bool:
        """Whether the slot has a payload of that generation, read without its lock."""
        return self._words[index] & ~_BANK_BIT == generation << _GENERATION_SHIFT | READY

    def state(self, index: int) -> SlotState:
        return _STATES[self._words[index] & _STATE]

    def glance(self) -> list[Glance]:
        return [
            Glance(_STATES[word & _STATE], word >> _GENERATION_SHIFT, index)
            for index, word in enumerate(self._words.tolist())
        ]

    def free(self, start: int) -> Iterator[int]:
        """Slots that are free, without a lock, from `start` on and around: a slot rests for as long as it can."""
        words = self._words.tolist()
        for index in (*range(start, len(words)), *range(start)):
            if not words[index] & _STATE:
                yield index

    def latest_generation(self) -> int:
        return max(self._words.tolist()) >> _GENERATION_SHIFT

    def payload(self, index: int, size: int) -> memoryview:
        start = self._payloads[index]
        return self.view[start : start + size]

    def schema(self, index: int, size: int) -> memoryview:
        start = self._schemas[index]
        return self.view[start : start + size]

    def announce(self) -> int:
        """Call this before `wait`, which takes what it returns, and look at the slots once more in between: the next
        change then wakes the waiting processes. Changes wake no process where none waits, which saves a system call
        for each."""
        # The counter first: a change after it was read moves it, and `wait` returns at once.
        seen = self._changes[0]
        self._waiting[0] = 1
        return seen

    def wake_waiting(self) -> None:
        """A slot has changed: wake the processes that wait, if any."""
        if self._waiting[0]:
            # Cleared before the wake: later, it would erase the mark of a process that announced itself meanwhile.
            self._waiting[0] = 0
            ring_locks.wake_all(self.changes_address)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Wait until something has changed since `seen`, but not for long: the caller looks again."""
        ring_locks.wait(self.changes_address, seen, timeout_s)


MAGIC = b"nvrxring"
VERSION = 1
PAGE, LINE = 4096, 64
HEADER_BYTES = 128
CHANGES_AT, WAITING_AT = 128, 132
WORDS_AT = 192
# glibc's pthread_mutex_t has 40 bytes on x86-64 and 48 on aarch64: one cache line is enough for it.
WORD_BYTES, MUTEX_BYTES, BANK_BYTES = 8, 64, 128
CONTROL_BYTES = MUTEX_BYTES + 2 * BANK_BYTES
MOST_SLOTS = 1 << 16
MOST_BYTES = 1 << 46

_MADE_BY = struct.Struct("=8sIxxxxQQQ")
_SHAPE = struct.Struct("=IIQQ")
_OVERWRITE, _CHECKSUM = 1, 2


class Creator(NamedTuple):
    """The process that made the ring: its id, when it began, and the namespace in which that is its id."""

    pid: int
    started_ticks: int
    namespace: int


class RingShape(NamedTuple):
    """The parameters of a ring, as it was made."""

    slots: int
    slot_bytes: int
    overwrite: bool
    checksum: bool
    lease_ns: int


class Header(NamedTuple):
    """The header of the file."""

    creator: Creator
    shape: RingShape

    def pack(self) -> bytes:
        slots, slot_bytes, overwrite, checksum, lease_ns = self.shape
        flags = overwrite * _OVERWRITE | checksum * _CHECKSUM
        return _MADE_BY.pack(MAGIC, VERSION, *self.creator) + _SHAPE.pack(slots, flags, slot_bytes, lease_ns)

    @classmethod
    def unpack(cls, data: bytes, name: str) -> Header:
        """The header of these bytes. Raises RingError where they are none, or are of another version."""
        creator, version = made_by(data)
        if creator is None:
            raise RingError(f"{name} is not a ring")
        if version != VERSION:
            raise RingError(f"{name} is a ring of version {version}, this side knows {VERSION}: use one release")
        slots, flags, slot_bytes, lease_ns = _SHAPE.unpack_from(data, _MADE_BY.size)
        return cls(creator, RingShape(slots, slot_bytes, bool(flags & _OVERWRITE), bool(flags & _CHECKSUM), lease_ns))


def made_by(data: bytes) -> tuple[Creator | None, int]:
    """The creator and the version, of a ring of any version; no creator if these are not the first bytes of one."""
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        return None, 0
    _, version, *creator = _MADE_BY.unpack_from(data)
    return Creator(*creator), version


class Layout(NamedTuple):
    """Offsets in the file. Raises nothing: `checked` has looked at the numbers."""

    slots: int
    slot_bytes: int

    @property
    def controls_at(self) -> int:
        return up_to(LINE, WORDS_AT + self.slots * WORD_BYTES)

    @property
    def areas_at(self) -> int:
        return up_to(PAGE, self.controls_at + self.slots * CONTROL_BYTES)

    @property
    def area_bytes(self) -> int:
        return up_to(PAGE, LONGEST_SCHEMA + self.slot_bytes)

    @property
    def total_bytes(self) -> int:
        return self.areas_at + self.slots * self.area_bytes

    def mutex_at(self, index: int) -> int:
        return self.controls_at + index * CONTROL_BYTES

    def banks_at(self, index: int) -> int:
        return self.mutex_at(index) + MUTEX_BYTES

    def schema_at(self, index: int) -> int:
        return self.areas_at + index * self.area_bytes

    def payload_at(self, index: int) -> int:
        return self.schema_at(index) + LONGEST_SCHEMA


def checked(slots: int, slot_bytes: int) -> Layout:
    """The layout of such a ring. Raises RingError where it cannot be."""
    if not 1 <= slots <= MOST_SLOTS:
        raise RingError(f"slots must be 1 to {MOST_SLOTS}, it is {slots}")
    if not 1 <= slot_bytes <= MOST_BYTES:
        raise RingError(f"slot_bytes must be 1 to {MOST_BYTES}, it is {slot_bytes}")
    return Layout(slots, slot_bytes)


def up_to(boundary: int, number: int) -> int:
    return -(-number // boundary) * boundary
