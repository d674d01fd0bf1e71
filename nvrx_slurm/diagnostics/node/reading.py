"""Small files of the kernel's, and sizes in words."""

from __future__ import annotations

from pathlib import Path


def first_line(path: Path) -> str:
    """The first line of a file; empty where it cannot be read."""
    try:
        with path.open(errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""


def size(number_bytes: float) -> str:
    """A size as people read it: `12.3 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number_bytes < 1024:
            return f"{number_bytes:.0f} B" if unit == "B" else f"{number_bytes:.1f} {unit}"
        number_bytes /= 1024
    return f"{number_bytes:.1f} TiB"
