"""What Slurm's programs print, as values. Pure: text in, values out; nothing here runs anything.

Only formats that were asked for (`-o`, `--parsable2`) and the words of error messages are read: `--json` changes
between releases.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from nvrx_slurm.cluster.commands import TIMED_OUT, CommandOutput
from nvrx_slurm.cluster.states import JobState, state_of_array, state_of_word
from nvrx_slurm.errors import UsageError

UNKNOWN_JOB = "Invalid job id"
NO_ACCOUNTING = "accounting storage is disabled"

_JOB_ID = re.compile(r"[0-9]+(_[0-9]+|\+[0-9]+)?(;[A-Za-z0-9_.-]+)?")
_SUBMITTED = re.compile(r"^(\d+(?:;\S+)?)$", re.MULTILINE)
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+)", re.MULTILINE)
_PREFIX = re.compile(r"^\w+: (?:error|fatal): ")
_REFUSED = "Batch job submission failed: "

# slurmctld or slurmdbd did not answer; asking again may help. From slurm_errno.c and slurm_protocol_api.c.
_NO_ANSWER = (
    "Unable to contact slurm controller",
    "Unable to contact slurm database",
    "Problem talking to",  # the database
    "can't be reached now",  # a cluster named with -M
    "Protocol authentication error",  # munged is down
    "Socket timed out",
    "Connection refused",
    "Connection reset",
    "Connection timed out",
    "Communication connection failure",
    "Communication shutdown failure",
    "Message receive failure",
    "Message send failure",
    "Zero Bytes were transmitted",
    "Slurm controller not responding",
    "Slurm temporarily unable to accept job",
    "Resource temporarily unavailable",
    "try again in a bit",  # the job's entry in the database is just being made
    "Slurm backup controller in standby mode",
)


def split_job_id(job_id: str) -> tuple[str, str | None]:
    """`123_4;alpha` → `123_4` and the cluster `alpha`; without one, None. Raises UsageError."""
    if not _JOB_ID.fullmatch(job_id):
        raise UsageError(f"{job_id!r} is no Slurm job id: 123, 123_4 (an array's element), 123+0, or 123;cluster")
    number, _, cluster = job_id.partition(";")
    return number, cluster or None


def submitted_id(stdout: str) -> str | None:
    """The job id that `sbatch --parsable` printed: `123`, or `123;cluster`. A site's plugins may print more lines."""
    found = _SUBMITTED.findall(stdout)
    return found[-1] if found else None


def submitted_by_script(stdout: str, script: str) -> str | None:
    """The job that runs this script, of squeue's lines `id|script`."""
    pairs = (line.partition("|") for line in stdout.splitlines())
    return next((job_id.strip() for job_id, _, command in pairs if command.strip() == script), None)


def states_of(stdout: str, job_ids: Iterable[str]) -> dict[str, JobState]:
    """The state of each of these jobs that the lines `id|state` of squeue or sacct name.

    The id of a whole job array stands for all of its elements.
    """
    rows = dict(_rows(stdout))
    elements: dict[str, list[JobState]] = {}
    for listed, state in rows.items():
        elements.setdefault(listed.partition("_")[0], []).append(state)
    found = {}
    for job_id in job_ids:
        if job_id in rows:
            found[job_id] = rows[job_id]
        elif job_id in elements:
            found[job_id] = state_of_array(elements[job_id])
    return found


def _rows(stdout: str) -> Iterable[tuple[str, JobState]]:
    for line in stdout.splitlines():
        listed, bar, word = line.partition("|")
        if bar:  # squeue -M prints a headline for each cluster
            yield listed.strip(), state_of_word(word)


def version_of(stdout: str) -> tuple[int, int, int] | None:
    """`slurm-wlm 22.05.8` → (22, 5, 8)."""
    found = _VERSION.search(stdout)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


def kill_wait_of(stdout: str) -> float | None:
    """The seconds that `scontrol show config` says: `KillWait                = 30 sec`."""
    found = _KILL_WAIT.search(stdout)
    return float(found[1]) if found else None


def is_without_answer(output: CommandOutput) -> bool:
    """Whether the program failed only because the other side did not answer."""
    if output.returncode == TIMED_OUT:
        return True
    return not output.ok and any(words in output.stderr for words in _NO_ANSWER)


def reason_of(output: CommandOutput) -> str:
    """Slurm's own reason, in one line: the summary that sbatch ends with first, then what led to it."""
    lines = [_PREFIX.sub("", line.strip()) for line in output.stderr.splitlines() if line.strip()]
    summary = [line.removeprefix(_REFUSED) for line in lines if line.startswith(_REFUSED)]
    details = [line for line in lines if not line.startswith(_REFUSED)]
    return "; ".join(list(dict.fromkeys(summary + details))) or f"exit code {output.returncode}, and no word why"
