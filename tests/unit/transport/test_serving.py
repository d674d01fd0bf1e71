"""How a server handles one link, frame by frame."""

from __future__ import annotations

import time

import pytest

from nvrx_slurm.transport import protocol
from nvrx_slurm.transport.errors import PayloadTimeout
from nvrx_slurm.transport.ref import PayloadRef
from nvrx_slurm.transport.ring import Claim, SharedRing
from nvrx_slurm.transport.server import ServerLimits, serve
from tests.transport.nodes import StandingRing

BUDGET_S = 0.2


class LateReader:
    """A link whose peer asks for one payload; its Ack arrives at the last moment until which the server waits for
    it."""

    needs_checksum = True

    def __init__(self, ref: PayloadRef) -> None:
        kind, budget_ms = protocol.RequestKind.READ, round(1000 * BUDGET_S)
        self._frames = [
            protocol.PayloadRequest(kind, ref.slot, budget_ms, ref.generation, ref.ring).pack(),
            protocol.Ack(protocol.AckVerdict.TAKEN, ref.slot, ref.generation).pack(),
        ]
        self.waited_until, self.is_served_on = 0.0, False

    def send(self, frame: bytes, payload: memoryview | None, deadline: float) -> None: ...

    def receive_into(self, buffer: memoryview, deadline: float) -> None:
        if not self._frames:
            self.is_served_on = True
            raise PayloadTimeout("it asks for nothing more")
        self.waited_until, buffer[:] = deadline, self._frames.pop(0)


def test_an_acknowledgement_has_time_to_come_after_the_reader_s_own() -> None:
    """A reader that gets its payload at the end of its own time sends the acknowledgement only then."""
    with SharedRing.create(1, 64) as ring:
        link, began = LateReader(ring.write(b"payload")), time.monotonic()
        serve(link, {ring.name: ring}, ServerLimits())  # type: ignore[arg-type]  # what it uses of a link
        assert link.waited_until - began > BUDGET_S + 0.1
        assert ring.metrics().consumed == 1


@pytest.mark.parametrize("is_claimed", [False, True])
def test_an_acknowledgement_that_comes_after_the_lease_is_not_lost(is_claimed: bool) -> None:
    """The payload is consumed; if another reader has it by then, the link ends, so that the first reader sends the
    acknowledgement again."""
    with SharedRing.create(1, 64) as ring:
        ref = ring.write(b"payload")
        others: list[object] = []

        def lapse() -> None:
            claim = ring.claim(ref.slot, ref.generation)
            assert isinstance(claim, Claim)
            others.append(claim if is_claimed else claim.finish(consumed=False))

        link = LateReader(ref)
        serve(link, {ring.name: StandingRing(ring, lapse)}, ServerLimits())  # type: ignore[arg-type, dict-item]
        assert link.is_served_on is not is_claimed
        assert ring.metrics().consumed == (not is_claimed)
        for other in others:
            if isinstance(other, Claim):
                other.drop()
