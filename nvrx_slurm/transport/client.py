"""`PayloadClient` and `AsyncPayloadClient`: payloads, from wherever they are."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from nvrx_slurm.errors import UsageError
from nvrx_slurm.transport import arguments
from nvrx_slurm.transport.backends import SCHEMES
from nvrx_slurm.transport.environment import token_or_none
from nvrx_slurm.transport.errors import (
    PayloadTimeout,
    PeerRefused,
    PeerReset,
    RingError,
    StaleSlotError,
    TransportError,
)
from nvrx_slurm.transport.fetching import ClientOptions, Fetcher, ReadCancellation
from nvrx_slurm.transport.ref import PayloadRef
from nvrx_slurm.transport.retrying import Limits, pause_s
from nvrx_slurm.util.threads import ThreadPool

if TYPE_CHECKING:
    from typing_extensions import Buffer


DEADLINE_S = 60.0
KEEP_S = 30.0
MOST_BYTES = 16 << 30
END_S = 1.0

OnMissing = Literal["skip", "raise"]
T = TypeVar("T")


class PayloadClient:
    """Reads payloads by their refs: from the ring where it is on this node, else from the ports of its server.

    `transports`: which ones to use, the preferred one first: "shm", "ucxx", "tcp". `token`: what its servers know
    (default: the job's, under an agent; `PayloadServer.token` elsewhere); on its own node a client needs none.
    `connections_per_port`: at most; a connection is kept for `keep_s` seconds of idleness at most, and for less where
    its server says so. `most_bytes`: a ref of more is refused before anything is allocated. `concurrency`: how many
    payloads of a batch are read at a time. `allow_pickle`: also unpickle payloads. Every process that
    can write into the ring can then run code here.

    Any number of threads may read at once. After a fork, parent and child each go on with connections of their own.
    Raises UsageError for arguments that cannot be, PeerRefused where a transport's library is not installed.
    """

    def __init__(
        self,
        *,
        token: bytes | None = None,
        transports: Sequence[str] = ("shm", "tcp"),
        connections_per_port: int = 4,
        keep_s: float = KEEP_S,
        most_bytes: int = MOST_BYTES,
        concurrency: int = 8,
        allow_pickle: bool = False,
        limits: Limits | None = None,
    ) -> None:
        known = ("shm", *SCHEMES)
        if (
            not transports
            or not isinstance(transports, list | tuple)
            or not all(each in known for each in transports)
        ):
            raise UsageError(f"transports must be a sequence of some of {', '.join(known)}, not {transports!r}")
        self._limits = Limits() if limits is None else arguments.instance("limits", limits, Limits)
        self._concurrency = arguments.whole("concurrency", concurrency, 1)
        self._threads = ThreadPool("payload read")
        # A client that is forgotten without `close` leaves no threads.
        weakref.finalize(self, self._threads.close)
        self._fetcher = Fetcher(
            ClientOptions(
                token=token_or_none(token),
                transports=tuple(transports),
                connections_per_port=arguments.whole("connections_per_port", connections_per_port, 1),
                keep_s=arguments.seconds("keep_s", keep_s),
                most_bytes=arguments.whole("most_bytes", most_bytes, 0),
                allow_pickle=allow_pickle,
                limits=self._limits,
            )
        )

    def read(
        self,
        ref: PayloadRef,
        *,
        deadline: float | timedelta = DEADLINE_S,
        into: Buffer | None = None,
        keep: bool = False,
    ) -> Any:
        """The object that `ref` names; its slot is free then, or with `keep` ready for another reader.

        `deadline`: seconds from now, for everything: it returns or raises by then, even where the peer is silent.
        `into`: the bytes go there, and arrays lie on top of it; after an error it may hold a part of them.

        Raises StaleSlotError where the payload is gone; PayloadTimeout at the deadline; and after all
        attempts have failed PeerReset, PayloadTruncated, PayloadCorrupt or PeerRefused, as the last one did.
        """
        buffer = None if into is None else arguments.buffer("into", into)
        return self._fetcher.read(arguments.payload_ref(ref), _point(deadline), into=buffer, keep=keep)

    def fetch_all(
        self,
        refs: Iterable[PayloadRef],
        *,
        deadline: float | timedelta = DEADLINE_S,
        on_missing: OnMissing = "raise",
        keep: bool = False,
    ) -> Fetched:
        """A dict of all objects by their refs, in the refs' order, within one deadline, some read at a time.

        `on_missing`: with "skip", what could not be had is left out, and `.missing` of the result says why; with
        "raise" it is PayloadsMissing, whose `.fetched` has what was read. What is missing for another reason than
        StaleSlotError is still where it was, and can be asked for again.
        """
        return self._fetch_all(
            arguments.payload_refs(refs), _point(deadline), _known(on_missing), keep, ReadCancellation()
        )

    def close(self) -> None:
        """Reads that are under way in other threads fail with PeerReset: at once, or, while they still connect, when
        their attempt's time to answer is over."""
        self._fetcher.close()
        self._threads.close()

    def __enter__(self) -> PayloadClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fetch_all(
        self, refs: Iterable[PayloadRef], deadline: float, on_missing: OnMissing, keep: bool, abort: ReadCancellation
    ) -> Fetched:
        wanted = list(dict.fromkeys(refs))
        got: dict[PayloadRef, object] = {}
        missing: dict[PayloadRef, TransportError] = {}
        for failed_rounds in range(self._limits.rounds):
            again = [ref for ref in wanted if ref not in got and not isinstance(missing.get(ref), StaleSlotError)]
            if failed_rounds and again:
                abort.pause(min(deadline, time.monotonic() + pause_s(self._limits, failed_rounds)))
            if not again or abort.is_set or (failed_rounds and time.monotonic() >= deadline):
                break
            round_ = _Round(partial(self._fetcher.read, keep=keep), again, deadline)
            round_.run(abort, self._threads, self._concurrency)
            got |= round_.got
            missing |= round_.missing
        # Both in the order of the refs.
        fetched = Fetched()
        fetched.update((ref, got[ref]) for ref in wanted if ref in got)
        fetched.missing.update((ref, missing[ref]) for ref in wanted if ref not in got)
        return _complete(fetched, on_missing)


class AsyncPayloadClient:
    """The same for asyncio: each read runs in a thread, `most_reads` of them at a time, and none holds up the loop.

    A read whose task is cancelled is cut off; its payload stays where it is, unless it had just arrived.
    """

    def __init__(self, client: PayloadClient | None = None, *, most_reads: int = 32) -> None:
        self._client = PayloadClient() if client is None else arguments.instance("client", client, PayloadClient)
        self._most_reads = arguments.whole("most_reads", most_reads, 1)
        self._places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    async def read(
        self,
        ref: PayloadRef,
        *,
        deadline: float | timedelta = DEADLINE_S,
        into: Buffer | None = None,
        keep: bool = False,
    ) -> Any:
        """As `PayloadClient.read`."""
        buffer, until = None if into is None else arguments.buffer("into", into), _point(deadline)
        fetcher, ref = self._client._fetcher, arguments.payload_ref(ref)

        def late() -> Any:
            raise self._late(ref)

        return await self._run(until, lambda abort: fetcher.read(ref, until, abort, into=buffer, keep=keep), late)

    async def fetch_all(
        self,
        refs: Iterable[PayloadRef],
        *,
        deadline: float | timedelta = DEADLINE_S,
        on_missing: OnMissing = "raise",
        keep: bool = False,
    ) -> Fetched:
        """As `PayloadClient.fetch_all`."""
        wanted, until, known = arguments.payload_refs(refs), _point(deadline), _known(on_missing)

        def late() -> Fetched:
            fetched = Fetched()
            fetched.missing.update((ref, self._late(ref)) for ref in wanted)
            return _complete(fetched, known)

        return await self._run(until, lambda abort: self._client._fetch_all(wanted, until, known, keep, abort), late)

    async def close(self) -> None:
        self._client.close()

    async def __aenter__(self) -> AsyncPayloadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _late(self, ref: PayloadRef) -> PayloadTimeout:
        return PayloadTimeout(f"{ref} was not read in time: most_reads={self._most_reads} others went on", ref=ref)

    async def _run(self, until: float, work: Callable[[ReadCancellation], T], late: Callable[[], T]) -> T:
        """What `work` returns in a thread, or, without a place for it by the deadline, `late`."""
        loop = asyncio.get_running_loop()
        places = self._places.setdefault(loop, asyncio.Semaphore(self._most_reads))
        try:
            async with asyncio.timeout(until - time.monotonic()):
                await places.acquire()
        except TimeoutError:
            return late()
        try:
            abort = ReadCancellation()
            try:
                reading = asyncio.wrap_future(self._client._threads.start(lambda: work(abort)))
            except RuntimeError as error:
                raise RingError(f"nothing was read: {error} in this process; see `ulimit -u` and pids.max") from None
            try:
                return await asyncio.shield(reading)
            except asyncio.CancelledError:
                abort.abort()
                reading.add_done_callback(
                    asyncio.Future.exception
                )  # asyncio logs an exception that was never retrieved
                # The thread reports its end to this loop, which must still run then.
                await asyncio.wait([reading], timeout=END_S)
                raise
        finally:
            places.release()


def _complete(fetched: Fetched, on_missing: OnMissing) -> Fetched:
    if fetched.missing and on_missing == "raise":
        first = next(iter(fetched.missing.values()))
        count = len(fetched.missing) + len(fetched)
        raise PayloadsMissing(f"{len(fetched.missing)} of {count} payloads are missing: {first}", fetched=fetched)
    return fetched


def _point(deadline: float | timedelta) -> float:
    return time.monotonic() + arguments.seconds("deadline", deadline)


def _known(on_missing: OnMissing) -> OnMissing:
    if on_missing not in ("skip", "raise"):
        raise UsageError(f'on_missing must be "skip" or "raise", not {on_missing!r}')
    return on_missing


# These are about a ring's server. Other errors are about one payload, and say nothing of the ring's others.
_AWAY = (PeerReset, PeerRefused, PayloadTimeout)

Read = Callable[[PayloadRef, float, ReadCancellation], object]  # one read: the ref, until when, and what ends it


class Fetched(dict[PayloadRef, Any]):
    """The objects that came, by their refs, in the order of the refs; `missing` says why the others did not."""

    def __init__(self) -> None:
        super().__init__()
        self.missing: dict[PayloadRef, TransportError] = {}


class PayloadsMissing(TransportError):
    """Not all of a batch came. `fetched` has what did, which is consumed; `fetched.missing` has the rest."""

    def __init__(self, message: str, *, fetched: Fetched) -> None:
        super().__init__(message)
        self.fetched = fetched

    def __reduce__(self) -> tuple[object, ...]:
        return partial(PayloadsMissing, self.said, fetched=self.fetched), ()


class _Round:
    """Asks for each ref once, in as many threads as there are places. Once a ring's server has failed, the ring's
    other refs are left for the next round: they would keep the places from those that can be read."""

    def __init__(self, read: Read, refs: list[PayloadRef], deadline: float) -> None:
        self._read, self._deadline = read, deadline
        self._guard = threading.Lock()
        # The refs of one node apart from each other, or all places would ask one node's ports at a time.
        by_node: dict[str, deque[PayloadRef]] = {}
        for ref in refs:
            by_node.setdefault(ref.node, deque()).append(ref)
        turns = zip_longest(*by_node.values())
        self._left = deque(ref for turn in turns for ref in turn if ref is not None)
        self._away: dict[str, TransportError] = {}
        self.got: dict[PayloadRef, object] = {}
        self.missing: dict[PayloadRef, TransportError] = {
            ref: PayloadTimeout(f"{ref} was not read in time", ref=ref) for ref in refs
        }

    def run(self, abort: ReadCancellation, threads: ThreadPool, concurrency: int) -> None:
        """Until all have ended, or the deadline has passed. An exception in this thread cancels them all."""
        ends = [ReadCancellation(within=abort) for _ in range(min(concurrency, len(self._left)))]
        running: list[Future[None]] = []
        try:
            try:
                for end in ends:
                    running.append(threads.start(partial(self._work, end)))
            except RuntimeError:  # no more threads can be started: those that run read all
                if not running and ends:
                    self._work(ends[0])
            # Reads end at the deadline by themselves. A moment more lets their threads report what they have.
            wait(running, self._deadline + END_S - time.monotonic())
        finally:
            for end in ends:
                end.abort()
        # None waits for a peer now. One that has acknowledged its payload before stores it.
        wait(running, END_S)
        # `_work` keeps each TransportError. Any other exception is the caller's, and must not get lost in a thread.
        for future in running:
            if future.done():
                future.result()

    def _work(self, end: ReadCancellation) -> None:
        while not end.is_set:
            with self._guard:
                if not self._left:
                    return
                ref = self._left.popleft()
            if ref.ring in self._away:
                self.missing[ref] = self._away[ref.ring].of(ref)
                continue
            try:
                self.got[ref] = self._read(ref, self._deadline, end)
            except TransportError as error:
                self.missing[ref] = error
                if isinstance(error, _AWAY):
                    self._away[ref.ring] = error
            except (OSError, MemoryError) as error:  # of this process: what was read must not get lost with it
                self.missing[ref] = RingError(f"{ref} was not read: {error!r}", ref=ref)
