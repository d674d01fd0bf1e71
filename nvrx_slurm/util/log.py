"""Logging of our own processes: one line each, to stderr; never mixed with what the workers print."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from nvrx_slurm.util.sanitize import shown


def get_logger(part: str) -> logging.Logger:
    """The logger of one part (`agent`, `controller`, `batch`, …)."""
    return logging.getLogger(f"nvrx.{part}")


def set_up(name: str, *, stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Send this process's log lines to `stream` (stderr), each with its time and `name`. Called once, by its main."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Formatter(f"%(asctime)s.%(msecs)03d {name}: %(message)s", "%H:%M:%S"))
    root = logging.getLogger("nvrx")
    root.handlers[:] = [handler]
    root.setLevel(level)
    # Else a program that has configured the root logger prints each line twice.
    root.propagate = False


class _Formatter(logging.Formatter):
    """Messages hold names and errors from elsewhere, and log files are read on terminals."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))
