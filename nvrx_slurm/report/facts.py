"""What each kind of fact changes in a view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from nvrx_slurm.journal import records
from nvrx_slurm.journal.records import Plan
from nvrx_slurm.report import recovery, words
from nvrx_slurm.report.changes import (
    arrive,
    change_cycle,
    change_node,
    change_replica,
    depart,
    hold_ranks,
    tell_step,
)
from nvrx_slurm.report.model import Dumped, Failure, InProcess, JobView, NodeView
from nvrx_slurm.util.ids import replica_id


def _job_started(view: JobView, fact: records.JobStarted, t: float) -> None:
    view.job, view.name, view.generation = fact.job, fact.name, fact.generation
    view.started_at = t if view.started_at is None else view.started_at
    view.shutdown = view.exit_code = view.ended_at = None
    view.nodes = {name: NodeView(name=name, since=t) for name in fact.expected}
    view.replicas, view.waiting, view.outages, view.heard, view.missing = {}, {}, {}, {}, ()
    view.preferred = _first_calls(view.plan, fact.expected)


def _first_calls(plan: Plan | None, expected: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Each replica's share of the allocation, in its order: whom the first rounds prefer."""
    calls: dict[str, tuple[str, ...]] = {}
    first = 0
    for role in plan.roles if plan else ():
        for index in range(role.replicas):
            calls[replica_id(role.name, index)] = expected[first : first + role.nodes_per_replica]
            first += role.nodes_per_replica
    return calls


def _controller_started(view: JobView, fact: records.ControllerStarted, t: float) -> None:
    view.controllers += 1


def _node_joined(view: JobView, fact: records.NodeJoined, t: float) -> None:
    view.nodes[fact.node] = NodeView(name=fact.node, since=t, incarnation=fact.incarnation)
    arrive(view, fact.node, t)


def _node_ready(view: JobView, fact: records.NodeReady, t: float) -> None:
    arrive(view, fact.node, t)


def _workers_started(view: JobView, fact: records.WorkersStarted, t: float) -> None:
    change_node(view, fact.node, ranks=tuple(sorted(fact.pids)))
    current, waiting = view.replicas[fact.replica], view.waiting[fact.replica]
    if current.phase != "starting" or current.cycle != fact.cycle:
        return
    waiting.discard(fact.node)
    if not waiting:
        change_replica(view, current.id, phase="running", since=t)
        change_cycle(view, current.id, current.cycle, started_at=t)


def _progress(view: JobView, fact: records.Progress, t: float) -> None:
    tell_step(view, fact.node, fact.step)
    key = (fact.replica, view.generation, fact.cycle)
    cycle = view.cycles.get(key)
    if cycle is None or cycle.first_step_at is not None:
        return
    view.cycles[key] = replace(cycle, first_step_at=t, first_step=fact.step)
    if key in view.recoveries:
        view.recoveries[key] = recovery.with_first_step(view.recoveries[key], t, fact.step)


def _restarted_in_process(view: JobView, fact: records.RestartedInProcess, t: float) -> None:
    view.restarts_in_process += fact.times
    cycle = view.cycles.get((fact.replica, view.generation, fact.cycle))
    if cycle is not None:
        change_cycle(view, fact.replica, fact.cycle, restarts_in_process=cycle.restarts_in_process + fact.times)
    view.last_in_process = InProcess(
        at=t,
        cause=fact.restart.cause,
        node=fact.node,
        replica=fact.replica,
        cycle=fact.cycle,
        iteration=fact.restart.iteration,
        total_s=fact.restart.total_s,
    )


def _worker_failed(view: JobView, fact: records.WorkerFailed, t: float) -> None:
    _fail_worker(view, fact, words.worker_end(fact), t)


def _worker_hung(view: JobView, fact: records.WorkerHung, t: float) -> None:
    _fail_worker(view, fact, words.worker_hang(fact), t, stacks=fact.stacks)
    if fact.stacks is not None:
        view.last_stacks = Dumped(at=t, why=fact.why, node=fact.node, files={fact.rank: fact.stacks})


def _fail_worker(
    view: JobView, fact: records.WorkerFailed | records.WorkerHung, why: str, t: float, stacks: str | None = None
) -> None:
    if fact.step is not None:
        tell_step(view, fact.node, fact.step)
    if view.shutdown is not None:  # it was told to end
        return
    view.last_failure = Failure(
        at=t - fact.ago_s,
        why=why,
        node=fact.node,
        replica=fact.replica,
        cycle=fact.cycle,
        rank=fact.rank,
        step=_step_of(view, fact.node, fact.step),
        stacks=stacks,
    )


def _node_isolated(view: JobView, fact: records.NodeIsolated, t: float) -> None:
    if view.shutdown is None:
        view.last_failure = _node_failure(view, fact.node, words.isolation(fact), t, None)


def _stacks_dumped(view: JobView, fact: records.StacksDumped, t: float) -> None:
    if fact.files:
        view.last_stacks = Dumped(at=t, why=fact.why, node=fact.node, files=fact.files)


def _workers_done(view: JobView, fact: records.WorkersDone, t: float) -> None:
    if fact.step is not None:
        tell_step(view, fact.node, fact.step)
    change_node(view, fact.node, done=True)


def _node_left(view: JobView, fact: records.NodeLeft, t: float) -> None:
    if view.shutdown is None:
        view.last_failure = _node_failure(view, fact.node, f"{fact.node} left: {fact.reason}", t, None)
    depart(view, fact.node, "left", fact.reason, t)


def _node_lost(view: JobView, fact: records.NodeLost, t: float) -> None:
    if fact.step is not None:
        tell_step(view, fact.node, fact.step)
    if view.shutdown is None:
        why = words.node_loss(fact)
        view.last_failure = _node_failure(view, fact.node, why, t - fact.ago_s, fact.step)
    had_ranks = fact.node in view.nodes and view.nodes[fact.node].state == "active"
    depart(view, fact.node, "lost", fact.cause.replace("_", " "), t)
    if had_ranks and fact.safe_after_s > 0.0:
        hold_ranks(view, fact.node, t + fact.safe_after_s)


def _node_fenced(view: JobView, fact: records.NodeFenced, t: float) -> None:
    node = view.nodes.get(fact.node)
    if node is not None and node.incarnation == fact.incarnation:
        change_node(view, fact.node, held_until=None)


def _slurm_node_state(view: JobView, fact: records.SlurmNodeState, t: float) -> None:
    node = view.nodes.get(fact.node)
    if node is not None and node.state == "lost":
        change_node(view, fact.node, slurm_says=words.slurm_state(fact))


def _recorded(view: JobView, fact: records.AnyFact, t: float) -> None:
    """Of itself it changes nothing that a view shows; the decisions that follow from it may."""


def _node_failure(view: JobView, name: str, why: str, at: float, step: int | None) -> Failure:
    node = view.nodes.get(name)
    replica = view.replicas.get(node.replica or "") if node else None
    return Failure(
        at=at,
        why=why,
        node=name,
        replica=replica.id if replica else None,
        cycle=replica.cycle if replica else None,
        step=_step_of(view, name, step),
    )


def _step_of(view: JobView, name: str, told: int | None) -> int | None:
    node = view.nodes.get(name)
    return node.step if told is None and node else told


HANDLERS: dict[type[Any], Callable[[JobView, Any, float], None]] = {
    records.JobStarted: _job_started,
    records.ControllerStarted: _controller_started,
    records.NodeJoined: _node_joined,
    records.NodeReady: _node_ready,
    records.WorkersStarted: _workers_started,
    records.Progress: _progress,
    records.RestartedInProcess: _restarted_in_process,
    records.WorkerFailed: _worker_failed,
    records.WorkerHung: _worker_hung,
    records.WorkersDone: _workers_done,
    records.NodeIsolated: _node_isolated,
    records.Learned: _recorded,
    records.StacksDumped: _stacks_dumped,
    records.NodeLeft: _node_left,
    records.NodeLost: _node_lost,
    records.NodeFenced: _node_fenced,
    records.SlurmNodeState: _slurm_node_state,
    records.DumpAsked: _recorded,
    records.Signalled: _recorded,
    records.Attributed: _recorded,
    records.RecordsRefused: _recorded,
    records.Tick: _recorded,
}
"""Kind of fact → what changes, given the view, the fact, and the time of its entry."""
