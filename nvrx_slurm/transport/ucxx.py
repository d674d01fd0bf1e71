"""UCX through its binding ucxx: RDMA where the system's UCX has it, TCP where there is none.

A connection begins as a socket of `tcp.py`, by which both ends learn where the other's worker is. Decision 0022 has
what UCX's own listener would cost here.
"""

from __future__ import annotations

import contextlib
import hmac
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from nvrx_slurm.transport.errors import PayloadTimeout, PayloadTruncated, PeerRefused, PeerReset, TransportError
from nvrx_slurm.transport.protocol import (
    OTHER_TOKEN,
    REASONS,
    AdmissionCheck,
    PeerLink,
    ResponseStatus,
    Seen,
    ServerHandshake,
    pass_through,
)
from nvrx_slurm.transport.tcp import TcpBackend, TcpLink, TcpListener
from nvrx_slurm.transport.ucxx_engine import Engine, engine
from nvrx_slurm.transport.ucxx_peer import Peer, SendCompletion, Want
from nvrx_slurm.util.log import get_logger

SCHEME = "ucxx"

_log = get_logger("transport")


MOST_ADDRESS_BYTES = 8 << 10  # of a worker: a hundred for each transport and device that it has
_MAGIC = b"nvrxucx2"
_HEAD = struct.Struct("<8s32sQIH")
_SAID = struct.Struct("<QI")

REFUSAL = _HEAD.pack(_MAGIC, b"", 0, 0, 0)  # instead of a hello: the other one's was not proven by the token


class WorkerHello(NamedTuple):
    """`number`: by which the other end is to name this one; `turn`: of the server's endpoint among those for this
    client; `address`: of the worker, as UCX packs it."""

    number: int
    turn: int
    address: bytes

    def pack(self, token: bytes) -> bytes:
        return _HEAD.pack(_MAGIC, _proof(token, *self), self.number, self.turn, len(self.address)) + self.address


class WorkerHandshake:
    """Receives one (a `ServerHandshake`). `hello`: the peer's, once it has passed. UCX trusts what an address
    says: it gets none that the token does not prove."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._head = b""
        self.wants, self.is_passed = _HEAD.size, False
        self.hello: WorkerHello

    def take(self, frame: bytes) -> bytes:
        """A refusal, where the token does not prove it. Raises PeerReset for no hello, PeerRefused for a refusal."""
        if not self._head:
            magic, _, _, _, size = _HEAD.unpack(frame)
            if frame == REFUSAL:
                raise PeerRefused(REASONS[ResponseStatus.REFUSED])
            if magic != _MAGIC or not 0 < size <= MOST_ADDRESS_BYTES:
                raise PeerReset("it uses another protocol, or another version of this one")
            self._head, self.wants = frame, int(size)  # the address follows
            return b""
        self.wants = 0
        _, proof, number, turn, _ = _HEAD.unpack(self._head)
        self.hello = WorkerHello(number, turn, frame)
        self.is_passed = hmac.compare_digest(proof, _proof(self._token, *self.hello))
        return b"" if self.is_passed else REFUSAL


def _proof(token: bytes, number: int, turn: int, address: bytes) -> bytes:
    return hmac.digest(token, _SAID.pack(number, turn) + address, "sha256")


# A sender need not wait until its peer wants a payload that is no longer: a socket would have room for that, too.
UNTAKEN_BYTES = 4 << 20
_CUT = "the connection was cut"


class UcxxLink:
    """A link whose methods post to the engine, and wait."""

    needs_checksum = True

    def __init__(self, engine: Engine, peer: Peer) -> None:
        self._engine, self._peer = engine, peer
        self._is_dropped = self._is_cut = False

    def send(self, frame: bytes, payload: memoryview | None, deadline: float) -> None:
        # While a message is unread, it may say why the connection ended.
        if self._peer.broken is not None and not self._peer.has_news:
            raise PeerReset(self._peer.broken)
        # A view of our own: a ring that is closed meanwhile keeps its memory for it.
        view = memoryview(payload).cast("B") if payload else None
        if view is None or len(view) <= UNTAKEN_BYTES:
            self._engine.post(partial(self._peer.send, frame, view, None))
            return
        outcome = SendCompletion()
        self._engine.post(partial(self._peer.send, frame, view, outcome))
        self._wait(outcome, deadline, "the peer takes no more")

    def receive_into(self, buffer: memoryview, deadline: float) -> None:
        outcome = SendCompletion()
        self._engine.post(partial(self._peer.receive, Want(memoryview(buffer).cast("B"), outcome)))
        self._wait(outcome, deadline, "the peer says nothing")

    def receive_payload_into(self, buffer: memoryview, deadline: float, seen: Seen | None) -> None:
        try:
            self.receive_into(buffer, deadline)
        except PeerReset as error:
            if self._is_cut:
                raise
            raise PayloadTruncated(f"{error}, before all of the payload had come") from None
        if seen is not None:
            seen(buffer)

    def is_stale(self) -> bool:
        return self._peer.broken is not None or self._peer.has_news

    def cut(self) -> None:
        self._is_cut = True
        self._post(partial(self._peer.end, _CUT))

    def close(self) -> None:
        self._post(self._peer.leave)

    def drop(self) -> None:
        self._is_dropped = True

    def _post(self, step: Callable[[], None]) -> None:
        if not self._is_dropped:
            # PeerReset: the engine has ended, and all links with it.
            with contextlib.suppress(PeerReset):
                self._engine.post(step)

    def _wait(self, outcome: SendCompletion, deadline: float, what: str) -> None:
        try:
            in_time = outcome.is_settled_by(deadline)
        except BaseException:
            # After an interrupt, too: UCX may use the caller's memory until the transfer has ended.
            self._abandon(outcome)
            raise
        if not in_time:
            self._abandon(outcome)
            raise PayloadTimeout(what)
        if outcome.error is not None:
            raise outcome.error

    def _abandon(self, outcome: SendCompletion) -> None:
        self._post(partial(self._peer.end_for, outcome))
        outcome.wait()


def _do(engine: Engine, step: Callable[[], None]) -> None:
    """Run `step` in the engine's thread, and wait for it."""
    outcome = SendCompletion()

    def run() -> None:
        try:
            step()
        except Exception as error:
            # UCXX has an exception class for each status.
            outcome.settle(PeerReset(f"no connection: {error}"))
        else:
            outcome.settle()

    engine.post(run)
    outcome.wait()
    if outcome.error is not None:
        raise outcome.error


class UcxxBackend:
    """UCX starts with the first of these in a process, which takes some 0.3 s. A peer that does not know the `token`
    never reaches it.

    Raises PeerRefused, which says what to install or to do, where it cannot be.
    """

    scheme = SCHEME

    def __init__(self, token: bytes) -> None:
        # UCX is loaded here: a library that is missing then shows when the client is made, not in its first read.
        engine()
        self._token = token
        self._sockets = TcpBackend(SCHEME)

    def connect(self, address: str, deadline: float) -> PeerLink:
        running = engine()
        socket = self._sockets.connect(address, deadline)
        peer = Peer(running, running.calling)
        link = UcxxLink(running, peer)
        try:
            # Known before its number is sent: the server's first message may come before `open`.
            running.post(partial(running.know, peer))
            socket.send(WorkerHello(peer.number, 0, peer.side.address).pack(self._token), None, deadline)
            handshake = WorkerHandshake(self._token)
            while handshake.wants:
                frame = bytearray(handshake.wants)
                socket.receive_into(memoryview(frame), deadline)
                handshake.take(bytes(frame))
            if not handshake.is_passed:
                raise PeerRefused(OTHER_TOKEN)
            theirs = handshake.hello
            _do(running, lambda: peer.open(running.call(peer.side, theirs), theirs.number, socket.detach()))
        except BaseException:
            link.cut()
            socket.close()
            raise
        return link

    def listen(
        self, host: str, port: int, serve: Callable[[PeerLink], None], entry: AdmissionCheck | None = None
    ) -> TcpListener:
        # A connection passes two handshakes: one on its socket, and `entry` over UCX.
        def begin(socket: TcpLink, handshake: ServerHandshake | None) -> None:
            assert isinstance(handshake, WorkerHandshake)
            theirs, running = handshake.hello, engine()
            peer = Peer(running, running.serving)
            link = UcxxLink(running, peer)

            def open() -> None:
                turn, endpoint = peer.side.next(theirs.address)
                detached = socket.detach()
                running.know(peer)
                peer.open(endpoint, theirs.number, detached)
                # It is the first message on this socket, so there is room for it.
                detached.sendall(WorkerHello(peer.number, turn, peer.side.address).pack(self._token))

            try:
                _do(running, open)
                is_in = entry is None or pass_through(link, entry.handshake(), time.monotonic() + entry.within_s)
            except TransportError as error:
                _log.debug("a connection came to nothing: %s", error)
            else:
                if is_in:
                    serve(link)
            finally:
                link.close()

        return self._sockets.listen_behind(host, port, begin, AdmissionCheck(lambda: WorkerHandshake(self._token)))
