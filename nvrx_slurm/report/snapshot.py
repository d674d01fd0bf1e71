"""A job at one moment: its view, with what its folder and its host add. What `status` shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from nvrx_slurm.clock import Clock, SystemClock
from nvrx_slurm.folder import JobFolder, JobInfo
from nvrx_slurm.records import Beat, Entry
from nvrx_slurm.report import jobs
from nvrx_slurm.report.model import (
    CycleView,
    Decided,
    Failure,
    JobView,
    NodeView,
    Recovery,
    ReplicaView,
    Value,
)
from nvrx_slurm.report.presence import Presence
from nvrx_slurm.report.source import Journal
from nvrx_slurm.report.view import fold, new_view, with_beat


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`now` is this machine's clock; `store_error` says why the steps may be old although the job runs."""

    view: JobView
    folder: JobFolder
    info: JobInfo | None
    state: str
    now: float
    exit_code: int | None = None
    reason: str | None = None
    store_error: str | None = None

    @property
    def started_at(self) -> float:
        return self.view.started_at or jobs.started_at(self.folder)

    @property
    def elapsed_s(self) -> float:
        """From the job's start to its end, or to now."""
        ended_at = self.view.ended_at if self.exit_code is not None else None
        return max(0.0, (ended_at or self.now) - self.started_at)


class ReplicaStatus(ReplicaView, frozen=True, kw_only=True):
    """A replica, and which nodes keep it in its phase."""

    waits_for: tuple[str, ...] = ()


class Status(Value, frozen=True, kw_only=True):
    """The object that `status JOB --json` prints. A key may be added; none goes away or changes its meaning.

    What is not known, or has not happened yet, is null.
    """

    job: str
    name: str
    cluster: str | None
    folder: str
    state: str
    generation: int
    started_at: float
    ended_at: float | None
    elapsed_s: float
    exit_code: int | None
    reason: str | None
    step: int | None
    cycle: int
    restarts: int
    restarts_left: int | None
    spares: int
    spares_left: tuple[str, ...]
    replicas: tuple[ReplicaStatus, ...]
    nodes: tuple[NodeView, ...]
    cycles: tuple[CycleView, ...]
    recoveries: tuple[Recovery, ...]
    last_failure: Failure | None
    last_decision: Decided | None
    missing: tuple[str, ...]
    journal_n: int
    store_error: str | None


def take(folder: JobFolder, *, live: bool = True, clock: Clock | None = None) -> Snapshot:
    """The job as it is now, from its folder and, if it runs, its store."""
    journal = Journal(folder, live=live, beats=True, clock=clock)
    view = new_view(jobs.read_plan(folder))
    try:
        for item in journal.catch_up():
            grow(view, item)
    finally:
        journal.close()
    gone = not journal.ended and Presence(folder, clock=clock).gone()
    return snap(view, folder, gone=gone, store_error=journal.store_error, clock=clock)


def grow(view: JobView, item: Entry | Beat) -> JobView:
    """The view after whatever a `Journal` passed on."""
    return with_beat(view, item) if isinstance(item, Beat) else fold(view, item)


def snap(
    view: JobView,
    folder: JobFolder,
    *,
    gone: bool = False,
    store_error: str | None = None,
    clock: Clock | None = None,
) -> Snapshot:
    """The view with what the folder adds to it."""
    result = folder.read_result()
    shutdown = view.shutdown.reason if view.shutdown else None
    return Snapshot(
        view=view,
        folder=folder,
        info=folder.read_info(),
        state=jobs.state_of(view, folder, gone=gone),
        now=(clock or SystemClock()).wall(),
        exit_code=jobs.exit_code_of(view, folder),
        reason=result.reason if result else shutdown,
        store_error=None if gone else store_error,
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
        ended_at=view.ended_at,
        elapsed_s=shot.elapsed_s,
        exit_code=shot.exit_code,
        reason=shot.reason,
        step=view.step,
        cycle=view.cycle,
        restarts=view.restarts,
        restarts_left=view.restarts_left,
        spares=view.plan.spares if view.plan else 0,
        spares_left=view.spares,
        replicas=tuple(_replica_status(view, replica) for replica in view.replicas.values()),
        nodes=tuple(view.nodes.values()),
        cycles=tuple(view.cycles.values()),
        recoveries=tuple(view.recoveries.values()),
        last_failure=view.last_failure,
        last_decision=view.last_decision,
        missing=view.missing,
        journal_n=view.n,
        store_error=shot.store_error,
    )


def as_json(shot: Snapshot) -> bytes:
    """The documented object, indented."""
    return to_json(as_status(shot))


def to_json(value: Any) -> bytes:
    """Any value of the report, indented for people, one object."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def _replica_status(view: JobView, replica: ReplicaView) -> ReplicaStatus:
    return ReplicaStatus(**msgspec.structs.asdict(replica), waits_for=view.waits_for(replica.id))
