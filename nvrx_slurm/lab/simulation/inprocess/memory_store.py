"""A store of an in-process restart group in memory, for ranks that are threads of one process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping

from nvrx_slurm.inprocess.exception import StoreError
from nvrx_slurm.inprocess.store import Cancelled, Connection, Store


class _Call:
    """What the ranks of one call share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.clear()

    def clear(self) -> None:
        self.log: list[bytes] = []
        self.barriers: dict[str, dict[int, bytes]] = defaultdict(dict)
        self.beats: dict[int, int] = defaultdict(int)


class MemoryStore(Store):
    """One store; its connections are for threads of this process."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, int], _Call] = defaultdict(_Call)
        self._guard = threading.Lock()

    def connect(self, group: str, call: int) -> MemoryConnection:
        with self._guard:
            return MemoryConnection(self._calls[group, call])


class MemoryConnection(Connection):
    def __init__(self, call: _Call) -> None:
        self._call = call
        self._cancelled = False

    def append(self, entry: bytes, after: int) -> bool:
        with self._using() as call:
            # The caller knows of entries that are not there: they were lost with the store.
            if after > len(call.log):
                raise StoreError(f"the log has lost its first {after} entries")
            if after == len(call.log):
                call.log.append(entry)
                call.changed.notify_all()
            # An earlier try of the same entry may have got through: that is no conflict.
            return call.log[after] == entry

    def read(self, after: int, wait_s: float) -> list[bytes]:
        deadline = time.monotonic() + wait_s
        with self._using() as call:
            # A condition wakes all that wait on it, for any change: look again.
            while len(call.log) == after and not self._cancelled:
                if not call.changed.wait(deadline - time.monotonic()):
                    break
            self._check()
            if len(call.log) < after:
                raise StoreError(f"the log has lost its first {after} entries")
            return call.log[after:]

    def arrive(self, barrier: str, member: int, payload: bytes = b"") -> int:
        with self._using() as call:
            call.barriers[barrier][member] = payload
            return len(call.barriers[barrier])

    def claim(self, barrier: str, member: int, payload: bytes) -> bytes:
        with self._using() as call:
            return call.barriers[barrier].setdefault(member, payload)

    def arrivals(self, barrier: str) -> Mapping[int, bytes]:
        with self._using() as call:
            return dict(call.barriers[barrier])

    def arrival(self, barrier: str, member: int) -> bytes | None:
        with self._using() as call:
            return call.barriers[barrier].get(member)

    def beat(self, member: int, watched: int | None) -> int:
        with self._using() as call:
            call.beats[member] += 1
            return 0 if watched is None else call.beats[watched]

    def clear(self) -> None:
        with self._using() as call:
            call.clear()
            call.changed.notify_all()

    def cancel(self) -> None:
        with self._call.changed:
            self._cancelled = True
            self._call.changed.notify_all()

    def close(self) -> None:
        """Nothing is held."""

    @contextlib.contextmanager
    def _using(self) -> Iterator[_Call]:
        with self._call.changed:
            self._check()
            yield self._call

    def _check(self) -> None:
        if self._cancelled:
            raise Cancelled
