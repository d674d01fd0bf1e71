"""One stream: items by id, the oldest first."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from redis.exceptions import ResponseError

Identity = tuple[int, int]
"""Milliseconds since the epoch, and a number within them."""

Item = tuple[bytes, list[bytes]]
"""Id, and its fields and values by turns, as the real server sends them."""

LEAF = 100
"""An approximate trim removes whole leaves of the server's tree, so up to so many items stay too long."""

START: Identity = (0, 0)
END: Identity = (1 << 63, 0)


def identity_of(text: str | bytes, default_number: int = 0) -> Identity:
    """`123-4`, or `123` with the number to be taken then; `-` and `+` are the ends."""
    text = text.decode() if isinstance(text, bytes) else text
    if text in ("-", "+"):
        return START if text == "-" else END
    ms, dash, number = text.partition("-")
    try:
        return int(ms), int(number) if dash else default_number
    except ValueError:
        raise ResponseError("Invalid stream ID specified as stream command argument") from None


def new_identity_of(text: str) -> Identity:
    """What XADD is told to use."""
    if (identity := identity_of(text)) == START:
        raise ResponseError("The ID specified in XADD must be greater than 0-0")
    return identity


class Stream:
    """Its items; `last` is the newest id that it ever had, trimmed or not."""

    __slots__ = ("identities", "items", "last")

    def __init__(self) -> None:
        self.identities: list[Identity] = []
        self.items: list[Item] = []
        self.last: Identity = START

    def __len__(self) -> int:
        return len(self.items)

    def add(self, fields: list[bytes], now_ms: int, identity: Identity | None = None) -> bytes:
        """Append, under the server's time or a given id, and return the id. Ids only grow, whatever the clock
        does."""
        last = self.last
        if identity is None:
            identity = (now_ms, 0) if now_ms > last[0] else (last[0], last[1] + 1)
        elif identity <= last:
            raise ResponseError("The ID specified in XADD is equal or smaller than the target stream top item")
        self.last = identity
        name = b"%d-%d" % self.last
        self.identities.append(self.last)
        self.items.append((name, fields))
        return name

    def after(self, identity: Identity, count: int | None) -> list[Item]:
        """The items behind an id."""
        begin = bisect_right(self.identities, identity)
        return self.items[begin:] if count is None else self.items[begin : begin + count]

    def between(self, first: Identity, last: Identity) -> list[Item]:
        """The items from one id to another, both included."""
        return self.items[bisect_left(self.identities, first) : bisect_right(self.identities, last)]

    def trim_to_length(self, length: int, approximate: bool) -> int:
        return self._drop(len(self.items) - length, approximate)

    def trim_before(self, identity: Identity, approximate: bool) -> int:
        return self._drop(bisect_left(self.identities, identity), approximate)

    def _drop(self, count: int, approximate: bool) -> int:
        count = max(0, count - count % LEAF if approximate else count)
        if count:
            del self.items[:count], self.identities[:count]
        return count
