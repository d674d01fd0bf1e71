"""The agent's end of a tether, in steps, for a loop that serves hundreds of them."""

from __future__ import annotations

import socket

import msgspec

from nvrx_slurm.tether import ACCEPTED, NONCE_BYTES, Hello, _mac


class SimulatedTether:
    """Connects, proves itself, and is then silent."""

    def __init__(self, address: tuple[str, int], *, token: str, node: str, incarnation: str) -> None:
        self._token, self._node, self._incarnation = token, node, incarnation
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.socket.connect_ex(address)

    def readable(self) -> None:
        """A nonce, or the acceptance of our answer to it."""
        data = self.socket.recv(NONCE_BYTES)
        assert data, "the controller refused a tether"
        if data == ACCEPTED:
            return
        mac = _mac(self._token, data, self._node, self._incarnation)
        hello = msgspec.msgpack.encode(Hello(node=self._node, incarnation=self._incarnation, mac=mac))
        self.socket.sendall(len(hello).to_bytes(2, "big") + hello)
