"""Both sides of a link prove that they know the job's token, without telling it: an HMAC over both nonces.

The server proves itself first, in the same message in which it asks; a client that finds another's server there tells
it nothing. The token is 256 random bits, so that a proof is of no use to who collects them.
"""

from __future__ import annotations

import hmac
import secrets
from typing import NamedTuple

from nvrx_slurm.transport import wire
from nvrx_slurm.transport.backends.port import Link
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


def admit(link: Link, token: bytes, eviction_s: float, deadline: float) -> bool:
    """The server's side, up to the client's proof; whether it knows the token."""
    frame = bytearray(wire.HELLO_BYTES)
    link.receive_into(memoryview(frame), deadline)
    hello = wire.Hello.unpack(frame)
    if hello.version != wire.VERSION:
        turn_away(link, wire.Status.VERSION, deadline)
        return False
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    proof = _proof(token, _SERVER, hello.nonce, nonce)
    challenge = wire.Challenge(wire.VERSION, wire.Status.OK, int(eviction_s * 1000), nonce, proof)
    link.send(challenge.pack(), None, deadline)
    answer = bytearray(wire.PROOF_BYTES)
    link.receive_into(memoryview(answer), deadline)
    return hmac.compare_digest(bytes(answer), _proof(token, _CLIENT, hello.nonce, nonce))


def turn_away(link: Link, status: wire.Status, deadline: float) -> None:
    """Instead of a challenge."""
    link.send(wire.Challenge(wire.VERSION, status, 0, bytes(wire.NONCE_BYTES), _NO_PROOF).pack(), None, deadline)


OTHER_TOKEN = "it has another token: it serves another job"
REASONS = {
    wire.Status.FULL: "it has as many connections as it takes",
    wire.Status.CLOSING: "it shuts down",
    wire.Status.REFUSED: "it does not take this token",
}


def _proof(token: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(token, role + client_nonce + server_nonce, "sha256")
