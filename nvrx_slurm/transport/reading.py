"""The client's side of one read, over one link: ask, take what comes, check it, and say so."""

from __future__ import annotations

import xxhash

from nvrx_slurm.transport import wire
from nvrx_slurm.transport.backends.port import Link
from nvrx_slurm.transport.errors import PayloadCorrupt
from nvrx_slurm.transport.ref import PayloadRef


def request(link: Link, ref: PayloadRef, *, budget_s: float, deadline: float) -> wire.Answer:
    """Ask for `ref`. An OK has its payload behind it: `receive` is next.

    Raises PayloadCorrupt for an answer that cannot be, and what links raise.
    """
    answer = _exchange(
        link, wire.Request(wire.Call.READ, ref.slot, int(budget_s * 1000), ref.generation, ref.ring), deadline
    )
    if answer.status is wire.Status.OK and (answer.generation, answer.size) != (ref.generation, ref.size):
        raise PayloadCorrupt(
            f"the peer offers {answer.size} bytes of generation {answer.generation}, "
            f"where the ref says {ref.size} of {ref.generation}"
        )
    return answer


def receive(link: Link, ref: PayloadRef, answer: wire.Answer, buffer: memoryview, deadline: float) -> None:
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


def acknowledge(link: Link, ref: PayloadRef, verdict: wire.Verdict, deadline: float) -> None:
    """Say what became of the payload."""
    link.send(wire.Ack(verdict, ref.slot, ref.generation).pack(), None, deadline)


def settle(link: Link, ring: str, slot: int, generation: int, deadline: float) -> wire.Status:
    """Say again that a payload was taken: the word of it may have been lost."""
    return _exchange(link, wire.Request(wire.Call.SETTLE, slot, 0, generation, ring), deadline).status


def _exchange(link: Link, asked: wire.Request, deadline: float) -> wire.Answer:
    link.send(asked.pack(), None, deadline)
    frame = bytearray(wire.ANSWER_BYTES)
    link.receive_into(memoryview(frame), deadline)
    return wire.Answer.unpack(frame)
