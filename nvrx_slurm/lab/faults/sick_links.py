"""Faults of a payload server that are made of whole messages, on any transport: `sick_ports` is for tcp."""

from __future__ import annotations

import time

from nvrx_slurm.lab.faults.sick_ports import Deed, Fault, Stage, fault_of
from nvrx_slurm.transport import protocol
from nvrx_slurm.transport.errors import PeerReset
from nvrx_slurm.transport.protocol import PeerLink, Seen

HOLD_S = 600.0
_STAGES = {protocol.CHALLENGE_BYTES: Stage.CHALLENGE, protocol.ANSWER_BYTES: Stage.ANSWER}


class SickLink:
    """A server's link, to be served in place of the healthy one: whatever is sent over it is struck by the fault.

    A message is whole here: one that is reset, or cut off, is half as long. None trickles, and none is late.
    """

    def __init__(self, link: PeerLink, fault: str) -> None:
        self._link, self._fault = link, fault_of(fault)
        self.needs_checksum = link.needs_checksum
        if self._fault.deed in (Deed.TRICKLE, Deed.LATE):
            raise ValueError(f"{fault!r} is no fault of a link: use a SickPort")

    def send(self, frame: bytes, payload: memoryview | None, deadline: float) -> None:
        fault = self._fault
        if fault.stage is Stage.CONNECT:
            self._end(fault)
        if fault.stage is _STAGES.get(len(frame)):
            frame = self._struck(fault, frame, deadline)
        if fault.stage is Stage.PAYLOAD and payload:
            self._link.send(frame, None, deadline)
            frame, payload = self._struck(fault, bytes(payload), deadline), None
        self._link.send(frame, payload, deadline)

    def receive_into(self, buffer: memoryview, deadline: float) -> None:
        self._link.receive_into(buffer, deadline)
        if self._fault.stage is Stage.ACK and len(buffer) == protocol.ACK_BYTES:
            if self._fault.deed is Deed.SWALLOW:
                self._hold(deadline)
            self._end(self._fault)

    def receive_payload_into(self, buffer: memoryview, deadline: float, seen: Seen | None) -> None:
        self._link.receive_payload_into(buffer, deadline, seen)

    def is_stale(self) -> bool:
        return self._link.is_stale()

    def cut(self) -> None:
        self._link.cut()

    def close(self) -> None:
        self._link.close()

    def drop(self) -> None:
        self._link.drop()

    def _struck(self, fault: Fault, message: bytes, deadline: float) -> bytes:
        """What is sent in its place; raises where nothing is."""
        if fault.deed is Deed.REPLACE:
            return fault.change(message)
        if fault.deed is not Deed.HOLD:
            self._link.send(message[: len(message) // 2], None, deadline)
        self._end(fault)
        raise AssertionError

    def _end(self, fault: Fault) -> None:
        """Raises PeerReset."""
        if fault.deed is Deed.HOLD:
            self._hold(time.monotonic() + HOLD_S)
        self._link.cut() if fault.deed is Deed.RESET else self._link.close()
        raise PeerReset("this link is sick")

    def _hold(self, deadline: float) -> None:
        """Nothing more is said until the peer leaves: then it raises."""
        self._link.receive_into(memoryview(bytearray(1)), deadline)
