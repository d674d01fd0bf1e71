"""One read, from the ref to the object: the plan's next step is done, and its outcome goes back to the plan."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from nvrx_slurm.errors import UsageError
from nvrx_slurm.transport import codec, protocol
from nvrx_slurm.transport.backends import by_scheme
from nvrx_slurm.transport.copying import PIECE_BYTES, checksum, room
from nvrx_slurm.transport.errors import (
    Attempt,
    PayloadTimeout,
    PayloadTruncated,
    PeerRefused,
    PeerReset,
    RingError,
    StaleSlotError,
    TransportError,
)
from nvrx_slurm.transport.pool import Cuttable, Pool, PooledConnection
from nvrx_slurm.transport.protocol import REASONS, AllInUse, Backend, acknowledge, receive, request, settle
from nvrx_slurm.transport.ref import PayloadRef
from nvrx_slurm.transport.retrying import (
    WELL,
    AttemptOutcome,
    EndRead,
    Limits,
    Pause,
    PortHealth,
    ReadPlan,
    Try,
    failed,
    hurried,
)
from nvrx_slurm.transport.ring import Claim, is_gone
from nvrx_slurm.transport.shm import LocalRings, ShmBackend
from nvrx_slurm.util.threads import SignalSafeEvent, reset_after_fork

MOST_SICK = 4096

_NOT_READ = object()

_OUTCOMES = {
    protocol.ResponseStatus.BUSY: AttemptOutcome.BUSY,
    protocol.ResponseStatus.STALE: AttemptOutcome.STALE,
    protocol.ResponseStatus.UNKNOWN_RING: AttemptOutcome.MOVED,
}


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The options of a client, as `PayloadClient` documents them."""

    token: bytes | None
    transports: tuple[str, ...]
    connections_per_port: int
    keep_s: float
    most_bytes: int
    allow_pickle: bool
    limits: Limits


class ReadCancellation:
    """Cancels a read from another thread, whether it waits for a peer or for the next attempt.

    `within`: an abort of that one aborts this one too.
    """

    def __init__(self, within: ReadCancellation | None = None) -> None:
        self.is_set = False
        # Without the lock, `abort` could cut a link that another read uses by then.
        self._guard = threading.Lock()
        self._wake: SignalSafeEvent | None = None
        self._link: Cuttable | None = None
        self._parts: list[ReadCancellation] = []
        if within is not None:
            # Registered before `is_set` is read: an abort in between reaches this one by one way or the other.
            within._parts.append(self)
            self.is_set = self.is_set or within.is_set

    def abort(self) -> None:
        self.is_set = True
        if (wake := self._wake) is not None:
            wake.set()
        with self._guard:
            if self._link is not None:
                self._link.cut()
        for part in self._parts:
            part.abort()

    def watch(self, link: Cuttable | None) -> None:
        """Cut this link on an abort, from now on."""
        with self._guard:
            self._link = link
        if link is not None and self.is_set:
            link.cut()

    def pause(self, until: float) -> None:
        # The event is stored before `is_set` is read: an abort in between wakes the wait.
        self._wake = SignalSafeEvent()
        if not self.is_set:
            self._wake.wait(max(0.0, until - time.monotonic()))


class _Got(NamedTuple):
    """A decoded payload, or why bytes that arrived intact cannot be decoded."""

    object: object
    error: TransportError | None = None


class Fetcher:
    """What the reads of one client share: connections, attached rings, the health of each port. For any number of
    threads.

    Raises UsageError and PeerRefused as `PayloadClient` says.
    """

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._rings = LocalRings()
        self._backends: dict[str, Backend] = {
            scheme: ShmBackend(self._rings) if scheme == "shm" else by_scheme(scheme, options.token or b"")
            for scheme in options.transports
        }
        self._is_local_first = options.transports[0] == "shm"
        self._guard = threading.Lock()
        self._health: dict[str, PortHealth] = {}
        # Clients begin with different ports.
        self._turns = itertools.count(random.randrange(1 << 16))
        self._pool = self._new_pool()
        reset_after_fork(self, Fetcher.drop)

    def read(
        self,
        ref: PayloadRef,
        deadline: float,
        abort: ReadCancellation | None = None,
        *,
        into: memoryview | None = None,
        keep: bool = False,
    ) -> object:
        """Read the object, until `deadline` at the latest. Raises what `PayloadClient.read` says."""
        buffer = self._buffer(ref, into)
        if self._pool.is_closed or (abort is not None and abort.is_set):
            raise self._ended(ref, ())
        if self._is_local_first:
            here = self._read_here(ref, deadline, buffer, abort, keep=keep)
            if here is not _NOT_READ:
                return here
        abort = abort or ReadCancellation()
        plan = ReadPlan(self._tiers(ref), ref.size, deadline, self._options.limits)
        attempts: list[Attempt] = []
        fault: TransportError | None = None
        turn = next(self._turns)
        while not (abort.is_set or self._pool.is_closed):
            step = plan.next(self._health, now=time.monotonic(), turn=turn + len(attempts))
            if isinstance(step, Pause):
                abort.pause(step.until)
                continue
            if isinstance(step, EndRead):
                if step.reason is AttemptOutcome.STALE:
                    raise StaleSlotError(f"{ref} is not there any more", ref=ref, attempts=attempts)
                if step.reason is None or fault is None:
                    raise PayloadTimeout(f"{ref} was not read in time", ref=ref, attempts=attempts)
                raise _again(fault, ref, attempts)
            began = time.monotonic()
            try:
                got = self._attempt(step, ref, buffer, abort, keep=keep)
            except AllInUse as error:
                outcome, said = AttemptOutcome.BUSY, error.said
            except TransportError as error:
                outcome, said, fault = AttemptOutcome.FAULT, error.said, error
                # After an abort, this side has cut the link: no fault of the port.
                if not abort.is_set:
                    self._had_fault(step, error, is_deadline=step.until >= deadline, began=began)
            else:
                # One success ends a quarantine.
                if step.port in self._health:
                    with self._guard:
                        self._health.pop(step.port, None)
                if isinstance(got, _Got):
                    if got.error is not None:
                        raise _again(got.error, ref, attempts)
                    return got.object
                outcome, said = _OUTCOMES[got], got.name.lower().replace("_", " ")
            now = time.monotonic()
            attempts.append(Attempt(step.port, now - began, said))
            plan.ended(step.port, outcome, now=now)
        raise self._ended(ref, attempts)

    def _had_fault(self, step: Try, error: TransportError, *, is_deadline: bool, began: float) -> None:
        now = time.monotonic()
        # A port that had less time than `answer_s` because the read's deadline was near is not known to be sick.
        is_hurried = is_deadline and now - began < self._options.limits.answer_s and isinstance(error, PayloadTimeout)
        with self._guard:
            health = self._health.get(step.port, WELL)
            self._health[step.port] = (
                hurried(health, now=now) if is_hurried else failed(health, now=now, dice=random.random())
            )
            # What is left there are ports of nodes that are gone for good.
            if len(self._health) > MOST_SICK:
                self._health.pop(next(iter(self._health)))

    def _ended(self, ref: PayloadRef, attempts: Sequence[Attempt]) -> TransportError:
        why = "the client was closed" if self._pool.is_closed else "it was cancelled"
        return PeerReset(f"{ref} was not read: {why}", ref=ref, attempts=attempts)

    def _read_here(
        self, ref: PayloadRef, deadline: float, buffer: memoryview, abort: ReadCancellation | None, *, keep: bool
    ) -> object:
        """The fast path where the ring is on this node: no plan, no connection, no frames. `_NOT_READ` where anything
        goes wrong; then the full path finds out what."""
        ring = self._rings.attached(ref.ring)
        if ring is None:
            return _NOT_READ
        try:
            # To claim the slot and to release it takes longer than a small copy. So the copy comes first, and `take`
            # reports afterwards whether a writer had the slot meanwhile. Not with pickles: a mix of two payloads must
            # never be unpickled.
            if ref.size <= PIECE_BYTES and not self._options.allow_pickle and ring.peek(ref, buffer):
                if ref.checksum and checksum(buffer) != int(ref.checksum, 16):
                    # The payload was overwritten while it was copied, or is corrupt: the full path finds out.
                    return _NOT_READ
                value = codec.decode(ref.schema, buffer)
                if abort is not None and abort.is_set:
                    return _NOT_READ
                if ring.take(ref, consume=not keep):
                    return value
            claim = ring.claim(ref.slot, ref.generation)
            if not isinstance(claim, Claim):
                return _NOT_READ
            try:
                is_read = claim.size == ref.size
                if is_read:
                    digest = xxhash.xxh3_64() if ref.checksum else None
                    claim.copy_into(buffer, seen=digest and digest.update)
                    is_read = digest is None or digest.intdigest() == int(ref.checksum, 16)
                if is_read:
                    if self._options.allow_pickle and not claim.is_ours():
                        # A mix of two payloads must never be unpickled.
                        return _NOT_READ
                    got = self._decoded(ref, buffer)
                    is_read = got.error is None
            except BaseException:
                claim.drop()
                raise
            is_read = is_read and not (abort is not None and abort.is_set)
            # `finish` comes last: only its True says that no writer had the slot while it was read.
            return got.object if claim.finish(is_read and not keep, deadline) and is_read else _NOT_READ
        except TransportError:
            # The ring was closed, a stopped process has the slot's lock, or the payload cannot be decoded.
            return _NOT_READ

    def close(self) -> None:
        """Reads that are under way fail at once, those that still connect after this attempt."""
        self._pool.cut()
        self._rings.close()

    def drop(self) -> None:
        """In a forked child, leave the connections to the parent."""
        self._pool.drop()
        self._guard = threading.Lock()
        is_closed, self._pool = self._pool.is_closed, self._new_pool()
        self._pool.is_closed = is_closed
        self._rings.after_fork()

    def _new_pool(self) -> Pool:
        options = self._options
        return Pool(
            self._backends, options.token or b"", per_port=options.connections_per_port, keep_s=options.keep_s
        )

    def _attempt(
        self, step: Try, ref: PayloadRef, buffer: memoryview, abort: ReadCancellation, *, keep: bool
    ) -> _Got | protocol.ResponseStatus:
        """Make one attempt at one port. Where an idle connection turns out to be dead, try again on a new one."""
        while True:
            with self._pool.connection(step.port, step.answer_by, abort.watch) as connection:
                try:
                    link, until = connection.link, step.until
                    connection.prove(step.answer_by)
                    self._settle(connection, ref.ring, step.answer_by)
                    answer = request(link, ref, budget_s=until - time.monotonic(), deadline=step.answer_by)
                    if answer.status is not protocol.ResponseStatus.OK and answer.status not in _OUTCOMES:
                        raise PeerRefused(REASONS.get(answer.status, f"it answers {answer.status.name}"))
                    connection.was_heard()
                    if answer.status is not protocol.ResponseStatus.OK:
                        return answer.status
                    receive(link, ref, answer, buffer, until)
                    got = self._decoded(ref, buffer)
                    # The payload has arrived, so a lost Ack is no failure: it is sent again with the next read. But
                    # without a checksum (shm), the Ack's success alone shows that these are the right bytes.
                    is_cancelled = abort.is_set
                    if got.error is not None or is_cancelled:
                        verdict = protocol.AckVerdict.BAD
                    else:
                        verdict = protocol.AckVerdict.KEPT if keep else protocol.AckVerdict.TAKEN
                    try:
                        acknowledge(connection.link, ref, verdict, until)
                    except TransportError:
                        if not connection.link.needs_checksum and verdict is not protocol.AckVerdict.BAD:
                            raise
                        connection.is_broken = True
                    if verdict is protocol.AckVerdict.TAKEN and connection.link.needs_checksum:
                        connection.has_taken(ref)
                    if is_cancelled:
                        raise self._ended(ref, ())  # the payload stays where it is, so it was not read
                    return got
                except (PeerReset, PayloadTruncated):
                    if not connection.is_reused or connection.has_heard or abort.is_set:
                        raise
                    connection.is_broken = True
            self._pool.discard_idle(step.port)

    def _decoded(self, ref: PayloadRef, buffer: memoryview) -> _Got:
        try:
            return _Got(codec.decode(ref.schema, buffer, allow_pickle=self._options.allow_pickle))
        except TransportError as error:
            return _Got(None, error)

    def _settle(self, connection: PooledConnection, ring: str, until: float) -> None:
        unconfirmed_acks = self._pool.unconfirmed_acks(ring)
        if not unconfirmed_acks:
            return
        # BUSY: the server may still be ending the very read whose Ack was lost. Ask again later.
        busy = []
        try:
            while unconfirmed_acks:
                # It is removed only after the answer: where the link breaks before that, `finally` keeps it.
                lost = unconfirmed_acks[-1]
                status = settle(connection.link, ring, lost.slot, lost.generation, until)
                connection.was_heard()
                unconfirmed_acks.pop()
                if status is protocol.ResponseStatus.BUSY:
                    busy.append(lost)
        finally:
            self._pool.keep_unconfirmed((*unconfirmed_acks, *busy))

    def _tiers(self, ref: PayloadRef) -> list[list[str]]:
        """The ref's ports by transport, the preferred one first."""
        tiers = []
        for scheme in self._options.transports:
            if scheme == "shm":
                tiers.append([f"shm://{ref.ring}"] if self._rings.has(ref.ring) else [])
            else:
                tiers.append([port for port in ref.ports if port.startswith(f"{scheme}://")])
        if self._pool.is_closed:
            raise self._ended(ref, ())
        if not any(tiers):
            transports = self._options.transports
            if ref.ports:
                served, have = sorted({port.partition("://")[0] for port in ref.ports}), ", ".join(transports)
                raise PeerRefused(f"{ref} is served by {', '.join(served)}; this client has {have}", ref=ref)
            if is_gone(ref.ring):
                raise StaleSlotError(f"{ref} has no port, and its ring is not on this node, or no longer", ref=ref)
            if "shm" not in transports:
                raise PeerRefused(f"{ref} has no port, and this client does not use shm", ref=ref)
            why = self._rings.why_not(ref.ring)
            raise RingError(f"{ref} has no port, and its ring cannot be attached here{why and f': {why}'}", ref=ref)
        if self._options.token is None:
            # Only what is on this node can be read without one.
            tiers = [tier for tier in tiers if tier and tier[0].startswith("shm:")]
            if not tiers:
                raise PeerRefused(
                    f"{ref} is read from its server: name the server's token (token=PayloadServer.token); only the "
                    "workers of a job have it by themselves",
                    ref=ref,
                )
        return tiers

    def _buffer(self, ref: PayloadRef, into: memoryview | None) -> memoryview:
        # Checked before anything is allocated: a ref may be forged.
        if ref.size > self._options.most_bytes:
            raise TransportError(
                f"{ref} is larger than most_bytes={self._options.most_bytes} of this client", ref=ref
            )
        if into is None:
            return memoryview(room(ref.size))
        if into.readonly or into.nbytes < ref.size or not into.c_contiguous:
            raise UsageError(f"into must be writable, contiguous, and of at least {ref.size} bytes")
        return into.cast("B")[: ref.size] if ref.size else memoryview(bytearray())


def _again(error: TransportError, ref: PayloadRef, attempts: Sequence[Attempt]) -> TransportError:
    kind = PayloadTimeout if isinstance(error, PayloadTimeout) else type(error)
    return kind(f"{ref} was not read: {error.said}", ref=ref, attempts=attempts)
