"""When a rendezvous opens, when it closes, and with which nodes.

A rendezvous prefers the nodes of the cycle before (in cycle 0: the first nodes of the allocation). It closes:

- at once, when every preferred node is ready or known dead, and spares fill what is missing;
- when the last call has passed, if spares could stand in for preferred nodes that are merely late;
- with fewer nodes, or not at all (the job stops, 75), when no more can come or the join timeout has passed;
- not before a failure is decided whose evidence is still awaited (`restart_decision`), nor within the pause that
  follows from a crash loop (`backoff`);
- never while a lost node of the cycle before may still have workers: no rank is ever held twice.

A drained node tears down and gets ready as the others do, and a spare has its seat. If the spare that was counted on
is lost meanwhile, the drain is taken back: an operator's request must not end a job that could go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain

from nvrx_slurm.core import limits, membership, restart_decision
from nvrx_slurm.core.assignment import passed_over, seat
from nvrx_slurm.core.state import ControlState, Failure, Node, NodeState, Phase, Replica, Stamps
from nvrx_slurm.errors import EXIT_RETRY
from nvrx_slurm.journal.records import (
    Decision,
    Fence,
    NodeUndrained,
    RendezvousClosed,
    RendezvousOpened,
    Shutdown,
)

# How long after it became clear that too few nodes are left the job stops.
SHORT_S = 0.5

# The same where no agent is left at all: until then the batch host has started them again, or ended the job.
EMPTY_S = 30.0


def open_rendezvous(
    job: ControlState, replica: Replica, now: float, noticed: float, dump: str | None = None
) -> list[Decision]:
    """Call the replica's nodes to its next cycle. `dump`: why they write down their workers' stacks first."""
    replica.cycle += 1
    replica.phase = Phase.RENDEZVOUS
    replica.opened_at = replica.called_at = now
    replica.last_call_at, replica.short_since = None, None
    replica.stamps = Stamps(noticed=noticed, decided=now)
    replica.ready, replica.started, replica.stepped, replica.done = set(), set(), set(), set()
    replica.first_done_at = None
    replica.awaited = set()
    for node in map(job.nodes.__getitem__, replica.order):
        is_member = node.state is NodeState.ACTIVE and node.replica == replica.id
        may_come = node.state in (NodeState.EXPECTED, NodeState.STANDBY) and node.name not in job.drained
        if is_member or may_come:
            replica.awaited.add(node.name)
    job.wanted_by.update(dict.fromkeys(replica.awaited, replica.id))
    for name in sorted(replica.awaited & job.standby):  # it was lost and came back: nothing to tear down
        arrive(job, job.nodes[name], now)
    return [RendezvousOpened(replica=replica.id, cycle=replica.cycle, generation=job.generation, dump=dump)]


def call_again(job: ControlState, replica: Replica, now: float) -> None:
    """All nodes have to join again: the open rendezvous waits for those of the cycle before."""
    replica.called_at, replica.last_call_at, replica.short_since = now, None, None
    again = job.expected.intersection(replica.order)
    replica.awaited |= again
    job.wanted_by.update(dict.fromkeys(again, replica.id))


def arrive(job: ControlState, node: Node, now: float) -> None:
    """A node without old workers is here: for the open rendezvous that prefers it, or else as a spare."""
    if node.name in job.drained:
        membership.move(job, node, NodeState.DRAINED)
        forget(job, node, now)
        return
    wanted_by = job.wanted_by.get(node.name)
    if wanted_by is None:
        if node.state is not NodeState.STANDBY:
            membership.move(job, node, NodeState.STANDBY)
        return
    replica = job.replicas[wanted_by]
    membership.move(job, node, NodeState.READY)
    node.replica = replica.id
    replica.ready.add(node.name)
    _no_longer_awaited(replica, node, now)


def forget(job: ControlState, node: Node, now: float) -> None:
    """A node is gone: no open rendezvous waits for it any more."""
    wanted_by = job.wanted_by.pop(node.name, None)
    if wanted_by is not None:
        replica = job.replicas[wanted_by]
        replica.ready.discard(node.name)
        _no_longer_awaited(replica, node, now)


def give_up(job: ControlState, node: Node, now: float) -> Fence:
    """The node may live, and has to join again."""
    order = fence(job, node, now)
    membership.move(job, node, NodeState.LOST)
    forget(job, node, now)
    return order


def fence(job: ControlState, node: Node, now: float) -> Fence:
    """Until the node reads this, any contact with the store renews the lease of its workers: its ranks are not given
    away before they are dead. For a lost node, too, whose fence is gone with the store's data."""
    replica = job.replicas.get(node.replica or "")
    if replica is not None and (node.state is NodeState.ACTIVE or now < replica.unsafe.get(node.name, now)):
        dead_by = now + job.plan.fault_tolerance.gives_away_after_s
        replica.unsafe[node.name] = membership.safe_at(node, dead_by)
    return Fence(node=node.name, incarnation=node.incarnation)


def close_what_can(job: ControlState, now: float) -> list[Decision]:
    """Close every open rendezvous that may close at `now`, or stop the job if one never can."""
    decisions: list[Decision] = []
    # The replica that failed comes first: other replicas may wait for the decision on its failure.
    order = sorted(job.replicas.values(), key=lambda each: not restart_decision.is_open(job, each))
    # Then those again that waited for a node of another replica: it may have been given up.
    for replica in chain(order, (each for each in order if each.waits_for)):
        if replica.phase is Phase.RENDEZVOUS and replica.cycle >= 0:
            decisions += _blame_silent(job, replica, now) + _close_if_due(job, replica, now)
            if decisions and isinstance(decisions[-1], Shutdown):
                break
    return decisions


def deadline(job: ControlState, replica: Replica) -> float:
    """When the open rendezvous must be looked at again if nothing happens."""
    if replica.unsafe:  # before the proof, or its time, nothing else can close it
        latest = max(replica.unsafe.values())
        return _overdue_at(job, replica) if latest == math.inf else latest
    if replica.paused and replica.pause_until is not None:
        return replica.pause_until
    if replica.waits_for:
        return min(deadline(job, job.replicas[each]) for each in replica.waits_for)
    if replica.held:
        return min(pending.due_at for pending in restart_decision.holding(job, replica))
    due = (_overdue_at(job, replica), replica.last_call_at, _stops_at(job, replica))
    return min(at for at in due if at is not None)


def _overdue_at(job: ControlState, replica: Replica) -> float:
    """When the open rendezvous has taken too long; later, where agents have been started for it since."""
    at = replica.called_at + job.plan.fault_tolerance.rendezvous.join_timeout
    return max(at, job.expected_until) if job.expected else at


def _stops_at(job: ControlState, replica: Replica) -> float | None:
    """When the job stops, since this open rendezvous lacks nodes and no more can come."""
    if replica.short_since is None:
        return None
    # When Slurm ends the step of all agents, their deaths arrive one by one, and then the batch host either starts
    # them again or reports that every agent is gone. A stop in between would be too early.
    return replica.short_since + (SHORT_S if any(node.alive for node in job.nodes.values()) else EMPTY_S)


def _no_longer_awaited(replica: Replica, node: Node, now: float) -> None:
    # A node that was ready already, and is drained or lost later, does not prolong the teardown.
    if node.name in replica.awaited:
        replica.awaited.remove(node.name)
        if not replica.awaited and replica.stamps:
            replica.stamps.torn_down = now


def _close_if_due(job: ControlState, replica: Replica, now: float) -> list[Decision]:
    replica.held = replica.paused = False
    replica.waits_for = ()
    replica.unsafe = {name: at for name, at in replica.unsafe.items() if now < at}
    if replica.unsafe:
        # The clock proves nothing of a node that was lost while the job was suspended. If its kernel does not either,
        # its ranks cannot run in this allocation any more.
        unproven = sorted(name for name, at in replica.unsafe.items() if at == math.inf)
        if unproven and job.is_over(_overdue_at(job, replica), now):
            reason = f"{', '.join(unproven)}: lost in a suspension, and not proven dead"
            return [Shutdown(exit_code=EXIT_RETRY, reason=reason)]
        return []
    # 1. Enough nodes: at once, if no preferred node is awaited any more; else after the last call.
    bounds = job.plan.fault_tolerance
    enough = len(replica.ready) + len(job.standby) >= replica.role.nodes_per_replica
    overdue = job.is_over(_overdue_at(job, replica), now)
    if enough:
        replica.short_since = None
    if enough and (not replica.awaited or overdue):
        return _fence_late(job, replica, now) or _close_once_decided(job, replica, now)
    if enough:
        if replica.last_call_at is None:
            # Late nodes of the cycle before may still be killing their workers: a spare must not overtake them.
            torn_down_by = replica.called_at + (bounds.teardown.grace if replica.cycle else 0.0)
            replica.last_call_at = max(now, torn_down_by) + bounds.rendezvous.last_call
        if not job.is_over(replica.last_call_at, now):
            return []
        return _fence_late(job, replica, now) or _close_once_decided(job, replica, now)
    # 2. Too few nodes, and more may come: wait for them.
    replica.last_call_at = None
    more_may_come = replica.awaited or (job.expected and not job.is_over(job.expected_until, now))
    if more_may_come and not overdue:
        replica.short_since = None
        return []
    # 3. Too few nodes, for good: have drained nodes back, else go on with fewer, else stop the job.
    if taken_back := _take_back_drains(job, replica):
        return [*taken_back, *_close_if_due(job, replica, now)]
    have, role = len(replica.ready) + len(job.standby), replica.role
    if role.min_nodes is not None and have >= role.min_nodes:
        return _fence_late(job, replica, now) or _close_once_decided(job, replica, now)
    replica.short_since = now if replica.short_since is None else replica.short_since
    stops_at = _stops_at(job, replica)
    if stops_at is not None and not job.is_over(stops_at, now) and not overdue:
        return []
    return _blame_late(job, replica, now) + _close_once_decided(job, replica, now, _stop)


def _take_back_drains(job: ControlState, replica: Replica) -> list[Decision]:
    """The spares that the open rendezvous' drains had counted on are gone: have as many drained nodes back as it
    lacks."""
    # Not those of an earlier rendezvous: a drain that was carried out stands. So `leaving` is empty after each close.
    missing = replica.role.nodes_per_replica - len(replica.ready) - len(job.standby)
    taken_back: list[Decision] = []
    for name, asked in list(replica.leaving.items()):
        node = job.nodes[name]
        fewest = replica.role.min_nodes if asked.force else None
        spared = 0 if fewest is None else replica.role.nodes_per_replica - fewest
        if missing <= spared or node.state is not NodeState.DRAINED:
            continue
        missing -= 1
        del replica.leaving[name]
        job.drained.discard(name)
        job.wanted_by[name] = replica.id
        membership.move(job, node, NodeState.READY)
        node.replica = replica.id
        replica.ready.add(name)
        why = f"no spare is left for its ranks in {replica.id}"
        taken_back.append(NodeUndrained(request=asked.request, by=asked.by, node=name, why=why))
    return taken_back


def _stop(job: ControlState, replica: Replica, now: float) -> list[Decision]:
    have, role = len(replica.ready) + len(job.standby), replica.role
    missing = sorted(replica.awaited or job.expected)
    reason = f"{replica.id} needs {role.min_nodes or role.nodes_per_replica} nodes and has {have}, no spare is left"
    if missing:
        reason += f"; never ready: {', '.join(missing)}"
    if drained := sorted(name for name in job.drained if job.nodes[name].state is NodeState.DRAINED):
        reason += f"; drained: {', '.join(drained)}"
    return [Shutdown(exit_code=EXIT_RETRY, reason=reason)]


def _close_once_decided(
    job: ControlState,
    replica: Replica,
    now: float,
    then: Callable[[ControlState, Replica, float], list[Decision]] | None = None,
) -> list[Decision]:
    """Decide on the failures that the rendezvous waits for; then close it (or do `then`)."""
    # While evidence is awaited it is not given up either: a job that no restart can help must not end with 75, and
    # come back for more nodes.
    decisions: list[Decision] = []
    for pending in restart_decision.holding(job, replica):
        others = restart_decision.waits_for(job, pending, replica)
        if then is not None and pending.replica == replica.id:
            others = []  # this one lacks nodes for good: others may wait for these, so it waits for none
        if others or not restart_decision.is_settled(job, pending, now):
            replica.held, replica.waits_for = True, tuple(each.id for each in others)
            pending.held_at = now if pending.held_at is None else pending.held_at
            return decisions
        decisions += restart_decision.decide(job, pending, now)
        if isinstance(decisions[-1], Shutdown):
            return decisions
    replica.paused = then is None and replica.pause_until is not None and now < replica.pause_until
    return decisions if replica.paused else decisions + (then or _close)(job, replica, now)


def _close(job: ControlState, replica: Replica, now: float) -> list[Decision]:
    previous, want = replica.order, replica.role.nodes_per_replica
    # A node that was lost after the opening and has joined again is a spare by now. It gets its own ranks back.
    here = replica.ready | job.standby.intersection(previous)
    unwanted = passed_over(previous, here, job.spares_in_order(), want, job.is_suspect)
    spares = [name for name in job.spares_in_order() if name not in unwanted]
    nodes = seat(previous, here - unwanted, spares, want)
    for name in previous:
        job.wanted_by.pop(name, None)
    for name in replica.ready.difference(nodes):
        membership.move(job, job.nodes[name], NodeState.STANDBY)
    for name in nodes:
        membership.move(job, job.nodes[name], NodeState.ACTIVE)
        job.nodes[name].replica = replica.id
    if replica.stamps:
        replica.stamps.closed = now
        replica.stamps.torn_down = replica.stamps.torn_down or now
    replica.phase, replica.order = Phase.RUNNING, nodes
    replica.began_at, replica.pause_until = now, None
    limits.start_cycle(replica)
    replica.awaited, replica.ready, replica.leaving, replica.silent = set(), set(), {}, set()
    master = job.nodes[nodes[0]]
    closed = RendezvousClosed(
        replica=replica.id,
        cycle=replica.cycle,
        nodes=nodes,
        promoted=tuple(name for name in nodes if name not in previous),
        active=sum(node.state is NodeState.ACTIVE for node in job.nodes.values()),
        standby=len(job.standby),
        world_size=len(nodes) * replica.role.workers_per_node,
        master_addr=master.addr,
        master_port=master.port,
        generation=job.generation,
    )
    return [closed]


def _fence_late(job: ControlState, replica: Replica, now: float) -> list[Decision]:
    """Nodes that are too late lose their ranks: they are fenced, and the rendezvous waits until they are dead."""
    late, evidence = _late(job, replica), _blame_late(job, replica, now)
    replica.silent.update(node.name for node in late)
    return [give_up(job, node, now) for node in late] + evidence


def _blame_late(job: ControlState, replica: Replica, now: float) -> list[Decision]:
    """Where only lost connections were reported so far, the first of the late nodes is what the others have lost."""
    return _blame(job, replica, [node.name for node in _late(job, replica)], replica.opened_at, now)


def _blame_silent(job: ControlState, replica: Replica, now: float) -> list[Decision]:
    """Once the clock proves that late nodes are dead: where only hangs were reported so far, the hung workers have
    waited for the first of those nodes that has not been heard since."""
    if job.catches_up or any(now < at for at in replica.unsafe.values()):
        return []
    silent, replica.silent = sorted(replica.silent), set()
    return _blame(job, replica, silent, -math.inf, now)


def _blame(job: ControlState, replica: Replica, nodes: list[str], began: float, now: float) -> list[Decision]:
    evidence: list[Decision] = []
    for name in nodes:
        failure = Failure(kind="node", cause=f"{name} lost: no answer to the teardown", node=name, noticed=now)
        evidence += restart_decision.take_evidence(job, replica, failure, began, now) or []
    return evidence


def _late(job: ControlState, replica: Replica) -> list[Node]:
    nodes = (job.nodes[name] for name in sorted(replica.awaited))
    return [node for node in nodes if node.state is NodeState.ACTIVE]
