"""pyzmq over TCP: REQ and REP; sent without a copy, received with `recv_into`."""

from __future__ import annotations

import threading
from typing import Any

import zmq

from bench.transport.carriers import base


class Producer(base.ShelfProducer):
    def __init__(self, size: int, count: int, options: dict[str, Any]) -> None:
        super().__init__(size, count, options)
        self._socket = zmq.Context().socket(zmq.REP)
        self.where = self._socket.bind_to_random_port(f"tcp://{base.LOOPBACK}")
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            slot, size = base.REQUEST.unpack(self._socket.recv())
            self._socket.send(self.shelf.at(slot)[:size], copy=False)


class Reader(base.Reader):
    def __init__(self, size: int, where: int, options: dict[str, Any]) -> None:
        self._socket = zmq.Context().socket(zmq.REQ)
        self._socket.connect(f"tcp://{base.LOOPBACK}:{where}")
        self._size, self._buffer = size, memoryview(bytearray(size))

    def read(self, ref: int) -> memoryview:
        self._socket.send(base.REQUEST.pack(ref, self._size))
        self._socket.recv_into(self._buffer)
        return self._buffer
