"""What the memory limit of this process's cgroup has done: cgroup v2, and v1 where a cluster still has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.diagnostics.node.reading import first_line, size

ROOT = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")
_V1 = ("memory.oom_control", "memory.usage_in_bytes", "memory.limit_in_bytes")
_V2 = ("memory.events", "memory.current", "memory.max")
_NO_LIMIT_BYTES = 1 << 60  # v1 says "none" by the largest number of pages


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
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
        for folder in (self.folder, *self.folder.parents):
            limit, used = first_line(folder / self.limit), first_line(folder / self.used)
            if limit.isdecimal() and used.isdecimal() and int(limit) < _NO_LIMIT_BYTES:
                yield f"{size(int(used))} in use of {size(int(limit))} ({folder})"
                return
            if folder == ROOT:
                return


def memory_cgroup(root: Path = ROOT, own: Path = SELF) -> MemoryCgroup | None:
    """The cgroup whose memory limit holds for this process; None where there is none to be seen."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    for line in lines:  # v2 says `0::/path`, and comes last: a hybrid has its memory in v1
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        below = path.lstrip("/")
        if hierarchy == "0":
            found = MemoryCgroup(root / below, *_V2)
        elif "memory" in controllers.split(","):
            found = MemoryCgroup(root / "memory" / below, *_V1)
        else:
            continue
        if found.oom_kills() is not None:
            return found
    return None
