"""The inquiries that the service holds in memory, counted by state, the least recently changed first."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import get_args

from nvrx_slurm.attribution.service.lifecycle import Record
from nvrx_slurm.attribution.service.wire import State

STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is held, and for how long."""

    queued: int = 256
    open: int = 4096
    kept: int = 10_000
    kept_for_s: float = 7 * 86400.0
    followed_for_s: float = 900.0
    """A progressive inquiry of which nobody says that it is settled is answered for good after this."""


@dataclass(slots=True)
class Entry:
    """One inquiry. `news` is set, and another put in its place, when there is something new to read."""

    record: Record
    news: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None

    def tell(self) -> None:
        news, self.news = self.news, asyncio.Event()
        news.set()

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Entries:
    """id → entry. A record changes through `put` alone, so that the counts are true."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.counts: Counter[State] = Counter(dict.fromkeys(STATES, 0))
        self._followed = 0
        self._entries: dict[str, Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, identity: str) -> Entry | None:
        return self._entries.get(identity)

    def put(self, identity: str, record: Record) -> Entry:
        """The entry, new or not, with this record."""
        entry = self._entries.pop(identity, None)
        if entry is None:
            entry = Entry(record)
        else:
            self._tally(entry.record, -1)
            entry.record = record
        self._entries[identity] = entry
        self._tally(record, 1)
        return entry

    @property
    def open(self) -> int:
        """How many there is still work for. What is merely tracked costs none, and makes way for others."""
        return self._followed + self.counts["queued"] + self.counts["running"]

    @property
    def is_busy(self) -> bool:
        """Whether a look is under way, or wanted now."""
        return self.counts["queued"] + self.counts["running"] > 0

    def forget(self, now: float) -> list[str]:
        """Let go of what is too old, and of the oldest of what is too much, but of nothing that is worked on."""
        over, gone = len(self._entries) - self.bounds.kept, list[str]()
        for identity, entry in self._entries.items():
            record = entry.record
            if len(gone) >= over and now - record.changed_at < self.bounds.kept_for_s:
                break
            if record.state not in ("queued", "running") and not record.is_followed:
                gone.append(identity)
        for identity in gone:
            self._tally(self._entries.pop(identity).record, -1)
        return gone

    def _tally(self, record: Record, by: int) -> None:
        self.counts[record.state] += by
        self._followed += by * record.is_followed
