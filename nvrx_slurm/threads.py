"""Blocking work in a thread of its own, which may never come back; standard library only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Start `work`; the future has its result or its exception. For asyncio: `asyncio.wrap_future`.

    A daemon thread, not one of a pool: whoever waits may give up, and work that hangs in a dead file system then
    keeps neither a place in the pool nor, as a pool's threads do, this process from its end.
    """
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
