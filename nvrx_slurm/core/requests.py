"""What a user asks of a running job: restart a replica, drain a node, undrain it, run a command. None of it is a
failure.

Each request is answered once, by a decision that carries its name: by what follows from it, or by `RequestRefused`.
A request names the generation, and a restart the cycles, that its user saw. One that arrives late, when they are
over, is refused: what it was to end has ended.
"""

from __future__ import annotations

from collections.abc import Collection

from nvrx_slurm.core import rendezvous, restart_decision
from nvrx_slurm.core.state import ControlState, Node, NodeState, Phase, Replica
from nvrx_slurm.journal.records import (
    CommandAsked,
    CommandOrdered,
    Decision,
    DrainAsked,
    NodeDrained,
    NodeUndrained,
    RequestRefused,
    RestartAsked,
    RestartOrdered,
    UndrainAsked,
)

Asked = RestartAsked | DrainAsked | UndrainAsked | CommandAsked


def answer(job: ControlState, fact: Asked, now: float) -> list[Decision] | None:
    """Answer a request, once."""
    if fact.request in job.requests:  # sent twice, or copied by another user of the store
        return None
    job.requests.add(fact.request)
    if fact.generation != job.generation:
        return _refuse(fact, f"the job was requeued: generation {job.generation} runs, not {fact.generation}")
    if job.shutdown is not None:
        return _refuse(fact, f"the job ends: {job.shutdown.reason}")
    match fact:
        case RestartAsked():
            return _restart(job, fact, now)
        case DrainAsked():
            return _drain(job, fact, now)
        case UndrainAsked():
            return _undrain(job, fact, now)
        case CommandAsked():
            return _run(job, fact)


def _restart(job: ControlState, fact: RestartAsked, now: float) -> list[Decision]:
    """Open the next rendezvous of the replicas that still run the cycle that the user saw."""
    chosen: set[str] = set()
    whys: list[str] = []
    for name, cycle in fact.cycles.items():
        replica = job.replicas.get(name)
        if replica is None:
            whys.append(f"there is no replica {name}")
        elif replica.ended:
            whys.append(f"{name} is {replica.phase}")
        elif replica.cycle != cycle:
            whys.append(f"{name} is in cycle {replica.cycle} by now, not {cycle}")
        elif replica.phase is Phase.RENDEZVOUS:
            whys.append(f"{name} starts anyway: the rendezvous of cycle {cycle} is open")
        else:
            chosen |= restart_decision.restarted_with(job, replica)
    # Several replicas in one request: those that still run the named cycle restart, whatever has become of the rest.
    if not chosen:
        return _refuse(fact, "; ".join(whys) or "it names no replica")
    return _open(job, fact, chosen, now)


def _drain(job: ControlState, fact: DrainAsked, now: float) -> list[Decision]:
    """Give the node no ranks any more, and have a spare take those that it has."""
    node = job.nodes.get(fact.node)
    if node is None:
        return _refuse(fact, f"{fact.node} is no node of this job")
    drained = NodeDrained(request=fact.request, by=fact.by, node=node.name)
    if node.name in job.drained:
        return [drained]
    owner = job.wanted_by.get(node.name) or (node.replica if node.state is NodeState.ACTIVE else None)
    replica = None if owner is None else job.replicas[owner]
    if (why := _lacks(job, node, replica, force=fact.force)) is not None:
        return _refuse(fact, why)
    # Before any rendezvous opens: it would count the node among those that may come.
    job.drained.add(node.name)
    job.expected.discard(node.name)
    if replica is not None and not replica.ended:
        replica.leaving[node.name] = fact
    if replica is not None and replica.phase is Phase.RUNNING:
        if node.name in replica.done:  # its ranks are done: nothing has to move
            return [drained]
        return [drained, *_open(job, fact, restart_decision.restarted_with(job, replica), now, node.name)]
    # Of an active node the teardown for the open rendezvous goes on, and is awaited.
    if node.state in (NodeState.STANDBY, NodeState.READY):
        rendezvous.arrive(job, node, now)
    elif node.state is NodeState.EXPECTED:
        rendezvous.forget(job, node, now)
    return [drained]


def _undrain(job: ControlState, fact: UndrainAsked, now: float) -> list[Decision]:
    """Let the node have ranks again. One that is lost may when it is back."""
    node = job.nodes.get(fact.node)
    if node is None or node.name not in job.drained:
        return _refuse(fact, f"{fact.node} is {'no node of this job' if node is None else 'not drained'}")
    job.drained.discard(node.name)
    for replica in job.replicas.values():
        replica.leaving.pop(node.name, None)
    if node.state is NodeState.DRAINED:
        rendezvous.arrive(job, node, now)
    elif node.state is NodeState.EXPECTED:
        job.expected.add(node.name)
    return [NodeUndrained(request=fact.request, by=fact.by, node=node.name)]


def _run(job: ControlState, fact: CommandAsked) -> list[Decision]:
    """Have the node that has the rank run the command, in the cycle that the user saw."""
    replica = job.replicas.get(fact.replica)
    if replica is None or replica.phase is not Phase.RUNNING or replica.cycle != fact.cycle:
        return _refuse(fact, f"cycle {fact.cycle} of {fact.replica} does not run any more")
    seat = fact.rank // replica.role.workers_per_node
    if seat >= len(replica.order) or (node := replica.order[seat]) in replica.done:
        return _refuse(fact, f"rank {fact.rank} of {fact.replica} has no worker")
    ordered = CommandOrdered(
        request=fact.request,
        by=fact.by,
        node=node,
        argv=fact.argv,
        replica=fact.replica,
        rank=fact.rank,
        cycle=fact.cycle,
        generation=fact.generation,
    )
    return [ordered]


def _refuse(fact: Asked, why: str) -> list[Decision]:
    return [RequestRefused(request=fact.request, why=why)]


def _open(
    job: ControlState, fact: RestartAsked | DrainAsked, chosen: Collection[str], now: float, node: str | None = None
) -> list[Decision]:
    decisions: list[Decision] = []
    for replica in job.replicas.values():
        if replica.id in chosen:
            ordered = RestartOrdered(
                request=fact.request, by=fact.by, replica=replica.id, cycle=replica.cycle, node=node
            )
            decisions += [ordered, *rendezvous.open_rendezvous(job, replica, now, noticed=now)]
    return decisions


def _lacks(job: ControlState, node: Node, owner: Replica | None, *, force: bool) -> str | None:
    """Why the job cannot go on without the node, in words; None: it can. `owner`: the replica that has the node."""
    if not (node.alive or node.state is NodeState.EXPECTED) or node.state is NodeState.QUARANTINED:
        return None
    without = job.drained | {node.name}
    spares = [
        each.name
        for each in job.nodes.values()
        if each.name not in without
        and (
            each.state is NodeState.STANDBY
            or (each.state is NodeState.EXPECTED and each.name in job.expected and each.name not in job.wanted_by)
        )
    ]
    # Every open rendezvous takes what it lacks from the same spares, so all of them are added up.
    lacks: dict[str, int] = {}
    for replica in job.replicas.values():
        if replica.phase is Phase.RENDEZVOUS:
            left = len((replica.ready | replica.awaited) - without)
            lacks[replica.id] = max(0, replica.role.nodes_per_replica - left)
        elif replica is owner and not replica.ended:
            lacks[replica.id] = 1
    missing = sum(lacks.values()) - len(spares)
    if missing <= 0:
        return None
    why = (
        f"no spare is left for the ranks of {node.name}"
        if owner is not None
        else f"{', '.join(name for name in lacks if lacks[name])} needs it"
    )
    if owner is None or owner.role.min_nodes is None:
        return why
    fewest = owner.role.min_nodes
    left = len(owner.order) - 1 if owner.phase is Phase.RUNNING else owner.role.nodes_per_replica - missing
    if left < fewest:
        return f"{why}, and {owner.id} needs {fewest} nodes at least"
    return None if force else f"{why}; with --force {owner.id} goes on with {left} nodes (min_nodes is {fewest})"
