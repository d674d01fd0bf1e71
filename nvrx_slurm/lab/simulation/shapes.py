"""What a run is about: a job, its bounds, and how its workers behave, all drawn from the seed.

Durations are virtual. They keep the order that `jobspec` asks of them (an interval is shorter than its timeout, …),
and are shorter than those of real jobs, so that a run holds few heartbeats.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Literal, cast

from msgspec.structs import replace

from nvrx_slurm.jobspec.model import (
    Aggregation,
    AttributionSpec,
    BackoffSpec,
    FaultToleranceSpec,
    HangSpec,
    HeartbeatSpec,
    OnFailure,
    ProgressSpec,
    RendezvousSpec,
    TeardownSpec,
)
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.jobspec.values import Allowance

AGGREGATIONS: tuple[Aggregation, ...] = ("any", "all")
CLUSTERS: tuple[Literal["local", "slurm"], ...] = ("local", "slurm")
MOST_SPARES = 3
MOST_NODES = 64
# How many nodes a job has at most, and the share of all runs. A run costs as much as its nodes do. Jobs of up to 8
# nodes find in as many runs what jobs of up to 16 find, and smaller ones find less (docs/simulation.md).
SIZES = {8: 0.955, 16: 0.04, MOST_NODES: 0.005}

KILL_WAIT_S = 30.0
BACKOFF = BackoffSpec(after=2, within=60.0, initial=0.5, max=4.0)
# Of every job with an odd number of nodes: not drawn, so that seeds of before it still mean the same runs.
NO_BACKOFF = BackoffSpec(max=0.0)


@dataclass(frozen=True, slots=True)
class WorkerBehaviour:
    """How workers take things. `leaves_s`: how long after a peer's death they leave their world, None: they wait for
    it for ever; `obeys_s`: how long after the stop signal they end, None: never."""

    step_s: float
    leaves_s: float | None
    obeys_s: float | None


@dataclass(frozen=True, slots=True)
class SourceBehaviour:
    """What attribution sources do, each as a share of all questions: say nothing; say STOP; say STOP of something
    else (another cycle, generation or rank); answer twice. `quick_s`, `slow_s`: the soonest and the latest answer."""

    silent: float = 0.15
    stops: float = 0.11
    lies: float = 0.2
    repeats: float = 0.33
    slow_s: float = 20.0
    quick_s: float = 0.01


@dataclass(frozen=True, slots=True)
class Shape:
    """One job on one cluster. `work_s`: how long its workers take if nothing goes wrong."""

    plan: Plan
    cluster: Literal["local", "slurm"]
    nodes: tuple[str, ...]
    work_s: float
    behaviour: WorkerBehaviour
    kill_wait_s: float | None
    sources: SourceBehaviour = SourceBehaviour()

    @property
    def recovery_s(self) -> float:
        """How long one failure may keep a replica from its work, if those who are to replace it are there."""
        bounds = self.plan.fault_tolerance
        noticed_s = max(bounds.heartbeat.timeout, bounds.heartbeat.startup_timeout) + bounds.heartbeat.timeout
        torn_down_s = bounds.teardown.grace + bounds.rendezvous.last_call + 10.0
        decided_s = bounds.attribution.decision_timeout if bounds.attribution.acts else 0.0
        paused_s = bounds.backoff.max
        return (
            noticed_s
            + torn_down_s
            + decided_s
            + paused_s
            + bounds.gives_away_after_s
            + bounds.rendezvous.join_timeout
        )

    @property
    def leaves_within_s(self) -> float:
        """How long a job may take to end once it was decided that it does."""
        bounds = self.plan.fault_tolerance
        return bounds.teardown.grace + bounds.teardown.checkpoint_timeout + bounds.heartbeat.timeout + 60.0


def draw_shape(chance: Random, most_nodes: int | None = None) -> Shape:
    """A job of `most_nodes` nodes at most, spares included; every other one has all of them. Without a bound `SIZES`
    has it."""
    # The order of the draws is part of a seed's meaning: a new one goes to the end, or has a `chance` of its own.
    if most_nodes is None:
        most_nodes = chance.choices(list(SIZES), list(SIZES.values()))[0]
    total = most_nodes if chance.random() < 0.5 else chance.randint(1, most_nodes)
    spares = min(chance.choice((0, 1, 1, 2, 2, MOST_SPARES)), total - 1)
    cluster = chance.choice(CLUSTERS)
    interval_s = chance.choice((1.0, 2.0))
    roles = _draw_roles(chance, total - spares)
    bounds = _draw_bounds(chance, interval_s)
    work_s = chance.uniform(1.5, 6.0)
    leaves_s = chance.choice((0.02, 0.3, 2.0, None))
    obeys_s = chance.choice((0.0, 0.05, 0.5 * bounds.teardown.grace, 2 * bounds.teardown.grace, None))
    behaviour = WorkerBehaviour(step_s=chance.choice((0.1, 0.5)), leaves_s=leaves_s, obeys_s=obeys_s)
    attribution = AttributionSpec(enable_lib=False)
    if chance.random() >= 0.5:  # every other job asks; of those most act on the answers
        attribution = AttributionSpec(
            enable_lib=True,
            enable_mcp=chance.random() < 0.5,
            dry_run=chance.random() < 0.3,
            timeout=30.0,
            decision_timeout=chance.choice((1.0, 5.0, 10.0)),
            aggregation=chance.choice(AGGREGATIONS),
        )
    bounds = _draw_limits(chance, bounds)
    plan = Plan(
        name="simulated",
        roles=roles,
        spares=spares,
        workdir="/work",
        folder="/jobs",
        fault_tolerance=replace(bounds, attribution=attribution, backoff=BACKOFF if total % 2 else NO_BACKOFF),
    )
    sources = SourceBehaviour(
        silent=chance.choice((0.0, 0.15, 0.5)),
        stops=chance.choice((0.0, 0.1, 0.4)),
        lies=chance.choice((0.0, 0.2, 0.7)),
        repeats=chance.choice((0.0, 0.33)),
        slow_s=chance.choice((1.0, 20.0, 40.0)),
    )
    if chance.random() < 0.3:  # the newest draw
        most = Allowance(count=chance.choice((0, 1)), per_s=chance.choice((None, 30.0)))
        plan = replace(plan, fault_tolerance=replace(plan.fault_tolerance, max_preemptions=most))
    return Shape(
        plan=plan,
        cluster=cluster,
        nodes=names(plan),
        work_s=work_s,
        behaviour=behaviour,
        kill_wait_s=KILL_WAIT_S if cluster == "slurm" else None,
        sources=sources,
    )


def names(plan: Plan) -> tuple[str, ...]:
    """The nodes of a job with this plan."""
    return tuple(f"n{index:02d}" for index in range(1, plan.total_nodes + 1))


def _draw_limits(chance: Random, bounds: FaultToleranceSpec) -> FaultToleranceSpec:
    """Other jobs have a rate instead of a count, limits for all replicas and for lost nodes, and count progress."""
    limits: dict[str, Any] = {}
    if chance.random() < 0.3:
        limits["max_restarts"] = Allowance(count=chance.choice((1, 2)), per_s=chance.choice((1.5, 5.0, 15.0)))
    if chance.random() < 0.3:
        limits["max_job_restarts"] = Allowance(count=chance.randint(1, 4), per_s=chance.choice((None, 5.0)))
    if chance.random() < 0.2:
        limits["max_node_losses"] = Allowance(count=chance.randint(0, 3), per_s=chance.choice((None, 20.0)))
    if chance.random() < 0.2:
        limits["progress"] = ProgressSpec(
            max_no_progress_cycles=chance.choice((1, 2, 3)), min_progress_steps=chance.choice((1, 5))
        )
    return replace(bounds, **limits)


def _draw_roles(chance: Random, active: int) -> tuple[RolePlan, ...]:
    if chance.random() < 0.6 or active == 1:
        return (_draw_role(chance, "main", active, 1),)
    if chance.random() < 0.5:
        replicas = chance.choice([count for count in (2, 3, 4) if count <= active])
        return (_draw_role(chance, "rollout", active // replicas, replicas),)
    policy = chance.randint(1, active - 1)
    replicas = chance.choice([count for count in (1, 2, 3) if count <= active - policy])
    return (
        _draw_role(chance, "policy", policy, 1),
        _draw_role(chance, "rollout", (active - policy) // replicas, replicas),
    )


def _draw_role(chance: Random, name: str, nodes: int, replicas: int) -> RolePlan:
    policy = chance.choice(("restart_replica",) * 6 + ("restart_job", "restart_job", "ignore", "fail_job"))
    return RolePlan(
        name=name,
        command=("train",),
        replicas=replicas,
        nodes_per_replica=nodes,
        min_nodes=max(1, nodes - chance.choice((0, 0, 1, 2, nodes))) if chance.random() < 0.35 else None,
        workers_per_node=chance.choice((1, 1, 2)),
        on_failure=cast(OnFailure, policy),
    )


def _draw_bounds(chance: Random, interval_s: float) -> FaultToleranceSpec:
    timeout_s = interval_s * chance.choice((4, 5, 8))
    fence_s = timeout_s * chance.choice((1.0, 1.5, 2.0))
    grace_s = chance.choice((1.0, 3.0, 6.0))
    saves = chance.random() < 0.3
    return FaultToleranceSpec(
        max_restarts=Allowance(count=chance.choice((0, 1, 3, 3, 10))),
        quarantine_after=chance.choice((1, 3, 3)),
        heartbeat=HeartbeatSpec(
            interval=interval_s, timeout=timeout_s, startup_timeout=timeout_s * chance.choice((1.0, 2.0))
        ),
        fence_timeout=fence_s,
        rendezvous=RendezvousSpec(join_timeout=chance.choice((15.0, 30.0)), last_call=chance.choice((0.5, 2.0))),
        teardown=TeardownSpec(
            grace=grace_s,
            checkpoint_signal="SIGUSR1" if saves else None,
            checkpoint_timeout=chance.choice((3.0, 8.0)) if saves else 0.0,
        ),
        control_plane_grace=fence_s * chance.choice((1.0, 2.0, 3.0)),
        hang=HangSpec()
        if chance.random() < 0.5
        else HangSpec(
            startup_timeout=20 * interval_s if chance.random() < 0.5 else None,
            step_timeout=5 * interval_s,
            exit_skew=5 * interval_s if chance.random() < 0.5 else None,
        ),
    )
