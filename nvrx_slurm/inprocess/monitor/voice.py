"""A monitor's log lines. They go through a thread of their own: nothing that watches waits for whoever reads them."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from pathlib import Path

STDERR = 2
LAST_WORDS_S = 1.0


class Voice(logging.Handler):
    """Warnings go to the rank's standard error, for as long as the rank lives; all lines to the log file, if any."""

    def __init__(self, name: str, logfile: Path | None) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(f"%(asctime)s.%(msecs)03d {name}: %(message)s", "%H:%M:%S"))
        self._lines: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._file = None if logfile is None else os.open(logfile, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._thread = threading.Thread(target=self._write, name="nvrx-voice", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put((record.levelno, f"{self.format(record)}\n".encode()))

    def _write(self) -> None:
        while (entry := self._lines.get()) is not None:
            level, line = entry
            with contextlib.suppress(OSError):  # nobody reads, or the disk is full: there is no place to say so
                if self._file is not None:
                    os.write(self._file, line)
            with contextlib.suppress(OSError):
                if level >= logging.WARNING:
                    os.write(STDERR, line)

    def let_go(self) -> None:
        """Hold the rank's standard error no longer: whoever reads it waits for its end."""
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, STDERR)
        os.close(nothing)

    def finish(self) -> None:
        """Write what is left, unless that takes longer than it is worth."""
        self._lines.put(None)
        self._thread.join(LAST_WORDS_S)


def set_up(name: str, logfile: Path | None) -> Voice:
    """Send this process's log lines there. Raises OSError for the log file."""
    voice = Voice(name, logfile)
    root = logging.getLogger("nvrx")
    root.handlers[:] = [voice]
    root.setLevel(logging.WARNING if logfile is None else logging.INFO)
    root.propagate = False
    return voice
