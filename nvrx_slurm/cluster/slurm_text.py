"""What Slurm's programs print, and what sbatch reads of a job script, as values. Pure: nothing here runs anything.

Only formats that were asked for (`-o`, `--parsable2`) and the words of error messages are read: `--json` changes
between releases.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

from nvrx_slurm.cluster.states import JobState, state_of_array, state_of_word
from nvrx_slurm.errors import UsageError

UNKNOWN_JOB = "Invalid job id"
NO_ACCOUNTING = "accounting storage is disabled"
# The first Slurm whose later steps are reliable after a node of the allocation was lost.
RELIABLE_SINCE = (23, 2, 3)

_JOB_ID = re.compile(r"[0-9]+(_[0-9]+|\+[0-9]+)?(;[A-Za-z0-9_.-]+)?")
_SUBMITTED = re.compile(r"^(\d+(?:;\S+)?)$", re.MULTILINE)
_FLAG = re.compile(r"#SBATCH --([a-z-]+)(?:=(.*))?")
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
# `SlurmctldHost[0]` is the first of several controllers.
_SETTING = re.compile(r"^(\w+)(?:\[0\])?\s*=\s?(.*)$", re.MULTILINE)
_FIELD = re.compile(r"(\w+)=(\S+)")


def split_job_id(job_id: str) -> tuple[str, str | None]:
    """`123_4;alpha` → `123_4` and the cluster `alpha`; without one, None. Raises UsageError."""
    if not _JOB_ID.fullmatch(job_id):
        raise UsageError(f"{job_id!r} is no Slurm job id: 123, 123_4 (an array's element), 123+0, or 123;cluster")
    number, _, cluster = job_id.partition(";")
    return number, cluster or None


def by_cluster(job_ids: Iterable[str]) -> dict[str | None, dict[str, str]]:
    """Cluster → number → job id: each cluster is asked about all of its jobs in one call. Raises UsageError."""
    found: dict[str | None, dict[str, str]] = {}
    for job_id in job_ids:
        number, cluster = split_job_id(job_id)
        found.setdefault(cluster, {})[number] = job_id
    return found


def on_cluster(cluster: str | None) -> list[str]:
    """The flag of Slurm's programs that names the cluster, if it is not the machine's own."""
    return [f"--clusters={cluster}"] if cluster else []


def submitted_id(stdout: str) -> str | None:
    """The job id that `sbatch --parsable` printed: `123`, or `123;cluster`. A site's plugins may print more lines."""
    found = _SUBMITTED.findall(stdout)
    return found[-1] if found else None


def flags_of(script: str) -> dict[str, str | None]:
    """The flags of a job script, by their names, with their values. sbatch reads them up to the first command."""
    head = itertools.takewhile(lambda line: line.startswith("#") or not line.strip(), script.splitlines())
    return {found[1]: found[2] for line in head if (found := _FLAG.match(line))}


def submitted_by_script(stdout: str, script: str) -> str | None:
    """The job that runs this script, of squeue's lines `id|script`, in sbatch's form: with `;cluster` where squeue
    was asked about clusters, and names each in a headline."""
    cluster = ""
    for line in stdout.splitlines():
        job_id, bar, command = line.partition("|")
        if bar and command.strip() == script:
            return job_id.strip() + cluster
        if line.startswith("CLUSTER: "):
            cluster = f";{line.removeprefix('CLUSTER: ').strip()}"
    return None


def listed_states(stdout: str) -> dict[str, JobState]:
    """What the lines `id|state` of squeue or sacct name."""
    lines = (line.partition("|") for line in stdout.splitlines())
    return {listed.strip(): state_of_word(word) for listed, bar, word in lines if bar}  # -M adds a headline without


def states_of(rows: Mapping[str, JobState], job_ids: Iterable[str]) -> dict[str, JobState]:
    """The state of each of these jobs that squeue or sacct has listed. The id of a whole job array stands for all of
    its elements."""
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


def settings_of(stdout: str) -> dict[str, str]:
    """What `scontrol show config` prints, cgroup.conf's settings at its end included."""
    return {name: value.strip() for name, value in _SETTING.findall(stdout)}


def number_of(settings: Mapping[str, str], name: str) -> float | None:
    """The number of a setting such as `30 sec`; None where it is not shown."""
    found = re.match(r"\d+", settings.get(name, ""))
    return float(found[0]) if found else None


def fields_of(line: str) -> dict[str, str]:
    """The `Name=value` pairs of a line of `scontrol --oneliner show`, up to a job's Command; of a value with spaces
    the first word."""
    # Behind Command stand the words of the user's own sbatch, which may look like fields: `train.sh JobState=x`. Of
    # two with one name the first is Slurm's: others stand in values, such as a comment.
    return dict(reversed(_FIELD.findall(line.partition(" Command=")[0])))


def version_of(stdout: str) -> tuple[int, int, int] | None:
    """`slurm-wlm 22.05.8` → (22, 5, 8)."""
    found = _VERSION.search(stdout)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None
