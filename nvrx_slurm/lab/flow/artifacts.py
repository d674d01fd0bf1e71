"""Where a run of flows keeps its files. An attempt that passed leaves none; of the others all is kept.

<artifacts>/                    default: nvrx-ci/<time>
  lease                         touched, and locked, while the run lives; its jobs end without that
  guard.log                     what the guard did, if the run was killed
  <flow>/attempt-<n>/
    attempt.json                what to run (AttemptSpec)
    attempt.log                 the log of the attempt's process; its stacks, if it hung
    held.jsonl                  what it has started (cleanup.py)
    jobs/<job id>/              the job's folder: journal, logs, result
    diagnosis/                  stacks, Slurm's answers, ends of logs: where a bound passed or something was not met
    outcome.json                how it went (outcome.FlowAttempt)
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
from datetime import datetime
from pathlib import Path

import msgspec

from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.records import Record
from nvrx_slurm.lab.flow.model import StageName
from nvrx_slurm.lab.flow.outcome import FlowAttempt, to_json
from nvrx_slurm.util.files import write_private

DEFAULT_BASE = Path("nvrx-ci")
LEASE = "lease"
GUARD_LOG = "guard.log"
RUN_FILES = (LEASE, GUARD_LOG)
LOG_TAIL_LINES = 30

# How long jobs outlive a run that was killed together with its guard.
LEASE_S = 10.0


class AttemptSpec(Record, frozen=True, kw_only=True):
    """One attempt: a flow file, where it runs, the lease that its job gets, and the process that it dies with.
    `notices_fd`: the inherited descriptor of what the run's user watches."""

    flow: str
    stage: StageName
    number: int
    lease: str
    parent: int
    notices_fd: int | None = None


class AttemptFolder:
    """The files of one attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec_path = path / "attempt.json"
        self.log_path = path / "attempt.log"
        self.diagnosis = path / "diagnosis"
        self._outcome_path = path / "outcome.json"

    def create(self, spec: AttemptSpec) -> None:
        """Make the folder. Raises OSError."""
        self.path.mkdir(mode=0o700, parents=True)
        write_private(self.spec_path, msgspec.json.encode(spec))

    def read_spec(self) -> AttemptSpec:
        return msgspec.json.decode(self.spec_path.read_bytes(), type=AttemptSpec)

    def write_outcome(self, attempt: FlowAttempt) -> None:
        write_private(self._outcome_path, to_json(attempt))

    def read_outcome(self) -> FlowAttempt | None:
        """None: the attempt's process did not get that far."""
        try:
            return msgspec.json.decode(self._outcome_path.read_bytes(), type=FlowAttempt)
        except FileNotFoundError:
            return None

    def log_tail(self) -> tuple[str, ...]:
        """The end of its log."""
        with contextlib.suppress(OSError):
            return tuple(self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        return ()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class Artifacts:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.lease = self.path / LEASE

    def create(self) -> None:
        """Make the folder and the lease. Raises UsageError: it cannot be written, or holds another run."""
        try:
            str(self.path).encode()
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(self.path.glob("*/attempt-*")):  # of a run that has ended, and left what did not pass
                raise FileExistsError
            # `x`: of two runs that begin at once in one folder, one fails. The lock is held until this process ends,
            # however it ends: `check_over` sees by it whether the run goes on.
            self._lock = self.lease.open("x")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            print(os.getpid(), file=self._lock, flush=True)
        except FileExistsError:
            what = "holds another run already" if self.path.is_dir() else "is no folder"
            raise UsageError(f"--artifacts {self.path}: {what}; name another folder") from None
        except OSError as error:
            raise UsageError(f"--artifacts {self.path}: cannot be written: {error.strerror}") from None
        except UnicodeEncodeError:
            raise UsageError(f"--artifacts {self.path}: is not UTF-8, and no result can hold it") from None

    def attempt(self, flow: str, number: int) -> AttemptFolder:
        return AttemptFolder(self.path / flow / f"attempt-{number}")

    def sweep(self) -> None:
        """Remove the lease, and every folder that is empty by now."""
        self._lock.close()
        self.lease.unlink(missing_ok=True)
        for folder in (*self.path.glob("*/"), self.path):
            with contextlib.suppress(OSError):  # something is kept there
                folder.rmdir()


def check_over(folder: Path) -> None:
    """Raises UsageError if the run of this artifacts folder goes on; one that is not there does not."""
    with contextlib.suppress(FileNotFoundError), (folder / LEASE).open() as lease:
        try:
            fcntl.flock(lease, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"{folder}: its run goes on; to end it: kill {lease.read().strip()}"
            raise UsageError(message) from None


def default_folder(wall: float) -> Path:
    """`nvrx-ci/20261121-153012`; with `-2` behind it where another run began in that second."""
    path = second = DEFAULT_BASE / f"{datetime.fromtimestamp(wall):%Y%m%d-%H%M%S}"
    for number in itertools.count(2):
        try:
            path.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            path = second.with_name(f"{second.name}-{number}")
        except OSError:  # `create` says why
            break
        else:
            break
    return path
