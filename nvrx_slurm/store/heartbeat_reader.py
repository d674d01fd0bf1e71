"""How the controller reads the whole fleet's heartbeats: everything new in the `beats` stream at once, a few times a
second.

Heartbeats are cheap in bulk only. A blocking read wakes for every few of them, and a client that makes dicts of each
and decodes all that its workers report costs three to four times as much (`docs/scale.md`). So this one asks without
blocking, at a pace that its caller chooses, takes replies as hiredis has parsed them, and decodes none: whose a beat
is stands beside it, and is part of what is signed.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
from redis import exceptions as failures

from nvrx_slurm.errors import MalformedRecord, StoreUnreachable, UntrustedRecord
from nvrx_slurm.journal.folder import StoreAddress
from nvrx_slurm.store.redis_client import Look, async_client
from nvrx_slurm.store.sealing import RefusedRecords, open_heartbeat
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.job_key import JobKey
from nvrx_slurm.util.log import get_logger

log = get_logger("store")

# How long one call of `read` takes at most.
READ_S = 3.0

# Without a beat for so long, the next call connects again.
IDLE_S = 5.0

# How many beats one reply holds at most: what 10,000 nodes send in 0.25 s; the loop is kept for some 20 ms.
BATCH = 4096

_START = b"0-0"


# Age in seconds; the sender, as `Heartbeat.incarnation`; and the packed heartbeat, for `unpack_heartbeat`.
PackedHeartbeat = tuple[float, bytes, bytes]


class HeartbeatBatch(msgspec.Struct, frozen=True):
    """What one call of `read` brought.

    `now_s`: the server's clock, in seconds since the epoch. `beats`: every beat that the server had taken by then and
    that no earlier call brought, oldest first; none comes twice. `first`: it was the first call that succeeded, which
    brings what the trimmed stream still holds, about two heartbeats a node.
    """

    now_s: float
    beats: list[PackedHeartbeat]
    first: bool = False


class HeartbeatReader:
    """The one reader of a job's beats, on a connection of its own, or on `connection`. Not for two tasks at once.

    The age of a beat is the server's: its clock when it answered less its clock when it took the beat. A clock that
    is set forward or back meanwhile falsifies neither way: an age is never negative, nor longer than the time since
    the call before, by our own monotonic clock, for that call would have brought an older beat.
    """

    def __init__(
        self,
        address: StoreAddress,
        key: str,
        *,
        clock: Clock,
        look: Look | None = None,
        connection: Any = None,
        job_key: JobKey | None = None,
    ) -> None:
        self._key, self._where, self._clock = key, address.url, clock
        # Any: its types know no raw replies.
        self._redis: Any = connection
        if connection is None:
            self._redis = async_client(address, look, connect_s=READ_S, answer_s=READ_S)
        # In place of redis-py's own parsing, which costs more than all the rest.
        self._redis.set_response_callback("XREAD", lambda response, **options: response)
        self.refused = RefusedRecords(clock)
        self._job_key = job_key or JobKey(address.token)
        self._numbers: dict[bytes, bytes] = {}  # whose beat → the number of the newest
        self._last = _START
        self._asked_s: float | None = None  # when the last call that succeeded began
        self._brought_s = clock.monotonic()  # when the last one began that brought a beat, or connected again

    async def close(self) -> None:
        await self._redis.aclose()

    async def read(self) -> HeartbeatBatch:
        """Everything new. Raises StoreUnreachable, after `READ_S` at most, where the store is away, is loading, or
        refuses us; then nothing counts as read, and the next call connects again."""
        began_s = self._clock.monotonic()
        try:
            async with asyncio.timeout(READ_S):
                now_s, items = await self._read_all()
        except (failures.AuthenticationError, failures.NoPermissionError) as error:
            message = f"the store at {self._where} refuses us: {error}; check its password"
            raise StoreUnreachable(message, refused=True) from None
        except (failures.RedisError, OSError) as error:  # a TimeoutError is an OSError
            what = str(error) or f"no answer in {READ_S:.0f} s"
            raise StoreUnreachable(f"the heartbeats in the store at {self._where} cannot be read: {what}") from None
        first = self._asked_s is None
        # The clock of the store may be set while it runs. An age longer than the time since the last read cannot be
        # right: that read would have brought the beat.
        longest_s = math.inf if self._asked_s is None else self._clock.monotonic() - self._asked_s
        batch = HeartbeatBatch(now_s, self._opened(items, now_s, longest_s), first)
        self._last = items[-1][0] if items else self._last
        self._asked_s = began_s
        if items:
            self._brought_s = began_s
        elif began_s - self._brought_s > IDLE_S:
            # After a failover the old primary may serve this connection on, as a replica that hears of nothing.
            self._brought_s = began_s
            await self._redis.aclose()
        return batch

    async def _read_all(self) -> tuple[float, list[Any]]:
        last, items = self._last, list[Any]()
        while True:
            async with self._redis.pipeline(transaction=False) as pipeline:
                # The time first: then what was taken before it is in the reply that follows.
                pipeline.time().xread({self._key: last}, count=BATCH)
                (seconds, micros), streams = await pipeline.execute()
            batch = streams[0][1] if streams else []
            items += batch
            if len(batch) < BATCH:
                return seconds + micros / 1e6, items
            last = batch[-1][0]

    def _opened(self, items: list[Any], now_s: float, longest_s: float) -> list[PackedHeartbeat]:
        """Raw stream items as beats. What no agent of this job has signed is set aside; a beat that is older than
        its sender's newest (a copy of one, or one that another overtook) says nothing about now."""
        beats = list[PackedHeartbeat]()
        now_ms, key, stream, numbers = now_s * 1000, self._job_key, self._key, self._numbers
        for identity, fields in items:
            try:
                if len(fields) < 4 or fields[0] != b"who" or fields[2] != b"m":
                    raise MalformedRecord("the item is no heartbeat")
                who = fields[1]
                number, packed = open_heartbeat(key, stream, who, fields[3])
            except UntrustedRecord as error:
                self.refused.add(stream, identity, error)
                continue
            # A copy of an older beat, or one that another overtook: it says nothing about now.
            if number <= numbers.get(who, b""):
                continue
            numbers[who] = number
            age_s = (now_ms - int(identity.partition(b"-")[0])) / 1000
            if not 0.0 <= age_s <= longest_s:  # rare: `min` and `max` of every beat would cost as much as all else
                age_s = min(max(age_s, 0.0), longest_s)
            beats.append((age_s, who, packed))
        return beats
