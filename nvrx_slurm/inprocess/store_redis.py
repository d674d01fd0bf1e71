"""`RedisStore`: what a group shares, in Redis or Valkey. The keys: `nvrx_slurm.store.keys`.

The connection and its retries are those of all threads in this package (`nvrx_slurm.store.connection`): ranks and
their monitors import neither redis-py, which takes 0.2 s and 22 MB, nor any other client.
"""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Mapping
from typing import Any

from nvrx_slurm.errors import StoreUnreachable, UntrustedRecord
from nvrx_slurm.inprocess import environment
from nvrx_slurm.inprocess.barriers import LEFT
from nvrx_slurm.inprocess.exception import OptionError, StoreError
from nvrx_slurm.inprocess.store import Cancelled, Connection, Store
from nvrx_slurm.store.connection import ANSWER_S, ClientClosed, Command, CommandRefused, Look, RetryingRedis
from nvrx_slurm.store.job_store import named_server, server_of_job
from nvrx_slurm.store.keys import InprocessKeys
from nvrx_slurm.util.admission import RateLimitedLog
from nvrx_slurm.util.job_key import JobKey
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.redis_url import RedisUrl

log = get_logger("inprocess")

# How long one read waits at the server, if a quarter of the patience is not less. A read without an entry looks then
# whether the log is still there: so a server that came back without its data is noticed within that time.
BLOCK_S = 10.0
# Of the patience: how long a server may wait before it answers a read, and how long any answer may take.
NOTICE_SHARE = 0.25
LEAST_ANSWER_S = 0.5

KEEP_S = 3600  # how long the keys of a call outlive its last heartbeat
RENEW_S = KEEP_S / 3

# How many barriers are kept, beside the first one. No member is further behind: all pass one before the next.
KEPT_BARRIERS = 64
# The server's refusal of an entry whose place in the log is taken: an answer, and no failure.
PLACE_IS_TAKEN = "ID specified in XADD is equal or smaller"


class RedisStore(Store):
    """Redis or Valkey. Without arguments it is the store of the job whose agent runs this rank; elsewhere, and
    where all ranks are on one host, a Valkey that is started for them, and ends after them.

    `url`: `redis://[user@]host[:port][/database]`, or `rediss://…`; it may hold no password. `password_file`: a file
    that holds the password, and nothing else. `patience`: how long to wait for a server that does not answer.
    Raises OptionError; connections raise StoreError, at once where the password is refused.
    """

    def __init__(
        self,
        *,
        url: str | None = None,
        password_file: str | None = None,
        patience: datetime.timedelta = datetime.timedelta(seconds=10),
    ) -> None:
        if password_file is not None and url is None:
            raise OptionError(
                "RedisStore: password_file without url: only a store that is named by url needs one",
                "password_file",
                "url",
            )
        self._url, self._password_file = url, password_file
        self._patience_s = patience.total_seconds()
        if url is not None:
            # What is no text is no URL either.
            named_server("RedisStore", str(url), None, OptionError)

    def connect(self, group: str, call: int) -> RedisConnection:
        server: tuple[RedisUrl, str | None] | Look
        job = key = None
        if self._url is not None:
            server = named_server("RedisStore", self._url, self._password_file, OptionError)
            where = self._url
        elif (path := environment.job_store_file()) is not None:
            store, server = server_of_job(path, StoreError)
            where, job = store.url, store.job
            key = JobKey(store.token) if store.token else None
        else:
            from nvrx_slurm.inprocess.store_keeper import VALKEY, hosted, place_now

            where = hosted(VALKEY, group, patience_s=self._patience_s).url
            server = functools.partial(place_now, VALKEY, group)
        keys = InprocessKeys(group, call, job=job)
        connection = RedisConnection(server, where, keys, patience_s=self._patience_s, job_key=key)
        try:
            connection.ping()
        except BaseException:
            connection.close()
            raise
        return connection


class RedisConnection(Connection):
    """Every operation is one round trip, except the first arrival at a barrier, and now and then a renewal.

    With `job_key` each entry is signed for its place in the log, and each arrival for its barrier and member. What is
    not signed is set aside: other users may know the password of a site's store.
    """

    def __init__(
        self,
        server: tuple[RedisUrl, str | None] | Look,
        where: str,
        keys: InprocessKeys,
        *,
        patience_s: float,
        renew_s: float = RENEW_S,
        job_key: JobKey | None = None,
    ) -> None:
        self._where, self._keys, self._job_key = where, keys, job_key
        self._log = RateLimitedLog(log.error)
        self._client = RetryingRedis(
            server,
            where,
            patience_s=patience_s,
            log=log,
            answer_s=min(ANSWER_S, patience_s, max(LEAST_ANSWER_S, NOTICE_SHARE * patience_s)),
            expected=PLACE_IS_TAKEN,
        )
        self._block_s = min(BLOCK_S, NOTICE_SHARE * patience_s)
        self._renew_s = renew_s
        self._renew_at = time.monotonic() + renew_s

    def ping(self) -> None:
        self._ask(["PING"])

    def _ask(self, *commands: Command, wait_s: float = 0.0) -> list[Any]:
        try:
            # The patience counts from when the answer was due: the server may have been away since then.
            retry = self._client.retry(began=time.monotonic() + wait_s) if wait_s else None
            return self._client.ask(*commands, wait_s=wait_s, retry=retry)
        except ClientClosed:
            raise Cancelled from None
        except (StoreUnreachable, CommandRefused) as error:
            raise StoreError(str(error)) from None

    def append(self, entry: bytes, after: int) -> bool:
        key, identity = self._keys.log, f"{after + 1}-0"
        entry = self._signed(f"{key} {after}", entry)
        # After the first entry the log must exist: without it, it has been lost with its server.
        must_be_there: Command = ["NOMKSTREAM"] if after else []
        _, _, found = self._ask(
            # The server refuses this where the place is taken.
            ["XADD", key, *must_be_there, identity, "m", entry],
            ["EXPIRE", key, KEEP_S],
            ["XRANGE", key, f"{after}-0", identity],
        )
        # The entry before this place, if any, and the one in it, whichever author has won.
        if len(found) < (2 if after else 1):
            raise self._lost(after)
        return bool(found[-1][1][1] == entry)

    def read(self, after: int, wait_s: float) -> list[bytes]:
        deadline = time.monotonic() + wait_s
        self._renew_if_due()
        while True:
            left_s = min(deadline - time.monotonic(), self._block_s)
            block: Command = ["BLOCK", max(1, int(left_s * 1000))] if left_s > 0 else []
            command = ["XREAD", *block, "STREAMS", self._keys.log, f"{after}-0"]
            [streams] = self._ask(command, wait_s=max(left_s, 0.0))
            if streams:
                items = streams[0][1]
                # A gap: entries were lost, and other ones were written after them.
                if [item[0] for item in items] != [
                    b"%d-0" % place for place in range(after + 1, after + 1 + len(items))
                ]:
                    raise self._lost(after)
                key = self._keys.log
                return [
                    self._verified(f"{key} {at}", fields[1]) or b"" for at, (_, fields) in enumerate(items, after)
                ]
            # Only now, and not with each read: its own answer would wake this thread once more for each entry.
            if after and not self._ask(["EXISTS", self._keys.log])[0]:
                raise self._lost(after)
            if time.monotonic() >= deadline:
                return []

    def arrive(self, barrier: str, member: int, payload: bytes = b"") -> int:
        key = self._keys.gate(barrier)
        payload = self._signed(f"{key} {member}", payload)
        new, _, arrived = self._ask(["HSET", key, member, payload], ["EXPIRE", key, KEEP_S], ["HLEN", key])
        # This member was the first; or it may have been, and the answer was lost. The last barrier is not listed: the
        # last member there may clear the call before the first one could list it.
        if barrier != LEFT and (new == arrived or self._client.asked_again):
            self._ask(["RPUSH", self._keys.gates, barrier], ["EXPIRE", self._keys.gates, KEEP_S])
        return int(arrived)

    def claim(self, barrier: str, member: int, payload: bytes) -> bytes:
        key = self._keys.gate(barrier)
        new, _, first, arrived = self._ask(
            ["HSETNX", key, member, self._signed(f"{key} {member}", payload)],
            ["EXPIRE", key, KEEP_S],
            ["HGET", key, member],
            ["HLEN", key],
        )
        if new == arrived or self._client.asked_again:
            self._ask(["RPUSH", self._keys.gates, barrier], ["EXPIRE", self._keys.gates, KEEP_S])
        return self._verified(f"{key} {member}", first) or b""

    def arrivals(self, barrier: str) -> Mapping[int, bytes]:
        key = self._keys.gate(barrier)
        [flat] = self._ask(["HGETALL", key])
        found = dict[int, bytes]()
        for member, signed in zip(flat[::2], flat[1::2], strict=True):
            payload = self._verified(f"{key} {member.decode(errors='replace')}", signed)
            if payload is not None and member.isdigit():
                found[int(member)] = payload
        return found

    def arrival(self, barrier: str, member: int) -> bytes | None:
        key = self._keys.gate(barrier)
        [payload] = self._ask(["HGET", key, member])
        return None if payload is None else self._verified(f"{key} {member}", payload)

    def beat(self, member: int, watched: int | None) -> int:
        self._renew_if_due()
        of_whom = member if watched is None else watched
        counted, seen = self._ask(
            ["HINCRBY", self._keys.beats, member, 1],
            ["HGET", self._keys.beats, of_whom],
        )
        # This member's first heartbeat, or possibly so, where an answer was lost: then the key may be new.
        if counted == 1 or self._client.asked_again:
            self._ask(["EXPIRE", self._keys.beats, KEEP_S])
        return 0 if watched is None else int(seen or 0)

    def clear(self) -> None:
        keys = self._keys
        [gates] = self._ask(["LRANGE", keys.gates, 0, -1])
        listed = (keys.gate(barrier.decode()) for barrier in gates)
        self._ask(["UNLINK", keys.log, keys.beats, keys.gates, keys.gate(LEFT), *listed])

    def cancel(self) -> None:
        self._client.cancel()

    def close(self) -> None:
        self._client.close()

    def _signed(self, place: str, data: bytes) -> bytes:
        return data if self._job_key is None else self._job_key.sign(place, data)

    def _verified(self, place: str, data: bytes) -> bytes | None:
        """The data that was signed for this place; None where it was not, and is set aside."""
        if self._job_key is None:
            return data
        try:
            return self._job_key.verify(place, data)
        except UntrustedRecord as error:
            self._log.say(f"{error}: it was set aside", time.monotonic())
            return None

    def _lost(self, after: int) -> StoreError:
        return StoreError(
            f"the store at {self._where} has lost the first {after} entries of {self._keys.log}: "
            "was it restarted without its data, or was there no sign of life for an hour?"
        )

    def _renew_if_due(self) -> None:
        """Put off the end of all keys of the call; barriers that no member needs any more are removed."""
        if time.monotonic() < self._renew_at:
            return
        self._renew_at = time.monotonic() + self._renew_s
        keys = self._keys
        [gates] = self._ask(["LRANGE", keys.gates, 0, -1])
        old, kept = gates[1:-KEPT_BARRIERS], [*gates[:1], *gates[1:][-KEPT_BARRIERS:]]
        commands: list[Command] = [["EXPIRE", key, KEEP_S] for key in (keys.log, keys.beats, keys.gates)]
        commands += [["EXPIRE", keys.gate(barrier.decode()), KEEP_S] for barrier in kept]
        for barrier in old:
            commands += [["UNLINK", keys.gate(barrier.decode())], ["LREM", keys.gates, 0, barrier]]
        self._ask(*commands)
