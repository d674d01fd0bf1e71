"""Ends all that an attempt still holds: what whoever comes after one that was interrupted or killed does.

Jobs are asked to end, with some patience; then what is left is killed. Each step is bounded, none relies on another,
and what has ended already is fine: it may all be done again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from nvrx_slurm.cluster.base import folder_name
from nvrx_slurm.cluster.local import LocalCluster
from nvrx_slurm.errors import NvrxError, WaitTimeout
from nvrx_slurm.journal.folder import JobFolder, clear_runtime_folders
from nvrx_slurm.lab import devcluster as dev
from nvrx_slurm.lab.devcluster import processes
from nvrx_slurm.lab.devcluster.processes import Table
from nvrx_slurm.lab.devcluster.waiting import wait_until
from nvrx_slurm.lab.flow.running.hold import (
    MARK,
    HeldCluster,
    HeldJob,
    HeldProcess,
    HeldQueue,
    Hold,
    standing,
)
from nvrx_slurm.lab.flow.running.queue import OwnJobs
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.log import get_logger

log = get_logger("ci")


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
