"""The floor on one node: memcpy out of a mapping that another process wrote into. Nobody is asked."""

from __future__ import annotations

import mmap
import os
from typing import Any

from bench.transport.carriers import base


class Producer(base.ShelfProducer):
    def __init__(self, size: int, count: int, options: dict[str, Any]) -> None:
        super().__init__(size, count, options)
        self.where = [self.shelf.path, size * count]


class Reader(base.Reader):
    def __init__(self, size: int, where: list[Any], options: dict[str, Any]) -> None:
        path, length = where
        descriptor = os.open(path, os.O_RDONLY)
        self._source = memoryview(mmap.mmap(descriptor, length, prot=mmap.PROT_READ))
        os.close(descriptor)
        self._size, self._buffer = size, memoryview(bytearray(size))

    def read(self, ref: int) -> memoryview:
        self._buffer[:] = self._source[ref * self._size : (ref + 1) * self._size]
        return self._buffer
