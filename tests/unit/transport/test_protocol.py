"""The frames: unpacking gives what was packed, and other bytes raise PayloadCorrupt and no other error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nvrx_slurm.transport import protocol
from nvrx_slurm.transport.errors import PayloadCorrupt

u16, u32, u64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
nonces = st.binary(min_size=protocol.NONCE_BYTES, max_size=protocol.NONCE_BYTES)
proofs = st.binary(min_size=protocol.PROOF_BYTES, max_size=protocol.PROOF_BYTES)
rings = st.from_regex(r"nvrx-ring-[0-9a-z-]{1,54}", fullmatch=True)
statuses = st.sampled_from(protocol.ResponseStatus)

FRAMES = {
    "hello": (protocol.ClientHello, protocol.HELLO_BYTES, st.builds(protocol.ClientHello, u16, nonces)),
    "challenge": (
        protocol.Challenge,
        protocol.CHALLENGE_BYTES,
        st.builds(protocol.Challenge, u16, statuses, u32, nonces, proofs),
    ),
    "request": (
        protocol.PayloadRequest,
        protocol.REQUEST_BYTES,
        st.builds(protocol.PayloadRequest, st.sampled_from(protocol.RequestKind), u32, u32, u64, rings),
    ),
    "answer": (protocol.Response, protocol.ANSWER_BYTES, st.builds(protocol.Response, statuses, u64, u64, u64)),
    "ack": (
        protocol.Ack,
        protocol.ACK_BYTES,
        st.builds(protocol.Ack, st.sampled_from(protocol.AckVerdict), u32, u64),
    ),
}
each_frame = pytest.mark.parametrize(
    ("kind", "size", "frames"), [pytest.param(*given, id=name) for name, given in FRAMES.items()]
)


@each_frame
def test_a_frame_survives_the_wire(kind: type, size: int, frames: st.SearchStrategy) -> None:
    """Unpacked it is the same, and it has the length that the other side expects."""

    @given(frame=frames)
    def holds(frame: protocol.PayloadRequest) -> None:
        packed = frame.pack()
        assert len(packed) == size
        assert kind.unpack(packed) == kind.unpack(bytearray(packed)) == frame

    holds()


@each_frame
def test_random_bytes_are_no_frame(kind: type, size: int, frames: st.SearchStrategy) -> None:
    """Bytes of the right length without the magic number raise PayloadCorrupt, and no other error."""

    @given(data=st.binary(min_size=size, max_size=size))
    @example(data=bytes(size))
    @example(data=b"\xff" * size)
    def holds(data: bytes) -> None:
        with pytest.raises(PayloadCorrupt):
            kind.unpack(data)

    holds()


@each_frame
def test_a_frame_with_one_byte_changed(kind: type, size: int, frames: st.SearchStrategy) -> None:
    """It raises PayloadCorrupt, or is a frame in which every number is known."""

    @given(frame=frames, at=st.integers(0, size - 1), by=st.integers(1, 255))
    def holds(frame: protocol.PayloadRequest, at: int, by: int) -> None:
        changed = bytearray(frame.pack())
        changed[at] ^= by
        try:
            other = kind.unpack(changed)
        except PayloadCorrupt:
            return
        assert [type(word) for word in other] == [type(word) for word in frame]

    holds()


MALFORMED: list[tuple[str, Callable[[bytes], object], bytes, str]] = [
    (
        "hello without magic",
        protocol.ClientHello.unpack,
        b"GET / HTTP/1.1\r\n".ljust(protocol.HELLO_BYTES),
        "no hello",
    ),
    ("challenge without magic", protocol.Challenge.unpack, b"SSH-2.0-".ljust(protocol.CHALLENGE_BYTES), "no server"),
    (
        "challenge of no status",
        protocol.Challenge.unpack,
        protocol.Challenge(1, 99, 0, bytes(32), bytes(32)).pack(),  # type: ignore[arg-type]
        "status 99",
    ),
    ("request without mark", protocol.PayloadRequest.unpack, bytes(protocol.REQUEST_BYTES), "no request"),
    (
        "request for nothing known",
        protocol.PayloadRequest.unpack,
        protocol.PayloadRequest(77, 0, 0, 0, "r").pack(),  # type: ignore[arg-type]
        "call 77",
    ),
    (
        "an ack for a request",
        protocol.PayloadRequest.unpack,
        protocol.Ack(protocol.AckVerdict.BAD, 1, 1).pack().ljust(88),
        "no request",
    ),
    ("answer without mark", protocol.Response.unpack, bytes(protocol.ANSWER_BYTES), "none of this protocol"),
    ("answer of no status", protocol.Response.unpack, protocol.Response(200).pack(), "status 200"),  # type: ignore[arg-type]
    ("ack without mark", protocol.Ack.unpack, bytes(protocol.ACK_BYTES), "no ack"),
    ("ack of no verdict", protocol.Ack.unpack, protocol.Ack(0, 1, 1).pack(), "verdict 0"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("unpack", "data", "said"), [pytest.param(*case[1:], id=case[0]) for case in MALFORMED])
def test_what_is_no_frame_is_reported(unpack: Callable[[bytes], object], data: bytes, said: str) -> None:
    """The error has what was seen in place of the frame."""
    with pytest.raises(PayloadCorrupt, match=said):
        unpack(data)


@pytest.mark.parametrize(
    ("asked_ms", "sent_ms"),
    [
        pytest.param(-5, 0, id="a time in the past is 0"),
        pytest.param(1 << 40, (1 << 32) - 1, id="at most what fits"),
    ],
)
def test_a_budget_is_cut_to_what_a_frame_holds(asked_ms: int, sent_ms: int) -> None:
    """A wait that is longer than a frame can hold, or that is over, still makes a valid frame."""
    request = protocol.PayloadRequest(protocol.RequestKind.READ, 0, asked_ms, 1, "nvrx-ring-1")
    assert protocol.PayloadRequest.unpack(request.pack()).budget_ms == sent_ms


@given(name=st.binary(max_size=protocol.RING_BYTES))
def test_a_ring_name_of_any_bytes_is_a_name(name: bytes) -> None:
    """Any bytes of a peer are read as text, which is only ever looked up."""
    frame = bytearray(protocol.PayloadRequest(protocol.RequestKind.READ, 0, 0, 1, "").pack())
    frame[-protocol.RING_BYTES :] = name.ljust(protocol.RING_BYTES, b"\0")
    assert isinstance(protocol.PayloadRequest.unpack(frame).ring, str)


def test_every_number_of_a_frame_has_a_name() -> None:
    """Statuses, calls and verdicts keep their numbers, because two versions can meet."""
    assert {status.name: status.value for status in protocol.ResponseStatus} == {
        "OK": 0,
        "BUSY": 1,
        "STALE": 2,
        "UNKNOWN_RING": 3,
        "REFUSED": 4,
        "VERSION": 5,
        "FULL": 6,
        "CLOSING": 7,
        "BAD_REQUEST": 8,
    }
    assert {call.name: call.value for call in protocol.RequestKind} == {"READ": 1, "SETTLE": 2}
    assert {verdict.name: verdict.value for verdict in protocol.AckVerdict} == {"TAKEN": 1, "KEPT": 2, "BAD": 3}
