"""The agent's end of a liveness connection, in steps, for a loop that serves hundreds of them."""

from __future__ import annotations

import socket

from nvrx_slurm.liveness.connection import Introduction, Session
from nvrx_slurm.util.job_key import NONCE_BYTES


class SimulatedConnection:
    """Connects, proves itself, has the controller prove itself, and is then silent."""

    def __init__(self, address: tuple[str, int], *, token: str, node: str, incarnation: str) -> None:
        self._introduction = Introduction(token, node=node, incarnation=incarnation, port=address[1])
        self._answered = False
        self.session: Session | None = None
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.socket.connect_ex(address)

    def readable(self) -> None:
        """A nonce, or the proof that answers ours."""
        data = self.socket.recv(NONCE_BYTES)
        if not data:
            raise ConnectionResetError("the controller refused a connection")
        if self._answered:
            self.session = self._introduction.believe(data)
        else:
            self._answered = True
            self.socket.sendall(self._introduction.answer(data))
