"""The journal and the beats as the store has them while the job runs. Imports redis when it is first connected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvrx_slurm.errors import StoreUnreachable
from nvrx_slurm.folder import StoreAddress
from nvrx_slurm.records import AnyFact, Entry, pack, unpack_beat, unpack_entry
from nvrx_slurm.report.model import Heard
from nvrx_slurm.store.keys import Keys

CONNECT_S = 1.0
ANSWER_S = 2.0
LONGEST_WAIT_S = 1.0
_START = b"0-0"
_BATCH = 1000


class JournalStream:
    """One connection to one job's store. Every method raises `StoreUnreachable` when the store does not answer."""

    def __init__(self, address: StoreAddress, *, after: int = 0, beats: bool = False) -> None:
        self._where = address.url
        self._keys = Keys(address.job)
        self._redis = _connect(address)
        self._after = after
        self._cursors: dict[str, bytes] = {}
        self._beats = beats

    def close(self) -> None:
        self._redis.close()

    def time(self) -> float:
        """The store's clock, by which beats are stamped: seconds since the epoch."""
        seconds, micros = self._call(self._redis.time)
        return int(seconds) + int(micros) / 1e6

    def read(self, wait_s: float) -> list[Entry | Heard]:
        """What is new. If nothing is, waits up to `wait_s` (at most a second) for it."""
        if not self._cursors:
            missed = self._call(self._catch_up)
            if missed:
                return list(missed)
        return list(self._call(lambda: self._news(wait_s)))

    def _catch_up(self) -> list[Entry | Heard]:
        """The entries after the number known so far, and no more: numbers have no gap, so their count is known.

        And the last beat of every node: agents keep that stream short.
        """
        journal = self._keys.journal
        newest = self._redis.xrevrange(journal, count=1)
        cursor = newest[0][0] if newest else _START
        missing = unpack_entry(newest[0][1][b"m"]).n - self._after if newest else 0
        items = self._redis.xrevrange(journal, max=cursor, count=missing) if missing > 0 else []
        self._cursors = {journal: cursor}
        missed: list[Entry | Heard] = [unpack_entry(fields[b"m"]) for _, fields in reversed(items)]
        return missed + (self._last_beats() if self._beats else [])

    def _last_beats(self) -> list[Heard]:
        items = self._redis.xrange(self._keys.beats)
        self._cursors[self._keys.beats] = items[-1][0] if items else _START
        beats = (_heard(identity, fields) for identity, fields in items)
        return list({heard.beat.node: heard for heard in beats}.values())

    def _news(self, wait_s: float) -> list[Entry | Heard]:
        block_ms = int(min(wait_s, LONGEST_WAIT_S) * 1000)
        reply = self._redis.xread(self._cursors, count=_BATCH, block=block_ms or None)  # 0 would block for ever
        found: list[Entry | Heard] = []
        for key, items in reply or ():
            of_journal = key.decode() == self._keys.journal
            found += [unpack_entry(fields[b"m"]) if of_journal else _heard(at, fields) for at, fields in items]
            self._cursors[key.decode()] = items[-1][0]
        return found

    def _call(self, call: Callable[[], Any]) -> Any:
        return _answered(self._where, call)


def post(address: StoreAddress, fact: AnyFact) -> None:
    """Tell the job's controller a fact. Raises `StoreUnreachable`."""
    client = _connect(address)
    try:
        _answered(address.url, lambda: client.xadd(Keys(address.job).inbox, {"m": pack(fact)}))
    finally:
        client.close()


def _heard(identity: bytes, fields: dict[bytes, bytes]) -> Heard:
    """A beat with its time: the server begins each id with its clock, in milliseconds."""
    return Heard(t=int(identity.partition(b"-")[0]) / 1000, beat=unpack_beat(fields[b"m"]))


def _answered(where: str, call: Callable[[], Any]) -> Any:
    from redis.exceptions import RedisError

    try:
        return call()
    except (RedisError, OSError) as error:
        raise StoreUnreachable(f"the store at {where} does not answer: {error}") from None


def _connect(address: StoreAddress) -> Any:  # redis-py types one reply for sync and async clients alike
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return Redis.from_url(
        address.url,
        password=address.password,
        socket_connect_timeout=CONNECT_S,
        socket_timeout=LONGEST_WAIT_S + ANSWER_S,
        retry=Retry(NoBackoff(), 0),  # who reads falls back to the folder at once
        protocol=2,
    )
