"""Blocking work in a thread of its own, which may never come back; standard library only."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Start `work`; the future has its result or its exception. For asyncio: `asyncio.wrap_future`.

    A daemon thread, not one of a pool: the caller may stop waiting, and work that hangs in a dead file system then
    keeps neither a place in the pool nor, as a pool's threads do, this process from its end.
    """
    future: Future[T] = Future()
    threading.Thread(target=_settle, args=(future, work), name=name, daemon=True).start()
    return future


class Bell:
    """As `threading.Event`, for a main thread whose signal handlers raise: to wait is one call into C. A handler that
    raises within `Event.wait` may leave its lock as it found it, and what comes out is a RuntimeError instead.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._silent = threading.Lock()
        self._silent.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Any number of times, from any thread."""
        self._is_set = True
        with contextlib.suppress(RuntimeError):  # it was set before
            self._silent.release()

    def wait(self, seconds: float) -> None:
        """Until it is set, for so long at most."""
        if not self._is_set and self._silent.acquire(timeout=seconds):
            self.set()  # for the other waiting threads


class Crew:
    """Threads as `in_thread` makes them, kept for the next work: to start one takes longer than a short read.

    There are as many as were ever busy at once. In a forked child there are none yet.
    """

    _guard: threading.Lock
    _idle: int
    _waiting: queue.SimpleQueue[Callable[[], None] | None]

    def __init__(self, name: str) -> None:
        self._name, self._is_closed = name, False
        self._forget()
        _crews.add(self)

    def start(self, work: Callable[[], T]) -> Future[T]:
        """The future has its result or its exception."""
        future: Future[T] = Future()
        with self._guard:
            is_more_than_idle = self._idle == 0
            self._idle -= not is_more_than_idle
        if is_more_than_idle:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._waiting.put(lambda: _settle(future, work))
        return future

    def close(self) -> None:
        """Its threads end, each after what it does now."""
        with self._guard:
            self._is_closed = True
            for _ in range(self._idle):
                self._waiting.put(None)
            self._idle = 0

    def _work(self) -> None:
        while (do := self._waiting.get()) is not None:
            do()
            del do  # and what it holds
            with self._guard:
                if self._is_closed:
                    return
                self._idle += 1

    def _forget(self) -> None:
        self._idle = 0
        self._guard = threading.Lock()
        self._waiting = queue.SimpleQueue()


_crews: weakref.WeakSet[Crew] = weakref.WeakSet()


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def _after_fork() -> None:
    for crew in list(_crews):
        crew._forget()


os.register_at_fork(after_in_child=_after_fork)
