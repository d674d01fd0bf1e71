"""Slurm: jobs are handed to sbatch, and asked about with squeue, then sacct; all of them in one call each.

What Slurm cannot say now it may say in a second: a question without an answer is asked again, with growing pauses,
and each time one line on stderr says so.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from nvrx_slurm.cluster.base import SCRIPT_NAME, not_writable, prepare_folder
from nvrx_slurm.cluster.commands import Output, Runner, SystemRunner
from nvrx_slurm.cluster.slurm_text import (
    ALREADY_OVER,
    NO_ACCOUNTING,
    NOT_SET_UP,
    UNKNOWN_JOB,
    is_without_answer,
    reason_of,
    split_job_id,
    states_of,
    submitted_by_script,
    submitted_id,
    version_of,
)
from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.errors import (
    MissingProgramError,
    NvrxError,
    SlurmUnreachable,
    SubmissionRefused,
    UsageError,
)
from nvrx_slurm.folder import JobFolder
from nvrx_slurm.ids import new_incarnation
from nvrx_slurm.log import get_logger

log = get_logger("slurm")

PATIENCE_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
COMMAND_TIMEOUT_S = 60.0
"""A site may set MessageTimeout, which Slurm's programs wait for an answer, to most of a minute."""

RELIABLE_SINCE = (23, 2, 3)
_T = TypeVar("_T")


class SlurmCluster:
    """The site's Slurm, or a development cluster through `SystemRunner(cluster.environment())`.

    `patience_s`: for how long a question that gets no answer is asked again before SlurmUnreachable.
    """

    def __init__(self, runner: Runner | None = None, *, patience_s: float = PATIENCE_S) -> None:
        self._runner = runner or SystemRunner()
        self._patience_s = patience_s

    # ---- submission

    def submit(self, script: str, *, folder: Path, name: str) -> str:
        """See `Cluster.submit`. The script is kept in the job folder. Warns where Slurm is too old to be trusted."""
        is_new = prepare_folder(folder)
        path = folder.absolute() / f"submission-{new_incarnation()}.sh"
        try:
            _write(path, script)
            job_id = self._sbatch(path, name)
        except BaseException:
            path.unlink(missing_ok=True)
            if is_new:
                with contextlib.suppress(OSError):  # somebody else uses it by now
                    folder.rmdir()
            raise
        self._keep(path, JobFolder(folder / folder_name(job_id)))
        self._warn_if_old()
        return job_id

    def _sbatch(self, path: Path, name: str) -> str:
        def first() -> str:
            return _accepted(self._run("sbatch", "--parsable", str(path)), name)

        def again() -> str:
            # A submission that timed out may have been accepted all the same: only squeue can tell.
            return self._submitted_as(path) or first()

        return self._patiently(first, again)

    def _submitted_as(self, path: Path) -> str | None:
        listing = self._run("squeue", "--noheader", "--me", "--states=all", "--format=%i|%o")
        return submitted_by_script(listing.stdout, str(path))

    def _keep(self, path: Path, job: JobFolder) -> None:
        try:
            job.create()
            path.replace(job.path / SCRIPT_NAME)
        except OSError as error:  # the job is submitted: too late for an error
            log.warning("%s: the script could not be kept there (%s)", job.path, error.strerror)

    def _warn_if_old(self) -> None:
        with contextlib.suppress(SlurmUnreachable):  # the job is submitted: too late for an error
            self._warn(version_of(self._run("sbatch", "--version").stdout))

    def _warn(self, version: tuple[int, int, int] | None) -> None:
        if version is not None and version < RELIABLE_SINCE:
            log.warning(
                "this is Slurm %d.%02d.%d: before 23.02.3, steps that start after a node was lost are not reliable",
                *version,
            )

    # ---- jobs

    def states(self, job_ids: Sequence[str]) -> Mapping[str, JobState]:
        """See `Cluster.states`: what squeue knows, else what sacct knows. Raises UsageError for what is no job id."""
        found = dict.fromkeys(job_ids, JobState.UNKNOWN)
        for cluster, numbers in _by_cluster(job_ids).items():
            known = self._squeue_states(cluster, list(numbers))
            absent = [number for number in numbers if known.get(number, JobState.UNKNOWN) is JobState.UNKNOWN]
            if absent:
                known |= self._sacct_states(cluster, absent)
            found |= {job_id: known[number] for number, job_id in numbers.items() if number in known}
        return found

    def cancel(self, job_id: str) -> None:
        """See `Cluster.cancel`."""
        number, cluster = split_job_id(job_id)
        output = self._ask("scancel", *_on(cluster), number)
        if UNKNOWN_JOB in output.stderr:
            raise UsageError(f"Slurm knows no job {job_id}")
        if not output.ok and ALREADY_OVER not in output.stderr:
            raise NvrxError(f"job {job_id} was not cancelled: {reason_of(output)}")

    def nodes(self, job_id: str) -> tuple[str, ...]:
        """See `Cluster.nodes`. A job that squeue no longer lists has none."""
        number, cluster = split_job_id(job_id)
        listing = self._ask(
            "squeue", *_on(cluster), "--noheader", "--states=all", f"--jobs={number}", "--format=|%N"
        )
        compressed = next((line[1:].strip() for line in listing.stdout.splitlines() if line.startswith("|")), "")
        if not compressed:
            return ()
        return tuple(self._ask("scontrol", "show", "hostnames", compressed).stdout.split())

    def _squeue_states(self, cluster: str | None, numbers: list[str]) -> dict[str, JobState]:
        jobs = f"--jobs={','.join(numbers)}"
        listing = self._ask(
            "squeue", *_on(cluster), "--noheader", "--array", "--states=all", jobs, "--format=%i|%T"
        )
        return states_of(listing.stdout, numbers)  # it fails where one job was asked for that it does not know

    def _sacct_states(self, cluster: str | None, numbers: list[str]) -> dict[str, JobState]:
        """Without accounting there is no answer; that hides none of squeue's."""
        jobs = f"--jobs={','.join(numbers)}"
        try:
            listing = self._ask(
                "sacct", *_on(cluster), "--noheader", "--parsable2", "--allocations", jobs, "--format=JobID,State"
            )
        except (SlurmUnreachable, MissingProgramError) as error:
            log.warning("%s", error)
            return {}
        if not listing.ok and NO_ACCOUNTING not in listing.stderr:
            log.debug("sacct: %s", reason_of(listing))
        return states_of(listing.stdout, numbers)

    # ---- commands

    def _ask(self, *command: str) -> Output:
        return self._patiently(lambda: self._run(*command))

    def _run(self, *command: str) -> Output:
        """One attempt. Raises MissingProgramError, SlurmUnreachable."""
        program = command[0]
        try:
            output = self._runner(command, timeout_s=COMMAND_TIMEOUT_S)
        except FileNotFoundError:
            raise MissingProgramError(
                f"{program} is not on PATH: there is no Slurm here. `nvrx-slurm run` runs a job without one,"
                " and `nvrx-slurm cluster up` starts one on this machine"
            ) from None
        if NOT_SET_UP in output.stderr:
            raise _NotSetUp(
                f"{program} finds no Slurm: neither SLURM_CONF nor this machine's own configuration names one."
                ' For a development cluster: nvrx-slurm cluster up, then eval "$(nvrx-slurm cluster env)"'
            )
        if is_without_answer(output):
            raise SlurmUnreachable(f"Slurm does not answer {program}: {reason_of(output)}")
        return output

    def _patiently(self, first: Callable[[], _T], again: Callable[[], _T] | None = None) -> _T:
        """`first`, and when Slurm does not answer, `again` until it does or the patience is spent."""
        try:
            return first()
        except SlurmUnreachable as error:
            if self._patience_s <= 0 or not _is_worth_another_attempt(error):
                raise
            log.warning("%s; trying again for %g s", error, self._patience_s)
        return self._retry(again or first)

    def _retry(self, ask: Callable[[], _T]) -> _T:
        import stamina  # only now: it costs as much as all of click, and Slurm nearly always answers

        logging.getLogger("stamina").addHandler(logging.NullHandler())  # the one line is ours
        attempts = stamina.retry_context(
            on=_is_worth_another_attempt,
            attempts=None,
            timeout=self._patience_s,
            wait_initial=FIRST_PAUSE_S,
            wait_max=LONGEST_PAUSE_S,
        )
        for attempt in attempts:
            with attempt:
                return ask()
        raise AssertionError("the last attempt returns or raises")


class _NotSetUp(SlurmUnreachable):
    """There is no Slurm to answer, and will be none in a second."""


def _is_worth_another_attempt(error: Exception) -> bool:
    return isinstance(error, SlurmUnreachable) and not isinstance(error, _NotSetUp)


def folder_name(job_id: str) -> str:
    """What a job's folder is called: its id, as Slurm tells the job itself, hence without a cluster's name."""
    return job_id.partition(";")[0]


def _write(path: Path, script: str) -> None:
    try:
        path.touch(mode=0o600)
        path.write_text(script)
    except OSError as error:
        raise not_writable(path.parent, error) from error


def _accepted(output: Output, name: str) -> str:
    job_id = submitted_id(output.stdout) if output.ok else None
    if job_id is None:
        raise SubmissionRefused(f"Slurm refused job {name!r}: {reason_of(output)}")
    return job_id


def _on(cluster: str | None) -> list[str]:
    return [f"--clusters={cluster}"] if cluster else []


def _by_cluster(job_ids: Sequence[str]) -> dict[str | None, dict[str, str]]:
    """cluster → number → job id: one call for each cluster."""
    found: dict[str | None, dict[str, str]] = {}
    for job_id in job_ids:
        number, cluster = split_job_id(job_id)
        found.setdefault(cluster, {})[number] = job_id
    return found
