"""Free memory, processor time and disk space of the node; its memory cgroup; the memory errors of its GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

PROC = Path("/proc")


def memory(proc: Path = PROC) -> Iterator[str]:
    """What is available of the node's memory."""
    kib = _meminfo(proc)
    names = (("", "MemAvailable", "MemTotal"), ("swap ", "SwapFree", "SwapTotal"))
    parts = [
        f"{what}{format_size(kib[free] << 10)} available of {format_size(kib[total] << 10)}"
        for what, free, total in names
        if kib.get(total) and free in kib
    ]
    if parts:
        yield "; ".join(parts)


def available_bytes(cgroup: MemoryCgroup | None, proc: Path = PROC) -> int:
    """How much of the node's memory is available, but no more than the limit of the cgroup. 0: it is not known."""
    available = _meminfo(proc).get("MemAvailable", 0) << 10
    limit = cgroup.limit_bytes() if cgroup is not None else None
    return available if limit is None else min(available, limit)


def _meminfo(proc: Path) -> dict[str, int]:
    """Name → KiB; empty where the kernel's file cannot be read."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest}
    except (OSError, ValueError, IndexError):
        return {}


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


def disks(folders: Iterable[Path]) -> Iterator[str]:
    """What is free where each of these folders lies. May block for as long as a file system does."""
    for folder in folders:
        try:
            found = os.statvfs(folder)
        except OSError as error:
            yield f"{folder}: {error.strerror}"
            continue
        room = (
            f"{format_size(found.f_bavail * found.f_frsize)} free of {format_size(found.f_blocks * found.f_frsize)}"
        )
        # Btrfs makes inodes as it needs them, and counts 0.
        inodes = f"; {found.f_favail} of {found.f_files} inodes free" if found.f_files else ""
        yield f"{folder}: {room}{inodes}"


ROOT = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")
_V1 = ("memory.oom_control", "memory.usage_in_bytes", "memory.limit_in_bytes")
_V2 = ("memory.events", "memory.current", "memory.max")
_NO_LIMIT_BYTES = 1 << 60  # v1 says "none" by the largest number of pages


class MemoryCgroup(msgspec.Struct, frozen=True):
    """One folder of the memory controller, with the names that its files have there."""

    folder: Path
    events: str
    used: str
    limit: str

    def oom_kills(self) -> int | None:
        """How many processes the kernel has killed here for want of memory; None: it does not say."""
        try:
            lines = (self.folder / self.events).read_text().splitlines()
            return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
        except (OSError, ValueError, IndexError):
            return None

    def usage(self) -> Iterator[str]:
        """What is in use of how much, where there is a limit: here or above."""
        if (limited := self._limited()) is not None:
            used, limit, folder = limited
            yield f"{format_size(used)} in use of {format_size(limit)} ({folder})"

    def limit_bytes(self) -> int | None:
        """How much memory may be in use; None: there is no limit."""
        limited = self._limited()
        return None if limited is None else limited[1]

    def _limited(self) -> tuple[int, int, Path] | None:
        found = []
        # The kernel enforces each limit on the way up, and a folder's may be larger than the one above it.
        for folder in (self.folder, *self.folder.parents):
            limit, used = first_line(folder / self.limit), first_line(folder / self.used)
            if limit.isdecimal() and used.isdecimal() and int(limit) < _NO_LIMIT_BYTES:
                found.append((int(used), int(limit), folder))
            if folder == ROOT:
                break
        return min(found, key=lambda each: each[1], default=None)


def memory_cgroup(root: Path = ROOT, own: Path = SELF) -> MemoryCgroup | None:
    """The cgroup whose memory limit holds for this process; None where there is none to be seen."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    # v2 says `0::/path`, and comes last. A hybrid has its memory controller in v1, so the first match counts.
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        below = path.lstrip("/")
        if hierarchy == "0":
            found = MemoryCgroup(root / below, *_V2)
        elif "memory" in controllers.split(","):
            found = MemoryCgroup(root / "memory" / below, *_V1)
        else:
            continue
        # In a container the path of /proc/self/cgroup may be the host's, and no folder below what is mounted here.
        if found.oom_kills() is not None:
            return found
    return None


# Field of `--query-gpu` → what it is called.
GPU_FIELDS = {
    "index": "",
    "pci.bus_id": "bus",
    "ecc.errors.uncorrected.volatile.total": "uncorrected errors since the driver was loaded",
    "ecc.errors.uncorrected.aggregate.total": "ever",
    "remapped_rows.uncorrectable": "rows remapped",
    "remapped_rows.pending": "pending",
    "remapped_rows.failure": "failed",
    "retired_pages.pending": "page retirement pending",
    "temperature.gpu": "temperature",
}

# What nvidia-smi is asked.
GPU_QUERY = (f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")

_UNKNOWN = ("[N/A]", "N/A", "[Not Supported]", "[Unknown Error]")


def gpu_rows(said: str) -> Iterator[str]:
    """One sentence for each GPU, of what nvidia-smi has printed; what it says instead of that, as it stands."""
    for line in said.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(GPU_FIELDS):
            yield line.strip()
            continue
        named = zip(GPU_FIELDS.values(), cells, strict=True)
        known = [f"{name} {cell}" for name, cell in named if name and cell not in _UNKNOWN]
        yield f"{cells[0]}: {', '.join(known)}"


def first_line(path: Path) -> str:
    """The first line of a file; empty where it cannot be read."""
    try:
        with path.open(errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""


def format_size(number_bytes: float) -> str:
    """A size as people read it: `12.3 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number_bytes < 1024:
            return f"{number_bytes:.0f} B" if unit == "B" else f"{number_bytes:.1f} {unit}"
        number_bytes /= 1024
    return f"{number_bytes:.1f} TiB"
