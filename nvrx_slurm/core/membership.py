"""The state of each node. Every change goes through `move`, which refuses what the table does not list."""

from __future__ import annotations

import math

from nvrx_slurm.core.state import ControlState, Node, NodeState
from nvrx_slurm.journal.records import FromAgent, NodeJoined
from nvrx_slurm.util.ids import precedes

TRANSITIONS: dict[NodeState, frozenset[NodeState]] = {
    NodeState.EXPECTED: frozenset(
        {NodeState.STANDBY, NodeState.READY, NodeState.LOST, NodeState.QUARANTINED, NodeState.DRAINED}
    ),
    NodeState.STANDBY: frozenset(
        {NodeState.READY, NodeState.ACTIVE, NodeState.LOST, NodeState.LEFT, NodeState.DRAINED}
    ),
    NodeState.READY: frozenset(
        {NodeState.ACTIVE, NodeState.STANDBY, NodeState.LOST, NodeState.LEFT, NodeState.DRAINED}
    ),
    NodeState.ACTIVE: frozenset(
        {NodeState.READY, NodeState.STANDBY, NodeState.LOST, NodeState.LEFT, NodeState.DRAINED}
    ),
    NodeState.LOST: frozenset({NodeState.EXPECTED}),
    NodeState.LEFT: frozenset({NodeState.EXPECTED}),
    NodeState.QUARANTINED: frozenset({NodeState.LOST, NodeState.LEFT}),
    NodeState.DRAINED: frozenset({NodeState.STANDBY, NodeState.READY, NodeState.LOST, NodeState.LEFT}),
}


def move(job: ControlState, node: Node, state: NodeState) -> None:
    """Put a node into another state, and keep the pool of spares in step with it."""
    assert state in TRANSITIONS[node.state], f"{node.name}: {node.state} → {state}"
    node.state = state
    job.expected.discard(node.name)
    if state is NodeState.STANDBY:
        job.standby.add(node.name)
        node.replica = None
    else:
        job.standby.discard(node.name)


def recognise(job: ControlState, fact: FromAgent) -> Node | None:
    """The node that sent the fact, or None if the fact is stale: of an older generation, of an agent that was
    replaced or never joined, or a repetition."""
    node = job.nodes.get(fact.node)
    if node is None or fact.generation != job.generation or fact.incarnation != node.incarnation:
        return None
    return node if fact.seq > node.seq else None


def heard(job: ControlState, fact: FromAgent) -> None:
    """A fact was accepted: should it come again, it is stale."""
    job.nodes[fact.node].seq = max(job.nodes[fact.node].seq, fact.seq)


def is_news(job: ControlState, fact: NodeJoined) -> bool:
    """Whether a join comes from an agent that has not joined before, and not been overtaken by its own next one."""
    node = job.nodes.get(fact.node)
    if fact.generation != job.generation:
        return False
    if node is None:
        return True
    # Joins may overtake each other, and a reply that was lost makes an agent send its join twice.
    known = fact.incarnation == node.incarnation or fact.incarnation in node.former
    return not known and not precedes(fact.incarnation, node.incarnation)


def safe_at(node: Node, at: float) -> float:
    """When the clock alone proves that the workers of a lost node are dead: at `at`, or never."""
    return at if node.grant is None else math.inf


def make_safe(job: ControlState, node: Node) -> bool:
    """None of the node's old workers lives any more. False: that was known already."""
    replica = job.replicas.get(node.replica or "")
    if replica is None:
        return False
    replica.silent.discard(node.name)
    return replica.unsafe.pop(node.name, None) is not None


def welcome(job: ControlState, fact: NodeJoined) -> Node:
    """Enter the agent's particulars. The node is EXPECTED afterwards; the caller says where it goes."""
    node = job.nodes.get(fact.node)
    if node is None:
        node = job.nodes[fact.node] = Node(name=fact.node, index=len(job.nodes))
    if node.incarnation:
        node.former.add(node.incarnation)
    node.incarnation, node.seq, node.grant = fact.incarnation, fact.seq, None
    node.addr, node.port, node.fence_port = fact.addr, fact.port, fact.fence_port
    # An agent joins only when no worker of an earlier one is left on its node. Before the next line, which forgets
    # whose ranks the node had.
    make_safe(job, node)
    node.replica = None
    if node.state is not NodeState.EXPECTED:
        move(job, node, NodeState.EXPECTED)
    return node
