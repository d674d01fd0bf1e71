"""The protocol between a client and a server of payloads: links, frames, the handshake, one read.

    client                          server
      ClientHello (version, nonce) ──▶
      ◀──────────────────────────────  Challenge (status, nonce, proof, idle eviction)
      Proof, and the first PayloadRequest ──▶
      PayloadRequest (READ slot, gen.) ▶       claims the slot
      ◀──────────────────────────────  Response (status, size, checksum), then the payload
      Ack (TAKEN | KEPT | BAD) ──────▶        the slot is freed now, or ready again
      PayloadRequest … ──────────────▶        … and its Response confirms that the Ack arrived

Frames have a fixed size; numbers are little-endian. A frame that is malformed raises PayloadCorrupt, and no memory is
allocated for a size that only the peer has named.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, TypeVar

import xxhash

from nvrx_slurm.transport.errors import PayloadCorrupt, PayloadTimeout, PeerRefused
from nvrx_slurm.transport.ref import PayloadRef
from nvrx_slurm.util.admission import PROOF_S

MAGIC = b"nvrxpay\n"
VERSION = 1
NONCE_BYTES = 32
PROOF_BYTES = 32
RING_BYTES = 64

_HELLO = struct.Struct("<8sHxx32s")
_CHALLENGE = struct.Struct("<8sHBxI32s32s")
_REQUEST = struct.Struct("<4sBxxxIIQ64s")
_ANSWER = struct.Struct("<4sBxxxQQQ")
_ACK = struct.Struct("<4sBxxxIQ")

HELLO_BYTES, CHALLENGE_BYTES = _HELLO.size, _CHALLENGE.size
REQUEST_BYTES, ANSWER_BYTES, ACK_BYTES = _REQUEST.size, _ANSWER.size, _ACK.size

_REQUEST_MARK, _ANSWER_MARK, _ACK_MARK = b"RQ\r\n", b"AN\r\n", b"AK\r\n"
_MOST_MS = (1 << 32) - 1

C = TypeVar("C", bound=IntEnum)


class RequestKind(IntEnum):
    """What a request is for."""

    READ = 1
    SETTLE = 2  # an earlier Ack may be lost: the slot was TAKEN, if it still has that generation


class ResponseStatus(IntEnum):
    """The result of a request or of a handshake."""

    OK = 0
    BUSY = 1  # another reader has the slot: ask again
    STALE = 2  # this payload is gone
    UNKNOWN_RING = 3  # this server does not serve that ring
    REFUSED = 4  # wrong proof
    VERSION = 5  # another version of the protocol
    FULL = 6  # as many connections as it takes
    CLOSING = 7  # it shuts down
    BAD_REQUEST = 8  # no request of this protocol


class AckVerdict(IntEnum):
    """What became of a payload at its reader."""

    TAKEN = 1  # it has it: the slot is free
    KEPT = 2  # it has it, and leaves it for others
    BAD = 3  # what came was not it: the slot is ready again


class ClientHello(NamedTuple):
    """The client's first frame."""

    version: int
    nonce: bytes

    def pack(self) -> bytes:
        return _HELLO.pack(MAGIC, self.version, self.nonce)

    @classmethod
    def unpack(cls, frame: bytes | bytearray) -> ClientHello:
        return cls(*_fields(_HELLO, MAGIC, frame, "this is no hello of this protocol"))


class Challenge(NamedTuple):
    """The server's side of the hello. `eviction_ms`: a link idle for so long is closed."""

    version: int
    status: ResponseStatus
    eviction_ms: int
    nonce: bytes
    proof: bytes

    def pack(self) -> bytes:
        eviction_ms = min(self.eviction_ms, _MOST_MS)
        return _CHALLENGE.pack(MAGIC, self.version, self.status, eviction_ms, self.nonce, self.proof)

    @classmethod
    def unpack(cls, frame: bytes | bytearray) -> Challenge:
        version, status, *rest = _fields(_CHALLENGE, MAGIC, frame, "no server of payloads is listening there")
        return cls(version, _member(ResponseStatus, "status", status), *rest)


class PayloadRequest(NamedTuple):
    """The client's request for one payload. `budget_ms`: how long the client will wait for it."""

    call: RequestKind
    slot: int
    budget_ms: int
    generation: int
    ring: str

    def pack(self) -> bytes:
        budget_ms = max(0, min(self.budget_ms, _MOST_MS))
        return _REQUEST.pack(
            _REQUEST_MARK, self.call, self.slot, budget_ms, self.generation, self.ring.encode("ascii")
        )

    @classmethod
    def unpack(cls, frame: bytes | bytearray) -> PayloadRequest:
        why = "this is no request of this protocol"
        call, slot, budget_ms, generation, ring = _fields(_REQUEST, _REQUEST_MARK, frame, why)
        name = ring.rstrip(b"\0").decode("ascii", "replace")
        return cls(_member(RequestKind, "call", call), slot, budget_ms, generation, name)


class Response(NamedTuple):
    """The server's answer. A payload follows if `status` is OK and `size` is not 0. `generation`: of the slot."""

    status: ResponseStatus
    size: int = 0
    checksum: int = 0
    generation: int = 0

    def pack(self) -> bytes:
        return _ANSWER.pack(_ANSWER_MARK, self.status, self.size, self.checksum, self.generation)

    @classmethod
    def unpack(cls, frame: bytes | bytearray) -> Response:
        status, *rest = _fields(_ANSWER, _ANSWER_MARK, frame, "the peer's answer is none of this protocol")
        return cls(_member(ResponseStatus, "status", status), *rest)


class Ack(NamedTuple):
    """The client's last frame of a read, after the payload."""

    verdict: AckVerdict
    slot: int
    generation: int

    def pack(self) -> bytes:
        return _ACK.pack(_ACK_MARK, self.verdict, self.slot, self.generation)

    @classmethod
    def unpack(cls, frame: bytes | bytearray) -> Ack:
        verdict, *rest = _fields(_ACK, _ACK_MARK, frame, "this is no ack of this protocol")
        return cls(_member(AckVerdict, "verdict", verdict), *rest)


def _fields(layout: struct.Struct, mark: bytes, frame: bytes | bytearray, otherwise: str) -> list[Any]:
    """The fields of a frame, behind its mark. Raises PayloadCorrupt, with the text `otherwise`, for another mark."""
    found, *fields = layout.unpack(frame)
    if found != mark:
        raise PayloadCorrupt(otherwise)
    return fields


def _member(kind: type[C], noun: str, number: int) -> C:
    try:
        return kind(number)
    except ValueError:
        raise PayloadCorrupt(f"the peer sent {noun} {number}, which does not exist") from None


# Called with each piece of a payload, in order, while it is still in the processor's cache.
Seen = Callable[[memoryview], object]


class PeerLink(Protocol):
    """One connection. One thread uses it at a time; `cut` may come from any other.

    Each `receive…` takes exactly one buffer that the peer has sent, of the same size. Deadlines are points of
    `time.monotonic()`. All methods raise PeerReset (broken, or cut), PayloadTruncated (closed in the middle of
    a message, or a longer one was sent), PayloadTimeout, and nothing else. After any of them the link can only be
    closed, and nothing writes into the caller's buffer any more.

    `needs_checksum`: False where `send` of the Ack shows whether what was received is valid, since it was read in
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
        """Between two uses: whether the peer has closed it, or has sent unexpected bytes. Does not wait."""

    def cut(self) -> None:
        """From any thread, any number of times: a thread that waits in it gets PeerReset."""

    def close(self) -> None:
        """Any number of times. What was sent still arrives."""

    def drop(self) -> None:
        """In a forked child: let go of it, so that the parent's connection neither ends nor is kept open here."""


class ServerHandshake(Protocol):
    """The server's side of a handshake, without I/O. A `TokenHandshake` is the one of this protocol.

    `wants`: so many bytes must come for the next `take`; 0: it is over, and `is_passed` says how.
    """

    wants: int
    is_passed: bool

    def take(self, frame: bytes) -> bytes:
        """The answer to these bytes. Raises TransportError where they are none of its protocol."""


@dataclass(frozen=True, slots=True)
class AdmissionCheck:
    """What a connection must do before it gets a thread: pass its own `handshake()`, `within_s` of its coming."""

    handshake: Callable[[], ServerHandshake]
    within_s: float = PROOF_S


class PortListener(Protocol):
    """A port that takes connections. `address`: as peers name it, such as `tcp://n3:40123`."""

    address: str

    def close(self) -> None:
        """No new links; those that are there are their servers' to cut."""

    def drop(self) -> None:
        """In a forked child: let go of it."""


class AllInUse(PayloadTimeout):
    """Other reads use all connections to the port, or this process has no descriptor left. It is no fault of the
    port."""


class Backend(Protocol):
    """One way to connect. `scheme` is what its addresses begin with."""

    scheme: str

    def connect(self, address: str, deadline: float) -> PeerLink: ...

    def listen(
        self, host: str, port: int, serve: Callable[[PeerLink], None], entry: AdmissionCheck | None = None
    ) -> PortListener:
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
    """An address of the form that `host_and_port` reads."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


_SERVER, _CLIENT = b"nvrx payloads, server", b"nvrx payloads, client"
_NO_PROOF = bytes(PROOF_BYTES)


class Welcome(NamedTuple):
    """What the server's challenge says, and the client's proof, which goes with its first request."""

    proof: bytes
    eviction_s: float


def greet(link: PeerLink, token: bytes, deadline: float) -> Welcome:
    """The client's side. Raises PeerRefused, PayloadCorrupt, and what links raise."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    link.send(ClientHello(VERSION, nonce).pack(), None, deadline)
    frame = bytearray(CHALLENGE_BYTES)
    link.receive_into(memoryview(frame), deadline)
    challenge = Challenge.unpack(frame)
    if challenge.status is ResponseStatus.VERSION or challenge.version != VERSION:
        raise PeerRefused(f"it has version {challenge.version} of the protocol, this side {VERSION}")
    if challenge.status is not ResponseStatus.OK:
        raise PeerRefused(REASONS.get(challenge.status, f"it answers a hello with {challenge.status.name}"))
    if not hmac.compare_digest(challenge.proof, _proof(token, _SERVER, nonce, challenge.nonce)):
        raise PeerRefused(OTHER_TOKEN)
    return Welcome(_proof(token, _CLIENT, nonce, challenge.nonce), challenge.eviction_ms / 1000)


class TokenHandshake:
    """The server's side (a `ServerHandshake`). `status`: whether the server takes another connection."""

    def __init__(
        self, token: bytes, eviction_s: float, status: Callable[[], ResponseStatus] = lambda: ResponseStatus.OK
    ) -> None:
        self._token, self._eviction_s, self._status = token, eviction_s, status
        self._expected: bytes | None = None
        self.wants, self.is_passed = HELLO_BYTES, False

    def take(self, frame: bytes) -> bytes:
        """The challenge, and after the proof nothing; or why it is refused. Raises PayloadCorrupt for no hello."""
        self.wants = 0
        if self._expected is not None:
            self.is_passed = hmac.compare_digest(frame, self._expected)
            return b"" if self.is_passed else Response(ResponseStatus.REFUSED).pack()
        hello = ClientHello.unpack(frame)
        if hello.version != VERSION:
            return refusal(ResponseStatus.VERSION)
        if (status := self._status()) is not ResponseStatus.OK:
            return refusal(status)
        self.wants, nonce = PROOF_BYTES, secrets.token_bytes(NONCE_BYTES)
        self._expected = _proof(self._token, _CLIENT, hello.nonce, nonce)
        # The server proves itself in the message in which it asks: a client that meets another job's server tells it
        # nothing. The token has 256 random bits, so a recorded proof does not help to guess it.
        proof = _proof(self._token, _SERVER, hello.nonce, nonce)
        return Challenge(VERSION, ResponseStatus.OK, int(self._eviction_s * 1000), nonce, proof).pack()


def pass_through(link: PeerLink, handshake: ServerHandshake, deadline: float) -> bool:
    """The server's side where a thread waits for the peer: whether it has passed. Raises as `take`, and what links
    raise."""
    while handshake.wants:
        frame = bytearray(handshake.wants)
        link.receive_into(memoryview(frame), deadline)
        if answer := handshake.take(bytes(frame)):
            link.send(answer, None, deadline)
    return handshake.is_passed


def refusal(status: ResponseStatus) -> bytes:
    """The frame that a server sends instead of a challenge."""
    return Challenge(VERSION, status, 0, bytes(NONCE_BYTES), _NO_PROOF).pack()


OTHER_TOKEN = "it has another token: it serves another job"
REASONS = {
    ResponseStatus.FULL: "it has as many connections as it takes",
    ResponseStatus.CLOSING: "it shuts down",
    ResponseStatus.REFUSED: "it does not take this token",
}


def _proof(token: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(token, role + client_nonce + server_nonce, "sha256")


def request(link: PeerLink, ref: PayloadRef, *, budget_s: float, deadline: float) -> Response:
    """Ask for `ref`. An OK has its payload behind it: `receive` is next.

    Raises PayloadCorrupt for an answer that cannot be, and what links raise.
    """
    answer = _exchange(
        link, PayloadRequest(RequestKind.READ, ref.slot, int(budget_s * 1000), ref.generation, ref.ring), deadline
    )
    if answer.status is ResponseStatus.OK and (answer.generation, answer.size) != (ref.generation, ref.size):
        raise PayloadCorrupt(
            f"the peer offers {answer.size} bytes of generation {answer.generation}, "
            f"where the ref says {ref.size} of {ref.generation}"
        )
    return answer


def receive(link: PeerLink, ref: PayloadRef, answer: Response, buffer: memoryview, deadline: float) -> None:
    """Fill `buffer`, of `ref.size` bytes, and not a byte more.

    Raises PayloadCorrupt for anything but the bytes that were written, and what links raise.
    """
    digest = xxhash.xxh3_64() if link.needs_checksum or ref.checksum else None
    if ref.size:
        link.receive_payload_into(buffer, deadline, digest and digest.update)
    if digest is None:
        return
    seen = digest.intdigest()
    is_other = link.needs_checksum and seen != answer.checksum
    if is_other or (ref.checksum and seen != int(ref.checksum, 16)):
        raise PayloadCorrupt(f"its checksum is {seen:016x}, and not {ref.checksum or f'{answer.checksum:016x}'}")


def acknowledge(link: PeerLink, ref: PayloadRef, verdict: AckVerdict, deadline: float) -> None:
    """Report to the server what became of the payload."""
    link.send(Ack(verdict, ref.slot, ref.generation).pack(), None, deadline)


def settle(link: PeerLink, ring: str, slot: int, generation: int, deadline: float) -> ResponseStatus:
    """Send again that a payload was taken: the Ack may have been lost."""
    return _exchange(link, PayloadRequest(RequestKind.SETTLE, slot, 0, generation, ring), deadline).status


def _exchange(link: PeerLink, asked: PayloadRequest, deadline: float) -> Response:
    link.send(asked.pack(), None, deadline)
    frame = bytearray(ANSWER_BYTES)
    link.receive_into(memoryview(frame), deadline)
    return Response.unpack(frame)
