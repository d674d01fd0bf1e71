"""What an attempt has started and must not leave behind (`held.jsonl` in its folder), and how all of it is ended.

A line is on the disk when the call that writes it returns: after an attempt that was killed, the next process knows
what to end. Jobs are asked to end, with some patience; then the rest is killed. Each step is bounded and independent
of the others, and all of it may run again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from nvrx_slurm.cluster.base import folder_name
from nvrx_slurm.cluster.commands import SystemRunner
from nvrx_slurm.cluster.local import LocalCluster
from nvrx_slurm.errors import NvrxError, SlurmUnreachable, WaitTimeout
from nvrx_slurm.journal.folder import JobFolder, clear_runtime_folders
from nvrx_slurm.journal.records import Record
from nvrx_slurm.lab import devcluster as dev
from nvrx_slurm.lab.devcluster import processes
from nvrx_slurm.lab.devcluster.processes import Identity, Table, identify, wait_until
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.files import write_all
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.ownership import read_owned

if TYPE_CHECKING:
    from nvrx_slurm.api.handle import Job


log = get_logger("ci")

HELD = "held.jsonl"
# In the environment of an attempt and of all that it starts on this machine: its folder.
MARK = "NVRX_CI_ATTEMPT"


class HeldCluster(Record, frozen=True, kw_only=True, tag_field="held", tag="cluster"):
    """A development cluster; its jobs go with it."""

    name: str


class HeldQueue(Record, frozen=True, kw_only=True, tag_field="held", tag="queue"):
    """Jobs may be submitted to this Slurm, with scripts that lie in the attempt's folder. `environment`: what Slurm's
    programs need, to find it."""

    environment: dict[str, str]


class HeldJob(Record, frozen=True, kw_only=True, tag_field="held", tag="job"):
    """A job that was submitted."""

    job_id: str
    base: str  # its folder is `<base>/<job id>`
    cluster: Literal["slurm", "local"]


class HeldProcess(Record, frozen=True, kw_only=True, tag_field="held", tag="process"):
    """A process of this machine, with all below it: the attempt itself, or what holds a disk or a network."""

    process: Identity


class HeldNothing(Record, frozen=True, kw_only=True, tag_field="held", tag="nothing"):
    """All of the lines above has ended."""


Held = HeldCluster | HeldQueue | HeldJob | HeldProcess | HeldNothing
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_decoder: msgspec.json.Decoder[Held] = msgspec.json.Decoder(Held)


class CleanupList:
    """One attempt's list, and the only writer of it. Every method raises OSError where the disk is full."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / HELD, _FLAGS, 0o600)

    def cluster(self, name: str) -> None:
        """A development cluster is about to be brought up."""
        self._write(HeldCluster(name=name))

    def queue(self, environment: Mapping[str, str]) -> None:
        """A job is about to be submitted to this Slurm: it may accept the job and never answer with its id."""
        self._write(HeldQueue(environment=dict(environment)))

    def job(self, job: Job) -> None:
        """A job was submitted."""
        self._write(HeldJob(job_id=job.job_id, base=str(job.folder.parent), cluster=job.cluster))

    def process(self, pid: int) -> None:
        """This process, and all below it, must end; one that has ended is fine."""
        if (process := identify(pid)) is not None:
            self._write(HeldProcess(process=process))

    def nothing(self) -> None:
        """All has ended."""
        self._write(HeldNothing())

    def close(self) -> None:
        os.close(self._file)

    def _write(self, held: Held) -> None:
        write_all(self._file, msgspec.json.encode(held) + b"\n")
        os.fsync(self._file)


def standing(folder: Path) -> list[Held]:
    """What the attempt of this folder still holds, oldest first. A torn last line was not yet true.

    Raises UnsafePath: another user could have written it, and it names processes to kill and clusters to take down.
    """
    found: list[Held] = []
    with contextlib.suppress(FileNotFoundError):
        for line in read_owned(folder / HELD).splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                held = _decoder.decode(line)
                # The list only grows: a line may be torn, and is never changed.
                found = [] if isinstance(held, HeldNothing) else [*found, held]
    return found


ANSWER_S = 5.0
# How long Slurm may take to forget a job whose processes were killed.
KILLED_S = 5.0


def end_jobs(
    folder: Path, environment: Mapping[str, str], job_ids: Collection[str], patience_s: float, clock: Clock
) -> None:
    """Cancel the jobs of one attempt, and kill those that have not ended in time. `environment`: what Slurm's
    programs need; none of them is waited for longer than ANSWER_S.

    Raises WaitTimeout, SlurmUnreachable, FileNotFoundError.
    """
    run = SystemRunner(environment)

    def ask(*command: str) -> str:
        output = run(command, timeout_s=ANSWER_S)
        if not output.ok:
            raise SlurmUnreachable(f"{command[0]} failed: {output.reason}")
        return output.stdout

    def unfinished() -> list[str]:
        """Those that wait, run or complete."""
        found = []
        for line in ask("squeue", "--noheader", "--me", "--format=%i|%o").splitlines():
            job_id, _, script = line.strip().partition("|")
            # A job whose id never reached the attempt is known by its script.
            if job_id in job_ids or Path(script).is_relative_to(folder):
                found.append(job_id)
        return found

    for flags, timeout_s in (((), patience_s), (("--full", "--signal=KILL"), KILLED_S)):
        # At first they are asked; the second time `--full` signals the batch script and every step.
        if left := unfinished():
            log.info("scancel %s", " ".join([*flags, *left]))
            ask("scancel", *flags, *left)
        try:
            what = f"jobs of {folder} to leave the queue"
            wait_until(lambda: not unfinished(), timeout_s=timeout_s, what=what, clock=clock)
        except WaitTimeout:
            if flags:
                raise
        else:
            return


def clean_up(folder: Path, patience_s: float) -> list[str]:
    """End what the attempt of this folder still holds; returns what could not be ended, as text. Its jobs get
    `patience_s` to end by themselves; those of a development cluster none, since the cluster is removed with them."""
    clock, held = SystemClock(), standing(folder)
    jobs = [each for each in held if isinstance(each, HeldJob)]

    def lives(job: HeldJob) -> bool:
        info = JobFolder(Path(job.base) / job.job_id).read_info() if job.cluster == "local" else None
        return info is not None and info.host_lives()

    def end_local_jobs() -> None:
        alive = [job for job in jobs if lives(job)]
        for job in alive:
            LocalCluster(Path(job.base)).cancel(job.job_id)
        try:
            what = "local jobs to end"
            wait_until(lambda: not any(map(lives, alive)), timeout_s=patience_s, what=what, clock=clock)
        # Not a problem yet: `kill_processes` ends them, as a later step.
        except WaitTimeout as error:
            log.info("%s; killing them", error)

    def members(table: Table) -> set[int]:
        """All of the attempt that runs on this machine, this process aside."""
        # By environment, since what a job detaches has other parents; and by descent, since a process may clear its
        # environment. Any user can write such an environment, so only own processes count.
        roots = processes.marked(table, MARK, str(folder))
        started = [each.process for each in held if isinstance(each, HeldProcess)]
        return processes.descendants(table, roots | {each.pid for each in started if processes.lives(each, table)})

    def remove(name: str) -> None:
        if name in dev.names():
            dev.remove(name, clock=clock)

    def kill_processes() -> None:
        if killed := processes.kill(members, clock):
            log.info("%s: killed %s", folder, ", ".join(map(str, sorted(killed))))

    def clear_folders() -> None:
        known = {Path(job.base) / folder_name(job.job_id) for job in jobs}
        for path in known.union((folder / "jobs").glob("*/")):
            clear_runtime_folders(JobFolder(path))

    # Jobs first, while their cluster still runs, and with patience: a job that ends by itself clears up after itself.
    # Then clusters, then the processes that are left, and at last the folders that killed ones could not clear away.
    steps: list[Callable[[], object]] = []
    for each in held:
        if isinstance(each, HeldQueue):
            of_slurm = [job.job_id for job in jobs if job.cluster == "slurm"]
            steps.append(partial(end_jobs, folder, each.environment, of_slurm, patience_s, clock))
    steps.append(end_local_jobs)
    for each in held:
        if isinstance(each, HeldCluster):
            steps.append(partial(remove, each.name))
    steps += [kill_processes, clear_folders]

    problems = []
    for step in steps:  # each may fail, and the others are done all the same
        try:
            step()
        except (NvrxError, OSError) as error:
            log.warning("%s: %s", folder, error)
            problems.append(str(error))
    # With problems the list stays as it is: the next process that cleans up tries all of it again.
    if not problems and held:
        # On a full disk the list stays as well: the next process then finds nothing of it.
        with contextlib.suppress(OSError), contextlib.closing(CleanupList(folder)) as cleanup:
            cleanup.nothing()
    return problems
