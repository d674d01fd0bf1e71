"""A listener, within the engine's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvrx_slurm.log import get_logger
from nvrx_slurm.transport.backends.ucx import sockets
from nvrx_slurm.transport.backends.ucx.engine import Engine
from nvrx_slurm.transport.backends.ucx.peer import Peer

INTRODUCTION_S = 5.0
"""So long may a peer take to say who it is."""

LET_GO_S = 0.25
"""How often it is looked whether who never said who they are has gone from a closed port."""

_log = get_logger("transport")


class Port:
    """Takes connections until it is closed. `accept` gets each that has introduced itself."""

    def __init__(self, engine: Engine, accept: Callable[[Peer], None]) -> None:
        self._engine, self._accept = engine, accept
        self._listener: Any = None
        self._peers: set[Peer] = set()
        self._is_closed = self._is_letting_go = False
        self.number = 0

    def open(self, number: int) -> None:
        """Raises what UCXX raises."""
        self._listener = self._engine.ucx.listener.create(self._engine.worker, number, self._has_come)
        self.number = self._listener.port

    def close(self) -> None:
        """UCX lets go of the port with the last of its connections; who comes until then is turned away."""
        self._is_closed = True
        self._let_go()

    def _has_come(self, request: int) -> None:
        """Within UCX's progress, where no endpoint can be closed, and what is raised is printed."""
        try:
            endpoint = self._listener.create_endpoint_from_conn_request(request, True)
        except Exception as error:  # UCXX has a class for each status
            _log.debug("a connection was gone before it was taken: %s", error)
        else:
            self._engine.accepted.append(lambda: self._take(endpoint))

    def _take(self, endpoint: Any) -> None:
        if self._is_closed:
            endpoint.close_blocking()
            return
        peer = Peer(self._engine, lambda error: self._has_opened(peer, error), self._has_gone)
        self._peers.add(peer)
        peer.accept(endpoint)
        self._engine.later(INTRODUCTION_S, lambda: self._give_up(peer))

    def _has_opened(self, peer: Peer, error: Exception | None) -> None:
        if error is None:
            self._accept(peer)

    def _give_up(self, peer: Peer) -> None:
        if not peer.has_opened:
            peer.end("it never said who it is")

    def _has_gone(self, peer: Peer) -> None:
        self._peers.discard(peer)
        self._let_go()

    def _let_go(self) -> None:
        """Not before: they hold UCX's listener, which would call back into what is no more."""
        if not self._is_closed or self._peers or self._is_letting_go:
            return
        if self._listener is not None and sockets.has_connections(self.number):
            self._is_letting_go = True
            self._engine.later(LET_GO_S, self._try_again)
        else:
            self._listener = None

    def _try_again(self) -> None:
        self._is_letting_go = False
        self._let_go()
