"""How much memory, processor time and disk space the node has left."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from nvrx_slurm.diagnostics.node.reading import first_line, size

PROC = Path("/proc")


def memory(proc: Path = PROC) -> Iterator[str]:
    """What is available of the node's memory."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest}
    except (OSError, ValueError, IndexError):
        return
    names = {"MemAvailable": "MemTotal", "SwapFree": "SwapTotal"}
    parts = [
        f"{'swap ' if free.startswith('Swap') else ''}{size(kib[free] << 10)} available of {size(kib[total] << 10)}"
        for free, total in names.items()
        if kib.get(total) and free in kib
    ]
    if parts:
        yield "; ".join(parts)


def pressure(proc: Path = PROC) -> Iterator[str]:
    """How much of the last 10 and 60 seconds was lost waiting for memory, the disk, the processor (PSI)."""
    for what in ("memory", "io", "cpu"):
        if line := first_line(proc / "pressure" / what):
            yield f"{what} {line}"


def load(proc: Path = PROC) -> Iterator[str]:
    """The load averages, and how long the node is up."""
    averages, up = first_line(proc / "loadavg").split(), first_line(proc / "uptime").partition(".")[0]
    if len(averages) >= 3 and up.isdecimal():
        yield f"{' '.join(averages[:3])} on {os.cpu_count()} processors, up {up} s"


def disk(folder: Path) -> Iterator[str]:
    """What is free where this folder lies. May block for as long as its file system does."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        yield f"{folder}: {error.strerror}"
        return
    room = f"{size(found.f_bavail * found.f_frsize)} free of {size(found.f_blocks * found.f_frsize)}"
    inodes = f"; {found.f_favail} of {found.f_files} inodes free" if found.f_files else ""
    yield f"{folder}: {room}{inodes}"


def disks(folders: Iterable[Path]) -> Iterator[str]:
    """The same of several."""
    for folder in folders:
        yield from disk(folder)
