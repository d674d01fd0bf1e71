"""`Directory`: producers publish refs of their payloads in the job's store, and consumers find them there.

A topic is a stream, `nvrx:{<job>}:payloads:<topic>`; a record in it (`Published`) is the field `m`. It names the
place of a payload: the payload itself stays in its producer's ring. Beyond about `KEPT_RECORDS` the oldest go, and
all of them `KEEP_S` after the last publish, lookup or follow.

Within a job a record is signed with the job's key, for its topic: what another user of the store writes there is
skipped. Without an agent, or with another job's name, there is no key, and nothing is signed.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import msgspec

from nvrx_slurm.errors import MalformedRecord, UntrustedRecord, UsageError
from nvrx_slurm.store.connection import ClientClosed, Command, CommandRefused, Look, RetryingRedis
from nvrx_slurm.store.job_store import named_server, server_of_job
from nvrx_slurm.store.retry import StoreRetry
from nvrx_slurm.transport import arguments, environment
from nvrx_slurm.transport.errors import TransportError
from nvrx_slurm.transport.ref import PayloadRef
from nvrx_slurm.util.admission import RateLimitedLog
from nvrx_slurm.util.decoding import decode
from nvrx_slurm.util.job_key import JobKey
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.redis_url import RedisUrl
from nvrx_slurm.util.threads import reset_after_fork

log = get_logger("transport")

TOPIC = "payloads"
KEPT_RECORDS = 1 << 16
# Long enough for a consumer that saves its checkpoint for hours meanwhile; a site's store has other users.
KEEP_S = 86400
SLICE_S = 1.0  # how long one read waits at the server: so soon `close` is seen
CHUNK = 1024
START = "0-0"


class Directory:
    """What is published in a job, by topic. For any number of threads; a forked child makes connections of its own.

    Without arguments it is the job whose agent runs this process. `url`: of a Redis or Valkey, without a password;
    `password_file` (mode 0600): holds that, and nothing else; `job`: whose keys (default: the agent's job).
    `patience_s`: how long a store that does not answer is waited for, each time.

    Raises UsageError where the store is not named or the arguments cannot be. Operations raise StoreUnreachable where
    the store does not answer for the patience, or refuses us; UsageError after `close`.
    """

    def __init__(
        self,
        url: str | None = None,
        password_file: str | os.PathLike[str] | None = None,
        job: str | None = None,
        *,
        patience_s: float = 30.0,
    ) -> None:
        server, where, job, self._key = _find_store(url, password_file, job)
        patience_s = arguments.seconds("Directory: patience_s", patience_s)
        self._client = RetryingRedis(server, where, patience_s=patience_s, log=log)
        self._producer = environment.producer()
        self._keys = f"nvrx:{{{job}}}:payloads:"
        self._numbers = _Numbers()
        reset_after_fork(self, Directory._forget_numbers)

    def publish(self, ref: PayloadRef, topic: str = TOPIC) -> Published:
        """Put a ref there, for all. A consumer gets it once, even where the store was restarted meanwhile.

        Raises TransportError for a ref that no reader would take.
        """
        key, ref = self._stream(topic), arguments.payload_ref(ref)
        numbers = self._numbers
        published = Published(
            ref=ref, **self._producer._asdict(), publisher=numbers.publisher, number=next(numbers.count)
        )
        data = pack(published)
        if self._key is not None:
            data = self._key.sign(key, data)
        identity, _ = self._ask(
            ["XADD", key, "MAXLEN", "~", KEPT_RECORDS, "*", "m", data],
            ["EXPIRE", key, KEEP_S],
        )
        return msgspec.structs.replace(published, id=identity.decode())

    def lookup(self, topic: str = TOPIC, after: str | None = None) -> list[Published]:
        """What is published now, oldest first; with `after`, the `id` of one, only what came later."""
        key, last = self._stream(topic), START if after is None else checked_id(after)
        # The newest record of this moment is the end: a producer that goes on must not keep the loop going.
        newest = self._newest(key)
        reader = _TopicReader(key, self._key)
        found: list[Published] = []
        while place(last) < place(newest):
            # The first id after `last`. (`(` before an id says the same, to servers from 6.2 on.)
            milliseconds, number = place(last)
            first = f"{milliseconds}-{number + 1}" if number < LARGEST_WORD else f"{milliseconds + 1}-0"
            [items] = self._ask(["XRANGE", key, first, newest, "COUNT", CHUNK])
            if not items:
                break  # trimmed meanwhile
            found += reader.read(items)
            last = items[-1][0].decode()
        return found

    def follow(self, topic: str = TOPIC, *, from_start: bool = True) -> Following:
        """All that is published, as it comes; without `from_start` only what is published from now on."""
        key = self._stream(topic)
        newest = self._newest(key)
        after, retry = START if from_start else newest, self._client.retry()
        return Following(functools.partial(self._ask, retry=retry), key, _TopicReader(key, self._key), after)

    def close(self) -> None:
        """Any number of times. A thread that waits in `Following.next` gets a UsageError within about a second."""
        self._client.close()

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(
        self, *commands: Command, wait_s: float = 0.0, until: float = math.inf, retry: StoreRetry | None = None
    ) -> list[Any]:
        try:
            return self._client.ask(*commands, wait_s=wait_s, until=until, retry=retry)
        except CommandRefused as error:
            raise TransportError(str(error)) from None
        except ClientClosed:
            raise UsageError("this Directory is closed") from None

    def _forget_numbers(self) -> None:
        # A forked child counts for itself, or what it publishes would be taken for its parent's.
        self._numbers = _Numbers()

    def _stream(self, topic: str) -> str:
        return self._keys + checked_topic(topic)

    def _newest(self, key: str) -> str:
        """The id of the newest record; renews the topic, since a consumer asks for it."""
        newest, _ = self._ask(["XREVRANGE", key, "+", "-", "COUNT", 1], ["EXPIRE", key, KEEP_S])
        return newest[0][0].decode() if newest else START


class Following:
    """One consumer's way through a topic; for one thread at a time. It ends with its `Directory`."""

    def __init__(self, ask: Callable[..., list[Any]], key: str, reader: _TopicReader, after: str) -> None:
        self._ask, self._key, self._reader, self._after = ask, key, reader, after

    @property
    def after(self) -> str:
        """The place up to which it has come: what `Directory.lookup` takes."""
        return self._after

    def next(self, most: int = 256, *, timeout_s: float = 10.0) -> list[Published]:
        """What comes next, oldest first, up to `most` at a time; waits for the first. Nothing after `timeout_s`.

        From a store that is away nothing comes, until the patience is used up. (One that is frozen, but takes what it
        is asked, is waited for a few seconds longer than `timeout_s`.)
        """
        most = arguments.whole("most", most, 1)
        deadline = time.monotonic() + arguments.seconds("timeout_s", timeout_s)
        while True:
            left_s = min(deadline - time.monotonic(), SLICE_S)
            block: list[str | int] = ["BLOCK", math.ceil(left_s * 1000)] if left_s > 0 else []
            command = ["XREAD", "COUNT", most, *block, "STREAMS", self._key, self._after]
            try:
                [streams] = self._ask(command, wait_s=left_s, until=deadline)
            except TimeoutError:
                streams = []
            items: list[Any] = streams[0][1] if streams else []
            if items:
                # Before they are read: records that are skipped are not asked for again.
                self._after = items[-1][0].decode()
            found = self._reader.read(items)
            if found or time.monotonic() >= deadline:
                return found


class _TopicReader:
    """Turns what a stream holds into records: each once, and none that is forged or cannot be read; one log line a
    minute says so."""

    def __init__(self, stream: str, key: JobKey | None) -> None:
        self._stream, self._key, self._duplicates = stream, key, Duplicates()
        self._log = RateLimitedLog(log.warning)

    def read(self, items: Iterable[Any]) -> list[Published]:
        found = []
        for identity, fields in items:
            try:
                # A stream's entry is names and values, flat.
                data = dict(zip(fields[::2], fields[1::2], strict=False)).get(b"m")
                if data is None:
                    raise TransportError("this is no record of a payload: it has no field m")
                if self._key is not None:
                    data = self._key.verify(self._stream, data)
                published = unpack(data, identity.decode())
            except (TransportError, UntrustedRecord) as error:
                self._log.say(f"{self._stream}: {identity.decode()} is skipped: {error}", time.monotonic())
                continue
            if not self._duplicates.has_had(published):
                found.append(published)
        return found


class _Numbers(threading.local):
    """How a thread counts what it publishes. It publishes one after the other, so its numbers grow in the stream."""

    def __init__(self) -> None:
        self.publisher = secrets.token_hex(8)
        self.count = itertools.count()


def publish(ref: PayloadRef, topic: str = TOPIC) -> Published:
    """As `Directory.publish`, in the job whose agent runs this process."""
    return _of_this_process().publish(ref, topic)


def lookup(topic: str = TOPIC, after: str | None = None) -> list[Published]:
    """As `Directory.lookup`, in the job whose agent runs this process."""
    return _of_this_process().lookup(topic, after)


@functools.cache
def _of_this_process() -> Directory:
    return Directory()


def _find_store(
    url: str | None, password_file: str | os.PathLike[str] | None, job: str | None
) -> tuple[tuple[RedisUrl, str | None] | Look, str, str, JobKey | None]:
    """The store as `RetryingRedis` takes it, its name in messages, the job whose keys are used, and the job's key."""
    if url is not None:
        job = job or environment.job_id()
        if job is None:
            raise UsageError("Directory: a url needs a job: name whose payloads these are, such as job='my-run'")
        url, job = arguments.instance("Directory: url", url, str), arguments.instance("Directory: job", job, str)
        try:
            file = None if password_file is None else os.fspath(password_file)
            server = named_server("Directory", url, file, lambda message, _: UsageError(message))
        except TypeError as error:
            raise UsageError(f"Directory: password_file: {error}") from None
        return server, url, job, None
    if password_file is not None:
        raise UsageError("Directory: password_file without url: only a store that is named by url needs one")
    path = environment.job_store_file()
    if path is None:
        raise UsageError(
            "Directory: this process is no worker of an nvrx-slurm job: name a Redis or Valkey by url= and job="
        )
    store, of_job = server_of_job(path, UsageError)
    key = JobKey(store.token) if store.token and job in (None, store.job) else None
    return of_job, store.url, job or store.job, key


VERSION = 1
LONGEST_RECORD_BYTES = 128 << 10
MOST_PUBLISHERS = 4096
LARGEST_WORD = (1 << 64) - 1

_TOPIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_Name = Annotated[str, msgspec.Meta(max_length=255)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Published(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A ref, and the worker that has published it: its `node`, and which life of which `replica` it is (its cycle
    within its generation); outside of a job there is no replica.

    `id`: its place in the topic; ids of one topic grow. `publisher` and `number` identify a record that was
    put there twice, because the answer to the first was lost. `version` grows only where older readers must not read
    on.
    """

    ref: PayloadRef
    replica: _Name = ""
    node: _Name = ""
    generation: _Count = 0
    cycle: _Count = 0
    publisher: _Name = ""
    number: _Count = 0
    version: _Count = VERSION
    id: str = ""

    def is_outlived_by(self, other: Published) -> bool:
        """Whether `other` comes from a later life of the same replica: then the server of this one is gone."""
        same = self.replica == other.replica and bool(self.replica)
        return same and (self.generation, self.cycle) < (other.generation, other.cycle)


class Duplicates:
    """Knows a record that a reader has had. A publisher's numbers grow, and it publishes one after the other."""

    def __init__(self, most: int = MOST_PUBLISHERS) -> None:
        self._most = most
        self._last: OrderedDict[str, int] = OrderedDict()

    def has_had(self, published: Published) -> bool:
        """Whether the record was seen before. From now on it counts as seen."""
        publisher, number = published.publisher, published.number
        if not publisher:
            return False
        last = self._last.pop(publisher, -1)
        self._last[publisher] = max(last, number)
        if len(self._last) > self._most:
            # The publisher that has been silent for longest.
            self._last.popitem(last=False)
        return number <= last


def pack(published: Published) -> bytes:
    """The record as bytes. Raises TransportError for one that no reader would take."""
    data = _encode(published)
    unpack(data, "")
    return data


def unpack(data: bytes, identity: str) -> Published:
    """The record of these bytes. Raises TransportError where they are none, or are of a later version."""
    if len(data) > LONGEST_RECORD_BYTES:
        raise TransportError(f"this record has {len(data)} bytes; none is longer than {LONGEST_RECORD_BYTES}")
    try:
        published = decode(_decoder.decode, data, "the item")
    except (MalformedRecord, UsageError) as error:
        raise TransportError(f"this is no record of a payload: {error}") from None
    if published.version > VERSION:
        raise TransportError(f"this record is of version {published.version}; this side reads {VERSION}")
    return msgspec.structs.replace(published, id=identity)


def checked_topic(topic: str) -> str:
    """The topic. Raises UsageError where it cannot be part of a key."""
    if not isinstance(topic, str) or not _TOPIC.fullmatch(topic):
        raise UsageError(
            f"topic {topic!r} must be 1 to 64 letters, digits, `.`, `_` and `-`, no sign at its beginning"
        )
    return topic


def checked_id(identity: str) -> str:
    """The id. Raises UsageError where it is no place in a topic."""
    if not isinstance(identity, str) or not _ID.fullmatch(identity) or max(place(identity)) > LARGEST_WORD:
        raise UsageError(f"after {identity!r} must be the `id` of a Published, such as 1700000000000-0")
    return identity


def place(identity: str) -> tuple[int, int]:
    """An id as numbers, in the order of the topic."""
    milliseconds, _, number = identity.partition("-")
    return int(milliseconds), int(number)


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Published)
