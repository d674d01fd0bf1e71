"""Work on file systems, beside the event loop: where one hangs, it holds up neither the loop nor other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from nvrx_slurm.util.threads import in_thread

_T = TypeVar("_T")

AT_ONCE = 32


class Stalled(Exception):
    """The file system does not answer."""


class Aside:
    """Runs work in threads, `at_once` at most, and waits `timeout_s` at most for each, and for its turn."""

    def __init__(self, timeout_s: float, at_once: int = AT_ONCE) -> None:
        self._timeout_s, self._places = timeout_s, asyncio.Semaphore(at_once)

    async def run(self, work: Callable[[], _T]) -> _T:
        """What `work` returns or raises. Raises Stalled."""
        bound = asyncio.timeout(self._timeout_s)
        try:
            async with bound:
                await self._places.acquire()
                future = in_thread(work, "aside")
                loop = asyncio.get_running_loop()
                # A thread that hangs keeps its place, whoever has given it up: there are never more of them.
                future.add_done_callback(lambda _: _soon(loop, self._places.release))
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if not bound.expired():  # the work itself said so
                raise
            raise Stalled(f"the file system has not answered for {self._timeout_s:g} s") from None


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
