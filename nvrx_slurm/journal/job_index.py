"""The index of a user's jobs: where each job's folder lies, so that a command finds a job from any folder.

`$XDG_STATE_HOME/nvrx-slurm/jobs/` (0700) holds one symbolic link for each job, which leads to the job's folder. A
link is made, replaced and removed in one system call each, on NFS too: many submissions at once need no lock, and no
reader sees half of an entry. The link's own time is the time of the submission.

The index is a convenience. Where it cannot be written (a read-only home) jobs run all the same, and are found by
their base folder. Standard library only: `submit` imports it.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from nvrx_slurm.errors import UsageError
from nvrx_slurm.jobspec.site import state_folder
from nvrx_slurm.util.files import make_folders
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.ownership import open_private_folder, private_folder

log = get_logger("index")


class IndexedJob(msgspec.Struct, frozen=True):
    """One entry. `folder`: the job's own folder, which may be gone; `at`: when the job was submitted."""

    job_id: str
    folder: Path
    at: float


def index_folder() -> Path:
    """Where the entries lie. It may not exist."""
    return state_folder() / "jobs"


def record_job(folder: Path, *, is_new: bool = True) -> None:
    """Enter a job, by its own folder. `is_new`: it has just been submitted, and takes the place of an earlier job
    that had this folder. A job that has no entry, because plain sbatch submitted it, enters itself when it starts.

    Never raises: no job fails because of the index.
    """
    folder = folder.absolute()  # not `resolve`: readers go the way that the user named
    try:
        make_folders(index_folder(), 0o700)
        index = open_private_folder(index_folder())
    except (OSError, UsageError, RuntimeError) as error:  # RuntimeError: this user has no home
        log.debug("job %s is not in the index of jobs: %s", folder.name, error)
        return
    name = _name(folder)
    try:
        if not is_new:
            # Never in the place of an entry that a submission has made: its time is that of the submission.
            with contextlib.suppress(FileExistsError):
                os.symlink(folder, name, dir_fd=index)
            return
        # A new link in the place of an old one: readers see one of the two.
        temporary = f".{name}.{os.urandom(4).hex()}"
        os.symlink(folder, temporary, dir_fd=index)
        os.replace(temporary, name, src_dir_fd=index, dst_dir_fd=index)
    except OSError as error:
        log.debug("job %s is not in the index of jobs: %s", folder.name, error)
    finally:
        os.close(index)


def indexed_jobs(job_id: str | None = None) -> list[IndexedJob]:
    """All entries, or those of one job id, the newest submission first. Raises UnsafePath where another user could
    have written them, and OSError; an index that does not exist has no entries."""
    try:
        index = open_private_folder(index_folder())
    except (FileNotFoundError, RuntimeError):
        return []
    try:
        # A folder that is listed while an entry is replaced may name it twice.
        found = {each.folder: each for each in _entries(index, job_id)}
        return sorted(found.values(), key=lambda each: (each.at, each.job_id), reverse=True)
    finally:
        os.close(index)


def forget_job(folder: Path) -> None:
    """Remove the entry of a job whose folder is gone, if it has one. Never raises."""
    with contextlib.suppress(OSError, UsageError, RuntimeError), private_folder(index_folder()) as index:
        os.unlink(_name(folder.absolute()), dir_fd=index)


def _entries(index: int, job_id: str | None) -> Iterator[IndexedJob]:
    with os.scandir(index) as entries:
        for entry in entries:
            named, at, _ = entry.name.rpartition("@")
            # A name with a dot in front is of a link that is just being made, or of one whose maker was killed.
            if not at or entry.name.startswith(".") or job_id not in (None, named):
                continue
            with contextlib.suppress(OSError):  # removed meanwhile, or no symbolic link
                folder = Path(os.readlink(entry.name, dir_fd=index))
                if folder.name == named and folder.is_absolute():
                    yield IndexedJob(named, folder, entry.stat(follow_symlinks=False).st_mtime)


def _name(folder: Path) -> str:
    """Job ids repeat from cluster to cluster, the pair of id and base folder does not."""
    return f"{folder.name}@{zlib.crc32(os.fsencode(folder.parent)):08x}"
