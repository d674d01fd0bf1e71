"""A port for the workers' rendezvous, held free until they need it."""

from __future__ import annotations

import socket


class HeldPort:
    """A TCP port that is bound, so that nobody else gets it, and not listened on. Let go of it just before use."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind(("", 0))
        self.number = int(self._socket.getsockname()[1])

    def release(self) -> None:
        """Free it for its user."""
        self._socket.close()
