"""The ring itself, where reader and producer share a node: no server, no socket; one copy, from the ring.

A link of this backend is the server's side of the protocol, within the reader: the same requests claim the same
slots, and an Ack ends the claim. That it was still the reader's then is what tells that it was not overwritten
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from nvrx_slurm.transport import wire
from nvrx_slurm.transport.backends.port import Entry, Link, Listener, Seen
from nvrx_slurm.transport.errors import PeerRefused, PeerReset
from nvrx_slurm.transport.serving import offer

if TYPE_CHECKING:
    from nvrx_slurm.transport.ring import Claim, SharedRing

SCHEME = "shm"
_LATE = "its slot was not this reader's any more when it had been read"


class ShmLink:
    """One reader's way to the rings that it has attached to."""

    needs_checksum = False

    def __init__(self, rings: Mapping[str, SharedRing]) -> None:
        self._rings = rings
        self._answer: wire.Answer | None = None
        self._claim: Claim | None = None

    def send(self, frame: bytes, payload: memoryview | None, deadline: float) -> None:
        if len(frame) == wire.ACK_BYTES:
            if not self._finish(taken=wire.Ack.unpack(frame).verdict is wire.Verdict.TAKEN, until=deadline):
                raise PeerReset(_LATE)
            return
        request = wire.Request.unpack(frame)
        self._answer, self._claim = offer(
            self._rings, request, keep_s=request.budget_ms / 1000, with_checksum=self.needs_checksum
        )

    def receive_into(self, buffer: memoryview, deadline: float) -> None:
        assert self._answer is not None
        buffer[:] = self._answer.pack()

    def receive_payload_into(self, buffer: memoryview, deadline: float, seen: Seen | None) -> None:
        assert self._claim is not None
        self._claim.copy_into(buffer, seen=seen)
        if not self._claim.is_ours():  # before anything is made of it
            raise PeerReset(_LATE)

    def is_stale(self) -> bool:
        return False

    def cut(self) -> None:
        """Nothing waits in it."""

    def close(self) -> None:
        self._finish(taken=False)

    def drop(self) -> None:
        """The claim is the parent's to end."""
        self._claim = None

    def _finish(self, *, taken: bool, until: float | None = None) -> bool:
        claim, self._claim = self._claim, None
        return claim is None or claim.finish(taken, until)


class ShmBackend:
    """Default where the ring can be attached to. `rings`: those that are attached, by name."""

    scheme = SCHEME

    def __init__(self, rings: Mapping[str, SharedRing]) -> None:
        self._rings = rings

    def connect(self, address: str, deadline: float) -> Link:
        return ShmLink(self._rings)

    def listen(self, host: str, port: int, serve: Callable[[Link], None], entry: Entry | None = None) -> Listener:
        raise PeerRefused("a ring in shared memory is read in place: there is nothing to listen for")
