"""One UCX connection, as the engine's thread sees it. Other threads wait for it by a `Completion`.

open ──leave: LEAVE sent──▶ leaving ──the peer hangs up, or the linger time is over──▶ ended
  └──────────── cut, a deadline, or the connection broke ──────────────────▶ ended
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from nvrx_slurm.transport.errors import PayloadTruncated, PeerReset

if TYPE_CHECKING:
    from nvrx_slurm.transport.ucxx_engine import Engine, UcxWorker


class SendCompletion:
    """Settled once, by the thread that does it; waited for by one other."""

    __slots__ = ("_pending", "error")

    def __init__(self) -> None:
        self.error: Exception | None = None
        # A plain lock costs a third of what an Event costs.
        self._pending = threading.Lock()
        self._pending.acquire()

    def settle(self, error: Exception | None = None) -> None:
        self.error = error
        self._pending.release()

    def is_settled_by(self, deadline: float) -> bool:
        """Wait until then at most."""
        left_s = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
        if not self._pending.acquire(timeout=left_s):
            return False
        self._pending.release()
        return True

    def wait(self) -> None:
        """Wait without a bound, for what is only a matter of the other thread's turn."""
        self._pending.acquire()
        self._pending.release()


NUMBER_BITS = 56
LINGER_S = 5.0  # how long what was sent may take to arrive once its link is closed
# How many messages may wait to be received. The protocol needs two: an answer and its payload.
MOST_UNREAD = 16
# A message that comes at once (eager). Of a longer one comes a word first, and its bytes when they are wanted
# (rendezvous): the engine has set UCX so.
#
# UCX frees a message only when it is received, so unwanted short ones are received too.
SHORT_BYTES = 64 << 10
_WORD = b"\0"  # UCX has no message of no bytes that could be relied upon

_CLOSED, _CUT = "the connection was closed", "the connection was cut"
_BROKEN, _UNASKED = "the connection broke", "the peer sent more than was asked for"

Done = Callable[[Exception | None], None]


class MessageKind(IntEnum):
    """The kind of a message: the upper bits of its tag."""

    DATA = 1
    LEAVE = 2  # nothing comes after this one


class Want(NamedTuple):
    """A buffer that one message is to fill."""

    buffer: memoryview
    outcome: SendCompletion


class Peer:
    """One end of a connection. `broken`: why it cannot be used any more, once it cannot.

    All bytes go as tagged messages; the tag is a kind and the receiver's number, since UCX matches by worker, not by
    connection.
    """

    def __init__(self, engine: Engine, side: UcxWorker) -> None:
        self.number, self._their_number = secrets.randbits(NUMBER_BITS), 0
        self.broken: str | None = None
        self.side, self._engine = side, engine
        self._endpoint: Any = None
        # The endpoint after it was closed, until its last request has ended.
        self._closed: Any = None
        self._socket: socket.socket | None = None
        self._is_leaving = self._has_said_last = self._has_been_left = self._is_taking = False
        self._unread: deque[Any] = deque()
        self._want: Want | None = None
        # The reader that a short message is being received for.
        self._short: Want | None = None
        self._in_flight = 0

    @property
    def has_news(self) -> bool:
        """From any thread: a message waits to be received."""
        return bool(self._unread)

    def open(self, endpoint: Any, their_number: int, bootstrap: socket.socket) -> None:
        """The peer may have sent already, and left: this one is known since before its number was sent."""
        self._endpoint, self._their_number, self._socket = endpoint, their_number, bootstrap
        self._engine.watch(bootstrap.fileno(), self)
        try:
            endpoint.set_close_callback(self._engine.fallen.append, (self,))
        except RuntimeError:  # it has died already
            self._engine.fallen.append(self)
        if self.broken is not None:
            self._let_go()

    def drop(self) -> None:
        """Close the socket, in a forked child."""
        if self._socket is not None:
            self._socket.close()

    def send(self, frame: bytes, payload: memoryview | None, outcome: SendCompletion | None) -> None:
        """Send two messages, straight from their memory, which is kept until UCX needs it no more."""
        done = outcome.settle if outcome else ignore
        if self.broken is not None:
            done(PeerReset(self.broken))
            return
        parts = (frame,) if payload is None else (frame, payload)
        self._start(lambda: [self._tagged(MessageKind.DATA, part) for part in parts], parts, done)

    def receive(self, want: Want) -> None:
        """Receive the next message, which must be as long as the buffer."""
        self._want = want
        self._match()

    def has_come(self, kind: int, message: Any) -> None:
        """A message for this end has arrived."""
        if kind == MessageKind.DATA:
            self._unread.append(message)
            if len(self._unread) > MOST_UNREAD:
                self.end(_UNASKED)
                return
            self._match()
            return
        self._engine.drain(self.side, message)
        if kind == MessageKind.LEAVE:
            self._break("the peer has closed the connection")
            self._has_been_left = True
            self._follow()

    def has_fallen(self) -> None:
        """UCX or the socket says that it has gone. What had come before can still be read."""
        self._break(_BROKEN)
        self._let_go()
        if self._is_leaving:
            self.end(_CLOSED)

    def _follow(self) -> None:
        """The peer waits for it. What is being received may come by other ways than its last word, and later."""
        if self._has_been_left and not self._is_taking:
            self._let_go()
            if self._is_leaving:
                self.end(_CLOSED)

    def leave(self) -> None:
        """Close it as soon as what was sent has arrived."""
        if self._is_leaving:
            return
        if self.broken is not None or self._endpoint is None:
            self.end(_CLOSED)
        else:
            self._is_leaving = True
            self._break(_CLOSED)
            self._engine.later(LINGER_S, lambda: self.end(_CLOSED))
            self._say_last()

    def _say_last(self) -> None:
        """Send LEAVE. The socket's end alone could overtake what was sent before it over UCX."""
        # Not before all transfers have ended: of a long payload only a header is sent until the peer receives it.
        if self._is_leaving and not self._in_flight and not self._has_said_last:
            self._has_said_last = True
            self._start(lambda: [self._tagged(MessageKind.LEAVE, _WORD)], (_WORD,), ignore)

    def end(self, why: str) -> None:
        """End it at once, any number of times. What is in flight settles as soon as UCX has released its memory."""
        self._break(why)
        self._engine.forget(self)
        self._let_go()
        while self._unread:
            self._engine.drain(self.side, self._unread.popleft())

    def end_for(self, outcome: SendCompletion) -> None:
        """The thread that waits for `outcome` gives up. It is settled when UCX touches the caller's memory no
        more."""
        if self._want is not None and self._want.outcome is outcome:
            self._want = None
            outcome.settle(PeerReset(_CUT))
        self.end(_CUT)

    def _break(self, why: str) -> None:
        if self.broken is None:
            self.broken = why
        want, self._want = self._want, None
        if want is not None:
            want.outcome.settle(PeerReset(self.broken))

    def _let_go(self) -> None:
        """Release UCX's endpoint and the socket; by the socket's end the peer notices."""
        bootstrap, self._socket = self._socket, None
        if bootstrap is not None:
            self._engine.unwatch(bootstrap.fileno())
            # A shutdown ends the connection also where a forked child still holds the socket.
            with contextlib.suppress(OSError):
                bootstrap.shutdown(socket.SHUT_RDWR)
            bootstrap.close()
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            # This blocks for tens of microseconds: the close is forced, and does not wait.
            endpoint.close_blocking()
            self._closed = endpoint
            # Later: transfers that have just ended are completed first.
            self._engine.later(0.0, self._lose)
        self._free()

    def _lose(self) -> None:
        """Nothing comes any more, not even the rest of a short message."""
        want, self._short = self._short, None
        if want is not None:
            self._taken(want.outcome, PeerReset(self.broken or _BROKEN))

    def _match(self) -> None:
        """Bring together the next message and the buffer that waits for one."""
        if self._want is None:
            return
        if not self._unread:
            if self.broken is not None:
                self._break(self.broken)
            return
        # No receive is ever posted ahead: a message is taken from UCX's queue once it has arrived, its length is
        # compared with the buffer's, and only then may UCX write there. So a parked reader has nothing to cancel, and
        # a payload of the wrong length is never begun.
        want, self._want = self._want, None
        message = self._unread.popleft()
        if message.length != len(want.buffer):
            self._engine.drain(self.side, message)
            want.outcome.settle(
                PayloadTruncated(f"the peer sent a message of {message.length} bytes, and not of {len(want.buffer)}")
            )
            self.end(_UNASKED)
            return
        self._is_taking = True
        if message.length > SHORT_BYTES:
            memory = want.buffer, message
            self._start(lambda: [self.side.take(message, want.buffer)], memory, partial(self._taken, want.outcome))
        else:
            # UCX frees a long message when its endpoint is closed. It does not free a short one that comes in pieces,
            # where the last piece never comes. So a short one is received into memory of its own, which may stay
            # behind while its reader goes on.
            self._short, room = want, memoryview(bytearray(message.length))

            def arrived(error: Exception | None) -> None:
                want, self._short = self._short, None
                if want is None:  # its reader has gone
                    return
                if error is None:
                    want.buffer[:] = room
                self._taken(want.outcome, error)

            self._start(lambda: [self.side.take(message, room)], (room, message), arrived)
            # The peer had gone before this was asked for: a message that is not whole now never will be.
            if self._endpoint is None:
                self._engine.later(0.0, self._lose)

    def _taken(self, outcome: SendCompletion, error: Exception | None) -> None:
        self._is_taking = False
        outcome.settle(error)
        self._follow()

    def _tagged(self, kind: MessageKind, part: bytes | memoryview) -> Any:
        # UCX takes a request on a dead endpoint, and never ends it.
        if self._endpoint is None or not self._endpoint.alive:
            raise PeerReset(_BROKEN)
        tag = self._engine.ucx.tag(kind << NUMBER_BITS | self._their_number)
        return self._endpoint.tag_send(self._engine.ucx.array(part), tag)

    def _start(self, submit: Callable[[], list[Any]], memory: Sequence[object], done: Done) -> None:
        self._in_flight += 1

        def settled(error: Exception | None) -> None:
            self._in_flight -= 1
            done(error)
            self._free()
            if error is None:
                self._say_last()

        try:
            requests = submit()
        except Exception as error:
            # An exception of UCXX's, or a RuntimeError where the connection has just died.
            settled(PeerReset(f"{_BROKEN}: {error}"))
            self.end(_BROKEN)
            return
        self._engine.start(requests, memory, settled)

    def _free(self) -> None:
        if self._closed is not None and not self._in_flight:
            if self._engine.ucx.canceling is not None:
                self._engine.ucx.canceling(self._closed.ucxx_ptr)
            self._closed = None


def ignore(error: Exception | None) -> None:
    """The callback of a transfer whose failure shows in what follows it."""
