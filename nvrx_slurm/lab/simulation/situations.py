"""Situations that swarms hardly ever make: a job and acts that fit each other, at the right distance.

A failure rate forgets only what is older than its period; a crash loop needs the next failure before the first step;
a verdict is late only where the job still runs. A swarm draws jobs and acts apart, so each of these comes together
once in thousands of runs. `stage` gives most of the runs in which a swarm does nothing to a situation: the others
keep their meaning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random
from typing import Any

from msgspec.structs import replace

from nvrx_slurm.jobspec.model import AttributionSpec, FaultToleranceSpec, HangSpec, ProgressSpec
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.jobspec.values import Allowance
from nvrx_slurm.lab.simulation.adversary import MOST_SKEW_S, SUSPEND_S, Act
from nvrx_slurm.lab.simulation.aims import Aim, Moment
from nvrx_slurm.lab.simulation.shapes import BACKOFF, KILL_WAIT_S, NO_BACKOFF, Shape, SourceBehaviour, names

# This share of the runs without a fault gets a situation.
STAGED_SHARE = 0.9

# Restarts, so that only the budget that the situation is about is spent.
ENOUGH = Allowance(count=10)

Staged = tuple[Shape, tuple[Act, ...]]


def stage(chance: Random, shape: Shape, acts: tuple[Act, ...]) -> Staged:
    """A situation for a run without acts; another run, and one in ten of these, stays as it is."""
    if acts or chance.random() >= STAGED_SHARE:
        return shape, acts
    [situation] = chance.choices(list(SITUATIONS), list(SITUATIONS.values()))
    return situation(chance, shape)


def _job(
    shape: Shape,
    *,
    nodes: int,
    spares: int = 1,
    replicas: int = 1,
    work_s: float = 5.0,
    slurm: bool = False,
    sources: SourceBehaviour | None = None,
    **bounds: Any,
) -> Shape:
    """A plain job with the drawn times: one role, enough restarts, and no limit but those that are named."""
    plain: FaultToleranceSpec = replace(
        shape.plan.fault_tolerance,
        max_restarts=ENOUGH,
        max_job_restarts=None,
        max_node_losses=None,
        max_preemptions=None,
        quarantine_after=3,
        progress=ProgressSpec(),
        attribution=AttributionSpec(enable_lib=False),
        backoff=NO_BACKOFF,
    )
    role = RolePlan(name="main", command=("train",), replicas=replicas, nodes_per_replica=nodes)
    plan = replace(shape.plan, roles=(role,), spares=spares, fault_tolerance=replace(plain, **bounds))
    cluster = "slurm" if slurm else shape.cluster
    return dataclasses.replace(
        shape,
        plan=plan,
        cluster=cluster,
        nodes=names(plan),
        work_s=work_s,
        kill_wait_s=KILL_WAIT_S if cluster == "slurm" else None,
        sources=sources or shape.sources,
    )


def _at(event: str, moment: Moment = "after", **how: Any) -> Aim:
    return Aim(event=event, moment=moment, **how)


def _slow(shape: Shape, chance: Random) -> Shape:
    """The same job, whose workers do not end before they are killed."""
    bounds = shape.plan.fault_tolerance
    teardown = replace(bounds.teardown, grace=chance.choice((3.0, 4.0, 6.0)))
    plan = replace(shape.plan, fault_tolerance=replace(bounds, teardown=teardown))
    behaviour = dataclasses.replace(shape.behaviour, leaves_s=None, obeys_s=None)
    return dataclasses.replace(shape, plan=plan, behaviour=behaviour)


def _fails(node: str, cycles: int, after_s: float) -> Act:
    """In so many cycles a worker of the node fails so long after its start."""
    return Act(at_s=0.0, kind="fail_cycles", node=node, number=cycles, lasts_s=round(after_s, 3))


def _number(chance: Random) -> int:
    return chance.randrange(1000)


def crash_loop(chance: Random, shape: Shape) -> Staged:
    """Several cycles in a row end before their first step: the restarts are spaced."""
    shape = _job(shape, nodes=chance.randint(1, 3), backoff=BACKOFF)
    after_s = chance.uniform(0.0, 0.8) * shape.behaviour.step_s
    return shape, (_fails(shape.nodes[0], chance.randint(2, 4), after_s),)


def failure_rate(chance: Random, shape: Shape) -> Staged:
    """Failures about as far apart as the period of their rate: some are forgotten when the next one comes. Or the job
    is suspended between two of them, for longer than the period."""
    suspended = chance.random() < 0.4
    per_s, cycles = 8.0 if suspended else chance.choice((1.5, 3.0)), chance.randint(2, 4)
    after_s = chance.uniform(1.0, 2.0) if suspended else per_s * chance.uniform(0.7, 1.7)
    rate = Allowance(count=chance.choice((1, 1, 2)), per_s=per_s)
    of_job = chance.random() < 0.3
    shape = _job(
        shape,
        nodes=chance.randint(1, 2),
        work_s=cycles * after_s + 1.0,
        max_restarts=ENOUGH if of_job else rate,
        max_job_restarts=rate if of_job else None,
    )
    acts = [_fails(shape.nodes[0], cycles, after_s)]
    if suspended:
        lasts_s = round(per_s * chance.uniform(1.1, 1.5), 3)
        aim = _at("restart_decided", nth=chance.randrange(rate.count))
        acts.append(Act(at_s=0.0, kind="suspend_all", lasts_s=lasts_s, number=_number(chance), aim=aim))
    return shape, tuple(acts)


def job_budget(chance: Random, shape: Shape) -> Staged:
    """Failures that the replicas' own budgets allow, and the job's does not."""
    most = Allowance(count=chance.choice((1, 2)))
    shape = _job(shape, nodes=chance.randint(1, 2), replicas=2, max_job_restarts=most)
    fails = (_fails(node, 2, chance.uniform(0.2, 1.5)) for node in (shape.nodes[0], shape.nodes[-2]))
    return shape, tuple(fails)


def late_exit(chance: Random, shape: Shape) -> Staged:
    """A worker ends with 0 long after the others have, or a little later: `exit_skew` is between the two."""
    skew_s = shape.plan.fault_tolerance.heartbeat.interval * chance.choice((1, 2, 3))
    shape = _job(shape, nodes=chance.randint(2, 4), work_s=chance.uniform(1.5, 4.0), hang=HangSpec(exit_skew=skew_s))
    aim, lasts_s = _at("workers_started", nth=chance.choice((0, 1))), skew_s * chance.choice((0.4, 5.0, 20.0))
    return shape, (Act(at_s=0.0, kind="linger", lasts_s=round(lasts_s, 3), number=_number(chance), aim=aim),)


def late_verdict(chance: Random, shape: Shape) -> Staged:
    """Each source answers after the decision, while the job still runs; half of them say STOP."""
    shape = _job(
        shape,
        nodes=chance.randint(1, 3),
        work_s=8.0,
        attribution=AttributionSpec(enable_lib=True, dry_run=False, timeout=30.0, decision_timeout=1.0),
        sources=SourceBehaviour(silent=0.0, stops=0.6, quick_s=1.2, slow_s=5.0),
    )
    return shape, (_fails(shape.nodes[0], chance.randint(1, 3), chance.uniform(0.1, 1.0)),)


def takeover_after_requeue(chance: Random, shape: Shape) -> Staged:
    """A failure, a requeue with a fresh store, another controller, another failure: all generations count."""
    shape = _job(shape, nodes=chance.randint(1, 3), slurm=True, max_restarts=Allowance(count=chance.choice((1, 3))))
    first = Act(at_s=0.0, kind="fail_worker", number=_number(chance), aim=_at("workers_started"))
    requeue = Act(at_s=3.0, kind="requeue", number=2 * _number(chance))
    # Workers obey at once: an aim does not wait for ever while workers step, and this one is for the next generation.
    shape = dataclasses.replace(shape, behaviour=dataclasses.replace(shape.behaviour, obeys_s=0.0))
    steps = chance.choice((0, 1))
    kill = Act(at_s=3.0, kind="kill_controller", aim=_at("rendezvous_closed", follows=True, steps=steps))
    runs = _at("workers_started", follows=True, steps=steps)
    second = Act(at_s=3.0, kind="fail_worker", number=_number(chance), aim=runs)
    return shape, (first, requeue, kill, second)


def suspended_late(chance: Random, shape: Shape) -> Staged:
    """A node is cut off when Slurm suspends the job, and reports that only when the job has resumed. The job counts
    as suspended once more, while others report that they have resumed."""
    shape = _job(shape, nodes=chance.randint(3, 6), slurm=True)
    at_s, lasts_s = chance.uniform(0.5, 2.0), chance.uniform(1.0, 3.0)
    resumes_s = SUSPEND_S + MOST_SKEW_S + lasts_s + chance.uniform(0.2, MOST_SKEW_S)
    suspend = Act(at_s=round(at_s, 3), kind="suspend_all", lasts_s=round(lasts_s, 3), number=_number(chance))
    node = chance.choice(shape.nodes)
    return shape, (suspend, Act(at_s=suspend.at_s, kind="cut", node=node, lasts_s=round(resumes_s, 3)))


def former_join(chance: Random, shape: Shape) -> Staged:
    """An agent joins again as another one, and the join of the first arrives once more."""
    shape = _job(shape, nodes=chance.randint(1, 3), work_s=chance.uniform(3.0, 5.0))
    kill = Act(at_s=0.0, kind="kill_supervisor", number=_number(chance), aim=_at("workers_started"))
    aim = _at("node_joined", follows=True, steps=chance.choice((0, 1, 2)))
    return shape, (kill, Act(at_s=0.0, kind="repeat_join", number=_number(chance), aim=aim))


def former_proof(chance: Random, shape: Shape) -> Staged:
    """A node's agent is replaced, and the next one lost without a proof of its death. That of the first arrives."""
    shape = _job(shape, nodes=chance.randint(2, 4), slurm=True)
    node = shape.nodes[0]
    lasts_s = shape.plan.fault_tolerance.gives_away_after_s * chance.uniform(0.9, 1.4)
    kill = Act(at_s=0.0, kind="kill_supervisor", node=node, aim=_at("workers_started"))
    again = _at("recovered", follows=True, steps=chance.choice((0, 1, 2)))
    cut = Act(at_s=0.0, kind="cut_frozen", node=node, lasts_s=round(lasts_s, 3), aim=again)
    lost = _at(chance.choice(("node_lost", "fence")), follows=True, steps=chance.choice((0, 1, 2)))
    return shape, (kill, cut, Act(at_s=0.0, kind="former_proof", number=_number(chance), aim=lost))


def lossy_joins(chance: Random, shape: Shape) -> Staged:
    """Calls are carried out and their replies lost while agents join."""
    shape = _job(shape, nodes=chance.randint(2, 4), slurm=True)
    lossy = (
        Act(at_s=0.0, kind="lossy_link", node=node, lasts_s=3.0, number=chance.randint(600, 950))
        for node in shape.nodes
    )
    return shape, tuple(lossy)


def dead_with_the_controller(chance: Random, shape: Shape) -> Staged:
    """A node loses its power in the moment in which the controller dies: only the journal knows that it was there."""
    beats = shape.plan.fault_tolerance.heartbeat
    shape = _job(
        shape,
        nodes=chance.randint(2, 4),
        slurm=True,
        heartbeat=replace(beats, startup_timeout=2 * beats.timeout),
    )
    # Its peers wait: their reports would have it fenced sooner, as one that is late for the next rendezvous.
    shape = dataclasses.replace(shape, behaviour=dataclasses.replace(shape.behaviour, leaves_s=None))
    aim = _at("workers_started", nth=chance.choice((0, 1)))
    power_off = Act(at_s=0.0, kind="power_off", number=_number(chance), aim=aim)
    return shape, (power_off, Act(at_s=0.0, kind="kill_controller", number=_number(chance), aim=aim))


def cut_at_the_close(chance: Random, shape: Shape) -> Staged:
    """An agent is cut off while it asks for its ranks, until another node has them and runs."""
    given_away_s = shape.plan.fault_tolerance.gives_away_after_s
    shape = _job(shape, nodes=chance.randint(1, 3), slurm=True, work_s=0.6 * given_away_s)
    lasts_s = given_away_s * chance.uniform(0.8, 1.4)
    aim = _at("rendezvous_closed", "after receipt", nth=chance.randrange(2), steps=chance.choice((0, 0, 1, 2)))
    return shape, (Act(at_s=0.0, kind="cut", lasts_s=round(lasts_s, 3), number=_number(chance), aim=aim),)


def replaced_at_the_close(chance: Random, shape: Shape) -> Staged:
    """An agent asks for its ranks, loses its supervisor, and has joined as another one when the answer is there."""
    nodes = chance.randint(2, 4)
    shape = _job(shape, nodes=nodes, spares=chance.choice((0, 1)))
    steps = chance.choice((2, 4, 6, 8))  # the request leaves after four of them, and nothing answers it at once
    aim = _at("rendezvous_closed", "after receipt", nth=chance.randrange(nodes), steps=steps)
    return shape, (Act(at_s=0.0, kind="kill_supervisor", number=_number(chance), aim=aim),)


def cut_without_spares(chance: Random, shape: Shape) -> Staged:
    """A node is cut off for about its lease, its connection closed, and no other can have its ranks. It gets them
    when it is back, and orders may reach it before a heartbeat of its own has arrived."""
    shape = _job(shape, nodes=chance.randint(2, 4), spares=0, slurm=True)
    lasts_s = shape.plan.fault_tolerance.fence_timeout * chance.uniform(0.6, 1.6)
    kind = chance.choice(("cut", "cut_closed", "cut_closed"))
    aim = _at(chance.choice(("workers_started", "workers_started", "rendezvous_closed")))
    return shape, (Act(at_s=0.0, kind=kind, lasts_s=round(lasts_s, 3), number=_number(chance), aim=aim),)


def frozen_past_a_deadline(chance: Random, shape: Shape) -> Staged:
    """The controller is frozen while nodes get ready, until their last call is over. They take longer for it than one
    read of the inbox takes."""
    shape = _slow(_job(shape, nodes=chance.randint(2, 4), spares=4), chance)
    bounds = shape.plan.fault_tolerance
    last_call_s = bounds.teardown.grace + bounds.rendezvous.last_call
    freeze = Act(
        at_s=0.0,
        kind="freeze_controller",
        lasts_s=round(last_call_s + chance.uniform(4.0, 8.0), 3),
        number=chance.choice((0, 0, 1, 2)),
        aim=_at("rendezvous_opened", follows=True),
    )
    fail = Act(at_s=0.0, kind="fail_worker", number=_number(chance), aim=_at("workers_started", steps=2))
    return shape, (fail, freeze)


def opened_late(chance: Random, shape: Shape) -> Staged:
    """A worker fails while the controller is frozen, or the store is when it would take the order to restart: the
    nodes learn of it when their grace and the last call would be over. There are spares for all. The controller may
    die before it knows that its order came late."""
    nodes = chance.randint(1, 3)
    shape = _slow(_job(shape, nodes=nodes, spares=chance.randint(nodes, 4)), chance)
    bounds = shape.plan.fault_tolerance
    lasts_s = bounds.teardown.grace + bounds.rendezvous.last_call + chance.uniform(0.5, 8.0)
    kind, aim = chance.choice(
        (
            ("freeze_controller", _at("workers_started", nth=nodes - 1, steps=chance.choice((0, 1)))),
            ("freeze_store", _at("rendezvous_opened", "before", nth=1)),
        )
    )
    freeze = Act(at_s=0.0, kind=kind, lasts_s=round(lasts_s, 3), aim=aim)
    acts = [_fails(shape.nodes[0], 1, chance.uniform(0.3, 2.0)), freeze]
    if kind == "freeze_store" and chance.random() < 0.5:
        acts.append(Act(at_s=0.0, kind="kill_controller", aim=_at("rendezvous_opened", nth=1)))
    return shape, tuple(acts)


def backlog_past_a_deadline(chance: Random, shape: Shape) -> Staged:
    """All workers end in time while the controller is frozen. It is killed when `exit_skew` is over, or before."""
    skew_s = shape.plan.fault_tolerance.heartbeat.interval * chance.choice((1, 2))
    shape = _job(shape, nodes=chance.randint(3, 4), work_s=chance.uniform(1.5, 4.0), hang=HangSpec(exit_skew=skew_s))
    aim, lasts_s = _at("workers_started", nth=chance.choice((0, 1, 2))), skew_s * chance.uniform(0.2, 0.6)
    late = Act(at_s=0.0, kind="linger", lasts_s=round(lasts_s, 3), number=_number(chance), aim=aim)
    outage_s = round(skew_s * chance.uniform(0.7, 2.0), 3)
    return shape, (late, Act(at_s=0.0, kind="replace_frozen", lasts_s=outage_s, aim=_at("workers_done")))


def older_cycle(chance: Random, shape: Shape) -> Staged:
    """An agent says of a cycle that is over what it has said before, under a fresh number."""
    nodes = chance.randint(1, 3)
    shape = _job(shape, nodes=nodes, work_s=chance.uniform(2.0, 4.0))
    aim = _at("workers_started", nth=nodes + chance.randrange(nodes), steps=chance.choice((0, 1)))
    repeat = Act(at_s=0.0, kind="repeat_cycle", number=_number(chance), aim=aim)
    return shape, (_fails(shape.nodes[0], 1, chance.uniform(0.3, 0.8)), repeat)


def copied_orders(chance: Random, shape: Shape) -> Staged:
    """A process that can write into the store copies orders, while the job restarts."""
    shape = _job(shape, nodes=chance.randint(1, 3))
    copies = (
        Act(at_s=round(chance.uniform(0.5, shape.work_s), 3), kind="copy_order", number=_number(chance))
        for _ in range(chance.randint(1, 4))
    )
    return shape, (_fails(shape.nodes[0], 1, chance.uniform(0.3, 2.0)), *sorted(copies, key=lambda act: act.at_s))


# Each with how often it is made: those more often in which the moment that matters is met by chance alone.
SITUATIONS: dict[Callable[[Random, Shape], Staged], float] = {
    crash_loop: 1,
    failure_rate: 1,
    job_budget: 1,
    late_exit: 1,
    late_verdict: 1,
    takeover_after_requeue: 1,
    suspended_late: 2,
    former_join: 1,
    former_proof: 1,
    lossy_joins: 1,
    dead_with_the_controller: 1,
    cut_at_the_close: 1,
    replaced_at_the_close: 2,
    cut_without_spares: 3,
    frozen_past_a_deadline: 2,
    opened_late: 2,
    backlog_past_a_deadline: 2,
    older_cycle: 1,
    copied_orders: 1,
}
