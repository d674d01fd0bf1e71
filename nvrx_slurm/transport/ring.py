"""`SharedRing`: slots in shared memory that producers write payloads into, and consumers on the node read from."""

from __future__ import annotations

import contextlib
import math
import mmap
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from nvrx_slurm.errors import UsageError
from nvrx_slurm.transport import arguments, codec, copying, ring_file, ring_locks
from nvrx_slurm.transport.errors import (
    PayloadCorrupt,
    PayloadTimeout,
    RingError,
    RingFull,
    StaleSlotError,
    TransportError,
)
from nvrx_slurm.transport.ref import LONGEST_SCHEMA, PayloadRef
from nvrx_slurm.transport.ring_access import HELD, Claim, Steps, Writing, lease_end
from nvrx_slurm.transport.ring_file import Creator, Glance, Header, Layout, Memory, RingShape, checked, is_gone, sweep
from nvrx_slurm.transport.ring_locks import OwnedAttempt, namespace, this_process
from nvrx_slurm.transport.slots import Counts, Refusal, RingSlot, SlotOwner, SlotState

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Claim", "RingHandle", "RingMetrics", "SharedRing", "Writing", "is_gone", "sweep"]

WRITE_PATIENCE_S = 0.05  # how long a writer that finds nothing else waits for the lock of each slot
_NOTHING = object()
_GONE = (Refusal.STALE, Refusal.CONSUMED)
# Looks at the slots while other processes are faster. After the last one, what is left of it is good enough.
_LOOKS = (*[False] * 15, True)


@dataclass(frozen=True, slots=True)
class RingHandle:
    """What another process on the node needs to attach."""

    name: str
    folder: str = str(ring_file.SHM)


class RingMetrics(NamedTuple):
    """What a ring has seen so far, as `slots.Counts`, summed over its slots; and how many slots are in each state.

    Once no write and no read is under way, published = consumed + dropped + READY.
    """

    published: int
    consumed: int
    dropped: int
    released: int
    lapsed: int
    late: int
    states: dict[SlotState, int]


class SharedRing:
    """A ring, made by `create` or found by `attach`. Any thread and process may use it; after a fork, the child too.

    As a context it is closed at the end, and by its creator also unlinked. Once it is closed, every use raises
    RingError. Writes and reads raise PayloadTimeout where a stopped process keeps a slot's lock for seconds.
    """

    def __init__(self, memory: Memory, name: str, header: Header, folder: Path, *, allow_pickle: bool) -> None:
        self.name = name
        self.slots, self.slot_bytes = header.shape.slots, header.shape.slot_bytes
        self.overwrite, self.checksum = header.shape.overwrite, header.shape.checksum
        self.lease_s = header.shape.lease_ns / 1e9
        self._creator, self._folder, self._allow_pickle = header.creator, folder, allow_pickle
        self._open: Steps | None = Steps(memory, name)
        self._is_linked = True
        # Whether this object has made it, or the object that a fork has copied.
        self._is_made_here = False
        self._cursor = 0

    @classmethod
    def create(
        cls,
        slots: int = 8,
        slot_bytes: int = 64 << 20,
        *,
        overwrite: bool = True,
        checksum: bool = True,
        lease_s: float = 30.0,
        allow_pickle: bool = False,
        folder: str | Path = ring_file.SHM,
    ) -> SharedRing:
        """A new ring with all its memory, readable by this user alone, and for as long as this process lives.

        `overwrite`: a write that finds no free slot takes the oldest payload that no reader has; else it is RingFull.
        `checksum`: each payload gets one, and reads check it. `lease_s`: how long a read may take until
        its payload is ready again for others. `allow_pickle`: what only pickle can take apart and put together may be
        written and read through this object. `folder`: a file system in memory, the same in all processes.

        First removes rings whose creator has died. Raises RingError where the ring cannot be.
        """
        if not (lease_s := arguments.lease(lease_s)) > 0:
            raise RingError(f"lease_s must be more than 0, it is {lease_s:g}")
        for named, value in (("overwrite", overwrite), ("checksum", checksum)):
            arguments.instance(named, value, bool)
        if not ring_locks.is_supported():
            raise RingError("rings are for Linux on x86-64 and aarch64")
        folder = arguments.folder(folder)
        slots, slot_bytes = arguments.whole("slots", slots, 0), arguments.whole("slot_bytes", slot_bytes, 0)
        layout = checked(slots, slot_bytes)
        # Before the new ring takes its memory: what killed creators have left may fill the folder.
        ring_file.sweep(folder)
        creator = Creator(*this_process(), namespace())
        header = Header(creator, RingShape(slots, slot_bytes, overwrite, checksum, int(lease_s * 1e9)))
        name = f"nvrx-ring-{creator.pid}-{creator.started_ticks}-{secrets.token_hex(6)}"

        def fill(mapped: mmap.mmap) -> None:
            packed = header.pack()
            mapped[: len(packed)] = packed
            Memory(mapped, layout, name).initialize()

        mapped = ring_file.make(folder, name, layout.total_bytes, fill)
        ring = cls(Memory(mapped, layout, name), name, header, folder, allow_pickle=allow_pickle)
        ring._is_made_here = True
        return ring

    @classmethod
    def attach(
        cls, ring: RingHandle | str, *, allow_pickle: bool = False, folder: str | Path = ring_file.SHM
    ) -> SharedRing:
        """A ring that a process of this node has made, by its handle or its name. Raises RingError."""
        name, folder = (ring.name, ring.folder) if isinstance(ring, RingHandle) else (ring, folder)
        name, folder = arguments.instance("ring (its handle or its name)", name, str), arguments.folder(folder)
        mapped, header = ring_file.open_(folder, name)
        memory = Memory(mapped, Layout(header.shape.slots, header.shape.slot_bytes), name)
        return cls(memory, name, header, folder, allow_pickle=allow_pickle)

    @property
    def handle(self) -> RingHandle:
        return RingHandle(self.name, str(self._folder))

    @property
    def memory(self) -> memoryview:
        """All of the ring's memory, for hardware that reads from it. A claim's `payload` lies in it."""
        return self._steps.memory.view

    # ---- writing

    def write(self, obj: object, *, timeout_s: float = 0.0) -> PayloadRef:
        """Write an object (`codec` says which). Raises TransportError where it cannot be sent, and as `begin`."""
        encoded = codec.encode(obj, allow_pickle=self._allow_pickle)
        return self.write_raw(encoded.buffers, encoded.schema, timeout_s=timeout_s)

    def write_raw(
        self, buffers: Buffer | Sequence[Buffer], schema: str = "", *, timeout_s: float = 0.0
    ) -> PayloadRef:
        """Write bytes, one buffer behind the other. Raises as `begin`."""
        pieces = [copying.as_bytes(piece) for piece in (buffers if isinstance(buffers, list | tuple) else (buffers,))]
        writing = self.begin(sum(piece.nbytes for piece in pieces), schema, timeout_s=timeout_s)
        try:
            offset = 0
            for piece in pieces:
                writing.copy_in(offset, piece)
                offset += piece.nbytes
            return writing.publish()
        except BaseException:
            writing.drop()
            raise

    def begin(self, size: int, schema: str = "", *, timeout_s: float = 0.0) -> Writing:
        """A slot for a payload of `size` bytes. A free one; else, where the ring overwrites, the one that was written
        longest ago and that no reader has; else it waits for one.

        Raises RingFull after `timeout_s`, and RingError where the payload or its schema fits in no slot.
        """
        steps = self._steps
        try:
            described = arguments.instance("schema", schema, str).encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"schema: {error}") from None
        timeout_s = _timeout(timeout_s)
        until = time.monotonic() + timeout_s
        size = arguments.whole("size", size, 0)
        if not 0 <= size <= self.slot_bytes:
            raise RingError(
                f"a payload of {size} bytes does not fit in a slot of {self.slot_bytes} bytes (slot_bytes)"
            )
        if len(described) > LONGEST_SCHEMA:
            raise RingError(f"a schema of {len(described)} bytes is longer than {LONGEST_SCHEMA} bytes")
        # An exception may come after a slot was taken, and before a `Writing` has it: then `disown` gives it back.
        attempt = OwnedAttempt(id(steps))
        try:
            found = self._slot_for(attempt.owner, until)
            if found is not None:
                return Writing(steps, attempt, *found, size, described, checksum=self.checksum)
        except BaseException:
            steps.disown(attempt.owner)
            raise
        states = Counter(glance.state.name for glance in self._steps.memory.glance())
        why = ", ".join(f"{count} {name}" for name, count in states.items())
        raise RingFull(f"ring {self.name} has no slot for another payload ({why}) after {timeout_s:g} s")

    # ---- reading

    def read(self, ref: PayloadRef | None = None, *, timeout_s: float | None = None, consume: bool = True) -> Any:
        """The object of that ref, or the one that was written longest ago of those that are ready; waits for it.

        It is the reader's own copy. The slot is free afterwards or, without `consume`, ready again. `timeout_s`: None
        waits for as long as it takes. Raises StaleSlotError where that payload is gone,
        PayloadTimeout, and PayloadCorrupt (its `ref` names the payload, which stays: `settle` removes it).
        """
        return self._waited(lambda: self._read(ref, consume), ref, timeout_s)

    def try_read(self, ref: PayloadRef | None = None, *, consume: bool = True) -> Any:
        """The same at once, or None: nothing is ready, or another reader has it now; or the payload is None."""
        read = self._read(ref, consume)
        return None if read is _NOTHING else read

    @contextlib.contextmanager
    def view(
        self,
        ref: PayloadRef | None = None,
        *,
        timeout_s: float | None = None,
        keep: bool = False,
        lease_s: float | None = None,
        check: bool = True,
    ) -> Iterator[Any]:
        """The object as `read` gives it, without a copy: it lies in the ring, read-only, until the block is left.

        `check`: compare its checksum first, which reads all of it once (some 10 GB/s); without, a view of any size
        takes microseconds. Raises PayloadCorrupt where it differs.

        Then the payload is consumed or, with `keep` or after an error, ready again. What still looks at it shows
        other payloads from then on. Raises StaleSlotError at the end where the block took longer than the lease
        (`lease_s`, else the ring's): others may have written there meanwhile.
        """
        claim = self._waited(lambda: self._claimed(ref, lease_s) or _NOTHING, ref, timeout_s)
        assert isinstance(claim, Claim)
        try:
            if check:
                try:
                    claim.check("" if ref is None else ref.checksum)
                except PayloadCorrupt as error:
                    # A writer that has the slot by now changes the checksum, too: that payload is stale, not corrupt.
                    if not claim.is_ours():
                        raise StaleSlotError(
                            f"slot {claim.slot}@{claim.generation}: its lease was shorter than the check of its sum",
                            ref=ref,
                        ) from None
                    error.ref = ref or claim.ref
                    raise
            yield codec.decode(claim.schema, claim.payload, allow_pickle=self._allow_pickle)
        except BaseException:
            claim.drop()
            raise
        if not claim.finish(consumed=not keep):
            raise StaleSlotError(
                f"slot {claim.slot}@{claim.generation} was viewed for longer than its lease", ref=ref
            )

    def claim(self, slot: int, generation: int | None = None, lease_s: float | None = None) -> Claim | Refusal:
        """Take the payload of that slot and generation (None: any), for `lease_s` seconds (None: the ring's).

        Waits for a slot's lock for a twentieth of a second at most, and then calls it BUSY.
        """
        steps = self._steps
        until_ns = lease_end(self.lease_s if lease_s is None else arguments.lease(lease_s))
        if not isinstance(slot, int) or not isinstance(generation, int | None):
            raise UsageError(f"slot and generation are whole numbers, not {slot!r} and {generation!r}")
        attempt = OwnedAttempt(id(steps))
        try:
            claimed = steps.claim(slot, generation, attempt.owner, until_ns)
            return claimed if isinstance(claimed, Refusal) else Claim(steps, attempt, slot, claimed)
        except BaseException:
            steps.disown(attempt.owner)
            raise

    def claim_ref(self, ref: PayloadRef, lease_s: float | None = None) -> Claim | Refusal:
        """Take the payload of that ref. Raises RingError where it is of another ring."""
        if not isinstance(ref, PayloadRef):
            arguments.payload_ref(ref)  # raises
        if ref.ring != self.name:
            raise RingError(f"{ref} is not of ring {self.name}", ref=ref)
        return self.claim(ref.slot, ref.generation, lease_s)

    def peek(self, ref: PayloadRef, buffer: memoryview) -> bool:
        """Copy the payload of `ref`, of as many bytes as `buffer` has, without a claim. False where it is not ready.

        Nothing keeps writers away meanwhile: what was copied is the payload only if `take` says so afterwards.
        """
        memory, slot, size = self._steps.memory, ref.slot, len(buffer)
        if slot >= self.slots or size > self.slot_bytes or not memory.is_ready(slot, ref.generation):
            return False
        copying.copy(buffer, memory.payload(slot, size))
        return True

    def take(self, ref: PayloadRef, *, consume: bool) -> bool:
        """The end of a read that began with `peek`: the payload is consumed or, else, left for others. False where it
        is not ready any more: what was copied is worth nothing, and nothing has changed."""
        return self._steps.take(ref.slot, ref.generation, ref.size, consumed=consume)

    def mark_consumed(self, claim: Claim) -> bool:
        """End a read that has succeeded; see `Claim.finish`."""
        return arguments.instance("claim", claim, Claim).finish(consumed=True)

    def release_reading(self, claim: Claim) -> bool:
        """End a read that has failed, or leaves the payload for others; see `Claim.finish`."""
        return arguments.instance("claim", claim, Claim).finish(consumed=False)

    def settle(self, slot: int, generation: int) -> bool:
        """Consume a payload that is ready, without reading it: its reader has it already. False where it is not
        there."""
        return self._steps.settle(slot, generation)

    def drain(self, timeout_s: float | None = None) -> int:
        """Wait until all payloads were consumed. Returns how many are left when the time is over."""
        with contextlib.suppress(PayloadTimeout):
            self._waited(lambda: _NOTHING if self._held() else None, None, timeout_s)
        return self._held()

    # ---- how it is

    def get_ready_count(self) -> int:
        """How many payloads wait to be read."""
        return len(self.get_ready_indices())

    def get_ready_indices(self) -> list[int]:
        """Their slots, the oldest payload first."""
        return [glance.slot for glance in _ready(_reclaimed(self._steps))]

    def is_full(self) -> bool:
        """Whether no slot is free."""
        return all(glance.state is not SlotState.FREE for glance in _reclaimed(self._steps))

    def slot_states(self) -> list[RingSlot]:
        """All that is known of each slot: its state, its generation, and so on."""
        steps = self._steps
        return [steps.look(index) for index in range(self.slots)]

    def metrics(self) -> RingMetrics:
        """All of it is exact for each slot; slots are looked at one after the other."""
        slots = self.slot_states()
        totals = {name: sum(getattr(slot.counts, name) for slot in slots) for name in Counts.__struct_fields__}
        states = [slot.state for slot in slots]
        return RingMetrics(**totals, states={state: states.count(state) for state in SlotState})

    # ---- the end

    def close(self) -> None:
        """This process uses it no more, through this object; its claims are released. Any number of times."""
        steps, self._open = self._open, None
        if steps is not None:
            steps.close()

    def unlink(self) -> None:
        """Remove the name: no process can attach any more, those that have attached go on, and the memory goes with
        the last of them. Any number of times, from any process."""
        if self._is_linked:
            self._is_linked = False
            ring_file.remove(self._folder, self.name, forget=self._is_creator())

    def __reduce__(self) -> NoReturn:
        raise UsageError("a SharedRing cannot be pickled: send its handle, and SharedRing.attach(handle) there")

    def __enter__(self) -> SharedRing:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            if self._is_made_here and self._is_creator():
                self.unlink()

    # ---- how

    @property
    def _steps(self) -> Steps:
        if self._open is None:
            raise RingError(f"ring {self.name} is closed")
        return self._open

    def _is_creator(self) -> bool:
        return this_process() == self._creator[:2]

    def _slot_for(self, owner: SlotOwner, deadline: float) -> tuple[int, int] | None:
        """A slot and its new generation."""
        for steps in self._turns(deadline):
            # First without waiting for any lock: a contended slot costs no time while another one can be had.
            for is_last in _LOOKS:
                begun = self._begun(steps, owner, 0.0, is_last)
                if begun is not Refusal.STALE:
                    break
            if begun is None:
                begun = self._begun(steps, owner, WRITE_PATIENCE_S, True)
            if isinstance(begun, tuple):
                self._cursor = (begun[0] + 1) % self.slots
                return begun
        return None

    def _begun(
        self, steps: Steps, owner: SlotOwner, patience_s: float, is_last: bool
    ) -> tuple[int, int] | Refusal | None:
        """As `_oldest`, for a writer: a slot and its new generation."""
        for index, drops in self._places(steps):
            begun = steps.begin(index, owner, drops=drops, patience_s=patience_s)
            if not isinstance(begun, Refusal):
                return index, begun
            if begun is Refusal.STALE and not is_last:
                return begun
        return None

    def _places(self, steps: Steps) -> Iterator[tuple[int, int | None]]:
        """Where to write, the best first; and the generation of the payload that is dropped there."""
        yield from self._free(steps)
        seen = steps.memory.glance()
        # To reclaim takes each held slot's lock and may read /proc: so only when no free slot could be taken.
        if any(glance.state in HELD for glance in seen):
            steps.reclaim_all()
            yield from self._free(steps)
            seen = steps.memory.glance()
        if self.overwrite:
            yield from ((glance.slot, glance.generation) for glance in _ready(seen))

    def _free(self, steps: Steps) -> Iterator[tuple[int, None]]:
        return ((index, None) for index in steps.memory.free(self._cursor))

    def _turns(self, deadline: float) -> Iterator[Steps]:
        """A turn whenever something may have changed, the first at once, until the deadline."""
        while True:
            yield self._steps
            if time.monotonic() >= deadline:
                return
            memory = self._steps.memory
            # A change before `announce` wakes no process, so the caller looks once more after it; a change after that
            # look has moved the counter past `seen`, and `wait` returns at once.
            seen = memory.announce()
            yield self._steps
            memory.wait(seen, deadline - time.monotonic())

    def _held(self) -> int:
        states = [glance.state for glance in self._steps.memory.glance()]
        return states.count(SlotState.READY) + states.count(SlotState.READING)

    def _waited(self, attempt: Callable[[], object], ref: PayloadRef | None, timeout_s: float | None) -> object:
        """What it comes to, once that is something."""
        timeout_s = None if timeout_s is None else _timeout(timeout_s)
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        for _ in self._turns(deadline):
            outcome = attempt()
            if outcome is not _NOTHING:
                return outcome
        raise PayloadTimeout(f"{ref or f'ring {self.name}'}: nothing to read came within {timeout_s:g} s", ref=ref)

    def _claimed(self, ref: PayloadRef | None, lease_s: float | None = None) -> Claim | None:
        """None where there is nothing yet, or another reader has it."""
        if ref is None:
            steps = self._steps
            # At a glance first: to reclaim what dead owners hold takes longer.
            for look in (steps.memory.glance, partial(_reclaimed, steps)):
                for is_last in _LOOKS:
                    claim = self._oldest(_ready(look()), lease_s, is_last)
                    if isinstance(claim, Claim):
                        return claim
                    if claim is None:
                        break
            return None
        claim = self.claim_ref(ref, lease_s)
        if claim in _GONE:
            raise StaleSlotError(f"{ref}: {claim}", ref=ref)
        return claim if isinstance(claim, Claim) else None

    def _oldest(self, ready: list[Glance], lease_s: float | None, is_last: bool) -> Claim | Refusal | None:
        """The first that can be had, or None. The refusal where one before it has gone meanwhile: then what was seen
        is out of date, and has to be seen again."""
        for seen in ready:
            claim = self.claim(seen.slot, seen.generation, lease_s)
            if isinstance(claim, Claim) or (claim in _GONE and not is_last):
                return claim
        return None

    def _read(self, ref: PayloadRef | None, consume: bool) -> object:
        claim = self._claimed(ref)
        if claim is None:
            return _NOTHING
        try:
            payload = memoryview(claim.copied("" if ref is None else ref.checksum))
            if self._allow_pickle and not claim.is_ours():
                # A mix of two payloads must never be unpickled.
                return _NOTHING
            value = codec.decode(claim.schema, payload, allow_pickle=self._allow_pickle)
        except TransportError as error:
            if not claim.finish(consumed=False):
                # The bytes were another payload's. The next attempt shows whether this one is still there.
                return _NOTHING
            error.ref = error.ref or claim.ref
            raise
        except BaseException:
            claim.drop()
            raise
        return value if claim.finish(consumed=consume) else _NOTHING


def _timeout(timeout_s: float) -> float:
    """Of any length, also without end."""
    with contextlib.suppress(OverflowError):  # an int that is too large for a float
        if isinstance(timeout_s, float | int) and not math.isnan(timeout_s):
            return float(timeout_s)
    return arguments.seconds("timeout_s", timeout_s)


def _ready(seen: list[Glance]) -> list[Glance]:
    """Slots that are ready, the oldest payload first."""
    ready = [glance for glance in seen if glance.state is SlotState.READY]
    return sorted(ready, key=lambda glance: glance.generation)


def _reclaimed(steps: Steps) -> list[Glance]:
    """All slots, without owners that have lost them."""
    seen = steps.memory.glance()
    if not any(glance.state in HELD for glance in seen):
        return seen
    steps.reclaim_all()
    return steps.memory.glance()
