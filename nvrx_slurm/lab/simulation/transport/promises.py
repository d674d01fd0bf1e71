"""What must hold in every history of payloads, by a record of its own of what was written and what was read."""

from __future__ import annotations

import enum
from collections import Counter
from typing import TYPE_CHECKING

from nvrx_slurm.lab.simulation.threads import HistoryPromises
from nvrx_slurm.transport.slots import State

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.threads import VirtualProcess
    from nvrx_slurm.lab.simulation.transport.history import PayloadHistory
    from nvrx_slurm.transport.ref import PayloadRef

# A read ends by its deadline, and a tenth of a second.
LATE_S = 0.15

# A payload: ring, slot and generation.
Key = tuple[str, int, int]


class PayloadPromise(enum.StrEnum):
    """What is promised to readers and producers."""

    BYTES = "the bytes that were written, or an error"
    KEPT = "no unread payload is lost while its producer lives"
    ONCE = "without a fault each payload is read once"
    DEADLINE = "each read ends by its deadline"
    FREED = "no slot stays blocked"
    SETTLED = "with its next read of a ring a reader confirms what it has read there before"
    COUNTED = "every payload is counted once"
    QUARANTINE = "a port is asked again when its quarantine is over, and not before"
    PROGRESS = "once faults stop, what is there can be read"
    SOUND = "no thread fails"


def key_of(ref: PayloadRef) -> Key:
    return ref.ring, ref.slot, ref.generation


class PayloadPromises(HistoryPromises):
    """Watches one history of payloads."""

    def __init__(self, history: PayloadHistory) -> None:
        super().__init__(history.scheduler)
        self._history = history
        self._written: dict[Key, bytes] = {}
        self.delivered: Counter[Key] = Counter()
        self._readers: dict[Key, str] = {}  # who has read it last
        self._lost_with: set[Key] = set()  # what a reader had asked for when it was killed

    def written(self, ref: PayloadRef, data: bytes, producer: VirtualProcess) -> None:
        key = key_of(ref)
        if key in self._written:
            self.broke(PayloadPromise.BYTES, f"{key} was given out twice")
        self._written[key] = data
        self.note(f"{producer.name} writes {key}")

    def read(self, reader: str, ref: PayloadRef, data: bytes) -> None:
        key = key_of(ref)
        self.note(f"{reader} reads {key}")
        if data != self._written[key]:
            self.broke(PayloadPromise.BYTES, f"{reader} asked for {key} and got {data[:8]!r}…")
        if not self._history.shape.kept:
            self.delivered[key] += 1
            self._readers[key] = reader
            if self.delivered[key] > 1 and not self._history.may_repeat:
                self.broke(PayloadPromise.ONCE, f"{key} was read {self.delivered[key]} times")

    def check_settled(self, number: int, reader: str) -> None:
        """By the producer: nothing that this reader has read and not left to others is ready still."""
        server = self._history.producers[number].server
        assert server is not None
        for index, slot in enumerate(server.ring.slot_states()):
            key = server.ring.name, index, slot.generation
            if slot.state is State.READY and self._readers.get(key) == reader:
                self.broke(PayloadPromise.SETTLED, f"{reader} has read {key}, and it is ready still")

    def failed(self, reader: str, ref: PayloadRef, error: Exception) -> None:
        self.note(f"{reader} does not read {key_of(ref)}: {type(error).__name__}: {error}")

    def took(self, reader: VirtualProcess, seconds: float, stopped_s: float, deadline_s: float) -> None:
        """`stopped_s`: of these it had no processor."""
        if seconds - stopped_s > deadline_s + LATE_S:
            self.broke(
                PayloadPromise.DEADLINE, f"{reader.name} waited {seconds:.3f} s, its deadline was {deadline_s}"
            )

    def asked_by_the_dead(self, ref: PayloadRef) -> None:
        """Its reader was killed while it read: whether it has got the payload is unknown."""
        self._lost_with.add(key_of(ref))

    def check_ring(self, number: int) -> None:
        """At the end, by a process of that host: no slot is held, and each payload is where it should be."""
        producer = self._history.producers[number]
        ring = producer.server.ring if producer.server is not None else None
        if ring is None or not producer.process.alive:
            return
        ring.get_ready_count()  # takes back what dead or late owners hold
        metrics, slots = ring.metrics(), ring.slot_states()
        for index, slot in enumerate(slots):
            if slot.state in (State.READING, State.WRITING):
                owner = self._history.kernel.processes.get((slot.owner.pid, slot.owner.started_ticks))
                name = owner.name if owner is not None else "no process"
                self.broke(PayloadPromise.FREED, f"slot {index} of {ring.name} is {slot.state.name} by {name}")
        ready = metrics.states[State.READY]
        if metrics.published != metrics.consumed + metrics.dropped + ready:
            self.broke(PayloadPromise.COUNTED, f"{ring.name}: {metrics}")
        written = [key for key in self._written if key[0] == ring.name]
        if len(written) > metrics.published:
            self.broke(PayloadPromise.COUNTED, f"{ring.name}: {len(written)} were written, {metrics}")
        still = {(ring.name, index, slot.generation) for index, slot in enumerate(slots) if slot.state is State.READY}
        gone = [key for key in written if key not in still and not self.delivered[key] and key not in self._lost_with]
        if len(gone) > metrics.dropped:
            self.broke(PayloadPromise.KEPT, f"{gone} had no reader, and {metrics.dropped} were dropped")
