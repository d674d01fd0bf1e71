"""Blocks of the user's code that no restart cuts, and which abort waits for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class AtomicBlocks:
    """Open in any number of threads at once; entering nests. Whoever holds them keeps new ones out.

    A thread counts as inside (`is_inside`) before anything of this object is locked for it, and until all is unlocked
    again. So whoever raises errors only in a thread that is not inside leaves no lock behind, and no count.
    """

    def __init__(self) -> None:
        self._depths: dict[int, int] = {}  # by thread, and changed by that thread alone
        self._lock = threading.RLock()  # reentrant: a signal's handler may enter a block too
        self._changed = threading.Condition(self._lock)  # for holders; taken by its lock alone, see `bells.py`
        self._open = 0
        self._holders = 0
        self._waiting: list[threading.Lock] = []

    def is_inside(self, thread: int) -> bool:
        """Whether a thread is in a block, or in the midst of entering or leaving one."""
        return thread in self._depths

    def __enter__(self) -> None:
        """Waits while somebody holds the blocks, unless this thread is in one already."""
        me = threading.get_ident()
        while True:
            depth = self._depths.get(me, 0)
            self._depths[me] = depth + 1
            if depth or (turn := self._admitted()) is None:
                return
            del self._depths[me]
            _wait_for(turn)

    def __exit__(self, *_: object) -> None:
        me = threading.get_ident()
        if self._depths[me] > 1:
            self._depths[me] -= 1
            return
        with self._lock:
            self._open -= 1
            self._changed.notify_all()
        del self._depths[me]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait until no block is open, and let none open until this ends. Not from inside of one."""
        with self._lock:
            self._holders += 1
        try:
            with self._lock:
                self._changed.wait_for(lambda: not self._open)
            yield
        finally:
            self._let_go()

    def _admitted(self) -> threading.Lock | None:
        """None if this thread may open its block; else a lock that is released when it is worth asking again."""
        with self._lock:
            if not self._holders:
                self._open += 1
                return None
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
            return turn

    def _let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                for turn in self._waiting:
                    turn.release()
                self._waiting.clear()


def _wait_for(turn: threading.Lock) -> None:
    """Each waits for a lock of its own, which nobody misses: an error raised in here harms nothing."""
    turn.acquire()
