"""What an attempt has started and must not leave behind (`held.jsonl` in its folder), and how all of it is ended.

A line is on the disk when the call that writes it returns: after an attempt that was killed, the next process knows
what to end. Jobs are asked to end, with some patience; then the rest is killed. Each step is bounded and independent
of the others, and all of it may run again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from nvrx_slurm.cluster.base import folder_name
from nvrx_slurm.cluster.commands import SystemRunner
from nvrx_slurm.cluster.local import LocalCluster
from nvrx_slurm.cluster.slurm_text import reason_of
from nvrx_slurm.errors import NvrxError, SlurmUnreachable, WaitTimeout
from nvrx_slurm.journal.folder import JobFolder, clear_runtime_folders
from nvrx_slurm.journal.records import Record
from nvrx_slurm.lab import devcluster as dev
from nvrx_slurm.lab.devcluster import processes
from nvrx_slurm.lab.devcluster.processes import Identity, Table, identify
from nvrx_slurm.lab.devcluster.waiting import wait_until
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.files import write_all
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.ownership import read_owned

if TYPE_CHECKING:
    from nvrx_slurm.api.handle import Job


HELD = "held.jsonl"
MARK = "NVRX_CI_ATTEMPT"
"""In the environment of an attempt and of all that it starts on this machine: its folder."""


class HeldCluster(Record, frozen=True, kw_only=True, tag_field="held", tag="cluster"):
    """A development cluster; its jobs go with it."""

    name: str


class HeldQueue(Record, frozen=True, kw_only=True, tag_field="held", tag="queue"):
    """Jobs may be submitted to this Slurm, with scripts that lie in the attempt's folder."""

    environment: dict[str, str]


class HeldJob(Record, frozen=True, kw_only=True, tag_field="held", tag="job"):
    """A job that was submitted. `environment`: what Slurm's programs need, to find it."""

    job_id: str
    base: str  # its folder is `<base>/<job id>`
    cluster: Literal["slurm", "local"]
    environment: dict[str, str]


class HeldProcess(Record, frozen=True, kw_only=True, tag_field="held", tag="process"):
    """A process of this machine, with all below it: the attempt itself, or what holds a disk or a network."""

    process: Identity


class HeldNothing(Record, frozen=True, kw_only=True, tag_field="held", tag="nothing"):
    """All of the lines above has ended."""


Held = HeldCluster | HeldQueue | HeldJob | HeldProcess | HeldNothing
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_decoder: msgspec.json.Decoder[Held] = msgspec.json.Decoder(Held)


class Hold:
    """One attempt's list, and the only writer of it. Every method raises OSError where the disk is full."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / HELD, _FLAGS, 0o600)

    def cluster(self, name: str) -> None:
        """A development cluster is about to be brought up."""
        self._write(HeldCluster(name=name))

    def queue(self, environment: Mapping[str, str]) -> None:
        """A job is about to be submitted to this Slurm: it may be accepted although its id is never heard."""
        self._write(HeldQueue(environment=dict(environment)))

    def job(self, job: Job, environment: Mapping[str, str]) -> None:
        """A job was submitted."""
        base = str(job.folder.parent)
        self._write(HeldJob(job_id=job.job_id, base=base, cluster=job.cluster, environment=dict(environment)))

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
                found = [] if isinstance(held, HeldNothing) else [*found, held]
    return found


log = get_logger("ci")

ANSWER_S = 5.0
KILLED_S = 5.0
"""How long Slurm may take to forget a job whose processes were killed."""


class OwnJobs:
    """The jobs of one attempt. `environment`: what Slurm's programs need. None is waited for longer than ANSWER_S."""

    def __init__(self, folder: Path, environment: Mapping[str, str], job_ids: Iterable[str], clock: Clock) -> None:
        self._folder, self._job_ids, self._clock = folder, set(job_ids), clock
        self._runner = SystemRunner(environment)

    def unfinished(self) -> list[str]:
        """Those that wait, run or complete. Raises SlurmUnreachable, FileNotFoundError."""
        listing = self._ask("squeue", "--noheader", "--me", "--format=%i|%o").splitlines()
        jobs = (line.strip().partition("|") for line in listing)
        return [job_id for job_id, _, script in jobs if self._is_ours(job_id, script)]

    def end(self, patience_s: float) -> None:
        """Cancel them; kill those that have not ended in time. Raises WaitTimeout, SlurmUnreachable."""
        self._signal()
        try:
            self._wait(patience_s)
        except WaitTimeout:
            self._signal("--full", "--signal=KILL")
            self._wait(KILLED_S)

    def _signal(self, *flags: str) -> None:
        if left := self.unfinished():
            log.info("scancel %s", " ".join([*flags, *left]))
            self._ask("scancel", *flags, *left)

    def _wait(self, timeout_s: float) -> None:
        what = f"jobs of {self._folder} to leave the queue"
        wait_until(lambda: not self.unfinished(), timeout_s=timeout_s, what=what, clock=self._clock)

    def _is_ours(self, job_id: str, script: str) -> bool:
        return job_id in self._job_ids or Path(script).is_relative_to(self._folder)

    def _ask(self, *command: str) -> str:
        output = self._runner(command, timeout_s=ANSWER_S)
        if not output.ok:
            raise SlurmUnreachable(f"{command[0]} failed: {reason_of(output)}")
        return output.stdout


def undo(folder: Path, patience_s: float, clock: Clock | None = None) -> list[str]:
    """End what the attempt of this folder still holds; says what could not be ended. Its jobs get `patience_s` to end
    by themselves; those of a development cluster none, since it goes with all that runs on it."""
    problems = []
    for step in _Undoing(folder, patience_s, clock or SystemClock()).steps():
        try:
            step()
        except (NvrxError, OSError) as error:
            log.warning("%s: %s", folder, error)
            problems.append(str(error))
    if not problems and standing(folder):
        hold = Hold(folder)
        hold.nothing()
        hold.close()
    return problems


class _Undoing:
    """What there is to do for one attempt."""

    def __init__(self, folder: Path, patience_s: float, clock: Clock) -> None:
        held = standing(folder)
        self._folder, self._patience_s, self._clock = folder, patience_s, clock
        self._clusters = [each.name for each in held if isinstance(each, HeldCluster)]
        self._queues = [each.environment for each in held if isinstance(each, HeldQueue)]
        self._jobs = [each for each in held if isinstance(each, HeldJob)]
        self._processes = [each.process for each in held if isinstance(each, HeldProcess)]

    def steps(self) -> Iterator[Callable[[], None]]:
        """Each may raise NvrxError or OSError, and the others are done all the same."""
        for environment in self._queues:
            job_ids = [job.job_id for job in self._jobs if job.cluster == "slurm"]
            jobs = OwnJobs(self._folder, environment, job_ids, self._clock)
            yield partial(jobs.end, self._patience_s)
        yield self._end_local_jobs
        yield from (partial(self._remove, name) for name in self._clusters)
        yield self._kill_processes
        yield self._clear_runtime_folders

    def _end_local_jobs(self) -> None:
        alive = [job for job in self._jobs if _lives(job)]
        for job in alive:
            LocalCluster(Path(job.base)).cancel(job.job_id)
        try:
            what = "local jobs to end"
            wait_until(lambda: not any(map(_lives, alive)), timeout_s=self._patience_s, what=what, clock=self._clock)
        except WaitTimeout as error:
            log.info("%s; killing them", error)

    def _remove(self, cluster: str) -> None:
        if cluster in dev.names():
            dev.remove(cluster, clock=self._clock)

    def _kill_processes(self) -> None:
        killed = processes.kill(self._members, self._clock)
        if killed:
            log.info("%s: killed %s", self._folder, ", ".join(map(str, sorted(killed))))

    def _members(self, table: Table) -> set[int]:
        """All of the attempt that runs on this machine, but whoever asks."""
        said = (pid for pid in table if processes.environment_of(pid).get(MARK) == str(self._folder))
        marked = {pid for pid in said if processes.is_own(pid)}
        held = {process.pid for process in self._processes if processes.lives(process, table)}
        return processes.descendants(table, marked | held)

    def _clear_runtime_folders(self) -> None:
        known = {Path(job.base) / folder_name(job.job_id) for job in self._jobs}
        for path in known.union((self._folder / "jobs").glob("*/")):
            clear_runtime_folders(JobFolder(path))


def _lives(job: HeldJob) -> bool:
    if job.cluster != "local":
        return False
    info = JobFolder(Path(job.base) / job.job_id).read_info()
    return info is not None and info.host_lives()
