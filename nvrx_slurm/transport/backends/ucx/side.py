"""A worker of UCX, and its endpoints to other workers, within the engine's thread.

An endpoint that is made from a worker's address is joined by UCX with one of the other side's: the first that this
worker makes for that one with the first that that one makes for this, and so on. Which one it is matters, since with
either of the two the other one ends, and only with its own endpoint a transfer. So the server counts, and the client
makes its endpoints up to the one that it is told.

A process calls with one worker and serves with another: else two processes that connect to each other at the same
time would both count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvrx_slurm.transport.backends.ucx.found import Ucx
from nvrx_slurm.transport.errors import PeerReset

MOST_MADE = 60_000
"""For one other worker. UCX counts them in sixteen bits, and joins none beyond."""

MOST_AHEAD = 256
"""Connections between two processes that are made at the same time."""

SPARE_S = 5.0
"""So long may the answer of one that was overtaken still be on its way; else it is lost."""


class Side:
    """`is_spent`: another worker must be taken for what comes next."""

    def __init__(self, ucx: Ucx, context: Any, later: Callable[[float, Callable[[], None]], None]) -> None:
        self._ucx, self._later = ucx, later
        self._any_tag = ucx.tag(0), ucx.tag_mask(0)
        self.worker = ucx.worker(context)
        self.worker.init_blocking_progress_mode()
        self.address: bytes = ucx.address.create_from_worker(self.worker).tobytes()
        self.is_spent = False
        self._made: dict[bytes, int] = {}
        self._spare: dict[tuple[bytes, int], Any] = {}

    def next(self, theirs: bytes) -> tuple[int, Any]:
        """The server's: which one it is, and the endpoint."""
        index = self._made.get(theirs, 0)
        if index > MOST_MADE + MOST_AHEAD:
            raise PeerReset("there were too many connections between these two processes")
        address = self._ucx.address.create_from_buffer(theirs)
        endpoint = self._ucx.endpoint.create_from_worker_address(self.worker, address, True)
        self._made[theirs] = index + 1
        self.is_spent = self.is_spent or index >= MOST_MADE
        return index, endpoint

    def nth(self, theirs: bytes, index: int) -> Any:
        """The client's."""
        if index > self._made.get(theirs, 0) + MOST_AHEAD:
            raise PeerReset(f"the server has told of connection {index}")
        while self._made.get(theirs, 0) <= index:
            made, endpoint = self.next(theirs)
            self._spare[theirs, made] = endpoint
            if made < index:
                self._later(SPARE_S, lambda key=(theirs, made): self._drop(key))  # type: ignore[misc]
        endpoint = self._spare.pop((theirs, index), None)
        if endpoint is None:
            raise PeerReset("its answer came too late")
        return endpoint

    def message(self) -> Any:
        """The next one that has come, or None."""
        message = self.worker.tag_probe(*self._any_tag, True)
        return message if message.matched else None

    def take(self, message: Any, buffer: memoryview) -> Any:
        """Begin to receive into `buffer`, which is as long as the message: UCX trusts that."""
        return self.worker.tag_recv_with_handle(self._ucx.array(buffer), message)

    def _drop(self, key: tuple[bytes, int]) -> None:
        endpoint = self._spare.pop(key, None)
        if endpoint is not None:
            endpoint.close_blocking()
