"""A monitor's log lines. They go through a thread of their own: nothing that watches waits for whoever reads them."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

STDERR = 2
LAST_WORDS_S = 1.0


class Voice(logging.Handler):
    """Warnings go to the rank's standard error, for as long as the rank lives; all lines to the log file, if any."""

    def __init__(self, name: str, logfile: Path | None) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(f"%(asctime)s.%(msecs)03d {name}: %(message)s", "%H:%M:%S"))
        self._file = None if logfile is None else os.open(logfile, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._do, name="nvrx-voice", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        self._work.put(partial(self._write, record.levelno, f"{self.format(record)}\n".encode()))

    def let_go(self) -> None:
        """After what was said so far, hold the rank's standard error no longer: who reads it waits for its end."""
        self._work.put(_silence_stderr)

    def finish(self) -> None:
        """Write what is left, unless that takes longer than it is worth."""
        self._work.put(None)
        self._thread.join(LAST_WORDS_S)

    def _do(self) -> None:
        while (work := self._work.get()) is not None:
            with contextlib.suppress(OSError):  # nobody reads, or the disk is full: there is no place to say so
                work()

    def _write(self, level: int, line: bytes) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.write(self._file, line)
        if level >= logging.WARNING:
            os.write(STDERR, line)


def _silence_stderr() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, STDERR)
    os.close(nothing)


def set_up(name: str, logfile: Path | None) -> Voice:
    """Send this process's log lines there. Raises OSError for the log file."""
    voice = Voice(name, logfile)
    root = logging.getLogger("nvrx")
    root.handlers[:] = [voice]
    root.setLevel(logging.WARNING if logfile is None else logging.INFO)
    root.propagate = False
    return voice
