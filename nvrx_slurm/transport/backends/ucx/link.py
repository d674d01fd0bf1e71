"""One connection, for the threads that wait for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from nvrx_slurm.transport.backends.port import Link, Seen
from nvrx_slurm.transport.backends.tcp import TcpLink
from nvrx_slurm.transport.backends.ucx.engine import Engine
from nvrx_slurm.transport.backends.ucx.hello import Hello, hear
from nvrx_slurm.transport.backends.ucx.outcome import Outcome
from nvrx_slurm.transport.backends.ucx.peer import Peer, Want
from nvrx_slurm.transport.errors import PayloadTimeout, PayloadTruncated, PeerReset, TransportError
from nvrx_slurm.util.log import get_logger

UNTAKEN_BYTES = 4 << 20
"""A sender need not wait until its peer wants a payload that is no longer: a socket would have room for that, too."""

_CUT = "the connection was cut"

_log = get_logger("transport")


class UcxxLink:
    """Posts to the engine, and waits."""

    needs_checksum = True

    def __init__(self, engine: Engine, peer: Peer) -> None:
        self._engine, self._peer = engine, peer
        self._is_dropped = self._is_cut = False

    def send(self, frame: bytes, payload: memoryview | None, deadline: float) -> None:
        if self._peer.broken is not None and not self._peer.has_news:  # its last word, which is unread, says why
            raise PeerReset(self._peer.broken)
        # A view of our own: a ring that is closed meanwhile keeps its memory for it.
        view = memoryview(payload).cast("B") if payload else None
        if view is None or len(view) <= UNTAKEN_BYTES:
            self._engine.post(partial(self._peer.send, frame, view, None))
            return
        outcome = Outcome()
        self._engine.post(partial(self._peer.send, frame, view, outcome))
        self._wait(outcome, deadline, "the peer takes no more")

    def receive_into(self, buffer: memoryview, deadline: float) -> None:
        outcome = Outcome()
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
            with contextlib.suppress(PeerReset):  # the engine has ended, and all links with it
                self._engine.post(step)

    def _wait(self, outcome: Outcome, deadline: float, what: str) -> None:
        try:
            in_time = outcome.is_settled_by(deadline)
        except BaseException:  # an interrupt: the caller's memory is UCX's until it has let go of it
            self._abandon(outcome)
            raise
        if not in_time:
            self._abandon(outcome)
            raise PayloadTimeout(what)
        if outcome.error is not None:
            raise outcome.error

    def _abandon(self, outcome: Outcome) -> None:
        self._post(partial(self._peer.end_for, outcome))
        outcome.wait()


def connect(engine: Engine, bootstrap: TcpLink, token: bytes, deadline: float) -> UcxxLink:
    """To a peer of this kind, which listens at the other end. Raises PeerReset, PayloadTimeout, PeerRefused."""
    peer = Peer(engine, engine.calling)
    link = UcxxLink(engine, peer)
    try:
        engine.post(partial(engine.know, peer))
        bootstrap.send(Hello(peer.number, 0, peer.side.address).pack(token), None, deadline)
        theirs = hear(bootstrap, token, deadline)
        _do(engine, lambda: peer.open(engine.call(peer.side, theirs), theirs.number, bootstrap.detach()))
    except BaseException:
        link.cut()
        raise
    return link


def accept(engine: Engine, bootstrap: TcpLink, theirs: Hello, token: bytes, serve: Callable[[Link], None]) -> None:
    """Serve one that has connected, and said who it is."""
    peer = Peer(engine, engine.serving)

    def open() -> None:
        turn, endpoint = peer.side.next(theirs.address)
        ours = bootstrap.detach()
        engine.know(peer)
        peer.open(endpoint, theirs.number, ours)
        ours.sendall(Hello(peer.number, turn, peer.side.address).pack(token))  # there is room: it is the first word

    link = UcxxLink(engine, peer)
    try:
        _do(engine, open)
    except TransportError as error:
        _log.debug("a connection came to nothing: %s", error)
    else:
        serve(link)
    finally:
        link.close()


def _do(engine: Engine, step: Callable[[], None]) -> None:
    """In the engine's thread, and wait for it."""
    outcome = Outcome()

    def run() -> None:
        try:
            step()
        except Exception as error:  # UCXX has a class for each status
            outcome.settle(PeerReset(f"no connection: {error}"))
        else:
            outcome.settle()

    engine.post(run)
    outcome.wait()
    if outcome.error is not None:
        raise outcome.error
