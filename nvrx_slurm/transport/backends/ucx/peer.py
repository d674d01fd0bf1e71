"""One connection, within the engine's thread; whatever waits for it in another thread has an Outcome.

Its two ends first tell each other, over UCX's stream, by which number each knows it, the client first. From then on
all goes as tagged messages, whose tag is a kind and the receiver's number: UCX matches by worker, not by connection.
No receive is ever posted ahead: a message is taken out of UCX's queue when it has come, its length is compared with
the buffer's, and only then may UCX write there. So a parked reader has nothing to cancel, and a payload that is
longer than told is never begun.

    OPENING ──their number──▶ OPEN ──leave: LEAVE sent──▶ LEAVING ──LEFT, or it is late──▶ ended
       └─────────────────────────┴──── cut, a deadline, or the connection broke ─────────────▶ ended

LEAVE and LEFT are there because UCX tells the end of a connection on another socket than its data: an end could
overtake what was sent before it.
"""

from __future__ import annotations

import secrets
import struct
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from nvrx_slurm.transport.backends.ucx.outcome import Outcome
from nvrx_slurm.transport.errors import PayloadTruncated, PeerReset

if TYPE_CHECKING:
    from nvrx_slurm.transport.backends.ucx.engine import Engine

NUMBER_BITS = 56
LINGER_S = 5.0
"""How long what was sent may take to arrive once its link is closed."""

MOST_UNREAD = 16
"""Messages that nobody has asked for yet. The protocol makes them two: an answer and its payload."""

DRAINED_BYTES = 64 << 10
"""UCX lets go of a message only when it is received, so that unread ones are, up to this size. Of a longer one only
the word has come, not its bytes."""

_INTRODUCTION = struct.Struct("<8sQ")
_MAGIC = b"nvrxucx\n"
_WORD = b"\0"  # UCX has no message of no bytes that could be relied upon

_CLOSED, _CUT = "the connection was closed", "the connection was cut"
_BROKEN, _UNASKED = "the connection broke", "the peer sent what nobody asked for"

Done = Callable[[Exception | None], None]


class Kind(IntEnum):
    """Of a message: the upper bits of its tag."""

    DATA = 1
    LEAVE = 2  # nothing comes after this one
    LEFT = 3  # and all before it was received


class Want(NamedTuple):
    """A buffer that one message is to fill."""

    buffer: memoryview
    outcome: Outcome


class Peer:
    """Numbers, messages that have come, and who waits for one.

    `broken`: why it is good for nothing, once it is; `has_opened`: `opened` was called, with an error or without one.
    `gone` is called, perhaps several times, when UCX has nothing of it any more.
    """

    def __init__(self, engine: Engine, opened: Done, gone: Callable[[Peer], None] | None = None) -> None:
        self.number = secrets.randbits(NUMBER_BITS)
        self.broken: str | None = None
        self._engine, self._opened, self._gone = engine, opened, gone
        self._endpoint: Any = None
        self._closed: Any = None  # the same, until its last request has ended
        self._their_number: int | None = None
        self.has_opened = self._is_leaving = self._has_said_last = False
        self._unread: deque[Any] = deque()
        self._want: Want | None = None
        self._in_flight = 0

    @property
    def has_news(self) -> bool:
        """From any thread: a message has come that nobody has asked for."""
        return bool(self._unread)

    def connect(self, endpoint: Any) -> None:
        """Ours, and still under way: say who we are, and learn who they are."""
        self._adopt(endpoint)
        self._introduce_us()
        self._learn(lambda: None)

    def accept(self, endpoint: Any) -> None:
        """Theirs: learn who they are, and only then say who we are: nothing comes before its sender is known."""
        self._adopt(endpoint)
        self._learn(self._introduce_us)

    def send(self, frame: bytes, payload: memoryview | None, outcome: Outcome | None) -> None:
        """Two messages, straight from their memory, which is kept until UCX needs it no more."""
        done = outcome.settle if outcome else nobody
        if self.broken is not None:
            done(PeerReset(self.broken))
            return
        parts = (frame,) if payload is None else (frame, payload)
        self._start(lambda: [self._tagged(Kind.DATA, part) for part in parts], parts, done)

    def receive(self, want: Want) -> None:
        """The next message, which must be as long as the buffer."""
        self._want = want
        self._match()

    def has_come(self, kind: int, message: Any) -> None:
        """A message for this end."""
        if kind == Kind.DATA:
            self._unread.append(message)
            if len(self._unread) > MOST_UNREAD:
                self.end(_UNASKED)
                return
            self._match()
            return
        self._engine.drain(message)
        if kind == Kind.LEFT:
            self.end(_CLOSED)
        elif kind == Kind.LEAVE and self._endpoint is not None:
            self._start(lambda: [self._tagged(Kind.LEFT, _WORD)], (_WORD,), nobody)
            self._break("the peer has closed the connection")

    def has_fallen(self) -> None:
        """UCX has found it dead. What had come before can still be read."""
        if self._endpoint is not None:
            self._endpoint, self._closed = None, self._endpoint
        has_no_link = self._is_leaving or not self.has_opened
        self._break(_BROKEN)
        if has_no_link:
            self.end(_BROKEN)

    def leave(self) -> None:
        """Close it as soon as what was sent has arrived."""
        if self.broken is not None or not self.has_opened:
            self.end(_CLOSED)
        elif not self._is_leaving:
            self._is_leaving = True
            self._break(_CLOSED)
            self._engine.later(LINGER_S, lambda: self.end(_CLOSED))
            self._say_last()

    def _say_last(self) -> None:
        """Not before all else was taken: of a long payload only the word is sent until the peer wants it."""
        if self._is_leaving and not self._in_flight and not self._has_said_last:
            self._has_said_last = True
            self._start(lambda: [self._tagged(Kind.LEAVE, _WORD)], (_WORD,), nobody)

    def end(self, why: str) -> None:
        """At once, any number of times. What is in flight settles as soon as UCX has let go of its memory."""
        endpoint, self._endpoint = self._endpoint, None
        self._break(why)
        self._engine.forget(self)
        if endpoint is not None:
            endpoint.close_blocking()  # tens of microseconds: it is forced, and waits for nobody
            self._closed = endpoint
        while self._unread:
            self._engine.drain(self._unread.popleft())
        self._tell_if_gone()

    def end_for(self, outcome: Outcome) -> None:
        """Whoever waits for `outcome` gives up. It is settled when UCX touches the caller's memory no more."""
        if self._want is not None and self._want.outcome is outcome:
            self._want = None
            outcome.settle(PeerReset(_CUT))
        self.end(_CUT)

    def _break(self, why: str) -> None:
        if self.broken is None:
            self.broken = why
        if not self.has_opened:
            self.has_opened = True
            self._opened(PeerReset(self.broken))
        want, self._want = self._want, None
        if want is not None:
            want.outcome.settle(PeerReset(self.broken))

    def _adopt(self, endpoint: Any) -> None:
        self._endpoint = endpoint
        self._engine.know(self)
        try:
            endpoint.set_close_callback(self._engine.fallen.append, (self,))
        except RuntimeError:  # it has died already
            self._engine.fallen.append(self)

    def _introduce_us(self) -> None:
        ours = _INTRODUCTION.pack(_MAGIC, self.number)
        self._start(lambda: [self._living().stream_send(self._engine.ucx.array(ours))], (ours,), nobody)

    def _learn(self, then: Callable[[], None]) -> None:
        theirs = bytearray(_INTRODUCTION.size)

        def learned(error: Exception | None) -> None:
            if error is not None or self.has_opened:
                self.end("no connection")
                return
            magic, self._their_number = _INTRODUCTION.unpack(theirs)
            if magic != _MAGIC:
                self.end("no server of payloads is listening there")
                return
            then()
            self.has_opened = True
            self._opened(None)

        self._start(lambda: [self._living().stream_recv(self._engine.ucx.array(theirs))], (theirs,), learned)

    def _match(self) -> None:
        """A message and a buffer."""
        if self._want is None:
            return
        if not self._unread:
            if self.broken is not None:
                self._break(self.broken)
            return
        want, self._want = self._want, None
        message = self._unread.popleft()
        if message.length != len(want.buffer):
            self._engine.drain(message)
            want.outcome.settle(
                PayloadTruncated(f"the peer sent a message of {message.length} bytes, and not of {len(want.buffer)}")
            )
            self.end(_UNASKED)
            return
        self._start(lambda: [self._engine.take(message, want.buffer)], (want.buffer, message), want.outcome.settle)

    def _tagged(self, kind: Kind, part: bytes | memoryview) -> Any:
        tag = self._engine.ucx.tag(kind << NUMBER_BITS | (self._their_number or 0))
        return self._living().tag_send(self._engine.ucx.array(part), tag)

    def _living(self) -> Any:
        """The endpoint. UCX takes a receive on a dead one, and never ends it."""
        if self._endpoint is None or not self._endpoint.alive:
            raise PeerReset(_BROKEN)
        return self._endpoint

    def _start(self, submit: Callable[[], list[Any]], memory: Sequence[object], done: Done) -> None:
        self._in_flight += 1

        def settled(error: Exception | None) -> None:
            self._in_flight -= 1
            done(error)
            self._tell_if_gone()
            if error is None:
                self._say_last()

        try:
            requests = submit()
        except Exception as error:  # UCXX's, or a RuntimeError where the connection has just died
            settled(PeerReset(f"{_BROKEN}: {error}"))
            self.end(_BROKEN)
            return
        self._engine.start(requests, memory, settled)

    def _tell_if_gone(self) -> None:
        if self._endpoint is not None or self._in_flight:
            return
        closed, self._closed = self._closed, None
        if closed is not None:
            self._engine.ucx.canceling(closed.ucxx_ptr)
            del closed
        if self._gone is not None:
            self._gone(self)


def nobody(error: Exception | None) -> None:
    """Waits for this one: what comes after it tells."""
