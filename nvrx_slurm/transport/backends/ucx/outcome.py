"""What one thread does, and another waits for."""

from __future__ import annotations

import threading
import time


class Outcome:
    """Settled once, by the thread that does it; waited for by one other."""

    __slots__ = ("_pending", "error")

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._pending = threading.Lock()  # a plain lock: a third of what an Event costs
        self._pending.acquire()

    def settle(self, error: Exception | None = None) -> None:
        self.error = error
        self._pending.release()

    def is_settled_by(self, deadline: float) -> bool:
        """Wait until then at most."""
        left_s = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
        if not self._pending.acquire(timeout=left_s):
            return False
        self._pending.release()
        return True

    def wait(self) -> None:
        """However long it takes: for what is only a matter of the other thread's turn."""
        self._pending.acquire()
        self._pending.release()
