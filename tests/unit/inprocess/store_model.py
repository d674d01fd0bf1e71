"""The shared state of a group without a server: reads can return part of the new entries, and the answers to appends
can be lost."""

from __future__ import annotations

from collections.abc import Mapping

from nvrx_slurm.inprocess.ledger import GroupLedger, decode, fold
from nvrx_slurm.inprocess.store import Connection


class Shared:
    """The contents of the store."""

    def __init__(self) -> None:
        self.log: list[bytes] = []
        self.barriers: dict[str, dict[int, bytes]] = {}

    def ledger(self, members: int) -> GroupLedger:
        return fold(GroupLedger(members), map(decode, self.log))


class Line(Connection):
    """A connection to it. A read returns the first `prefix` new entries; `unanswered` appends are done, and
    repeated."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.prefix = 1 << 30
        self.unanswered = False

    def append(self, entry: bytes, after: int) -> bool:
        if self.unanswered:
            self._put(entry, after)
        return self._put(entry, after)

    def _put(self, entry: bytes, after: int) -> bool:
        log = self._shared.log
        if after == len(log):
            log.append(entry)
        return log[after] == entry if after < len(log) else False

    def read(self, after: int, wait_s: float) -> list[bytes]:
        return self._shared.log[after : after + self.prefix]

    def arrive(self, barrier: str, member: int, payload: bytes = b"") -> int:
        arrived = self._shared.barriers.setdefault(barrier, {})
        arrived[member] = payload
        return len(arrived)

    def arrivals(self, barrier: str) -> Mapping[int, bytes]:
        return dict(self._shared.barriers.get(barrier, {}))

    def arrival(self, barrier: str, member: int) -> bytes | None:
        return self._shared.barriers.get(barrier, {}).get(member)

    def beat(self, member: int, watched: int | None) -> int:
        return 0

    def clear(self) -> None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...
