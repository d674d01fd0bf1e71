"""The ring itself, where reader and producer share a node: no server, no socket; one copy, from the ring.

A link of this backend is the server's side of the protocol, within the reader: the same requests claim the same
slots, and an Ack ends the claim. That it was still the reader's then is what shows that it was not overwritten
meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from nvrx_slurm.transport import protocol
from nvrx_slurm.transport.errors import ForeignRing, PeerRefused, PeerReset, RingError
from nvrx_slurm.transport.protocol import AdmissionCheck, PeerLink, PortListener, Seen
from nvrx_slurm.transport.ring import SharedRing, is_gone
from nvrx_slurm.transport.server import offer
from nvrx_slurm.util.log import get_logger

if TYPE_CHECKING:
    from nvrx_slurm.transport.ring import Claim


SCHEME = "shm"
_LATE = "its slot was not this reader's any more when it had been read"


class ShmLink:
    """One reader's way to the rings that it has attached to."""

    needs_checksum = False

    def __init__(self, rings: Mapping[str, SharedRing]) -> None:
        self._rings = rings
        self._answer: protocol.Response | None = None
        self._claim: Claim | None = None

    def send(self, frame: bytes, payload: memoryview | None, deadline: float) -> None:
        if len(frame) == protocol.ACK_BYTES:
            if not self._finish(
                taken=protocol.Ack.unpack(frame).verdict is protocol.AckVerdict.TAKEN, until=deadline
            ):
                raise PeerReset(_LATE)
            return
        request = protocol.PayloadRequest.unpack(frame)
        self._answer, self._claim = offer(
            self._rings, request, keep_s=request.budget_ms / 1000, with_checksum=self.needs_checksum
        )

    def receive_into(self, buffer: memoryview, deadline: float) -> None:
        assert self._answer is not None
        buffer[:] = self._answer.pack()

    def receive_payload_into(self, buffer: memoryview, deadline: float, seen: Seen | None) -> None:
        assert self._claim is not None
        self._claim.copy_into(buffer, seen=seen)
        # Checked before the bytes are decoded.
        if not self._claim.is_ours():
            raise PeerReset(_LATE)

    def is_stale(self) -> bool:
        return False

    def cut(self) -> None:
        """Nothing waits in it."""

    def close(self) -> None:
        self._finish(taken=False)

    def drop(self) -> None:
        """In a forked child, leave the claim to the parent."""
        self._claim = None

    def _finish(self, *, taken: bool, until: float | None = None) -> bool:
        claim, self._claim = self._claim, None
        return claim is None or claim.finish(taken, until)


class ShmBackend:
    """Default where the ring can be attached to. `rings`: those that are attached, by name."""

    scheme = SCHEME

    def __init__(self, rings: Mapping[str, SharedRing]) -> None:
        self._rings = rings

    def connect(self, address: str, deadline: float) -> PeerLink:
        return ShmLink(self._rings)

    def listen(
        self, host: str, port: int, serve: Callable[[PeerLink], None], entry: AdmissionCheck | None = None
    ) -> PortListener:
        raise PeerRefused("a ring in shared memory is read in place: there is nothing to listen for")


MOST_RINGS = 64
MOST_ELSEWHERE = 4096
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_log = get_logger("transport")


class LocalRings(Mapping[str, SharedRing]):
    """Ring by name, attached at its first use. One whose producer has died goes when another ring is attached to, and
    one that was used longest ago when there are too many: what is mapped takes memory."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._attached: OrderedDict[str, SharedRing] = OrderedDict()
        self._elsewhere: OrderedDict[str, str] = OrderedDict()
        self._has_warned = False
        self._is_closed = False

    def has(self, name: str) -> bool:
        """Whether the ring is on this node; attaches to it."""
        return name in self._attached or (name not in self._elsewhere and self._attach(name) is not None)

    def why_not(self, name: str) -> str:
        """Why the ring was not attached to; "" where that is not known."""
        return self._elsewhere.get(name, "")

    def attached(self, name: str) -> SharedRing | None:
        """The ring, if it has been attached to."""
        ring = self._attached.get(name)
        if ring is not None and len(self._attached) > 1:
            with contextlib.suppress(KeyError):  # it is being let go
                self._attached.move_to_end(name)
        return ring

    def __getitem__(self, name: str) -> SharedRing:
        """Attaches again where the ring was just let go: `has` may have said that it is here."""
        ring = self._attached.get(name) or self._attach(name)
        if ring is None:
            raise KeyError(name)
        return ring

    def __iter__(self) -> Iterator[str]:
        """The names, from a copy: a read in another thread changes their order."""
        return iter(list(self._attached))

    def __len__(self) -> int:
        return len(self._attached)

    def close(self) -> None:
        with self._guard:
            self._is_closed = True
            for ring in list(self._attached.values()):
                ring.close()
            self._attached.clear()

    def after_fork(self) -> None:
        """In a forked child, replace the lock: a thread of the parent may hold it. The memory is the same."""
        self._guard = threading.Lock()

    def _attach(self, name: str) -> SharedRing | None:
        with self._guard:
            if self._is_closed or name in self._attached:
                return self._attached.get(name)
            try:
                ring = SharedRing.attach(name)
            except RingError as error:
                is_news = isinstance(error, ForeignRing) and not self._has_warned
                self._has_warned |= is_news
                _log.log(
                    logging.WARNING if is_news else logging.DEBUG, "%s is read over the network: %s", name, error
                )
                # Remembered, unless this process has too many files open just now: that says nothing of the ring.
                if not (isinstance(error.__context__, OSError) and error.__context__.errno in _EXHAUSTED):
                    self._elsewhere[name] = error.said
                if len(self._elsewhere) > MOST_ELSEWHERE:
                    self._elsewhere.popitem(last=False)
                return None
            # Dropped, not closed: its memory goes when the last read that is under way has ended.
            gone = [name for name in self if is_gone(name)]
            crowd = len(self._attached) - len(gone) - MOST_RINGS + 1
            gone += [name for name in list(self)[: max(crowd, 0)] if name not in gone]
            for old in gone:
                del self._attached[old]
            self._attached[name] = ring
            return ring
