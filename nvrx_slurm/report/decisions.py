"""What each kind of decision changes in a view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from nvrx_slurm.journal import records
from nvrx_slurm.report import recovery
from nvrx_slurm.report.changes import (
    change_cycle,
    change_node,
    change_replica,
    depart,
    hold_ranks,
    may_come,
    release_ranks,
)
from nvrx_slurm.report.model import CycleView, Decided, Failure, JobView, NodeView, ReplicaView
from nvrx_slurm.report.sentences import describe

RESTARTS = ("restart_replica", "restart_job")
ENDED = ("done", "failed", "stopped")


def _round_opened(view: JobView, decision: records.RoundOpened, t: float) -> None:
    replica, cycle = decision.replica, decision.cycle
    known = view.replicas.get(replica)
    called = known.nodes if known else view.preferred.get(replica, tuple(view.nodes))
    view.waiting[replica] = {name for name in called if may_come(view, name, replica)}
    view.replicas[replica] = ReplicaView(
        id=replica,
        role=replica.rpartition("-")[0],
        phase="stopping" if cycle and view.waiting[replica] else "joining",
        cycle=cycle,
        nodes=called,
        step=known.step if known else None,
        since=t,
    )
    opened = CycleView(replica=replica, generation=view.generation, cycle=cycle, opened_at=t)
    view.cycles[replica, view.generation, cycle] = opened
    if cycle and view.last_failure:
        change_cycle(view, replica, cycle - 1, ended_at=t, outcome=view.last_failure.why)
        view.outages.setdefault(replica, view.last_failure)


def _round_closed(view: JobView, decision: records.RoundClosed, t: float) -> None:
    replica, nodes = decision.replica, decision.nodes
    release_ranks(view, replica)
    promoted = decision.promoted if decision.cycle else ()  # in cycle 0 nobody was a spare before
    for name in set(view.replicas[replica].nodes).difference(nodes):
        if name in view.nodes and view.nodes[name].state == "ready":
            change_node(view, name, state="standby", since=t, replica=None, role=None)
    for index, name in enumerate(nodes):
        view.nodes[name] = _seated(view, decision, index, name, t)
    view.waiting[replica] = set(nodes)
    world = decision.world_size
    change_replica(view, replica, phase="starting", nodes=nodes, world_size=world, step=None, since=t)
    told = {"nodes": nodes, "promoted": promoted, "world_size": world}
    change_cycle(view, replica, decision.cycle, closed_at=t, **told)


def _seated(view: JobView, decision: records.RoundClosed, index: int, name: str, t: float) -> NodeView:
    """The node with its ranks: as many as each of the round's nodes has."""
    workers = decision.world_size // len(decision.nodes)
    return replace(
        view.nodes.get(name) or NodeView(name=name),
        state="active",
        since=t,
        replica=decision.replica,
        role=view.replicas[decision.replica].role,
        group_rank=index,
        ranks=tuple(range(index * workers, (index + 1) * workers)),
        step=None,
        done=False,
        promoted=bool(decision.cycle) and name in decision.promoted,
    )


def _restart_decided(view: JobView, decision: records.RestartDecided, t: float) -> None:
    noticed = view.last_failure if view.last_failure and view.last_failure.node == decision.node else None
    view.last_failure = Failure(
        at=noticed.at if noticed else t,
        why=noticed.why if noticed else decision.cause,
        node=decision.node,
        replica=decision.replica,
        cycle=decision.cycle,
        rank=decision.rank,
        step=noticed.step if noticed and decision.step is None else decision.step,
        stacks=noticed.stacks if noticed else None,
    )
    view.restarts += decision.action in RESTARTS
    view.restarts_left = decision.restarts_left
    view.last_decision = Decided(at=t, what=describe(decision))


def _recovered(view: JobView, decision: records.Recovered, t: float) -> None:
    key = (decision.replica, view.generation, decision.cycle)
    outage = view.outages.pop(decision.replica, None)
    view.recoveries[key] = recovery.complete(decision, t, outage, view.cycles[key])


def _replica_ended(view: JobView, decision: records.ReplicaEnded, t: float) -> None:
    view.waiting[decision.replica] = set()
    change_replica(view, decision.replica, phase=decision.outcome, since=t)
    change_cycle(view, decision.replica, decision.cycle, ended_at=t, outcome=decision.outcome)


def _shutdown(view: JobView, decision: records.Shutdown, t: float) -> None:
    view.shutdown = decision
    view.last_decision = Decided(at=t, what=f"shutdown with {describe(decision)}")
    for replica in list(view.replicas.values()):
        if replica.phase not in ENDED:
            view.waiting[replica.id] = {name for name in view.present if view.nodes[name].replica == replica.id}
            change_replica(view, replica.id, phase="stopping", since=t)


def _job_ended(view: JobView, decision: records.JobEnded, t: float) -> None:
    view.exit_code, view.ended_at, view.missing = decision.exit_code, t, decision.missing
    for key, cycle in view.cycles.items():
        if cycle.generation == view.generation and cycle.ended_at is None:
            view.cycles[key] = replace(cycle, ended_at=t, outcome=decision.reason)
    for replica in list(view.replicas.values()):
        if replica.phase not in ENDED:
            change_replica(view, replica.id, phase="stopped", since=t)


def _fence(view: JobView, decision: records.Fence, t: float) -> None:
    node = view.nodes.get(decision.node)
    if node and node.state not in ("lost", "left") and node.incarnation == decision.incarnation:
        depart(view, node.name, "lost", "fenced: too late for its round", t)
        if view.plan is not None:  # it may still be killing its workers
            hold_ranks(view, node.name, t + view.plan.fault_tolerance.gives_away_after_s)


def _quarantined(view: JobView, decision: records.Quarantined, t: float) -> None:
    depart(view, decision.node, "quarantined", decision.reason, t)
    view.last_decision = Decided(at=t, what=f"quarantined {describe(decision)}")


def _attribution_asked(view: JobView, decision: records.AttributionAsked, t: float) -> None:
    """Nothing changes: the round has opened, or will."""


def _attribution_judged(view: JobView, decision: records.AttributionJudged, t: float) -> None:
    view.last_decision = Decided(at=t, what=f"attribution says {describe(decision)}")


def _dump_ordered(view: JobView, decision: records.DumpOrdered, t: float) -> None:
    """Nothing changes: workers go on while their stacks are written down."""


HANDLERS: dict[type[Any], Callable[[JobView, Any, float], None]] = {
    records.RoundOpened: _round_opened,
    records.RoundClosed: _round_closed,
    records.AttributionAsked: _attribution_asked,
    records.AttributionJudged: _attribution_judged,
    records.RestartDecided: _restart_decided,
    records.Recovered: _recovered,
    records.ReplicaEnded: _replica_ended,
    records.Shutdown: _shutdown,
    records.JobEnded: _job_ended,
    records.Fence: _fence,
    records.Quarantined: _quarantined,
    records.DumpOrdered: _dump_ordered,
}
"""Kind of decision → what changes, given the view, the decision, and the time of its entry."""
