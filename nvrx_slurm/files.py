"""Where each file of a job lies, and how one is written; standard library only. `folder.py` draws the folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path

RESERVE_BYTES = 16 << 10
"""Kept free for the job's last records: the disk may be full by then."""


RUNTIME_ROOTS = (Path("/dev/shm"), Path("/tmp"))
"""Where a node keeps what need not outlive it: the first of these that is there."""

_JOURNAL_PART = re.compile(r"events\.(\d+)\.jsonl")


def journal_parts(current: Path) -> list[Path]:
    """The older parts of a journal, oldest first, beside the one that is written now."""
    found = ((_JOURNAL_PART.fullmatch(path.name), path) for path in current.parent.glob("events.*.jsonl"))
    return [path for _, path in sorted((int(named[1]), path) for named, path in found if named)]


class JobFiles:
    """Paths below one job's folder, and bytes written there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def job_id(self) -> str:
        return self.path.name

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def job_log(self) -> Path:
        return self.path / "job.log"

    @property
    def service_path(self) -> Path:
        """Where the job's own attribution service is, while it runs."""
        return self.path / "attrsvc.json"

    @property
    def store_path(self) -> Path:
        """Where the store is while the job runs, and its password."""
        return self.path / "store.json"

    @property
    def store_dir(self) -> Path:
        return self.path / "store"

    @property
    def runtime_name(self) -> str:
        """What its folders in a node's memory are called: job ids repeat from cluster to cluster, paths do not."""
        digest = hashlib.sha256(os.fsencode(self.path.absolute())).hexdigest()
        return f"nvrx-{self.job_id}-{digest[:10]}"

    def runtime_folders(self) -> list[Path]:
        """What nodes of the job have in this machine's memory, and is ours."""
        found = (path for root in RUNTIME_ROOTS for path in root.glob(f"{self.runtime_name}-*"))
        return [path for path in found if _is_ours(path)]

    def node_log(self, node: str) -> Path:
        return self.path / "nodes" / f"{node}.log"

    def cycle_logs(self, replica: str, generation: int, cycle: int) -> Path:
        return self.path / "logs" / replica / f"gen-{generation}" / f"cycle-{cycle}"

    def cycle_stacks(self, replica: str, generation: int, cycle: int) -> Path:
        return self.cycle_logs(replica, generation, cycle) / "stacks"

    def cycle_health(self, replica: str, generation: int, cycle: int) -> Path:
        return self.cycle_logs(replica, generation, cycle) / "health"

    @property
    def reserve_path(self) -> Path:
        return self.path / ".reserve"

    def create(self) -> None:
        """Make the folder (0700) with its parents, and set space aside for its last records. Raises OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o700)
        (self.path / "nodes").mkdir(exist_ok=True)
        if not self.reserve_path.exists():
            write_private(self.reserve_path, os.urandom(RESERVE_BYTES))  # some file systems store zeros in no block

    def write_plan_json(self, plan_json: bytes) -> None:
        """Keep a plan in the form that `records.plan_to_json` gives it."""
        write_private(self.plan_path, plan_json + b"\n")


def write_all(descriptor: int, data: bytes) -> None:
    """Write to the last byte, in as many pieces as the kernel takes. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_private(path: Path, data: bytes) -> None:
    """Write a file for its owner alone (0600). A reader sees the old file or the whole new one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_into_reserve(path: Path, data: bytes, reserve: Path) -> None:
    """The same where the disk may be full: `reserve`, if it is there, becomes the file. Raises OSError.

    It is overwritten in place and renamed. Removed first, its space might be somebody else's before we have it.
    """
    if len(data) > RESERVE_BYTES or not reserve.exists():
        write_private(path, data)
        return
    with reserve.open("rb+") as file:
        file.write(data)
        file.truncate()
    reserve.replace(path)


def _is_ours(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # another clears it away
        return path.stat().st_uid == os.getuid()
    return False
