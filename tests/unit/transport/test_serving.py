"""What a server does with one link, frame by frame."""

from __future__ import annotations

import time

from nvrx_slurm.transport import protocol
from nvrx_slurm.transport.errors import PayloadTimeout
from nvrx_slurm.transport.ref import PayloadRef
from nvrx_slurm.transport.ring import SharedRing
from nvrx_slurm.transport.server import ServerLimits, serve

BUDGET_S = 0.2


class LateReader:
    """A link whose peer asks for one payload; its Ack arrives in the last moment that the server waits for it."""

    needs_checksum = True

    def __init__(self, ref: PayloadRef) -> None:
        kind, budget_ms = protocol.RequestKind.READ, round(1000 * BUDGET_S)
        self._frames = [
            protocol.PayloadRequest(kind, ref.slot, budget_ms, ref.generation, ref.ring).pack(),
            protocol.Ack(protocol.AckVerdict.TAKEN, ref.slot, ref.generation).pack(),
        ]
        self.waited_until = 0.0

    def send(self, frame: bytes, payload: memoryview | None, deadline: float) -> None: ...

    def receive_into(self, buffer: memoryview, deadline: float) -> None:
        if not self._frames:
            raise PayloadTimeout("it asks for nothing more")
        self.waited_until, buffer[:] = deadline, self._frames.pop(0)


def test_an_acknowledgement_has_time_to_come_after_the_reader_s_own() -> None:
    """A reader that has its payload at the end of its time sends it then."""
    with SharedRing.create(1, 64) as ring:
        link, began = LateReader(ring.write(b"payload")), time.monotonic()
        serve(link, {ring.name: ring}, ServerLimits())  # type: ignore[arg-type]  # what it uses of a link
        assert link.waited_until - began > BUDGET_S + 0.1
        assert ring.metrics().consumed == 1
