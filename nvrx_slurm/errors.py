"""Every error that the tool itself raises, in one tree. Each says what was seen, where, and what to do.

    NvrxError                     1   the workload failed, or a part of nvrx-slurm did
    ├── UsageError                2   the command line or the Python call is wrong
    │   ├── ConfigError           2   job.yaml (or the site file, or the environment) is wrong; names file, line, key
    │   ├── MissingProgramError   2   a program the command needs is not installed; names the line to install it
    │   ├── UnsafePath            2   another user could change what a job reads; names the path and the fix
    │   └── SubmissionRefused     2   sbatch said no; carries its reason
    ├── UnreachableError         69   Slurm or the store does not answer
    │   ├── SlurmUnreachable
    │   └── StoreUnreachable
    ├── RefusedByJob              1   the job does not do what a user asked for; says why
    ├── SourceError               1   a source of attribution gave no verdict; says why
    ├── DeliveryError             1   a receiver did not accept a failure's report; says why
    ├── FaultFailed               1   a fault of a flow did not happen; says what stood in its way
    ├── SimulationStuck           1   a simulated history cannot go on, or passed a bound
    ├── UntrustedRecord           1   bytes from outside are not what this job writes; they are set aside
    │   ├── MalformedRecord       1   they cannot be decoded
    │   └── ForgedRecord          1   they are not signed with the job's key
    ├── BatchHostLost            75   Slurm keeps a job RUNNING that has lost its batch host before it began
    ├── FencedError              75   a newer controller has taken over; this one may write no more
    ├── DataLostError             1   the store has lost what it had taken; another controller goes on from the copy
    └── WaitTimeout             124   a bound passed; says what was waited for

The exit code of a command that ends with the error is its `exit_code`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path  # every command loads this module, and `--help` needs no path

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 69
EXIT_RETRY = 75
EXIT_NO_RESTART = 93
EXIT_TIMEOUT = 124
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class NvrxError(Exception):
    """Base of the tree. `str(error)` is one clear message for a person, without a traceback."""

    exit_code = EXIT_FAILED


class UsageError(NvrxError):
    """The command line or the Python call is wrong."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """A configuration value is wrong. `file`, `line` (from 1) and `key` say where, as far as known."""

    def __init__(
        self, message: str, *, file: str | None = None, line: int | None = None, key: str | None = None
    ) -> None:
        self.file, self.line, self.key = file, line, key
        where = ":".join(str(part) for part in (file, line) if part is not None)
        parts = [part for part in (where, key) if part]
        super().__init__(": ".join([*parts, message]))


class MissingProgramError(UsageError):
    """A program that the command needs is not installed."""


class UnsafePath(UsageError):
    """Another user owns a folder or file of a job, or can write to it. `path` is the one that is wrong."""

    def __init__(self, message: str, *, path: Path) -> None:
        self.path = path
        super().__init__(message)


# What a job folder raises whose records cannot be read.
UNREADABLE = (ConfigError, UnsafePath, OSError)


class SubmissionRefused(UsageError):
    """Slurm refused the job; the message carries its reason."""


class UnreachableError(NvrxError):
    """Slurm or the store does not answer."""

    exit_code = EXIT_UNREACHABLE


class SlurmUnreachable(UnreachableError):
    """slurmctld (or slurmdbd) does not answer."""


class StoreUnreachable(UnreachableError):
    """The store does not answer, or refuses this client or its command (`refused`: then waiting does not help)."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class BatchHostLost(NvrxError):
    """Slurm calls a job RUNNING that has lost its batch host before it began; another start may help."""

    exit_code = EXIT_RETRY


class RefusedByJob(NvrxError):
    """A running job does not do what a user asked for; the message says why."""


class SourceError(NvrxError):
    """A source of attribution gave no verdict; the message says why."""


class DeliveryError(NvrxError):
    """A receiver (Slack, an index, a ledger) did not accept a failure's report; the message says why."""


class FaultFailed(NvrxError):
    """A fault that a flow asks for did not happen; the message says what stood in its way."""


class SimulationStuck(NvrxError):
    """A simulated history cannot go on, or passed a bound; the message says who waits where."""


class UntrustedRecord(NvrxError):
    """Bytes from outside this process are not what this job writes; their reader sets them aside and goes on."""


class MalformedRecord(UntrustedRecord):
    """They cannot be decoded; the message names what they should have been."""


class ForgedRecord(UntrustedRecord):
    """They are not signed with the job's key, or were copied from another place."""


class FencedError(NvrxError):
    """A newer controller has taken over; this one may write no more."""

    exit_code = EXIT_RETRY


class DataLostError(NvrxError):
    """The store has lost what it had taken, as one does that restarts without its data. A controller that starts now
    goes on from the journal's copy in the job folder."""


class WaitTimeout(NvrxError):
    """A bound passed; the message says what was waited for."""

    exit_code = EXIT_TIMEOUT
