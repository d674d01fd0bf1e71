"""Small changes to a view, shared by the handlers of facts and decisions."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from nvrx_slurm.report.model import JobView, NodeState, NodeView

OPEN = ("joining", "stopping")
"""The phases of a replica whose round is open."""


def change_node(view: JobView, name: str, **changes: Any) -> None:
    """Change fields of a node; one never heard of is entered first."""
    view.nodes[name] = replace(view.nodes.get(name) or NodeView(name=name), **changes)


def change_replica(view: JobView, replica: str, **changes: Any) -> None:
    """Change fields of a replica that has opened a round."""
    view.replicas[replica] = replace(view.replicas[replica], **changes)


def change_cycle(view: JobView, replica: str, cycle: int, **changes: Any) -> None:
    """Change fields of one cycle of the running generation, if it was seen to open."""
    key = (replica, view.generation, cycle)
    if key in view.cycles:
        view.cycles[key] = replace(view.cycles[key], **changes)


def tell_step(view: JobView, name: str, step: int) -> None:
    """A rank of the node told a step."""
    change_node(view, name, step=step)
    replica = view.replicas.get(view.nodes[name].replica or "")
    if replica is not None and (replica.step is None or step > replica.step):
        change_replica(view, replica.id, step=step)


def arrive(view: JobView, name: str, t: float) -> None:
    """A node without old workers is here: for the open round that waits for it, or else as a hot spare."""
    for replica in view.replicas.values():
        if replica.phase in OPEN and name in view.waiting[replica.id]:
            place = {"replica": replica.id, "role": replica.role, "ranks": (), "done": False}
            change_node(view, name, state="ready", since=t, **place)
            stop_waiting(view, replica.id, name)
            return
    free = {"replica": None, "role": None, "group_rank": None, "ranks": (), "promoted": False, "done": False}
    change_node(view, name, state="standby", since=t, **free)


def depart(view: JobView, name: str, state: NodeState, why: str, t: float) -> None:
    """A node is gone. It keeps the name of the replica that it worked for, and nobody waits for it any more."""
    gone = {"done": False, "group_rank": None, "ranks": (), "promoted": False, "held_until": None}
    change_node(view, name, state=state, since=t, why=why, **gone)
    for replica in view.replicas.values():
        stop_waiting(view, replica.id, name)


def hold_ranks(view: JobView, name: str, until: float) -> None:
    """Nobody gets the ranks that the lost node had until then, unless its death is proven before."""
    change_node(view, name, held_until=until)


def release_ranks(view: JobView, replica: str) -> None:
    """The replica's round has closed: none of its lost nodes has workers any more."""
    for name in view.unproven(replica):
        change_node(view, name, held_until=None)


def stop_waiting(view: JobView, replica: str, name: str) -> None:
    """The replica waits for one node less; a round whose old workers are all gone only lacks nodes."""
    waiting = view.waiting[replica]
    waiting.discard(name)
    if not waiting and view.replicas[replica].phase == "stopping" and view.shutdown is None:
        change_replica(view, replica, phase="joining")


def may_come(view: JobView, name: str, replica: str) -> bool:
    """Whether an opening round of the replica still has to wait for this node of its cycle before."""
    node = view.nodes.get(name)
    if node is None or node.state in ("lost", "left", "quarantined"):
        return False
    return node.state in ("joining", "standby") or node.replica == replica
