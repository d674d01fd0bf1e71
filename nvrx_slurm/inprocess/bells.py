"""Waiting for something that another thread changes, in a thread whose signal handlers may raise at any moment.

`threading.Condition` and `Event` are no good there: a handler that raises within their `__enter__`, when the lock is
taken already, leaves it taken for ever. What is one step of the interpreter (`with` on a plain lock, `acquire` with a
timeout) has happened or has not.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Bells:
    """One for each who waits. Whoever changes something rings them all."""

    def __init__(self) -> None:
        self._hung: list[threading.Lock] = []

    @contextlib.contextmanager
    def hung(self) -> Iterator[threading.Lock]:
        """`acquire` it to wait until the next ring, or for one since the last time. Look at what you wait for in
        here, else you may miss it."""
        bell = silent()
        self._hung.append(bell)
        try:
            yield bell
        finally:
            self._hung.remove(bell)

    def ring(self) -> None:
        """From any thread, after the change."""
        for bell in tuple(self._hung):
            with contextlib.suppress(RuntimeError):  # it rings already
                bell.release()


def silent() -> threading.Lock:
    """A bell that has not rung."""
    bell = threading.Lock()
    bell.acquire()
    return bell
