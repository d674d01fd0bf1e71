"""The agent's end of a liveness connection, in steps, for a loop that serves hundreds of them."""

from __future__ import annotations

import socket
import types
from collections.abc import Generator

from nvrx_slurm.liveness.connection import Session, introduce


class SimulatedConnection:
    """Connects, proves itself, has the controller prove itself, and is then silent."""

    def __init__(self, address: tuple[str, int], *, token: str, node: str, incarnation: str) -> None:
        self.session: Session | None = None
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.socket.connect_ex(address)
        self._handshake = introduce(self, token=token, node=node, incarnation=incarnation, port=address[1])
        self._handshake.send(None)  # up to its first `receive`

    def readable(self) -> None:
        """Take a nonce, or the controller's proof. Raises OSError."""
        if self.session is not None:
            raise ConnectionResetError("the controller closed the connection")
        try:
            self._handshake.send(None)
        except StopIteration as done:
            self.session = done.value

    async def receive(self, most: int) -> bytes:
        await _until_readable()
        return self.socket.recv(most)

    async def send(self, data: bytes) -> None:
        self.socket.sendall(data)


@types.coroutine
def _until_readable() -> Generator[None, None, None]:
    """Stop here; `readable` goes on."""
    yield
