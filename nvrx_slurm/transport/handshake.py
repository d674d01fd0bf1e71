"""Both sides of a link prove that they know the job's token, without telling it: an HMAC over both nonces.

The server proves itself first, in the same message in which it asks; a client that finds another's server there tells
it nothing. The token is 256 random bits, so that a proof is of no use to who collects them.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from typing import NamedTuple

from nvrx_slurm.transport import wire
from nvrx_slurm.transport.backends.port import Door, Link
from nvrx_slurm.transport.errors import PeerRefused

_SERVER, _CLIENT = b"nvrx payloads, server", b"nvrx payloads, client"
_NO_PROOF = bytes(wire.PROOF_BYTES)


class Welcome(NamedTuple):
    """What a client learns at the hello. The proof goes with its first request."""

    proof: bytes
    eviction_s: float


def greet(link: Link, token: bytes, deadline: float) -> Welcome:
    """The client's side. Raises PeerRefused, PayloadCorrupt, and what links raise."""
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    link.send(wire.Hello(wire.VERSION, nonce).pack(), None, deadline)
    frame = bytearray(wire.CHALLENGE_BYTES)
    link.receive_into(memoryview(frame), deadline)
    challenge = wire.Challenge.unpack(frame)
    if challenge.status is wire.Status.VERSION or challenge.version != wire.VERSION:
        raise PeerRefused(f"it speaks version {challenge.version} of the protocol, this side {wire.VERSION}")
    if challenge.status is not wire.Status.OK:
        raise PeerRefused(REASONS.get(challenge.status, f"it answers a hello with {challenge.status.name}"))
    if not hmac.compare_digest(challenge.proof, _proof(token, _SERVER, nonce, challenge.nonce)):
        raise PeerRefused(OTHER_TOKEN)
    return Welcome(_proof(token, _CLIENT, nonce, challenge.nonce), challenge.eviction_ms / 1000)


class ServerDoor:
    """The server's side (a `Door`). `status`: whether the server takes another connection."""

    def __init__(
        self, token: bytes, eviction_s: float, status: Callable[[], wire.Status] = lambda: wire.Status.OK
    ) -> None:
        self._token, self._eviction_s, self._status = token, eviction_s, status
        self._expected: bytes | None = None
        self.wants, self.is_passed = wire.HELLO_BYTES, False

    def take(self, frame: bytes) -> bytes:
        """The challenge, and after the proof nothing; or why it is refused. Raises PayloadCorrupt for no hello."""
        self.wants = 0
        if self._expected is not None:
            self.is_passed = hmac.compare_digest(frame, self._expected)
            return b"" if self.is_passed else wire.Answer(wire.Status.REFUSED).pack()
        hello = wire.Hello.unpack(frame)
        if hello.version != wire.VERSION:
            return refusal(wire.Status.VERSION)
        if (status := self._status()) is not wire.Status.OK:
            return refusal(status)
        self.wants, nonce = wire.PROOF_BYTES, secrets.token_bytes(wire.NONCE_BYTES)
        self._expected = _proof(self._token, _CLIENT, hello.nonce, nonce)
        proof = _proof(self._token, _SERVER, hello.nonce, nonce)
        return wire.Challenge(wire.VERSION, wire.Status.OK, int(self._eviction_s * 1000), nonce, proof).pack()


def pass_through(link: Link, door: Door, deadline: float) -> bool:
    """The server's side where a thread waits for the peer: whether it has passed. Raises as `take`, and what links
    raise."""
    while door.wants:
        frame = bytearray(door.wants)
        link.receive_into(memoryview(frame), deadline)
        if answer := door.take(bytes(frame)):
            link.send(answer, None, deadline)
    return door.is_passed


def refusal(status: wire.Status) -> bytes:
    """Instead of a challenge."""
    return wire.Challenge(wire.VERSION, status, 0, bytes(wire.NONCE_BYTES), _NO_PROOF).pack()


OTHER_TOKEN = "it has another token: it serves another job"
REASONS = {
    wire.Status.FULL: "it has as many connections as it takes",
    wire.Status.CLOSING: "it shuts down",
    wire.Status.REFUSED: "it does not take this token",
}


def _proof(token: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(token, role + client_nonce + server_nonce, "sha256")
