"""Slurm: jobs are handed to sbatch, and asked about with squeue, then sacct; all of them in one call each.

A job id is `123`, `123_4` (an array's element), `123+0` (a component of a heterogeneous job), or any of them with
`;cluster` behind it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from nvrx_slurm.cluster.base import SCRIPT_NAME, folder_name, prepare_folder
from nvrx_slurm.cluster.commands import PATIENCE_S, CommandOutput, Runner, SlurmPrograms, SystemRunner
from nvrx_slurm.cluster.slurm_text import (
    NO_ACCOUNTING,
    RELIABLE_SINCE,
    UNKNOWN_JOB,
    by_cluster,
    flags_of,
    listed_states,
    on_cluster,
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
    UnsafePath,
    UsageError,
)
from nvrx_slurm.jobspec import env
from nvrx_slurm.journal.job_index import record_job
from nvrx_slurm.util.files import CLUSTER, JobFiles
from nvrx_slurm.util.ids import new_incarnation
from nvrx_slurm.util.log import get_logger

log = get_logger("slurm")


class SlurmCluster:
    """The site's Slurm, or a development cluster through `SystemRunner(cluster.environment())`.

    `patience_s`: for how long a question that gets no answer is asked again before SlurmUnreachable.
    """

    def __init__(self, runner: Runner | None = None, *, patience_s: float = PATIENCE_S) -> None:
        self._programs = SlurmPrograms(runner or SystemRunner(), patience_s)

    # ---- submission

    def submit(self, script: str, *, folder: Path, name: str) -> str:
        """See `Cluster.submit`. The script is kept in the job folder. Warns where Slurm is too old to be trusted."""
        is_new = prepare_folder(folder)
        try:
            with _written(script) as path:

                def first() -> str:
                    output = self._programs.run("sbatch", "--parsable", str(path))
                    job_id = submitted_id(output.stdout) if output.ok else None
                    if job_id is None:
                        raise SubmissionRefused(f"Slurm refused job {name!r}: {output.reason}")
                    return job_id

                def again() -> str:
                    # A submission that timed out may have been accepted all the same: only squeue knows. It is asked
                    # for %F, as sbatch prints it: %i of an array that waits is `43_[0-7]`, which is no job id.
                    clusters = on_cluster(flags_of(script).get("clusters") or env.get("SBATCH_CLUSTERS"))
                    mine = ("--noheader", "--me", "--states=all", "--format=%F|%o")
                    listing = self._programs.run("squeue", *clusters, *mine)
                    return submitted_by_script(listing.stdout, str(path)) or first()

                job_id = self._programs.patiently(first, again)
        except BaseException:
            if is_new:
                with contextlib.suppress(OSError):  # another submission uses it by now
                    folder.rmdir()
            raise
        # From here on the job is submitted: too late for an error.
        job = JobFiles(folder / folder_name(job_id))
        try:
            job.create()
            # The cluster first: as soon as the script is there, others take the folder for a job.
            if cluster := split_job_id(job_id)[1]:
                job.write(CLUSTER, cluster.encode())
            else:  # of an earlier job with this number
                job.remove(CLUSTER)
            job.write(SCRIPT_NAME, script.encode())
        except (OSError, UnsafePath) as error:
            log.warning("%s: the script could not be kept there (%s)", job.path, error)
        record_job(job.path)
        with contextlib.suppress(SlurmUnreachable):
            # `run`, not `ask`: no submitter waits half a minute for the sake of a warning.
            version = version_of(self._programs.run("sbatch", "--version").stdout)
            if version is not None and version < RELIABLE_SINCE:
                log.warning(
                    "this is Slurm %d.%02d.%d: before 23.02.3, steps started after a node loss are not reliable",
                    *version,
                )
        return job_id

    # ---- jobs

    def states(self, job_ids: Sequence[str]) -> Mapping[str, JobState]:
        """See `Cluster.states`: what squeue knows, else what sacct knows. Raises UsageError for what is no job id."""
        found = dict.fromkeys(job_ids, JobState.UNKNOWN)
        for cluster, numbers in by_cluster(job_ids).items():
            jobs = f"--jobs={','.join(numbers)}"
            listing = self._squeue(cluster, "--array", jobs, "--format=%i|%T")
            if not listing.ok and UNKNOWN_JOB not in listing.stderr:  # so it fails where it knows none of the jobs
                raise NvrxError(f"squeue does not know the state of {', '.join(numbers)}: {listing.reason}")
            listed = listed_states(listing.stdout)
            rows = {job_id: state for job_id, state in listed.items() if state is not JobState.UNKNOWN}
            known = states_of(rows, numbers)
            # squeue forgets a job MinJobAge after its end, and each element of an array after its own; the accounting
            # keeps them. Only for these: of a requeued job the accounts go on to show how the run before has ended.
            # Not listed, or an array of which elements are listed that have all ended: there may be more.
            absent = [
                number
                for number in numbers
                if (state := known.get(number)) is None or (state.terminal and number not in rows)
            ]
            if absent:
                known |= states_of(self._sacct_states(cluster, absent) | rows, absent)
            found |= {job_id: known[number] for number, job_id in numbers.items() if number in known}
        return found

    def elements(self, job_id: str) -> Mapping[str, JobState]:
        """The tasks of a job array that Slurm still lists, by their ids without cluster. Raises SlurmUnreachable."""
        number, cluster = split_job_id(job_id)
        rows = listed_states(self._squeue(cluster, "--array", f"--jobs={number}", "--format=%i|%T").stdout)
        return {job_id: state for job_id, state in rows.items() if job_id.startswith(f"{number}_")}

    def cancel(self, job_id: str) -> None:
        """See `Cluster.cancel`."""
        # scancel succeeds without a word where it knows no such job.
        state = self.states([job_id])[job_id]
        if state is JobState.UNKNOWN:
            raise UsageError(f"Slurm knows no job {job_id}")
        if state.terminal:
            return
        number, cluster = split_job_id(job_id)
        output = self._programs.ask("scancel", *on_cluster(cluster), number)
        if not output.ok:
            raise NvrxError(f"job {job_id} was not cancelled: {output.reason}")

    def nodes(self, job_id: str) -> tuple[str, ...]:
        """See `Cluster.nodes`. A job that squeue no longer lists has none."""
        return self._batch_host_and_nodes(job_id)[1]

    def lost_batch_host(self, job_id: str) -> str | None:
        """The batch host of a running job, if Slurm has taken that node from the job: `--no-kill` keeps the job
        RUNNING then, without its script. Raises SlurmUnreachable."""
        host, nodes = self._batch_host_and_nodes(job_id)
        return host if nodes and host not in nodes else None

    def _batch_host_and_nodes(self, job_id: str) -> tuple[str, tuple[str, ...]]:
        number, cluster = split_job_id(job_id)
        # The bar in front tells these lines from the headline that `--clusters` adds.
        listing = self._squeue(cluster, f"--jobs={number}", "--format=|%B|%N")
        found = (line.split("|") for line in listing.stdout.splitlines() if line.startswith("|"))
        _, host, compressed = next(found, ("", "", ""))
        if not compressed.strip():
            return host, ()
        return host, tuple(self._programs.ask("scontrol", "show", "hostnames", compressed.strip()).stdout.split())

    def _squeue(self, cluster: str | None, *flags: str) -> CommandOutput:
        return self._programs.ask("squeue", *on_cluster(cluster), "--noheader", "--states=all", *flags)

    def _sacct_states(self, cluster: str | None, numbers: list[str]) -> dict[str, JobState]:
        """Without accounting there is no answer; that hides none of squeue's."""
        jobs = f"--jobs={','.join(numbers)}"
        try:
            listing = self._programs.ask(
                "sacct",
                *on_cluster(cluster),
                "--noheader",
                "--parsable2",
                "--allocations",
                jobs,
                "--format=JobID,State",
            )
        except (SlurmUnreachable, MissingProgramError) as error:
            log.warning("%s", error)
            return {}
        if not listing.ok and NO_ACCOUNTING not in listing.stderr:
            log.debug("sacct: %s", listing.reason)
        return listed_states(listing.stdout)


@contextlib.contextmanager
def _written(script: str) -> Iterator[Path]:
    """The script as a file, for as long as sbatch needs it. Its folder is this user's alone (0700), in $TMPDIR or
    else in /tmp: sbatch opens the path, and no other user may put a script of his there."""
    folder = Path(env.get("TMPDIR") or "/tmp") / f"nvrx-slurm-{new_incarnation()}"
    path = folder / "submission.sh"
    try:
        try:
            folder.mkdir(mode=0o700)  # it must be new
            path.write_bytes(script.encode())
        except OSError as error:
            message = f"{folder}: cannot be written ({error.strerror}); TMPDIR names a folder for temporary files"
            raise UsageError(message) from error
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            folder.rmdir()
