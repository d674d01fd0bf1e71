"""What a read or a write of payloads raises, in one tree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from nvrx_slurm.errors import NvrxError

if TYPE_CHECKING:
    from nvrx_slurm.transport.ref import PayloadRef

SHOWN_ATTEMPTS = 8


class Attempt(NamedTuple):
    """One try at one port, and how it ended. `port` is "" where none was tried (the ring itself was asked)."""

    port: str
    took_s: float
    outcome: str

    def __str__(self) -> str:
        return f"{self.port or 'ring'}: {self.outcome} after {self.took_s:.3f} s"


class TransportError(NvrxError):
    """Base of the tree. `ref`: what was asked for, None where there was no ref; `attempts`: in their order."""

    def __init__(self, message: str, *, ref: PayloadRef | None = None, attempts: Sequence[Attempt] = ()) -> None:
        super().__init__(message)
        self.ref, self.attempts = ref, tuple(attempts)

    @property
    def said(self) -> str:
        """The message without the attempts. (Errors of this tree are shown with them.)"""
        return super().__str__()

    def of(self, ref: PayloadRef) -> TransportError:
        """The same error for another ref, which was not asked for because of this one."""
        return type(self)(f"{ref} was not asked for: {self.said}", ref=ref)

    def __str__(self) -> str:
        if not self.attempts:
            return self.said
        last = self.attempts[-SHOWN_ATTEMPTS:]
        left_out = f"{len(self.attempts) - len(last)} more; " if len(last) < len(self.attempts) else ""
        return f"{self.said} ({left_out}{'; '.join(map(str, last))})"

    def __reduce__(self) -> tuple[object, ...]:
        # By name, since the default would pass the arguments by place.
        return partial(type(self), self.said, ref=self.ref, attempts=self.attempts), ()


class StaleSlotError(TransportError):
    """The slot has another payload by now, or this one was consumed, or its ring is gone. So it is gone for every
    reader, and is never asked for again."""


class PeerReset(TransportError):
    """The connection broke, or none could be made."""


class PayloadTruncated(TransportError):
    """The peer closed the connection in the middle of an answer, or a message was longer than announced."""


class PayloadTimeout(TransportError):
    """The deadline has passed; the message says where the time went."""


class PayloadCorrupt(TransportError):
    """The bytes are not those that were written, or are no answer at all. They were thrown away."""


class PeerRefused(TransportError):
    """The peer has another token, or another version of the protocol, or has no place left."""


class RingFull(TransportError):
    """No slot is free, and none may be overwritten."""


class RingError(TransportError):
    """A ring that cannot be made, attached to, or used; the message says why, and what to do."""


class ForeignRing(RingError):
    """A file on this node has the ring's name, but other users own it or can write it. Its bytes were not used."""
