"""The journal and the heartbeats as the store has them while the job runs. Imports redis when it is first connected.

What is not signed with the job's key is set aside, as the controller does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

from nvrx_slurm.errors import StoreUnreachable, UntrustedRecord
from nvrx_slurm.journal.folder import StoreAddress
from nvrx_slurm.journal.records import AnyFact, Entry, pack, unpack_entry, unpack_heartbeat
from nvrx_slurm.report.model import ReceivedHeartbeat
from nvrx_slurm.store.keys import Keys
from nvrx_slurm.store.sealing import RefusedRecords, field_m, open_heartbeat
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.job_key import JobKey

CONNECT_S = 1.0
ANSWER_S = 2.0
LONGEST_WAIT_S = 1.0
_START = b"0-0"
_BATCH = 1000


class JournalStream:
    """One connection to one job's store. Every method raises `StoreUnreachable` when the store does not answer."""

    def __init__(self, address: StoreAddress, *, after: int = 0, beats: bool = False) -> None:
        self._where = address.url
        self._keys, self._key = Keys(address.job), JobKey(address.token)
        self._refused = RefusedRecords(SystemClock())
        self._numbers: dict[bytes, bytes] = {}  # whose heartbeat → the number of the newest
        self._redis = connect(address)
        self._after = after
        self._cursors: dict[str, bytes] = {}
        self._beats = beats

    def close(self) -> None:
        self._redis.close()

    def time(self) -> float:
        """The store's clock, by which heartbeats are stamped: seconds since the epoch."""
        seconds, micros = answered(self._where, self._redis.time)
        return int(seconds) + int(micros) / 1e6

    def read(self, wait_s: float) -> list[Entry | ReceivedHeartbeat]:
        """What is new. If nothing is, waits up to `wait_s` (at most a second) for it. An entry may come again, as a
        copy: its number says so."""
        if not self._cursors:
            missed = answered(self._where, self._catch_up)
            if missed:
                return list(missed)
        return list(answered(self._where, lambda: self._news(wait_s)))

    def _catch_up(self) -> list[Entry | ReceivedHeartbeat]:
        """The entries after the number known so far, and no more.

        And the last two heartbeats of every node: agents keep that stream short.
        """
        journal, missed, before = self._keys.journal, list[Entry](), "+"
        cursor = None
        # From the end back: of a journal of weeks a reader that was away for a moment needs the last page only.
        while items := self._redis.xrevrange(journal, max=before, count=_BATCH):
            # Of the first page: what is appended while older pages are read comes by `_news`.
            cursor = cursor or items[0][0]
            page = self._entries(reversed(items))
            missed[:0] = [entry for entry in page if entry.n > self._after]
            if len(items) < _BATCH or any(entry.n <= self._after for entry in page):
                break
            before = f"({items[-1][0].decode()}"
        self._cursors = {journal: cursor or _START}
        if not self._beats:
            return [*missed]
        items = self._redis.xrange(self._keys.beats)
        self._cursors[self._keys.beats] = items[-1][0] if items else _START
        last = dict[str, list[ReceivedHeartbeat]]()
        for heard in self._heard(items):
            of_node = last.setdefault(heard.heartbeat.node, [])
            of_node[:] = [*of_node[-1:], heard]
        return [*missed, *(heard for of_node in last.values() for heard in of_node)]

    def _news(self, wait_s: float) -> list[Entry | ReceivedHeartbeat]:
        block_ms = int(min(wait_s, LONGEST_WAIT_S) * 1000)
        reply = self._redis.xread(self._cursors, count=_BATCH, block=block_ms or None)  # 0 would block for ever
        found: list[Entry | ReceivedHeartbeat] = []
        for key, items in reply or ():
            of_journal = key.decode() == self._keys.journal
            found += self._entries(items) if of_journal else self._heard(items)
            self._cursors[key.decode()] = items[-1][0]
        return found

    def _entries(self, items: Iterable[Any]) -> list[Entry]:
        journal, found = self._keys.journal, list[Entry]()
        for identity, fields in items:
            try:
                found.append(unpack_entry(self._key.verify(journal, field_m(fields))))
            except UntrustedRecord as error:
                self._refused.add(journal, identity, error)
        return found

    def _heard(self, items: Iterable[Any]) -> list[ReceivedHeartbeat]:
        """Heartbeats with their times: the server begins each id with its clock, in milliseconds."""
        beats, found = self._keys.beats, list[ReceivedHeartbeat]()
        for identity, fields in items:
            who = fields.get(b"who", b"")
            try:
                number, packed = open_heartbeat(self._key, beats, who, field_m(fields))
                beat = unpack_heartbeat(packed)
            except UntrustedRecord as error:
                self._refused.add(beats, identity, error)
                continue
            if number > self._numbers.get(who, b""):  # else it is a copy of an older one
                self._numbers[who] = number
                found.append(ReceivedHeartbeat(t=int(identity.partition(b"-")[0]) / 1000, heartbeat=beat))
        return found


def post(address: StoreAddress, fact: AnyFact) -> None:
    """Post a fact to the job's controller. Raises `StoreUnreachable`."""
    inbox = Keys(address.job).inbox
    sealed = JobKey(address.token).sign(inbox, pack(fact))
    with closing(connect(address)) as client:
        answered(address.url, lambda: client.xadd(inbox, {"m": sealed}))


def answered(where: str, call: Callable[[], Any]) -> Any:
    """What the store answers. Raises StoreUnreachable."""
    from redis.exceptions import RedisError

    try:
        return call()
    except (RedisError, OSError) as error:
        raise StoreUnreachable(f"the store at {where} does not answer: {error}") from None


def connect(address: StoreAddress) -> Any:  # redis-py types one reply for sync and async clients alike
    """A connection for one thread."""
    from nvrx_slurm.store.redis_client import client

    # It does not try again by itself: a reader falls back to the folder at once.
    # An XREAD that finds nothing answers `LONGEST_WAIT_S` late. That is no silence of the store.
    return client(address, connect_s=CONNECT_S, answer_s=LONGEST_WAIT_S + ANSWER_S)
