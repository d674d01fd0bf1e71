"""The store as agents and the controller use it: records in, records out.

Every call here is patient: while the store is away or refuses writes, it tries again until `patience_s` has passed
(`store/retry.py` decides), because a store that is restarted is no reason to touch a worker. A retry is harmless:
a fact that arrives twice is known by its `seq`, and a commit by its number.

Every record is signed with the job's key. A record that is not, or that cannot be decoded, is set aside: the reader
skips it and counts it in `refused`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from redis import exceptions as failures

from nvrx_slurm.errors import DataLostError, FencedError, ForgedRecord, MalformedRecord, UntrustedRecord
from nvrx_slurm.journal.commands import KEPT_S, WINDOW, AskerWord, CommandWord, unpack_asker
from nvrx_slurm.journal.folder import StoreAddress
from nvrx_slurm.journal.records import (
    AnyFact,
    AnyOrder,
    Assignment,
    ControllerUp,
    Entry,
    Fact,
    Heartbeat,
    LogFindings,
    NodeJoined,
    Record,
    Shutdown,
    pack,
    unpack_assignment,
    unpack_entry,
    unpack_order,
    unpack_record,
)
from nvrx_slurm.store.keys import Keys
from nvrx_slurm.store.redis_client import Look, async_client
from nvrx_slurm.store.retry import IN_MEMORY, GiveUp, StoreRetry
from nvrx_slurm.store.sealing import (
    RefusedRecords,
    claimed_number,
    field_m,
    open_order,
    order_place,
    seal_heartbeat,
    seal_order,
)
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.job_key import JobKey
from nvrx_slurm.util.log import get_logger

log = get_logger("store")

# How long one blocking read waits at most: short, so that a waiting agent can report it, and see a shutdown.
BLOCK_MS = 2000

CONNECT_S = 3.0

# How many facts one read of the inbox brings at most.
INBOX_BATCH = 4096

# A client that the server has answered within this time has a connection that works: each read ends sooner.
SERVED_S = BLOCK_MS / 1000 + 1.0

_ID = re.compile(rb"[0-9]{1,20}-[0-9]{1,20}")
_T = TypeVar("_T")
_R = TypeVar("_R", bound=Record)
Rendezvous = tuple[str, int, int, Sequence[tuple[str, Assignment]]]


class StoreClient:
    """One process's access to one job's keys. `look` reads `store.json` again, for each connection to an embedded
    store; `connection` is a client to use in place of a new one of the address, `key` a key in place of a new one of
    the address's token.

    Raises `StoreUnreachable` at once where the password or a command is refused, and after `patience_s` where the
    store does not answer or refuses writes (its disk is full). Where the password is refused only since the store
    took another, a call waits for one of the connections that were opened before, while these are still answered.
    """

    def __init__(
        self,
        address: StoreAddress,
        *,
        clock: Clock,
        patience_s: float = 600.0,
        generation: int = 0,
        look: Look | None = None,
        connection: Any = None,
        key: JobKey | None = None,
    ) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._hurried_at: float | None = None
        self._answered_at = -math.inf
        self._where, self._embedded = address.url, address.embedded
        self.generation = generation
        self.keys = Keys(address.job)
        self.refused = RefusedRecords(clock)
        self._key = key or JobKey(address.token)
        self._beats = 0  # so many were sent
        self._orders = 0  # so many were committed
        self._passed = 0  # the number of the last order that was read
        self._lost_orders = False  # the store has, with all its data, and nothing of the new ones is read yet
        # Any: redis-py's stubs know neither decoded nor raw replies for certain.
        self._redis: Any = connection
        if connection is None:
            self._redis = async_client(address, look, connect_s=CONNECT_S, answer_s=BLOCK_MS / 1000 + 5.0)
        self._acquire, self._commit, self._join = (
            self._redis.register_script(script_text(name)) for name in ("acquire", "commit", "join")
        )

    async def close(self) -> None:
        await self._redis.aclose()

    async def ping(self) -> None:
        await self._patiently(self._redis.ping)

    # ---- agents and the batch host

    async def join(self, fact: NodeJoined) -> tuple[str, Shutdown | None, ControllerUp | None]:
        """Post a join. Returns the id of the last order before it, the shutdown if there is one, the controller."""
        keys = self.keys
        names = [keys.inbox, keys.orders, keys.shutdown(self.generation), keys.controller, keys.joins]
        args: list[bytes | str] = [self._key.sign(keys.inbox, pack(fact)), fact.incarnation]
        last, shutdown, controller = await self._patiently(lambda: self._join(keys=names, args=args))
        first = self._value(names[2], shutdown, Shutdown), self._value(names[3], controller, ControllerUp)
        return last.decode(), *first

    async def has_join_of(self, incarnation: str) -> bool:
        """Whether the store still has the join that it took: one that loses its data loses that, too."""
        return await self._patiently(lambda: self._redis.hget(self.keys.joins, incarnation)) is not None

    async def post(self, fact: Record) -> None:
        """Post a fact."""
        data = {"m": self._key.sign(self.keys.inbox, pack(fact))}
        await self._patiently(lambda: self._redis.xadd(self.keys.inbox, data))

    async def send_heartbeat(self, beat: Heartbeat, keep: int | None = None) -> None:
        """Post a sign of life, and with `keep` trim the stream to about that many. Not tried again: the next one
        is as good."""
        self._beats += 1
        sealed = seal_heartbeat(self._key, self.keys.beats, beat, self._beats)
        fields = {"who": beat.incarnation, "m": sealed}  # who first: the controller reads no further
        await self._once(lambda: self._redis.xadd(self.keys.beats, fields, maxlen=keep, approximate=True))
        self._answered_at = self._clock.monotonic()

    async def controller_lives(self) -> bool:
        """Whether a controller of this generation has renewed its lease of late: that is its own sign of life."""
        owner: bytes | None = await self._redis.get(self.keys.lease)
        return owner is not None and owner.startswith(self._owner("").encode())

    def hurry(self, patience_s: float) -> None:
        """The job ends: from now on fail after `patience_s` instead of waiting for a store that may never be back."""
        self._patience_s = min(self._patience_s, patience_s)
        self._hurried_at = self._hurried_at or self._clock.monotonic()

    async def orders(self, after: str) -> list[tuple[str, AnyOrder | None]]:
        """The orders after an id; an empty list after `BLOCK_MS` without any. None in place of one that was set
        aside. An order that this process has read before does not come again, wherever it is copied to."""
        stream = self.keys.orders
        place = order_place(stream, self.generation)

        def opened(sealed: bytes) -> AnyOrder:
            number, packed = open_order(self._key, place, sealed, self._passed)
            order = unpack_order(packed)
            self._passed = number
            return order

        again = self._lost_orders
        items = await self._read(stream, "0-0" if again else after)
        # A store that has come back without its data, and with an earlier clock, gives new orders older ids.
        self._lost_orders = not items and place_of(await self._newest(stream)) < place_of(after)
        if again:  # an old file may have brought back some that were read before
            items = [item for item in items if claimed_number(item[1].get(b"m", b"")) > self._passed]
        return [(identity, self._opened(stream, identity, fields, opened)) for identity, fields in items]

    async def newest_order(self) -> str:
        """The id of the newest order."""
        return await self._newest(self.keys.orders)

    async def assignment(
        self, replica: str, cycle: int, node: str, incarnation: str = ""
    ) -> tuple[Assignment | None, str]:
        """What a node does in a closed rendezvous (None: it has no part in it), and the id of the newest order by
        then. With `incarnation` an assignment of another agent of that node is none of its own."""
        key = self.keys.rendezvous(replica, self.generation, cycle)

        async def ask() -> list[Any]:
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.hget(key, node).xrevrange(self.keys.orders, count=1)
                answers: list[Any] = await pipeline.execute()
                return answers

        data, newest = await self._patiently(ask)
        assignment = None
        if data is not None:
            fields = {b"m": data}
            assignment = self._opened(
                key, node, fields, lambda sealed: unpack_assignment(self._key.verify(f"{key} {node}", sealed))
            )
        if assignment is not None and incarnation and assignment.incarnation not in ("", incarnation):
            assignment = None
        return assignment, _newest_id(newest)

    async def say_of_command(self, request: str, word: CommandWord, number: int) -> None:
        """Post what a user's command has printed, or how it ended. `number` grows from word to word."""
        key = self.keys.command_out(request)
        sealed = seal_order(self._key, key, word, number)

        async def send() -> None:
            async with self._redis.pipeline(transaction=False) as pipeline:
                await pipeline.xadd(key, {"m": sealed}, maxlen=2 * WINDOW).expire(key, KEPT_S).execute()

        await self._patiently(send)

    async def newest_asker_word(self, request: str) -> str:
        """The id of the last word of a command's user so far."""
        return await self._newest(self.keys.command_in(request))

    async def asker_words(self, request: str, after: str, passed: int) -> tuple[str, int, list[AskerWord]]:
        """The words of a command's user after an id, whose numbers are above `passed`; none after `BLOCK_MS` without
        any. The next call begins with the id and the number that come first."""
        key, words = self.keys.command_in(request), list[AskerWord]()
        for identity, fields in await self._read(key, after):
            # Before the check: a word that is set aside must not come again with the next read.
            after = identity
            try:
                passed, packed = open_order(self._key, key, field_m(fields), passed)
                words.append(unpack_asker(packed))
            except UntrustedRecord as error:
                self.refused.add(key, identity, error)
        return after, passed, words

    # ---- the controller

    async def acquire(
        self, owner: str, ttl_s: float, kept: int = 0, kept_epoch: int | None = None
    ) -> tuple[int, int, str]:
        """Take over. Returns the new epoch, the number of the last journal entry, the last inbox id accounted for.

        `kept`, `kept_epoch`: the last number and the last epoch in the job folder's copy, from which a store counts
        on that is fresh, or has lost its data. Epoch 0: it is such a store, and needs the epoch; nothing was done.
        """
        keys = self.keys
        first = (keys.epoch, keys.lease, keys.journal_n, keys.cursor)
        names = [*first, *(key for key in keys.all(self.generation) if key not in first)]
        epoch, last, cursor = await self._patiently(
            lambda: self._acquire(
                keys=names,
                args=[self._owner(owner), int(ttl_s * 1000), kept, "" if kept_epoch is None else kept_epoch],
            )
        )
        # Nothing signs the cursor: in a site's store it may be any text. Read from 0-0 no fact is missed, and one
        # that the journal has already is known by its `seq`.
        return int(epoch), int(last), cursor.decode() if _ID.fullmatch(cursor) else "0-0"

    async def commit(
        self,
        epoch: int,
        entries: Sequence[Entry],
        *,
        orders: Sequence[Record] = (),
        rendezvous: Sequence[Rendezvous] = (),
        cursor: str = "",
        shutdown: Shutdown | None = None,
        controller: ControllerUp | None = None,
    ) -> float:
        """Journal entries and what follows from them, all or nothing. Returns the server's time, in seconds.

        Raises `FencedError` if a newer controller has taken over, `DataLostError` if the store has lost older
        entries.
        """
        keys = self.keys
        names = [keys.epoch, keys.journal_n, keys.journal, keys.orders, keys.cursor]
        names += [keys.shutdown(self.generation), keys.controller, keys.inbox]
        names += [keys.rendezvous(replica, generation, cycle) for replica, generation, cycle, _ in rendezvous]
        first, sign = entries[0].n if entries else 0, self._key.sign
        args: list[Any] = [
            epoch,
            first,
            cursor,
            sign(names[5], pack(shutdown)) if shutdown else "",
            sign(keys.controller, pack(controller)) if controller else "",
        ]
        args += [len(entries), *(sign(keys.journal, pack(entry)) for entry in entries)]
        args.append(len(orders))
        place = order_place(keys.orders, self.generation)
        for order in orders:
            # Numbered by the epoch, which grows from controller to controller, and a count below it.
            self._orders += 1
            args.append(seal_order(self._key, place, order, (epoch << 32) + self._orders))
        for key, (*_, fields) in zip(names[8:], rendezvous, strict=True):
            args.append(2 * len(fields))
            for node, assignment in fields:
                args += [node, sign(f"{key} {node}", pack(assignment))]
        status, micros = await self._patiently(lambda: self._commit(keys=names, args=args))
        # `already`: an earlier try of this commit was carried out, and its answer was lost.
        if status == b"fenced":
            raise FencedError(f"a newer controller than epoch {epoch} writes the journal")
        if status == b"lost":
            raise DataLostError(f"{self._where} has lost this job's journal")
        return int(micros) / 1e6

    async def renew(self, owner: str, ttl_s: float, epoch: int = 0, committed: int = 0) -> None:
        """Say that the controller lives. Not tried again: the next time is as good. `committed`: the number of the
        last entry that it knows to be in the journal. Raises DataLostError if the store has lost that."""
        keys = self.keys
        with contextlib.suppress(failures.RedisError, OSError):
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.set(keys.lease, self._owner(owner), px=int(ttl_s * 1000))
                _, newest, last = await self._once(pipeline.get(keys.epoch).get(keys.journal_n).execute)
            if int(newest or 0) < epoch or int(last or 0) < committed:
                raise DataLostError(f"{self._where} has lost this job's journal")

    async def retire(self, keep_s: int) -> None:
        """The job has ended: let its keys go by themselves after `keep_s`, when the last reader has read."""

        async def expire() -> None:
            # A new pipeline for each try: redis-py empties one when it has failed, and sends nothing the second time.
            async with self._redis.pipeline(transaction=False) as pipeline:
                for key in self.keys.all(self.generation):
                    pipeline.expire(key, keep_s)
                await pipeline.execute()

        await self._patiently(expire)

    async def inbox(self, after: str) -> list[tuple[str, AnyFact | LogFindings | None]]:
        """The facts after an id; an empty list after `BLOCK_MS` without any. None in place of one that was set
        aside."""
        inbox = self.keys.inbox

        def opened(sealed: bytes) -> AnyFact | LogFindings:
            fact = unpack_record(self._key.verify(inbox, sealed))
            if not isinstance(fact, Fact):
                raise MalformedRecord(f"a {type(fact).__name__} is not a fact")
            return fact

        items = await self._read(inbox, after, count=INBOX_BATCH)
        return [(identity, self._opened(inbox, identity, fields, opened)) for identity, fields in items]

    async def journal(self) -> list[Entry]:
        """The whole journal so far: each number once, in order. What else stands there is set aside."""
        return [entry for _, entry in await self.dated_journal()]

    async def dated_journal(self) -> list[tuple[float, Entry]]:
        """The journal, with when the server took the commit of each entry: seconds since the epoch, the same for all
        entries of one commit."""
        stream, entries = self.keys.journal, list[tuple[float, Entry]]()
        for identity, fields in await self._patiently(lambda: self._redis.xrange(stream)):
            entry = self._opened(
                stream, identity, fields, lambda sealed: unpack_entry(self._key.verify(stream, sealed))
            )
            if entry is not None and entries and entry.n <= (last := entries[-1][1].n):
                error = ForgedRecord(f"entry {entry.n} stands again behind entry {last}: it is a copy")
                self.refused.add(stream, identity, error)
            elif entry is not None:
                entries.append((int(identity.partition(b"-")[0]) / 1000, entry))
        return entries

    async def time(self) -> float:
        """The server's clock, in seconds since the epoch: the only one that counts."""
        seconds, micros = await self._patiently(self._redis.time)
        return int(seconds) + int(micros) / 1e6

    # ---- how

    def _owner(self, process: str) -> str:
        """What the lease holds while a controller process of this generation runs."""
        return f"{self.generation}:{process}"

    async def _newest(self, stream: str) -> str:
        return _newest_id(await self._patiently(lambda: self._redis.xrevrange(stream, count=1)))

    async def _read(self, key: str, after: str, count: int = 1024) -> list[tuple[str, dict[bytes, bytes]]]:
        reply = await self._patiently(lambda: self._redis.xread({key: after}, count=count, block=BLOCK_MS))
        if not reply:
            return []
        # redis-py returns a list of pairs for RESP2, and a dict for RESP3.
        streams = reply.values() if isinstance(reply, dict) else (items for _, items in reply)
        return [(identity.decode(), fields) for items in streams for identity, fields in items]

    def _opened(
        self, key: str, identity: bytes | str, fields: dict[bytes, bytes], opened: Callable[[bytes], _T]
    ) -> _T | None:
        """The record of an item; None where it was set aside."""
        try:
            return opened(field_m(fields))
        except UntrustedRecord as error:
            self.refused.add(key, identity, error)
            return None

    def _value(self, key: str, sealed: bytes, kind: type[_R]) -> _R | None:
        """The order that a key holds; None: there is none, or it was set aside."""

        def opened(sealed: bytes) -> _R:
            order = unpack_order(self._key.verify(key, sealed))
            if not isinstance(order, kind):
                raise MalformedRecord(f"a {type(order).__name__} is not a {kind.__name__}")
            return order

        return self._opened(key, "its value", {b"m": sealed}, opened) if sealed else None

    async def _once(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Call, and try nothing again. Raises what redis-py does."""
        try:
            return await call()
        except failures.ReadOnlyError:
            # As `_patiently`: after a failover the connections that are open lead to the old primary for ever.
            await self._redis.aclose()
            raise

    async def _patiently(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Call until the store answers, as `StoreRetry` decides. Says once that it waits, and once that it waits no
        more. Raises StoreUnreachable."""
        retry: StoreRetry | None = None
        began = self._clock.monotonic()
        while True:
            try:
                answer = await call()
            except (failures.RedisError, OSError) as error:
                if retry is None:  # only now: nearly every call is answered at once
                    retry = StoreRetry(self._where, self._patience_s, embedded=self._embedded, began=began)
                if self._hurried_at is not None:
                    retry.hurry(self._patience_s, self._hurried_at)
                # Another task's call may have been answered while this one's login was refused: then this one waits
                # for that connection.
                now = self._clock.monotonic()
                decision = retry.failed(error, now, served=now - self._answered_at <= SERVED_S)
                if isinstance(decision, GiveUp):
                    raise decision.unreachable() from None
                if decision.warning:
                    log.warning("%s", decision.warning)
                if decision.reconfigure:
                    with contextlib.suppress(failures.RedisError, OSError):  # the next answer says how the server is
                        await self._redis.config_set(*IN_MEMORY[2:])
                if decision.reconnect:
                    await self._redis.aclose()  # the next command opens a connection
                await asyncio.sleep(decision.pause_s)
            else:
                self._answered_at = self._clock.monotonic()
                if retry is not None and (message := retry.answered(self._answered_at)):
                    log.info("%s", message)
                return answer


def place_of(identity: str) -> tuple[int, int]:
    """Where an item stands in its stream."""
    milliseconds, _, number = identity.partition("-")
    return int(milliseconds), int(number)


def _newest_id(reply: list[Any]) -> str:
    """Of XREVRANGE with COUNT 1; `0-0`, which is before all items, of an empty stream."""
    return reply[0][0].decode() if reply else "0-0"


@cache
def script_text(name: str) -> str:
    """A script of `store/lua`."""
    return (resources.files("nvrx_slurm.store") / "lua" / f"{name}.lua").read_text()
