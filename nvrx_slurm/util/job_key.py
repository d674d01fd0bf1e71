"""The job's key: the one secret from which every proof in a job is derived.

The batch host makes it (256 random bits, `StoreAddress.token`) and keeps it in `store.json` (0600) in the job folder.
Only the job's own user can read that file. Nothing else is a root of trust: not a port number, a host, a name,
or the password of a store that other jobs use too.

Each purpose has a key of its own (HKDF-Expand with one block, RFC 5869), so a proof made for one is worth nothing for
another. Standard library only: workers import it.
"""

from __future__ import annotations

import hmac
from hashlib import sha256

from nvrx_slurm.errors import ForgedRecord

NONCE_BYTES = 32
PROOF_BYTES = 32
# HMAC-SHA256 cut to 128 bits (RFC 2104, section 5): a forgery succeeds once in 2^128 tries.
SIGNATURE_BYTES = 16


class JobKey:
    """Derives, signs and proves. The key itself never leaves the process that has read it."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        # Keyed once, and copied for each record: with cold caches that takes 2 µs less than `hmac.digest`.
        self._keyed = hmac.new(self.derive("records"), digestmod=sha256)

    def __repr__(self) -> str:
        return "JobKey(…)"  # a traceback or a log must not show it

    def derive(self, purpose: str) -> bytes:
        """The 32-byte key for one purpose."""
        return hmac.digest(self._token, b"nvrx-slurm " + purpose.encode() + b"\x01", sha256)

    def sign(self, place: str, data: bytes) -> bytes:
        """`data` behind its signature. `place` names where it is stored (a key, and a field): a record that is copied
        to another place does not verify there."""
        return self._signature(place, data) + data

    def verify(self, place: str, signed: bytes) -> bytes:
        """The data that `sign` was given for this place. Raises ForgedRecord."""
        signature, data = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(place, data)):
            raise ForgedRecord(f"a record in {place} is not signed with this job's key")
        return data

    def _signature(self, place: str, data: bytes) -> bytes:
        # The length keeps `place` and `data` apart: no two pairs give the same message.
        name = place.encode()
        message = len(name).to_bytes(4, "big") + name + data
        signature = self._keyed.copy()
        signature.update(message)
        return signature.digest()[:SIGNATURE_BYTES]


def proof(key: bytes, role: str, *parts: bytes) -> bytes:
    """One side's proof in a handshake. `role` names the link and the side, so a peer's own proof cannot be sent back
    to it; `parts` are both nonces, and what else the two must agree on."""
    message = b"".join(len(part).to_bytes(4, "big") + part for part in (role.encode(), *parts))
    return hmac.digest(key, message, sha256)


def is_proof(expected: bytes, given: bytes) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(expected, given)
