"""nvrx_slurm.transport. Options: `how` (client, ring or view), `transport` (of the client) and `checksum` (of the
ring)."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from bench.transport.carriers import base
from nvrx_slurm.transport import PayloadClient, PayloadRef, PayloadServer, SharedRing

DEADLINE_S = 60.0
WARM_UP_VIEWS = 200
SPARE = 2
"""Slots beyond a turn's payloads: the last one read is free only once its server has heard so."""


class Producer:
    def __init__(self, size: int, count: int, options: dict[str, Any]) -> None:
        self._ring = SharedRing.create(count + SPARE, size, checksum=options["checksum"])
        self._server = None
        self.where: Any = ["", self._ring.name]
        if options["transport"] != "shm":
            self._server = PayloadServer(self._ring, transport=options["transport"], ports=1, host=base.LOOPBACK)
            self.where[0] = self._server.token.hex()

    def write(self, slot: int, payload: memoryview) -> PayloadRef:
        return self._ring.write_raw(payload)

    def refer(self, slot: int, written: PayloadRef) -> str:
        return (self._server.refer(written) if self._server else written).to_json().decode()

    def close(self) -> None:
        if self._server:
            self._server.close()
        self._ring.close()
        self._ring.unlink()


class _Ours(base.Reader):
    def parse(self, ref: str) -> PayloadRef:
        return PayloadRef.from_json(ref)


class ClientReader(_Ours):
    """`PayloadClient.read` into the reader's buffer."""

    def __init__(self, size: int, where: list[str], options: dict[str, Any]) -> None:
        self._client = PayloadClient(token=bytes.fromhex(where[0]) or None, transports=(options["transport"],))
        self._buffer = memoryview(bytearray(size))

    def read(self, ref: PayloadRef) -> memoryview:
        self._client.read(ref, deadline=DEADLINE_S, into=self._buffer)
        return self._buffer


class RingReader(_Ours):
    """`SharedRing.read`, which makes the object."""

    def __init__(self, size: int, where: list[str], options: dict[str, Any]) -> None:
        self._ring = SharedRing.attach(where[1])

    def read(self, ref: PayloadRef) -> Any:
        return self._ring.read(ref)


class ViewReader(RingReader):
    """`SharedRing.view` without a look at the checksum: no copy. What is timed is to enter and to leave it."""

    def timed(self, refs: Sequence[str], check: base.Check) -> list[float]:
        parsed = [self.parse(ref) for ref in refs]
        # A turn has few large payloads, and the first views after each of them was written find cold caches.
        for number in range(WARM_UP_VIEWS):
            with self._ring.view(parsed[number % len(parsed)], keep=True, check=False):
                pass
        took = []
        for place, ref in enumerate(parsed):
            began = perf_counter()
            viewing = self._ring.view(ref, check=False)
            payload = viewing.__enter__()
            entered = perf_counter()
            check(payload, place)
            left = perf_counter()
            viewing.__exit__(None, None, None)
            took.append(entered - began + perf_counter() - left)
        return took


READERS = {"client": ClientReader, "ring": RingReader, "view": ViewReader}


def Reader(size: int, where: list[str], options: dict[str, Any]) -> base.Reader:
    return READERS[options["how"]](size, where, options)
