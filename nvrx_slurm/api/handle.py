"""The handle to a job: how it stands, how it ended, what it said; and finding one that was submitted before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nvrx_slurm.cluster.base import (
    DEFAULT_FOLDER,
    LOCAL_PREFIX,
    Cluster,
    ClusterName,
    check_cluster,
    folder_name,
)
from nvrx_slurm.cluster.ending import EndWatch, OnState, last_known, last_result, read_result
from nvrx_slurm.cluster.slurm import SlurmCluster
from nvrx_slurm.cluster.states import JobState, state_of_result
from nvrx_slurm.cluster.tasks import exit_code_of, tasks_of
from nvrx_slurm.errors import NvrxError, SlurmUnreachable, UsageError, WaitTimeout
from nvrx_slurm.jobspec import env
from nvrx_slurm.journal.folder import LOOPBACK, JobFolder
from nvrx_slurm.util.clock import Clock, SystemClock

if TYPE_CHECKING:
    from nvrx_slurm.api.user_request import UserRequest
    from nvrx_slurm.cluster.watcher import StateWatcher
    from nvrx_slurm.journal.records import Entry
    from nvrx_slurm.report.explanation import Explanation
    from nvrx_slurm.report.goodput import Goodput
    from nvrx_slurm.report.job_report import JobReport, Recoveries
    from nvrx_slurm.report.snapshot import Status

CANCEL_S = 30.0
GONE_PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6)
# How long Slurm may take to complete a job on nodes that answer.
COMPLETES_S = 10.0

_NOT_STARTED = (JobState.PENDING, JobState.CONFIGURING, JobState.REQUEUED)


class Job:
    """A handle to one job, with the manners of submitit's. It holds nothing: make as many as you like.

    Its questions about Slurm jobs go through one watcher for each Slurm, which asks about all of a process's jobs at
    once, and no more often than every 2 s, later 10 s.
    """

    def __init__(
        self, job_id: str, *, folder: Path | str = DEFAULT_FOLDER, cluster: ClusterName, clock: Clock | None = None
    ) -> None:
        check_cluster(cluster)
        self.job_id = job_id
        self.cluster: ClusterName = cluster
        self.folder = Path(folder) / folder_name(job_id)
        """The job's own folder: logs, journal, result."""
        self._clock = clock or SystemClock()

    def __repr__(self) -> str:
        return f"Job({self.job_id!r}, folder={str(self.folder.parent)!r}, cluster={self.cluster!r})"

    def _repr_html_(self) -> str:
        """The job's page, for a notebook: how it stands at this moment."""
        from nvrx_slurm.report.notebook import job_html

        return job_html(self._files)

    @property
    def state(self) -> JobState:
        """Where the job stands. Raises SlurmUnreachable."""
        state = self._cluster_state()
        result = read_result(self._files)
        if result is None:
            state = last_known(self._files, state, self._clock.wall())
            code = exit_code_of(self._files, state)
            return state if code in (None, state.exit_code) else state_of_result(code)
        # The result is of an earlier generation: Slurm has requeued the job, or may yet do so.
        if self.cluster == "slurm":
            result = last_result(self._files, result, lambda: state, self._clock.wall())
        return state if result is None or state in _NOT_STARTED else state_of_result(result.exit_code)

    @property
    def exit_code(self) -> int | None:
        """How the job ended: 0, 1, 75, 93, 124, 130 or 143 (`nvrx_slurm.errors`); None while it lives."""
        result = read_result(self._files)
        if result is None:
            return exit_code_of(self._files, last_known(self._files, self._cluster_state(), self._clock.wall()))
        # Slurm is asked only about results that a requeue may have left.
        if self.cluster == "slurm":
            result = last_result(self._files, result, self._cluster_state, self._clock.wall())
        return None if result is None else result.exit_code

    def done(self) -> bool:
        """Whether the job has ended."""
        return self.exit_code is not None

    def wait(
        self,
        timeout: float | None = None,
        *,
        on_state: OnState | None = None,
        on_pending: Callable[[], None] | None = None,
    ) -> int:
        """Block until the job has ended and return its exit code; `on_state` is called with each change of state,
        `on_pending` at each look while the job is in Slurm's queue.

        `timeout`: seconds, after which WaitTimeout is raised; the job goes on. While slurmctld does not answer, the
        wait goes on. Raises NvrxError where it is not known how the job ended.
        """
        watch = self.end_watch(timeout, on_state, on_pending)
        while (code := watch.look()) is None:
            self._clock.sleep(watch.pause_s())
        return code

    def status(self) -> Status:
        """How the job stands: nodes, ranks, steps, the last failure and decision; what `status JOB --json` prints.

        Reads the job's folder and, while it runs, its store. Raises UsageError for a job that has no folder.
        """
        from nvrx_slurm.report.array_tasks import take_with_tasks
        from nvrx_slurm.report.jobs import find_job
        from nvrx_slurm.report.snapshot import as_status

        base = self.folder.parent
        # `take_with_tasks` takes a job without a folder for pending if Slurm knows it. For a handle that is an error.
        if not tasks_of(base, self.folder.name):
            find_job(base, self.job_id)
        return as_status(take_with_tasks(base, self.job_id))

    def explain(self, *, cycle: int | None = None, replica: str | None = None) -> Explanation:
        """Why the job failed last, or in that cycle, and what was done about it; what `explain JOB --json` prints.

        Raises UsageError where nothing has failed.
        """
        from nvrx_slurm.api.explaining import explain_job

        self._refuse_array()
        return explain_job(self._files, cycle=cycle, replica=replica)[0]

    def report(self) -> JobReport:
        """The job's page: one HTML file that opens offline. In a notebook it shows itself; `report().write(path)`
        keeps it. Raises UsageError for a job that has no folder."""
        from nvrx_slurm.report.job_report import job_report

        return job_report(self._found())

    def goodput(self) -> Goodput:
        """What the time of the job's nodes was spent on, so far: parts that add up. Raises UsageError."""
        from nvrx_slurm.report.job_report import read_job

        self._refuse_array()
        shot, history = read_job(self._found())
        return history.goodput(shot.view, shot.until)

    def recoveries(self) -> Recoveries:
        """Each recovery, oldest first: its cause, its phases, the steps that were lost. Raises UsageError."""
        from nvrx_slurm.report.job_report import Recoveries, read_job

        self._refuse_array()
        shot, _ = read_job(self._found())
        return Recoveries(shot.view.recoveries.values())

    def awaitable(self) -> AwaitableJob:
        """The same for asyncio: `await job.awaitable().wait()`."""
        return AwaitableJob(self)

    def cancel(self) -> None:
        """Ask the job to end, and return at once. One that has ended is left alone. Raises SlurmUnreachable.

        A run inside an allocation is asked from its own host by a signal, and from any other by its store: raises
        StoreUnreachable, and WaitTimeout where its controller does not answer.
        """
        info = self._files.read_info()
        if self.cluster == "local" and info is not None and not info.is_here and info.addr != LOOPBACK:
            if self._files.read_result() is None:
                with self._request() as request:
                    request.cancel(CANCEL_S)
            return
        try:
            self._its_cluster().cancel(self.job_id)
        except UsageError:
            if not self._files.has_end:  # Slurm has forgotten it
                raise
        if self.cluster == "slurm":
            _slurm_watcher().register_job(self.job_id)  # what it knew is old now

    def wait_until_gone(self, timeout: float = 60.0, *, for_slurm: bool = True) -> JobState:
        """Block until nothing of the job runs any more, cleaning up included; returns its state.

        `for_slurm=False`: also return where the job has left its result, and Slurm is still completing it
        `COMPLETES_S` later: for a lost node it does so for a minute and longer. Raises WaitTimeout after `timeout`
        seconds, SlurmUnreachable.
        """
        deadline = self._clock.monotonic() + timeout
        completing_since: float | None = None
        looks = 0
        # Not from the watcher, whose answer may be 10 s old: few jobs are waited for so, and each for a short time.
        while not (state := self._its_cluster().states([self.job_id])[self.job_id]).terminal:
            if state is JobState.UNKNOWN and self._files.has_end:  # Slurm has forgotten it
                break
            if not for_slurm and state is JobState.COMPLETING and read_result(self._files) is not None:
                completing_since = completing_since or self._clock.monotonic()
                if self._clock.monotonic() - completing_since >= COMPLETES_S:
                    break
            pause = GONE_PAUSES_S[min(looks, len(GONE_PAUSES_S) - 1)]
            looks += 1
            if self._clock.monotonic() + pause > deadline:
                raise WaitTimeout(f"job {self.job_id} is still {state} after {timeout:g} s")
            self._clock.sleep(pause)
        result = read_result(self._files)
        if result is None:
            return last_known(self._files, state, self._clock.wall())
        if self.cluster == "slurm":
            result = last_result(self._files, result, lambda: state, self._clock.wall()) or result
        return state_of_result(result.exit_code)

    def nodes(self) -> tuple[str, ...]:
        """The nodes of the allocation, in the order that ranks follow; none before the job starts."""
        info = self._files.read_info()
        return info.nodes if info and info.nodes else self._its_cluster().nodes(self.job_id)

    def events(self, *, follow: bool = False) -> Iterator[Entry]:
        """The journal so far, oldest first; with `follow` also what is still to come, until the job has ended."""
        from nvrx_slurm.report import source

        self._refuse_array()
        return source.follow(self._files) if follow else iter(source.so_far(self._files))

    def logs(
        self,
        *,
        rank: int | None = None,
        cycle: int | None = None,
        replica: str | None = None,
        stream: Literal["out", "err"] = "out",
    ) -> str:
        """What one rank, or all of them, have printed so far, of all cycles or one; without any choice, the job's
        merged log, with both streams.

        Raises UsageError that names the valid ranks, replicas, cycles or streams.
        """
        from nvrx_slurm.report.jobs import read_plan
        from nvrx_slurm.report.logs import STREAMS, Selection, choose, find

        self._refuse_array()
        if stream not in STREAMS:
            raise UsageError(f"stream must be one of {', '.join(STREAMS)}, not {stream!r}")
        if (rank, cycle, replica, stream) == (None, None, None, "out"):
            return _text(self._files.job_log)
        wanted = Selection(replica=replica, rank=rank, cycle=cycle, streams=(stream,))
        chosen = choose(wanted, read_plan(self._files), self._files, may_come=False)
        return "".join(_text(file.path) for file in find(self._files, chosen))

    def dump(
        self, ranks: Collection[int] | None = None, *, replica: str | None = None, timeout: float = 30.0
    ) -> dict[int, str]:
        """Stacks of live workers now, without stopping them: rank → text. A rank that has no worker now is left out.

        Without `ranks`, of all; where several replicas have them, `replica` says of which. Raises UsageError (the job
        does not run; it has no such rank), StoreUnreachable, WaitTimeout after `timeout` seconds.
        """
        from nvrx_slurm.api.stack_request import StackRequest

        request = StackRequest(self._files, ranks=ranks or (), replica=replica, clock=self._clock)
        # The answer has ranks as its keys: of two replicas one would hide the other.
        if len(request.replicas) > 1:
            raise UsageError(f"several replicas have such ranks: choose one of {', '.join(request.replicas)}")
        return {each.rank: each.text for answer in request.answers(timeout) for each in answer.stacks}

    def restart(self, replica: str | None = None, *, timeout: float = 30.0) -> None:
        """Start the workers of the running job again, or of one replica; returns once that is ordered.

        No budget counts it. Raises UsageError (the job does not run; it has no such replica), RefusedByJob with the
        reason, StoreUnreachable, WaitTimeout after `timeout` seconds.
        """
        with self._request() as request:
            request.restart(replica, timeout)

    def drain(self, node: str, *, force: bool = False, timeout: float = 30.0) -> None:
        """Move a node's ranks to a hot spare, and give it none any more. `force`: where no spare is left, go on with
        fewer nodes, down to `min_nodes`. Raises as `restart`."""
        with self._request() as request:
            request.drain(node, timeout, force=force)

    def undrain(self, node: str, *, timeout: float = 30.0) -> None:
        """Let a drained node have ranks again. Raises as `restart`."""
        with self._request() as request:
            request.undrain(node, timeout)

    def _request(self) -> contextlib.closing[UserRequest]:
        from nvrx_slurm.api.user_request import UserRequest

        return contextlib.closing(UserRequest(self._files, clock=self._clock))

    def _refuse_array(self) -> None:
        """Of a whole job array there is neither journal nor log. Raises UsageError, which names one of its tasks."""
        from nvrx_slurm.report.jobs import refuse_array

        refuse_array(self._files)

    def _found(self) -> JobFolder:
        """Its folder, which is there. Raises UsageError."""
        from nvrx_slurm.report.jobs import find_job

        return find_job(self.folder.parent, self.job_id)

    @property
    def _files(self) -> JobFolder:
        return JobFolder(self.folder)

    def _its_cluster(self) -> Cluster:
        return open_cluster(self.cluster, self.folder.parent)

    def _cluster_state(self) -> JobState:
        try:
            return self._seldom_asked_state()
        except SlurmUnreachable:
            # The watcher does not wait for slurmctld, since each wait looks again. This caller looks once.
            return self._its_cluster().states([self.job_id])[self.job_id]  # with patience

    def _seldom_asked_state(self) -> JobState:
        if self.cluster == "slurm":
            return _slurm_watcher().state(self.job_id)
        return self._its_cluster().states([self.job_id])[self.job_id]

    def end_watch(
        self, timeout: float | None, on_state: OnState | None, on_pending: Callable[[], None] | None = None
    ) -> EndWatch:
        """One wait, which the caller drives."""

        def lost_batch_host() -> str | None:
            return SlurmCluster(patience_s=0).lost_batch_host(self.job_id)

        return EndWatch(
            self._files,
            self._seldom_asked_state,
            self._clock,
            timeout_s=timeout,
            on_state=on_state,
            on_pending=on_pending,
            lost_batch_host=lost_batch_host if self.cluster == "slurm" else None,
        )


class AwaitableJob:
    """A job whose end and whose answers can be awaited; the event loop is never blocked."""

    def __init__(self, job: Job) -> None:
        self.job = job

    async def wait(self, timeout: float | None = None) -> int:
        """As `Job.wait`."""
        import asyncio  # only here: it is half of what this module would cost

        watch = self.job.end_watch(timeout, None)
        while (code := await asyncio.to_thread(watch.look)) is None:  # noqa: ASYNC110 - a shared folder sends no event
            await asyncio.sleep(watch.pause_s())
        return code

    async def dump(
        self, ranks: Collection[int] | None = None, *, replica: str | None = None, timeout: float = 30.0
    ) -> dict[int, str]:
        """As `Job.dump`."""
        import asyncio

        return await asyncio.to_thread(self.job.dump, ranks, replica=replica, timeout=timeout)


def open_cluster(name: ClusterName, base: Path) -> Cluster:
    """The port to where jobs of this base folder run."""
    if name == "slurm":
        return SlurmCluster()
    from nvrx_slurm.cluster.local import LocalCluster

    return LocalCluster(base)


def job(job_id: str | None = None, *, folder: Path | str | None = None) -> Job:
    """A handle to a job that was submitted before; without an id, or with `last`, to the newest.

    Without `folder`: that of NVRX_SLURM_FOLDER; else `nvrx-jobs` here, if it holds the job, or wherever the index of
    this user's jobs has it. Raises UsageError, which lists the jobs of the folder.
    """
    from nvrx_slurm.report import jobs as listing

    base = Path(folder) if folder is not None else env.base_folder()
    if job_id is None or (job_id == listing.NEWEST and not os.path.isdir((base or DEFAULT_FOLDER) / job_id)):
        return _handle(listing.newest_job(base))
    if base is None:
        base = listing.base_of(job_id)
    files = listing.named_job(base, job_id)
    # Slurm may have a job that left no folder yet: `sbatch` of a rendered script put it in the queue.
    slurm_knows = False
    if not os.path.isfile(files.plan_path) and job_id[:1].isdigit():
        with contextlib.suppress(NvrxError):
            slurm_knows = SlurmCluster(patience_s=0).states([job_id])[job_id] is not JobState.UNKNOWN
    if not os.path.isfile(files.plan_path) and not slurm_knows:
        files = listing.find_job(base, job_id)
    return _handle(files)


def jobs(*, folder: Path | str | None = None, most: int | None = None) -> list[Job]:
    """This user's jobs, the newest first, `most` of them: those of a folder (or of NVRX_SLURM_FOLDER); without one,
    those of the user's index and of `nvrx-jobs` here."""
    from itertools import islice

    from nvrx_slurm.report.jobs import my_jobs

    found = my_jobs(Path(folder) if folder is not None else env.base_folder())
    return [_handle(files) for files in islice(found, most)]


def _handle(files: JobFolder) -> Job:
    info = files.read_info()
    # A run in an allocation of the user's is known by its own process, and no job of Slurm's.
    of_process = info.cluster == "local" or info.allocation is not None if info else None
    local = files.job_id.startswith(LOCAL_PREFIX) if of_process is None else of_process
    return Job(
        files.job_id if local else files.full_id, folder=files.path.parent, cluster="local" if local else "slurm"
    )


def just_submitted(job_id: str, *, folder: Path | str, cluster: ClusterName, clock: Clock | None = None) -> Job:
    """A handle to a job that is new: what is known of an earlier one of its number counts no more, for a development
    cluster that is made again begins at 1."""
    if cluster == "slurm" and (watcher := _watchers.get(env.get("SLURM_CONF"))) is not None:
        watcher.register_job(job_id)
    return Job(job_id, folder=folder, cluster=cluster, clock=clock)


# By SLURM_CONF: each Slurm has a job 1.
_watchers: dict[str | None, StateWatcher] = {}


def _slurm_watcher() -> StateWatcher:
    """Of the Slurm that this process's environment leads to now."""
    conf = env.get("SLURM_CONF")
    if conf not in _watchers:
        from nvrx_slurm.cluster.watcher import StateWatcher

        _watchers[conf] = StateWatcher(SlurmCluster(patience_s=0))
    return _watchers[conf]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
