"""Calls a function between any two bytecodes of a call, and checks for locks that stay taken."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

DEADLINE_S = 10.0


def at_bytecode(
    number: int, watches: Callable[[FrameType], bool], act: Callable[[FrameType], None], call: Callable[[], Any]
) -> tuple[Any, bool]:
    """The result of a call during which `act` is called before bytecode `number` of the watched frames; and whether
    it was called.

    The trace function runs between two bytecodes, and the traced frame raises what it raises, as with a signal
    handler.
    """
    seen, done = itertools.count(), []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes = watches(frame)
        if event == "opcode" and frame.f_trace_opcodes and next(seen) == number:
            done.append(True)
            act(frame)
        return trace

    former = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 checks only here whether any frame wants them
    sys.settrace(trace)
    try:
        outcome = call()
    finally:
        sys.settrace(former)
    return outcome, bool(done)


def another_thread_can_take(taken: Callable[[], contextlib.AbstractContextManager[None]]) -> bool:
    """Whether another thread can take the lock, so this thread has left it unlocked."""

    def take() -> None:
        with taken():
            pass

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return not thread.is_alive()


def locked() -> threading.Lock:
    """A lock that is taken."""
    lock = threading.Lock()
    lock.acquire()
    return lock
