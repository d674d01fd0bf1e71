"""Bounds for connections that have proven nothing yet, and for the log lines about them.

Pure accounting: the server that uses it passes the time in, and opens and closes the connections itself. Each port
that anybody can connect to keeps one `Admission`: a flood of connections then costs a bounded number of descriptors,
and a peer that holds the key still gets through. Standard library only: workers import it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

MOST_UNPROVEN = 64
# How long one connection may take for its proof, measured from its accept(2).
PROOF_S = 2.0

# How long a connection is safe from being dropped for a newer one. An honest peer needs one round trip; a flood of
# silent connections is worked off at 64 in this time.
TURN_S = 0.05

LOG_EVERY_S = 60.0

_Id = TypeVar("_Id", bound=Hashable)


class Admission(Generic[_Id]):
    """The unproven connections of one listening port, oldest first. `now` never goes back (a monotonic clock)."""

    def __init__(self, most: int = MOST_UNPROVEN, within_s: float = PROOF_S, turn_s: float = TURN_S) -> None:
        self.most, self.within_s, self.turn_s = most, within_s, turn_s
        self._since: dict[_Id, float] = {}
        self._sources: dict[_Id, str] = {}

    def __len__(self) -> int:
        return len(self._since)

    def admit(self, connection: _Id, now: float, source: str = "") -> _Id | None:
        """Count a new connection from the address `source`. Returns the one to drop for it, which is counted no
        longer; None while there is room."""
        dropped = self._next_to_drop() if len(self._since) >= self.most else None
        if dropped is not None:
            self.gone(dropped)
        self._since[connection], self._sources[connection] = now, source
        return dropped

    def wait_s(self, now: float) -> float:
        """How long the server should leave the next connection in the kernel's queue; 0.0: accept it now.

        Ask again when a connection is proven or gone. A server that does not wait keeps the cap too, but may drop
        honest peers when more than `most` of them connect at one moment.
        """
        if len(self._since) < self.most:
            return 0.0
        return max(0.0, self._since[self._next_to_drop()] + self.turn_s - now)

    def shed(self, now: float) -> _Id | None:
        """The connection to drop when the process has no descriptor left for another; None if each still has its
        turn. It is counted no longer."""
        if not self._since or now - self._since[dropped := self._next_to_drop()] < self.turn_s:
            return None
        self.gone(dropped)
        return dropped

    def overdue(self, now: float) -> list[_Id]:
        """The connections whose time for the proof is over: drop them. They are counted no longer."""
        late = [each for each, since in self._since.items() if now - since >= self.within_s]
        for each in late:
            self.gone(each)
        return late

    def overdue_in_s(self, now: float) -> float | None:
        """When to ask `overdue` next; None while every connection is proven."""
        oldest = next(iter(self._since.values()), None)
        return None if oldest is None else max(0.0, oldest + self.within_s - now)

    def proven(self, connection: _Id) -> None:
        """It has proven itself, and is no longer bounded here."""
        self.gone(connection)

    def gone(self, connection: _Id) -> None:
        """It is closed. An unknown or a proven one is no error."""
        self._since.pop(connection, None)
        self._sources.pop(connection, None)

    def _next_to_drop(self) -> _Id:
        # The oldest connection of the address that has the most: a flood from one host drops its own connections.
        counts = Counter(self._sources.values())
        most = max(counts.values())
        return next(each for each, source in self._sources.items() if counts[source] == most)


class RateLimitedLog:
    """Writes at most one line in `every_s`, and with it how many were left out since the one before."""

    def __init__(self, write: Callable[[str], object], every_s: float = LOG_EVERY_S) -> None:
        self._write, self._every_s = write, every_s
        self._last_at: float | None = None
        self._left_out = 0

    def say(self, line: str, now: float) -> None:
        """Write the line, or count it."""
        if self._last_at is not None and now - self._last_at < self._every_s:
            self._left_out += 1
            return
        since_s = 0.0 if self._last_at is None else now - self._last_at
        more = f" (and {self._left_out} more like it in the last {since_s:.0f} s)" if self._left_out else ""
        self._last_at, self._left_out = now, 0
        self._write(line + more)
