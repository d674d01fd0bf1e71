"""asyncio streams as their documentation uses them: `write` and `drain`, `readexactly`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from bench.transport.carriers import base


class Producer(base.ShelfProducer):
    def __init__(self, size: int, count: int, options: dict[str, Any]) -> None:
        super().__init__(size, count, options)
        self._listening = base.listening()
        self.where = self._listening.getsockname()[1]
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._answer, sock=self._listening)
        await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            slot, size = base.REQUEST.unpack(await reader.readexactly(base.REQUEST.size))
            writer.write(self.shelf.at(slot)[:size])
            await writer.drain()


class Reader(base.Reader):
    def __init__(self, size: int, where: int, options: dict[str, Any]) -> None:
        self._size = size
        self._loop = asyncio.new_event_loop()
        self._streams = self._loop.run_until_complete(asyncio.open_connection(base.LOOPBACK, where))

    def timed(self, refs: Sequence[Any], check: base.Check) -> list[float]:
        return self._loop.run_until_complete(self._timed(refs, check))

    async def _timed(self, refs: Sequence[int], check: base.Check) -> list[float]:
        """In the loop, as a program that lives in it: starting and stopping it is not in the numbers."""
        reader, writer = self._streams
        took = []
        for place, ref in enumerate(refs):
            began = perf_counter()
            writer.write(base.REQUEST.pack(ref, self._size))
            await writer.drain()
            payload = await reader.readexactly(self._size)
            took.append(perf_counter() - began)
            check(payload, place)
        return took
