"""Blocking work in a thread of its own, which may never come back; standard library only."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

SLICE_S = 1.0


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Start `work`; the future has its result or its exception. For asyncio: `asyncio.wrap_future`.

    A daemon thread, not one of a pool: the caller may stop waiting, and work that hangs in a dead file system then
    keeps neither a place in the pool nor, as a pool's threads do, this process from its end.
    """
    future: Future[T] = Future()
    try:
        threading.Thread(target=_settle, args=(future, work), name=name, daemon=True).start()
    except KeyError as error:
        # CPython 3.11 to 3.13: when a signal handler raises inside `start()`, its clean-up removes an entry that the
        # new thread has removed already, and that KeyError hides the handler's exception.
        raise error.__context__ or error from None
    except RuntimeError as error:  # no thread can be started now: to the caller one more failure of its work
        future.set_exception(OSError(errno.EAGAIN, str(error)))
    return future


def awaitable_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """The same for the running event loop. The loop may close before the thread ends; the result is then dropped."""
    import asyncio  # only here: workers load this module, most of them without asyncio

    loop = asyncio.get_running_loop()
    awaited: asyncio.Future[T] = loop.create_future()

    def settle(done: Future[T]) -> None:
        if awaited.done():  # the caller has stopped waiting
            return
        if (error := done.exception()) is not None:
            awaited.set_exception(error)
        else:
            awaited.set_result(done.result())

    def on_done(done: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, done)

    in_thread(work, name).add_done_callback(on_done)
    return awaited


class SignalSafeEvent:
    """A `threading.Event` for a main thread whose signal handlers raise."""

    # To set it, and to wait for it, is one call into C. `threading.Event` takes a lock in Python code: a handler that
    # raises there may leave that lock taken, for all other threads too.

    def __init__(self) -> None:
        self._is_set = False
        self._closed = threading.Lock()
        self._closed.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Any number of times, from any thread."""
        self._is_set = True
        with contextlib.suppress(RuntimeError):  # it was set before
            self._closed.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is set, at most so long. Returns whether it is."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self._is_set:
            # In slices: a thread that an exception takes away just here, once it was woken, does not wake the next.
            left_s = SLICE_S if until is None else min(SLICE_S, until - time.monotonic())
            if left_s <= 0:
                return False
            if self._closed.acquire(timeout=left_s):
                self.set()  # for the next waiting thread
        return True


class ThreadPool:
    """Threads as `in_thread` makes them, kept for the next work: to start one takes longer than a short read.

    There are as many as were ever busy at once. In a forked child there are none yet.
    """

    _guard: threading.Lock
    _idle: int
    _waiting: queue.SimpleQueue[Callable[[], None] | None]

    def __init__(self, name: str) -> None:
        self._name, self._is_closed = name, False
        self._forget()
        reset_after_fork(self, ThreadPool._forget)

    def start(self, work: Callable[[], T]) -> Future[T]:
        """The future has its result or its exception."""
        future: Future[T] = Future()
        with self._guard:
            # An idle thread is reserved under the guard, so two callers never count on the same one.
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
        # In a forked child the threads do not exist, and one of them may have held the guard at the fork.
        self._idle = 0
        self._guard = threading.Lock()
        self._waiting = queue.SimpleQueue()


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


_resets: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def reset_after_fork(owner: T, reset: Callable[[T], None]) -> None:
    """Call `reset(owner)` in each forked child, as long as the owner lives. What it holds there is the parent's, and
    its locks may be held by threads that the child does not have. `reset` must not keep the owner alive."""
    _resets[owner] = reset


def _reset_all() -> None:
    for owner, reset in list(_resets.items()):
        reset(owner)


os.register_at_fork(after_in_child=_reset_all)
