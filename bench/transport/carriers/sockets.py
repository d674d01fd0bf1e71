"""The floor between nodes: blocking sockets, `sendall` out of the shelf, `recv_into` the reader's buffer."""

from __future__ import annotations

import socket
import threading
from typing import Any

from bench.transport.carriers import base


class Producer(base.ShelfProducer):
    def __init__(self, size: int, count: int, options: dict[str, Any]) -> None:
        super().__init__(size, count, options)
        self._listening = base.listening()
        self.where = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection = base.without_delay(self._listening.accept()[0])
        frame = bytearray(base.REQUEST.size)
        while connection.recv_into(frame, len(frame), socket.MSG_WAITALL):
            slot, size = base.REQUEST.unpack(frame)
            connection.sendall(self.shelf.at(slot)[:size])


class Reader(base.Reader):
    def __init__(self, size: int, where: int, options: dict[str, Any]) -> None:
        self._socket = base.without_delay(socket.create_connection((base.LOOPBACK, where)))
        self._size, self._buffer = size, memoryview(bytearray(size))

    def read(self, ref: int) -> memoryview:
        self._socket.sendall(base.REQUEST.pack(ref, self._size))
        done = 0
        while done < self._size:
            done += self._socket.recv_into(self._buffer[done:])
        return self._buffer
