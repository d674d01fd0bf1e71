"""A job at one moment: its view, with what its folder and its host add. What `status` shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nvrx_slurm.cluster.ending import goes_on
from nvrx_slurm.cluster.queue_place import QueuePlace
from nvrx_slurm.cluster.states import JobState, state_of_word
from nvrx_slurm.cluster.tasks import tasks_of
from nvrx_slurm.errors import UNREADABLE
from nvrx_slurm.journal.folder import JobFolder, JobInfo, Result
from nvrx_slurm.report import jobs, ranks
from nvrx_slurm.report.jobs import known_jobs
from nvrx_slurm.report.model import (
    CycleView,
    Decided,
    FailureView,
    InProcess,
    JobView,
    NodeView,
    RankView,
    Recovery,
    ReplicaView,
    StacksView,
    Value,
)
from nvrx_slurm.report.presence import (
    OutsideState,
    Presence,
    ask_queue,
    ask_slurm,
    in_slurm,
    may_be_requeued,
    still_in_slurm,
)
from nvrx_slurm.report.source import Journal
from nvrx_slurm.report.view import JobFold, Subscriber
from nvrx_slurm.util.clock import Clock, SystemClock

QUEUED = (JobState.PENDING, JobState.REQUEUED, JobState.CONFIGURING)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`now` is this machine's clock, `store_now` the store's, by which heartbeats are stamped (None: it is not read).

    `ended_at`: of a job that has ended, as `ended_at` has it.
    `store_error` says why the steps may be old although the job runs. `slurm_state`: where Slurm was asked; of a job
    that has ended, only while Slurm still has it. `queue`: why a pending job waits. `tasks`: of a whole job array.
    """

    view: JobView
    folder: JobFolder
    info: JobInfo | None
    state: str
    now: float
    exit_code: int | None = None
    ended_at: float | None = None
    reason: str | None = None
    store_now: float | None = None
    store_error: str | None = None
    slurm_state: str | None = None
    queue: QueuePlace | None = None
    tasks: tuple[JobLine, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, or no process runs it any more."""
        return self.exit_code is not None or self.state == "died"

    @property
    def moment(self) -> float:
        """The moment that the page shows: now, or the end of a job that has ended."""
        return (self.ended_at or self.view.t or self.now) if self.is_over else self.now

    @property
    def until(self) -> float | None:
        """Up to which moment the job is shown; None: to the last entry of its journal."""
        return self.ended_at if self.is_over else self.now

    @property
    def started_at(self) -> float | None:
        """None: it waits in Slurm's queue."""
        return self.view.started_at or jobs.started_at(self.folder)

    @property
    def elapsed_s(self) -> float:
        """From the job's start to the moment that is shown."""
        return max(0.0, self.moment - (self.started_at or self.moment))


class JobLine(Value, frozen=True, kw_only=True):
    """One job of the table that `status` prints without a job, or one task of a job array. `age_s`: since it was
    started."""

    job: str
    name: str
    cluster: str
    state: str
    nodes: str
    """How many are present, of how many the job asks for: `3/4`."""
    cycle: int | None = None
    restarts: int = 0
    step: int | None = None
    age_s: float | None = None
    exit_code: int | None = None
    folder: str = ""
    """Its own folder."""
    pending: str | None = None
    """Why Slurm has not started it yet, in Slurm's word."""
    problem: str | None = None
    """What keeps its records from being read, and what to do; its state is `unreadable` then."""


class ReplicaStatus(ReplicaView, frozen=True, kw_only=True):
    """A replica, and which nodes keep it in its phase."""

    waits_for: tuple[str, ...] = ()


class NodeStatus(NodeView, frozen=True, kw_only=True):
    """A node, and what its last heartbeat reported. `beat_age_s`: by the store's clock; `teardown`: its phase."""

    beat_age_s: float | None = None
    teardown: str | None = None


class Status(Value, frozen=True, kw_only=True):
    """The object that `status JOB --json` prints. A key may be added; none goes away or changes its meaning.

    What is not known, or has not happened yet, is null. `tasks`: of a whole job array (`status 1234`), each with a
    journal of its own; the array itself has none, so that its state and exit code alone are known (`elapsed_s` is
    null).
    """

    job: str
    name: str
    cluster: str | None
    folder: str
    state: str
    generation: int
    started_at: float | None
    ended_at: float | None
    elapsed_s: float | None
    exit_code: int | None
    reason: str | None
    step: int | None
    cycle: int
    restarts: int
    restarts_left: int | None
    restarts_asked: int
    restarts_in_process: int
    spares: int
    spares_left: tuple[str, ...]
    replicas: tuple[ReplicaStatus, ...]
    nodes: tuple[NodeStatus, ...]
    ranks: tuple[RankView, ...]
    cycles: tuple[CycleView, ...]
    recoveries: tuple[Recovery, ...]
    last_failure: FailureView | None
    last_in_process: InProcess | None
    last_decision: Decided | None
    last_stacks: StacksView | None
    missing: tuple[str, ...]
    journal_n: int
    store_error: str | None
    slurm_state: str | None
    queue: QueuePlace | None
    tasks: tuple[JobLine, ...] = ()


def take(
    folder: JobFolder,
    *subscribers: Subscriber,
    live: bool = True,
    clock: Clock | None = None,
    slurm: Callable[[str], JobState | None] | None = None,
) -> Snapshot:
    """The job as it is now, from its folder and, if it runs, its store; `slurm` as for `Presence`. The subscribers
    read the same journal in the same pass."""
    fold = JobFold(jobs.read_plan(folder), subscribers)
    with contextlib.closing(Journal(folder, live=live, beats=True, clock=clock)) as journal:
        for item in journal.catch_up():
            fold.take(item)
        store_now = journal.store_time()
    if journal.ended and not begins_again(fold.view, folder.read_info(), folder.read_result()):
        outside = OutsideState(slurm_says=still_in_slurm(folder, clock=clock, slurm=slurm))
    else:
        outside = Presence(folder, clock=clock, slurm=slurm).ask()
    return snap(fold.view, folder, outside=outside, clock=clock, store_now=store_now, store_error=journal.store_error)


def begins_again(view: JobView, info: JobInfo | None, result: Result | None) -> bool:
    """Whether a requeued job has begun its next generation, and has not journaled it yet: the end that the view may
    have is of the generation before."""
    # The batch host removes the result of the generation before, seconds before its controller journals anything.
    return result is None and info is not None and info.generation > view.generation


def ended_at(view: JobView, result: Result | None) -> float | None:
    """When the job ended; None: neither its journal nor a result says so."""
    if view.ended_at is not None or result is None:
        return view.ended_at
    # The batch host was killed: the journal has no end, and its last entry may be hours older than the job's end. The
    # result has the clock of its host: by that of the store the end may seem to come before the last entry.
    return max(view.t, result.ended_at)


def node_status(view: JobView, node: NodeView, store_now: float | None) -> NodeStatus:
    """A node with what its last heartbeat reported."""
    heard = view.last_heartbeat(node.name)
    return NodeStatus(
        **msgspec.structs.asdict(node),
        beat_age_s=ranks.beat_age_s(view, node.name, store_now),
        teardown=heard.heartbeat.teardown if heard else None,
    )


def snap(
    view: JobView,
    folder: JobFolder,
    *,
    outside: OutsideState,
    store_now: float | None = None,
    store_error: str | None = None,
    clock: Clock | None = None,
) -> Snapshot:
    """The view with what the folder and others add to it."""
    result, info = folder.read_result(), folder.read_info()
    is_again = begins_again(view, info, result)
    # The result is surest; the journal's end stands in for one that could not be written; then Slurm's word.
    exit_code = result.exit_code if result else None if is_again else view.exit_code
    if exit_code is None and outside.over:
        exit_code = outside.exit_code
    reason = f"{outside.slurm_says} in Slurm" if outside.slurm_says else None
    if view.shutdown is not None and not is_again:
        reason = view.shutdown.reason
    state = "starting" if is_again and not outside.over else None
    says = state_of_word(outside.slurm_says or "")
    has_started = info is not None or says is JobState.RUNNING
    if info is None and has_started and tasks_of(folder.path.parent, folder.job_id):
        state = "running"  # a job array as a whole has no batch host, and no journal
    if result is not None:
        reason = result.reason
        if goes_on(result, says):  # as `wait` sees it: the job has not ended
            state = "pending" if says in QUEUED else "stopping"
            reason = f"{says} in Slurm; its last generation ended with exit code {result.exit_code}: {result.reason}"
            exit_code = None
    return Snapshot(
        view=view,
        folder=folder,
        info=info,
        state=state or jobs.state_of(view, exit_code, started=has_started, over=outside.over),
        now=(clock or SystemClock()).wall(),
        exit_code=exit_code,
        ended_at=None if exit_code is None else ended_at(view, result),
        reason=reason,
        store_now=store_now,
        store_error=None if outside.over else store_error,
        slurm_state=outside.slurm_says,
        queue=outside.queue,
    )


def as_status(shot: Snapshot) -> Status:
    """The documented object."""
    view = shot.view
    return Status(
        job=shot.folder.job_id,
        name=view.name or (shot.info.name if shot.info else ""),
        cluster=shot.info.cluster if shot.info else None,
        folder=str(shot.folder.path.absolute()),
        state=shot.state,
        generation=view.generation,
        started_at=shot.started_at,
        ended_at=shot.ended_at,
        elapsed_s=None if shot.tasks else shot.elapsed_s,
        exit_code=shot.exit_code,
        reason=shot.reason,
        step=view.step,
        cycle=view.cycle,
        restarts=view.restarts,
        restarts_left=view.restarts_left(shot.moment),
        restarts_asked=view.restarts_asked,
        restarts_in_process=view.restarts_in_process,
        spares=view.plan.spares if view.plan else 0,
        spares_left=view.spares,
        replicas=tuple(
            ReplicaStatus(**msgspec.structs.asdict(replica), waits_for=view.waits_for(replica.id))
            for replica in view.replicas.values()
        ),
        nodes=tuple(node_status(view, node, shot.store_now) for node in view.nodes.values()),
        ranks=ranks.ranks(view, shot.store_now),
        cycles=tuple(view.cycles.values()),
        recoveries=tuple(view.recoveries.values()),
        last_failure=view.last_failure,
        last_in_process=view.last_in_process,
        last_decision=view.last_decision,
        last_stacks=view.last_stacks,
        missing=view.missing,
        journal_n=view.n,
        store_error=shot.store_error,
        slurm_state=shot.slurm_state,
        queue=shot.queue,
        tasks=shot.tasks,
    )


def list_jobs(base: Path) -> list[JobLine]:
    """Every job of the folder, newest first. A running job's step comes from its store, if that answers."""
    return lines_of(known_jobs(base))


def lines_of(folders: Sequence[JobFolder]) -> list[JobLine]:
    """These jobs, a line each, also where the records of one cannot be read."""
    states = slurm_states(folders)
    # One call for all that are pending.
    waiting = [job_id for job_id, state in states.items() if state is JobState.PENDING]
    places = ask_queue(waiting) if waiting else {}
    lines = []
    for folder in folders:
        try:
            line = line_of(take(folder, slurm=states.get))
        except UNREADABLE as error:
            line = JobLine(
                job=folder.job_id,
                name="",
                cluster="",
                state="unreadable",
                nodes="-",
                folder=str(folder.path.absolute()),
                problem=str(error),
            )
        if line.state == "pending" and (place := places.get(folder.full_id)):
            line = msgspec.structs.replace(line, pending=place.reason)
        lines.append(line)
    return lines


def not_ended(folders: Iterable[JobFolder]) -> list[JobFolder]:
    """Those that have left no end, and those of which Slurm says that the end that they have left is not their last:
    they are requeued. Some of the former may have died."""
    found = list(folders)
    states = slurm_states(folder for folder in found if folder.has_end)
    again = {job_id for job_id, state in states.items() if state is not JobState.UNKNOWN and not state.terminal}
    return [each for each in found if not each.has_end or each.full_id in again]


def slurm_states(folders: Iterable[JobFolder]) -> Mapping[str, JobState]:
    """Slurm's state of those that have left no result, or that it may have requeued, in one call; nothing where Slurm
    cannot be asked."""
    asked, now = [], SystemClock().wall()
    for folder in folders:
        with contextlib.suppress(*UNREADABLE):
            result = folder.read_result()
            may_be_there = result is None or may_be_requeued(folder, result, now)
            if may_be_there and in_slurm(folder.job_id, folder.read_info()):
                asked.append(folder.full_id)
    return ask_slurm(asked) if asked else {}


def line_of(shot: Snapshot) -> JobLine:
    """A job in one line."""
    view = shot.view
    wanted = view.plan.total_nodes if view.plan else len(view.nodes)
    return JobLine(
        job=shot.folder.job_id,
        name=view.name or (shot.info.name if shot.info else ""),
        cluster=shot.info.cluster if shot.info else "",
        state=shot.state,
        nodes=f"{len(view.present)}/{wanted}",
        cycle=view.cycle if view.replicas else None,
        restarts=view.restarts,
        step=view.step,
        age_s=None if shot.started_at is None else max(0.0, shot.now - shot.started_at),
        exit_code=shot.exit_code,
        folder=str(shot.folder.path.absolute()),
    )
