"""What the protocol needs of a backend: connect, listen; and of a connection: send, receive into, close.

Each `receive…` takes exactly one buffer that the peer has sent, of the same size: a transport of messages needs that,
a stream does not mind. Deadlines are points of `time.monotonic()`. All raise, and nothing else:

- PeerReset: the connection is broken, or none could be made;
- PayloadTruncated: the peer closed it in the middle of a message, or sent a longer one;
- PayloadTimeout: the deadline has passed;
- PeerRefused: there is no such backend here.

After any of them the link is good for nothing but `close`, and nothing writes into the caller's buffer any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from nvrx_slurm.util.admission import PROOF_S

Seen = Callable[[memoryview], object]
"""Called with each piece of a payload, in order, while it is still in the processor's cache."""


class Link(Protocol):
    """One connection. One thread uses it at a time; `cut` may come from any other.

    `needs_checksum`: False where `send` of the Ack tells whether what was received is valid, since it was read in
    place: it raises PeerReset where it is not.
    """

    needs_checksum: bool

    def send(self, frame: bytes, payload: memoryview | None, deadline: float) -> None:
        """A frame, and after it a payload, as a message of its own; an empty payload is none.

        It returns when the bytes are on their way, not when the peer has them: the payload's memory must stay as it
        is until the peer has said so.
        """

    def receive_into(self, buffer: memoryview, deadline: float) -> None:
        """Fill `buffer` with one frame."""

    def receive_payload_into(self, buffer: memoryview, deadline: float, seen: Seen | None) -> None:
        """Fill `buffer` with one payload."""

    def is_stale(self) -> bool:
        """Between two uses: whether the peer has closed it, or has sent what nobody asked for. Does not wait."""

    def cut(self) -> None:
        """From any thread, any number of times: whoever waits in it is woken with PeerReset."""

    def close(self) -> None:
        """Any number of times. What was sent still arrives."""

    def drop(self) -> None:
        """In a forked child: let go of it, so that the parent's connection neither ends nor is kept open here."""


class Door(Protocol):
    """The server's side of a handshake, without I/O.

    `wants`: so many bytes must come for the next `take`; 0: it is over, and `is_passed` says how.
    """

    wants: int
    is_passed: bool

    def take(self, frame: bytes) -> bytes:
        """The answer to these bytes. Raises TransportError where they are none of its protocol."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a connection must do before it gets a thread: pass its own `door()`, `within_s` of its coming."""

    door: Callable[[], Door]
    within_s: float = PROOF_S


class Listener(Protocol):
    """A port that takes connections. `address`: as peers name it, such as `tcp://n3:40123`."""

    address: str

    def close(self) -> None:
        """No new links; those that are there are their servers' to cut."""

    def drop(self) -> None:
        """In a forked child: let go of it."""


class Backend(Protocol):
    """One way to connect. `scheme` is what its addresses begin with."""

    scheme: str

    def connect(self, address: str, deadline: float) -> Link: ...

    def listen(self, host: str, port: int, serve: Callable[[Link], None], entry: Entry | None = None) -> Listener:
        """Take connections, each served by `serve` in a thread of its own, which closes it. `host`: the name by which
        peers find this node; `port` 0 is any free one. `entry`: only connections that have passed it are served, and
        no others cost a thread; None: all are. Raises RingError where it cannot listen."""


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `scheme://host:port`; an IPv6 host is in brackets. Raises ValueError."""
    _, separator, rest = address.partition("://")
    host, colon, port = rest.rpartition(":")
    if not (separator and colon and host):
        raise ValueError(f"{address!r} must look like scheme://host:port")
    number = int(port) if port.isascii() and port.isdigit() else 0
    if not 0 < number < 1 << 16:
        raise ValueError(f"{address!r}: a port is 1 to 65535")
    return host.removeprefix("[").removesuffix("]"), number


def address_of(scheme: str, host: str, port: int) -> str:
    """The other way round."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
