"""`RedisStore`: what a group shares, in Redis or Valkey. The keys: `nvrx_slurm.store.keys`."""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Mapping
from pathlib import Path

from nvrx_slurm.errors import UntrustedRecord
from nvrx_slurm.inprocess import environment
from nvrx_slurm.inprocess.exception import OptionError, StoreError
from nvrx_slurm.inprocess.store.port import Connection, Store
from nvrx_slurm.inprocess.store.redis_client import Command, RedisAddress, RetryingRedis, parse_address
from nvrx_slurm.store.job_store import read_job_store
from nvrx_slurm.store.keys import InprocessKeys
from nvrx_slurm.util.admission import RateLimitedLog
from nvrx_slurm.util.job_key import JobKey
from nvrx_slurm.util.log import get_logger

log = get_logger("inprocess")

BLOCK_S = 10.0
"""How long one read waits at the server: a server that has frozen is noticed so long, and `ANSWER_S`, after that."""

KEEP_S = 3600
"""How long the keys of a call outlive its last sign of life."""

RENEW_S = KEEP_S / 3

KEPT_BARRIERS = 64
"""How many barriers are kept, beside the first one. No member is further behind: all pass one before the next."""


class RedisStore(Store):
    """Redis or Valkey. Without arguments it is the store of the job whose agent runs this rank; elsewhere, and
    where all ranks are on one host, a Valkey that is started for them, and ends after them.

    `url`: `redis://[user@]host[:port][/database]`, or `rediss://…`; it may hold no password. `password_file`: holds
    it, and nothing else. `patience`: how long a server that does not answer is waited for.
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
            raise OptionError("RedisStore: password_file without url: only a store that is named by url needs one")
        self._url, self._password_file = url, password_file
        self._patience_s = patience.total_seconds()
        if url is not None:
            parse_address(url, None)

    def connect(self, group: str, call: int) -> RedisConnection:
        address, job, key, embedded = self._find(group)
        keys = InprocessKeys(group, call, job=job)
        patience_s = self._patience_s
        connection = RedisConnection(address, keys, patience_s=patience_s, embedded=embedded, job_key=key)
        try:
            connection.ping()
        except BaseException:
            connection.close()
            raise
        return connection

    def _find(self, group: str) -> tuple[RedisAddress, str | None, JobKey | None, bool]:
        """The server, the job whose keys are used, what it signs with, and whether this package has started the
        server."""
        if self._url is not None:
            return parse_address(self._url, self._password()), None, None, False
        if (path := environment.job_store_file()) is not None:
            store = read_job_store(path, StoreError)
            key = JobKey(store.token) if store.token else None
            if store.embedded:
                return (
                    RedisAddress(store.url, look=functools.partial(read_job_store, path, OSError)),
                    store.job,
                    key,
                    True,
                )
            return parse_address(store.url, store.password), store.job, key, False
        from nvrx_slurm.inprocess.store.keeper import VALKEY, hosted, place_now

        place = hosted(VALKEY, group, patience_s=self._patience_s)
        return RedisAddress(place.url, look=functools.partial(place_now, VALKEY, group)), None, None, True

    def _password(self) -> str | None:
        if self._password_file is None:
            return None
        try:
            return Path(self._password_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"RedisStore: password_file {self._password_file} cannot be read: {error}") from None


class RedisConnection(Connection):
    """Every operation is one round trip, but for the first arrival at a barrier, and once in a while a renewal.

    With `job_key` each entry is signed for its place in the log, and each arrival for its barrier and member. What is
    not signed is set aside: others may know the password of a site's store.
    """

    def __init__(
        self,
        address: RedisAddress,
        keys: InprocessKeys,
        *,
        patience_s: float,
        embedded: bool = False,
        renew_s: float = RENEW_S,
        job_key: JobKey | None = None,
    ) -> None:
        self._where, self._keys, self._job_key = address.where, keys, job_key
        self._log = RateLimitedLog(log.error)
        self._line = RetryingRedis(address, patience_s=patience_s, embedded=embedded)
        self._renew_s = renew_s
        self._renew_at = time.monotonic() + renew_s

    def ping(self) -> None:
        self._line.ask(["PING"])

    def append(self, entry: bytes, after: int) -> bool:
        key, identity = self._keys.log, f"{after + 1}-0"
        entry = self._signed(f"{key} {after}", entry)
        # The log of a call that goes on is there, to its last entry: one that is not has been lost with its server.
        must_be_there: Command = ["NOMKSTREAM"] if after else []
        _, _, found = self._line.ask(
            # Is refused where the place is taken.
            ["XADD", key, *must_be_there, identity, "m", entry],
            ["EXPIRE", key, KEEP_S],
            ["XRANGE", key, f"{after}-0", identity],
        )
        if len(found) < (2 if after else 1):
            raise self._lost(after)
        return bool(found[-1][1][1] == entry)

    def read(self, after: int, wait_s: float) -> list[bytes]:
        deadline = time.monotonic() + wait_s
        self._renew_if_due()
        while True:
            left_s = min(deadline - time.monotonic(), BLOCK_S)
            block: Command = ["BLOCK", max(1, int(left_s * 1000))] if left_s > 0 else []
            command = ["XREAD", *block, "STREAMS", self._keys.log, f"{after}-0"]
            [streams] = self._line.ask(command, wait_s=max(left_s, 0.0))
            if streams:
                items = streams[0][1]
                if [item[0] for item in items] != [
                    b"%d-0" % place for place in range(after + 1, after + 1 + len(items))
                ]:
                    raise self._lost(after)
                key = self._keys.log
                return [
                    self._verified(f"{key} {at}", fields[1]) or b"" for at, (_, fields) in enumerate(items, after)
                ]
            if time.monotonic() >= deadline:
                return []

    def arrive(self, barrier: str, member: int, payload: bytes = b"") -> int:
        key = self._keys.gate(barrier)
        payload = self._signed(f"{key} {member}", payload)
        new, _, arrived = self._line.ask(["HSET", key, member, payload], ["EXPIRE", key, KEEP_S], ["HLEN", key])
        if new == arrived or self._line.asked_again:
            # The first one; or we were it, and the answer was lost.
            self._line.ask(["RPUSH", self._keys.gates, barrier], ["EXPIRE", self._keys.gates, KEEP_S])
        return int(arrived)

    def arrivals(self, barrier: str) -> Mapping[int, bytes]:
        key = self._keys.gate(barrier)
        [flat] = self._line.ask(["HGETALL", key])
        found = dict[int, bytes]()
        for member, signed in zip(flat[::2], flat[1::2], strict=True):
            payload = self._verified(f"{key} {member.decode(errors='replace')}", signed)
            if payload is not None and member.isdigit():
                found[int(member)] = payload
        return found

    def arrival(self, barrier: str, member: int) -> bytes | None:
        key = self._keys.gate(barrier)
        [payload] = self._line.ask(["HGET", key, member])
        return None if payload is None else self._verified(f"{key} {member}", payload)

    def beat(self, member: int, watched: int | None) -> int:
        self._renew_if_due()
        of_whom = member if watched is None else watched
        counted, seen = self._line.ask(
            ["HINCRBY", self._keys.beats, member, 1],
            ["HGET", self._keys.beats, of_whom],
        )
        if counted == 1 or self._line.asked_again:
            self._line.ask(["EXPIRE", self._keys.beats, KEEP_S])
        return 0 if watched is None else int(seen or 0)

    def clear(self) -> None:
        keys = self._keys
        [gates] = self._line.ask(["LRANGE", keys.gates, 0, -1])
        self._line.ask(
            ["UNLINK", keys.log, keys.beats, keys.gates, *(keys.gate(barrier.decode()) for barrier in gates)]
        )

    def cancel(self) -> None:
        self._line.cancel()

    def close(self) -> None:
        self._line.close()

    def _signed(self, place: str, data: bytes) -> bytes:
        return data if self._job_key is None else self._job_key.sign(place, data)

    def _verified(self, place: str, data: bytes) -> bytes | None:
        """What was signed for this place; None: it was set aside."""
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
        [gates] = self._line.ask(["LRANGE", keys.gates, 0, -1])
        old, kept = gates[1:-KEPT_BARRIERS], [*gates[:1], *gates[1:][-KEPT_BARRIERS:]]
        commands: list[Command] = [["EXPIRE", key, KEEP_S] for key in (keys.log, keys.beats, keys.gates)]
        commands += [["EXPIRE", keys.gate(barrier.decode()), KEEP_S] for barrier in kept]
        for barrier in old:
            commands += [["UNLINK", keys.gate(barrier.decode())], ["LREM", keys.gates, 0, barrier]]
        self._line.ask(*commands)
