"""The ends of the logs that an attempt left behind."""

from __future__ import annotations

import os
from pathlib import Path

from nvrx_slurm.lab.flow.outcome import Attempt

SUFFIXES = frozenset({".log", ".out", ".err"})
MOST_FILES = 12
LAST_LINES = 20
READ_BYTES = 16 << 10


def log_tails(attempt: Attempt) -> dict[str, tuple[str, ...]]:
    """The last lines of the logs in the attempt's artifacts, by path; those written last come first.

    A file that cannot be read is not there: this is for looking, not for deciding.
    """
    if attempt.artifacts is None:
        return {}
    top = Path(attempt.artifacts)
    found = [(_written_at(path), path) for path in top.rglob("*") if path.suffix in SUFFIXES]
    newest = [path for at, path in sorted(found, reverse=True) if at][:MOST_FILES]
    return {str(path.relative_to(top)): _tail(path) for path in newest}


def _written_at(path: Path) -> int:
    """0: nothing to read there."""
    try:
        status = path.stat()
    except OSError:
        return 0
    return status.st_mtime_ns if status.st_size else 0


def _tail(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - READ_BYTES))
            text = file.read(READ_BYTES)
    except OSError as error:
        return (f"not readable: {error.strerror}",)
    return tuple(text.decode(errors="replace").splitlines()[-LAST_LINES:])
