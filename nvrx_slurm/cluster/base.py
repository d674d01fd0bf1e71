"""What a cluster can do for a job: the port that Slurm and this machine stand behind."""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, get_args

from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.errors import UsageError
from nvrx_slurm.util.files import make_base
from nvrx_slurm.util.log import get_logger

log = get_logger("submit")

DEFAULT_FOLDER = Path("nvrx-jobs")
# How the ids of local jobs begin; Slurm's begin with a number.
LOCAL_PREFIX = "local-"

# The submitted script, as the job folder keeps it.
SCRIPT_NAME = "job.sh"

_JOB_ID = re.compile(r"(?P<folder>[A-Za-z0-9][A-Za-z0-9_.+-]{0,127})(;[A-Za-z0-9_.-]+)?")


ClusterName = Literal["slurm", "local"]


def check_cluster(name: str) -> None:
    """Raises UsageError for what is no cluster: a Python caller may give any text."""
    if name not in get_args(ClusterName):
        raise UsageError(f"cluster={name!r}: must be 'slurm' or 'local'")


class Cluster(Protocol):
    """Where jobs run. `folder` is always the base folder: a job's own is `<folder>/<job id>`."""

    def submit(self, script: str, *, folder: Path, name: str) -> str:
        """Hand the script over and return the job's id. What is refused leaves nothing behind.

        Raises SubmissionRefused, MissingProgramError, SlurmUnreachable; UsageError where `folder` cannot be written.
        """
        ...

    def states(self, job_ids: Sequence[str]) -> Mapping[str, JobState]:
        """The state of each job, all asked for at once; UNKNOWN where it is not known. Raises SlurmUnreachable."""
        ...

    def cancel(self, job_id: str) -> None:
        """Ask the job to end, and return at once; one that has ended is left alone.

        Raises UsageError for an unknown job, and SlurmUnreachable.
        """
        ...

    def nodes(self, job_id: str) -> tuple[str, ...]:
        """The job's nodes in the order that ranks follow; none while it has none. Raises SlurmUnreachable."""
        ...


def folder_name(job_id: str) -> str:
    """The name of a job's folder: its id, as Slurm gives it to the job itself, hence without a cluster's name.

    Raises UsageError for what is no job id, above all for a path: a job's folder lies in the base folder, nowhere
    else. Every command and every Python call takes a job id through this function.
    """
    found = _JOB_ID.fullmatch(job_id)
    if found is None:
        base, _, name = job_id.rstrip("/").rpartition("/")
        if base and _JOB_ID.fullmatch(name):
            raise UsageError(f"{job_id!r} is no job id, but a path; that job is `{name} --folder {base}`")
        raise UsageError(
            f"{job_id!r} is no job id: it looks like 123, 123_4 (an array's element), 123+0 (a heterogeneous job's"
            " component), 123;cluster, or local-20261121-093012-4f2a; --folder names the folder that holds the jobs"
        )
    return found["folder"]


def prepare_folder(folder: Path) -> bool:
    """Make the base folder (0700) where it is missing, and say whether it was. Warns of folders above it that a group
    can write to. Raises UsageError; UnsafePath where another user could change the jobs in it."""
    is_new = not os.path.exists(folder)
    try:
        shared = make_base(folder)
    except (FileExistsError, NotADirectoryError) as error:
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise UsageError(f"{folder}: is a file; --folder names a folder for the jobs") from None
        raise not_writable(folder, error) from error
    except OSError as error:
        raise not_writable(folder, error) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise not_writable(folder, OSError(errno.EACCES, os.strerror(errno.EACCES)))
    for path in shared:
        _warn_of(path, folder)
    return is_new


# A process that submits many jobs warns once of each folder.
@functools.cache
def _warn_of(path: Path, folder: Path) -> None:
    log.warning(
        "%s: its group can write to it, and so replace %s; jobs refuse a folder that is not yours, but they fail"
        " then; `chmod g-w %s`, or --folder names a folder elsewhere",
        path,
        folder,
        path,
    )


def not_writable(folder: Path, error: OSError) -> UsageError:
    """One message for every way in which a folder cannot be written."""
    return UsageError(f"{folder}: cannot be written ({error.strerror}); --folder names a folder that can")
