"""Every key and the commands on them, as redis-py calls them; replies are the real server's, before any parsing."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from nvrx_slurm.util.clock import Clock

# Milliseconds since the epoch, and a number within them.
Identity = tuple[int, int]

# Id, and its fields and values by turns, as the real server sends them.
Item = tuple[bytes, list[bytes]]

# An approximate trim removes whole leaves of the server's tree, so up to so many items stay too long.
LEAF = 100

START: Identity = (0, 0)
END: Identity = (1 << 63, 0)


def identity_of(text: bytes, default_number: int = 0) -> Identity:
    """`123-4`, or `123` with the number to be taken then; `-` and `+` are the ends."""
    if text == b"-":
        return START
    if text == b"+":
        return END
    ms, dash, number = text.partition(b"-")
    try:
        return int(ms), int(number) if dash else default_number
    except ValueError:
        raise ResponseError("Invalid stream ID specified as stream command argument") from None


class KeyStream:
    """Its items; `last` is the newest id that it ever had, trimmed or not."""

    __slots__ = ("identities", "items", "last")

    def __init__(self) -> None:
        self.identities: list[Identity] = []
        self.items: list[Item] = []
        self.last: Identity = START

    def __len__(self) -> int:
        return len(self.items)

    def add(self, fields: list[bytes], now_ms: int, identity: Identity | None = None) -> bytes:
        """Append, under the server's time or a given id, and return the id. Ids only grow, even if the clock is set
        back."""
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


# What a client may send as a key, field or value.
Word = str | bytes | int | float

Hash = dict[bytes, bytes]

DISK_FULL = "MISCONF Errors writing to the AOF file: No space left on device"
NOT_A_NUMBER = "value is not an integer or out of range"
WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"

_T = TypeVar("_T")


def encoded(word: Word) -> bytes:
    """As it goes over the wire."""
    if type(word) is bytes:
        return word
    return word.encode() if type(word) is str else str(word).encode()


def key_of(name: Word) -> str:
    if type(name) is str:
        return name
    return name.decode() if type(name) is bytes else str(name)


class Keyspace:
    """The data of one server. `added` is called with the key of each stream that grows.

    While `disk_full` and not `in_memory` every write is refused; `config_set("appendonly", "no")` sets the latter.
    """

    def __init__(self, clock: Clock, added: Callable[[str], None]) -> None:
        self._clock, self._added = clock, added
        self._values: dict[str, bytes | Hash | KeyStream] = {}
        self._expires_ms: dict[str, int] = {}
        self.disk_full = self.in_memory = False
        self._script_s: float | None = None  # when the script began that runs now

    def stand_still(self) -> None:
        """A script begins: until `go_on` the server's clock stands still."""
        self._script_s = self._clock.wall()

    def go_on(self) -> None:
        self._script_s = None

    # ---- any key

    def ping(self) -> bool:
        return True

    def time(self) -> tuple[int, int]:
        micros = int(self._wall_s() * 1_000_000)
        return micros // 1_000_000, micros % 1_000_000

    def config_set(self, name: str, value: str) -> bool:
        if name == "appendonly":
            self.in_memory = value == "no"
        return True

    def delete(self, *names: Word) -> int:
        self._check_disk()
        return sum(self._drop(key_of(name)) for name in names if self._find(name) is not None)

    def expire(self, name: Word, time: int) -> bool:
        self._check_disk()
        if self._find(name) is None:
            return False
        self._expires_ms[key_of(name)] = self._now_ms() + time * 1000
        return True

    def persist(self, name: Word) -> bool:
        self._check_disk()
        return self._find(name) is not None and self._expires_ms.pop(key_of(name), None) is not None

    def ttl(self, name: Word) -> int:
        if self._find(name) is None:
            return -2
        until_ms = self._expires_ms.get(key_of(name))
        return -1 if until_ms is None else round((until_ms - self._now_ms()) / 1000)

    def memory_usage(self, name: Word) -> int | None:
        """A measure of what the key holds; not the real server's figure."""
        value = self._find(name)
        if isinstance(value, KeyStream):
            return sum(len(identity) + sum(map(len, fields)) for identity, fields in value.items)
        return None if value is None else len(value)

    # ---- strings

    def get(self, name: Word) -> bytes | None:
        return self._of_kind(name, bytes)

    def set(self, name: Word, value: Word, px: int | None = None, nx: bool = False) -> bool | None:
        self._check_disk()
        if nx and self._find(name) is not None:
            return None
        key = key_of(name)
        self._values[key] = encoded(value)
        self._expires_ms.pop(key, None)
        if px is not None:
            self._expires_ms[key] = self._now_ms() + px
        return True

    # ---- hashes

    def hget(self, name: Word, key: Word) -> bytes | None:
        fields: Hash | None = self._of_kind(name, dict)
        return None if fields is None else fields.get(encoded(key))

    def hgetall(self, name: Word) -> Hash:
        return dict(self._of_kind(name, dict) or {})

    def hset(
        self,
        name: Word,
        key: Word | None = None,
        value: Word | None = None,
        mapping: Mapping[Word, Word] | None = None,
    ) -> int:
        self._check_disk()
        fields: Hash | None = self._of_kind(name, dict)
        if fields is None:
            fields = {}
            self._values[key_of(name)] = fields
        before = len(fields)
        pairs = dict(mapping or {}) | ({} if key is None or value is None else {key: value})
        fields.update((encoded(field), encoded(content)) for field, content in pairs.items())
        return len(fields) - before

    # ---- streams

    def xadd(
        self,
        name: Word,
        fields: Mapping[Any, Any],
        id: str = "*",
        maxlen: int | None = None,
        approximate: bool = True,
    ) -> bytes:
        self._check_disk()
        given = None if id == "*" else identity_of(encoded(id))
        if given == START:
            raise ResponseError("The ID specified in XADD must be greater than 0-0")
        key = key_of(name)
        known: KeyStream | None = self._of_kind(key, KeyStream)
        stream = KeyStream() if known is None else known
        flat = [word if type(word) is bytes else encoded(word) for pair in fields.items() for word in pair]
        identity = stream.add(flat, self._now_ms(), given)
        if known is None:  # only now: an id that is refused makes no key
            self._values[key] = stream
        if maxlen is not None:
            stream.trim_to_length(maxlen, approximate)
        self._added(key)
        return identity

    def xlen(self, name: Word) -> int:
        return len(self._stream(name))

    def xtrim(self, name: Word, minid: Word, approximate: bool = True) -> int:
        self._check_disk()
        return self._stream(name).trim_before(identity_of(encoded(minid)), approximate)

    def xrange(self, name: Word, min: Word = "-", max: Word = "+", count: int | None = None) -> list[Item]:
        items = self._stream(name).between(identity_of(encoded(min)), identity_of(encoded(max), END[0]))
        return items if count is None else items[:count]

    def xrevrange(self, name: Word, max: Word = "+", min: Word = "-", count: int | None = None) -> list[Item]:
        return self.xrange(name, min, max)[::-1][:count]

    def xread(
        self, streams: Mapping[Any, Word], count: int | None = None, block: int | None = None
    ) -> list[list[Any]] | None:
        """The new items at this moment; the server handles `block`."""
        found = []
        for name, after in streams.items():
            if items := self._stream(name).after(identity_of(encoded(after)), count):
                found.append([encoded(name), items])
        return found or None

    # ---- how

    def _now_ms(self) -> int:
        return int(self._wall_s() * 1000)

    def _wall_s(self) -> float:
        return self._clock.wall() if self._script_s is None else self._script_s

    def _check_disk(self) -> None:
        if self.disk_full and not self.in_memory:
            raise ResponseError(DISK_FULL)

    def _find(self, name: Word) -> bytes | Hash | KeyStream | None:
        key = name if type(name) is str else key_of(name)
        if self._expires_ms and (until_ms := self._expires_ms.get(key)) is not None and until_ms <= self._now_ms():
            self._drop(key)
        return self._values.get(key)

    def _drop(self, key: str) -> bool:
        self._expires_ms.pop(key, None)
        return self._values.pop(key, None) is not None

    def _of_kind(self, name: Word, kind: type[_T]) -> _T | None:
        value = self._find(name)
        if value is None or type(value) is kind:
            return value
        raise ResponseError(WRONG_TYPE)

    def _stream(self, name: Word) -> KeyStream:
        stream: KeyStream | None = self._of_kind(name, KeyStream)
        return _NONE if stream is None else stream


# Shared by all keys that have no stream: nothing is ever added to it, for XADD makes its own.
_NONE = KeyStream()
