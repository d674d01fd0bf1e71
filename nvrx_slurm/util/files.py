"""Where each file of a job lies, and how one is written; standard library only. `folder.py` draws the folder.

Records (`plan.json`, `store.json`, …) are read and written relative to a descriptor of the job folder. It must belong
to this user, and no other may write to it: a folder that was put in its place is refused (`ownership.py`). All modes
are explicit, so that no umask makes anything writable for others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from contextlib import AbstractContextManager
from pathlib import Path

from nvrx_slurm.errors import ForgedRecord, UsageError
from nvrx_slurm.util import ownership

# Kept free for the job's last records: the disk may be full by then.
RESERVE_BYTES = 16 << 10


# Each key of the job's configuration, its value, and where that came from.
ORIGINS = "origins.json"

# The cluster of Slurm's that runs the job, where `submit` has handed it to another one than this machine's own.
CLUSTER = "cluster"

# Where a node keeps what need not outlive it: the first of these that is there.
RUNTIME_ROOTS = (Path("/dev/shm"), Path("/tmp"))

# How much of a node's name is in that of its folder there. Clouds make names of 60 characters and more.
LONGEST_NODE_PART = 32

_JOURNAL_PART = re.compile(r"events\.(\d+)\.jsonl")


def journal_parts(current: Path) -> list[Path]:
    """The older parts of a journal, oldest first, beside the one that is written now."""
    found = ((_JOURNAL_PART.fullmatch(path.name), path) for path in current.parent.glob("events.*.jsonl"))
    return [path for _, path in sorted((int(named[1]), path) for named, path in found if named)]


class JobFiles:
    """Paths below one job's folder, and bytes written there. `cluster`: the one that the user named with the id."""

    def __init__(self, path: Path, cluster: str = "") -> None:
        self.path = path
        self.job_id = path.name
        self._cluster = cluster
        self.plan_path = path / "plan.json"
        self.events_path = path / "events.jsonl"
        self.job_log = path / "job.log"
        self.service_path = path / "attrsvc.json"  # where the job's own attribution service is, while it runs
        self.store_path = path / "store.json"  # where the store is while the job runs, and its password
        self.store_dir = path / "store"
        self.reserve_path = path / ".reserve"

    @property
    def full_id(self) -> str:
        """The job's id for Slurm's programs: with `;cluster` behind it where another cluster than this machine's own
        runs it. Raises UnsafePath."""
        # Of an array's task `submit` has made the array's folder alone.
        for path in (self.path, self.path.with_name(self.job_id.partition("_")[0])):
            if not self._cluster:
                with contextlib.suppress(OSError):
                    self._cluster = JobFiles(path).read(CLUSTER).decode(errors="replace").strip()
        return f"{self.job_id};{self._cluster}" if self._cluster else self.job_id

    @property
    def runtime_name(self) -> str:
        """How its folders in a node's memory begin: job ids repeat from cluster to cluster, paths do not."""
        import hashlib  # loads OpenSSL; `submit` has nothing to hash

        digest = hashlib.sha256(os.fsencode(self.path.absolute())).hexdigest()
        return f"nvrx-{self.job_id}-{digest[:10]}"

    def make_runtime_folder(self, node: str) -> Path:
        """A new folder (0700) for a node's slots and sockets, in memory. Its name ends at random, so that no other
        user can have taken it. Raises OSError."""
        name = f"{self._runtime_name_of(node)}-{os.urandom(8).hex()}"
        *first, last = RUNTIME_ROOTS
        for root in first:
            with contextlib.suppress(OSError):  # it is not there, or a container has it read-only
                (root / name).mkdir(mode=0o700)
                return root / name
        (last / name).mkdir(mode=0o700)
        return last / name

    def runtime_folders(self, node: str | None = None) -> list[Path]:
        """What nodes of the job (or one of them) have in this machine's memory. What another user has put there under
        such a name is passed over."""
        found = [path for root in RUNTIME_ROOTS for path in root.glob(f"{self.runtime_name}-*")]
        if node is not None:
            found = [path for path in found if path.name.rpartition("-")[0] == self._runtime_name_of(node)]
        return [path for path in found if ownership.is_ours(path)]

    def _runtime_name_of(self, node: str) -> str:
        import hashlib  # as above

        if len(node) > LONGEST_NODE_PART:  # the path of a socket has 107 bytes at most (unix(7))
            node = f"{node[: LONGEST_NODE_PART - 11]}.{hashlib.sha256(os.fsencode(node)).hexdigest()[:10]}"
        return f"{self.runtime_name}-{node}"

    def node_log(self, node: str) -> Path:
        return self.path / "nodes" / f"{node}.log"

    def cycle_logs(self, replica: str, generation: int, cycle: int) -> Path:
        return self.path / "logs" / replica / f"gen-{generation}" / f"cycle-{cycle}"

    def cycle_stacks(self, replica: str, generation: int, cycle: int) -> Path:
        return self.cycle_logs(replica, generation, cycle) / "stacks"

    def cycle_health(self, replica: str, generation: int, cycle: int) -> Path:
        return self.cycle_logs(replica, generation, cycle) / "health"

    def create(self) -> list[Path]:
        """Make the folder (0700) and its base folder, and set space aside for its last records.

        Returns what `make_base` returns. Raises OSError; UnsafePath where another user could change what is there.
        """
        shared = make_base(self.path.parent)
        base = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path.name, 0o700, dir_fd=base)
            folder = ownership.open_private_folder(self.path, dir_fd=base)
        finally:
            os.close(base)
        try:
            # The folder may have been there already, with another mode.
            os.fchmod(folder, 0o700)
            with contextlib.suppress(FileExistsError):
                os.mkdir("nodes", 0o700, dir_fd=folder)
            if not _exists(self.reserve_path.name, folder):
                # Random bytes: some file systems store zeros in no block.
                write_private(self.reserve_path, os.urandom(RESERVE_BYTES), dir_fd=folder)
        finally:
            os.close(folder)
        return shared

    def opened(self) -> AbstractContextManager[int]:
        """A descriptor of the folder. Raises OSError; UnsafePath where it is not this user's, or others can write."""
        return ownership.private_folder(self.path)

    def read(self, name: str) -> bytes:
        """A file right in this folder. Raises OSError, UnsafePath."""
        with self.opened() as folder:
            return ownership.read_owned(self.path / name, dir_fd=folder)

    def write(self, name: str, data: bytes, *, replace: bool = True) -> None:
        """Write a file right in this folder, as `write_private` does. Raises OSError, UnsafePath."""
        with self.opened() as folder:
            write_private(self.path / name, data, dir_fd=folder, replace=replace)

    def write_last(self, name: str, data: bytes) -> None:
        """The same where the disk may be full: the reserve, if it is there, becomes the file. Raises OSError,
        UnsafePath."""
        with self.opened() as folder:
            if len(data) > RESERVE_BYTES or not _exists(self.reserve_path.name, folder):
                write_private(self.path / name, data, dir_fd=folder)
                return
            reserve = os.open(self.reserve_path.name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            # Overwritten in place and renamed. Were it removed first, another process could take its space.
            with os.fdopen(reserve, "rb+") as file:
                file.write(data)
                file.truncate()
            os.replace(self.reserve_path.name, name, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self, name: str) -> None:
        """Remove a file right in this folder, if it is there. Raises OSError, UnsafePath."""
        with contextlib.suppress(FileNotFoundError), self.opened() as folder:
            os.unlink(name, dir_fd=folder)

    def remove_tree(self, name: str) -> None:
        """Remove a folder right in this folder, with all that it holds, as far as that can be done."""
        import shutil  # workers import this module, and need it not

        with contextlib.suppress(OSError, UsageError), self.opened() as folder:
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)  # by descriptors: no symbolic link is followed

    def write_plan_json(self, plan_json: bytes, *, replace: bool = True) -> None:
        """Keep a plan in the form that `plan.plan_to_json` gives it. Raises as `write`."""
        self.write(self.plan_path.name, plan_json + b"\n", replace=replace)

    def read_plan_json(self, digest: str | None = None) -> bytes:
        """The plan as it is kept. `digest`: what `digest_of_plan` made of the plan that the batch host runs.

        Raises ForgedRecord where the file holds another plan; OSError, UnsafePath.
        """
        plan_json = self.read(self.plan_path.name)
        if digest is not None and digest != digest_of_plan(plan_json):
            raise ForgedRecord(
                f"{self.plan_path}: is not the plan that this job was submitted with (its SHA-256 differs);"
                " submit the job again, and find out what has changed the file"
            )
        return plan_json


def digest_of_plan(plan_json: bytes) -> str:
    """What names a plan where agents and controller are started: the SHA-256 of its JSON, in hex."""
    import hashlib

    return hashlib.sha256(plan_json.strip()).hexdigest()


def make_base(folder: Path) -> list[Path]:
    """Make the folder that holds job folders (0700; those above it 0755) where it is missing, and check that no other
    user can change what is in it. Returns the folders above it that a group can write to.

    Raises OSError, UnsafePath.
    """
    make_folders(folder.parent, 0o755)
    make_folders(folder, 0o700)
    return ownership.check_base(folder)


def make_folders(folder: Path, mode: int = 0o700) -> None:
    """Make a folder and all that are missing above it, each with this mode, which a umask can only narrow. Raises
    OSError."""
    # One by one: `Path.mkdir(parents=True)` gives those above 0777 less the umask.
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        try:
            path.mkdir(mode=mode)
        except FileExistsError:  # another process has made it; or it is a file
            if not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None


def open_log(path: Path) -> int:
    """A descriptor that appends to a file for its owner alone (0600), made with its folder (0700). Raises OSError."""
    make_folders(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


def write_all(descriptor: int, data: bytes) -> None:
    """Write to the last byte, in as many pieces as the kernel takes. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_private(path: Path, data: bytes, *, dir_fd: int | None = None, replace: bool = True) -> None:
    """Write a file for its owner alone (0600). A reader sees the old file or the whole new one. `dir_fd`: the folder
    that holds it. Raises OSError; without `replace` FileExistsError where there is a file."""
    # A random name that must be new: another user may have put a symbolic link under one that can be guessed.
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    name = path
    if dir_fd is not None:
        temporary, name = Path(temporary.name), Path(path.name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=dir_fd)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        if replace:
            os.replace(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:  # rename(2) would replace a file that another process has just written; link(2) fails
            os.link(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            os.unlink(temporary, dir_fd=dir_fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=dir_fd)
        raise


def write_output(path: Path, data: bytes) -> None:
    """Write the file that the user has named, as `write_private` does. A device, a pipe or a socket is written into,
    not replaced, and a symbolic link of this user's is followed. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            path.write_bytes(data)
            return
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_uid == os.geteuid():
            path = path.resolve()
    write_private(path, data)


def _exists(name: str, dir_fd: int) -> bool:
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
