"""The journal and the beats as the store has them while the job runs. Imports redis when it is first connected."""

from __future__ import annotations

from typing import Any

from nvrx_slurm.errors import StoreUnreachable
from nvrx_slurm.folder import StoreAddress
from nvrx_slurm.records import Beat, Entry, unpack_beat, unpack_entry
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

    def read(self, wait_s: float) -> list[Entry | Beat]:
        """What is new. If nothing is, waits up to `wait_s` (at most a second) for it."""
        if not self._cursors:
            missed = self._call(self._catch_up)
            if missed:
                return list(missed)
        return list(self._call(lambda: self._news(wait_s)))

    def _catch_up(self) -> list[Entry]:
        """The entries after the number known so far, and no more: numbers have no gap, so their count is known."""
        journal = self._keys.journal
        newest = self._redis.xrevrange(journal, count=1)
        cursor = newest[0][0] if newest else _START
        missing = unpack_entry(newest[0][1][b"m"]).n - self._after if newest else 0
        items = self._redis.xrevrange(journal, max=cursor, count=missing) if missing > 0 else []
        self._cursors = {journal: cursor} | ({self._keys.beats: _START} if self._beats else {})
        return [unpack_entry(fields[b"m"]) for _, fields in reversed(items)]

    def _news(self, wait_s: float) -> list[Entry | Beat]:
        block_ms = int(min(wait_s, LONGEST_WAIT_S) * 1000)
        reply = self._redis.xread(self._cursors, count=_BATCH, block=block_ms or None)  # 0 would block for ever
        found: list[Entry | Beat] = []
        for key, items in reply or ():
            unpack = unpack_entry if key.decode() == self._keys.journal else unpack_beat
            found += [unpack(fields[b"m"]) for _, fields in items]
            self._cursors[key.decode()] = items[-1][0]
        return found

    def _call(self, call: Any) -> Any:
        from redis.exceptions import RedisError

        try:
            return call()
        except (RedisError, OSError) as error:
            raise StoreUnreachable(f"the store at {self._where} does not answer: {error}") from None


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
