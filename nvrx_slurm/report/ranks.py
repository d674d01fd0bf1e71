"""Each rank as the heartbeats report it: its step, how far it is behind, how long it has been quiet. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from math import inf
from typing import NamedTuple

from nvrx_slurm.report.model import JobView, RankView, ReceivedHeartbeat, ReplicaView, SectionView

# How long a heartbeat may be on its way to the store. What a replica does in that time is no lag.
JITTER_S = 0.1


def ranks(view: JobView, store_now: float | None) -> tuple[RankView, ...]:
    """Every rank that has a worker, by replica and number.

    `store_now` is the store's clock: what a heartbeat reported has grown older by the time since. Without it, or
    without a heartbeat of its node in the running cycle, only a rank's place is known.
    """
    running = (replica for replica in view.replicas.values() if replica.phase in ("starting", "running"))
    return tuple(rank for replica in running for rank in _of_replica(view, replica, store_now))


def _of_replica(view: JobView, replica: ReplicaView, store_now: float | None) -> Iterator[RankView]:
    nodes = [node for name in replica.nodes if (node := view.nodes.get(name)) and node.state == "active"]
    current = {
        node.name: heard
        for node in nodes
        if (heard := view.heard.get(node.name)) and view.is_current(node, heard.heartbeat)
    }
    # Where each node's fastest rank was, and when: heartbeats of different nodes are of different moments.
    moving = _moving(view, current)
    for node in nodes:
        heard = current.get(node.name)
        age_s = 0.0 if heard is None or store_now is None else max(0.0, store_now - heard.t)
        fastest = None if heard is None else _fastest(moving, heard.t)  # once a node: they have 8 ranks and more
        for rank in node.ranks:
            if heard is None:
                yield RankView(replica=replica.id, rank=rank, node=node.name)
                continue
            step, quiet_s = heard.heartbeat.steps.get(rank), heard.heartbeat.quiet.get(rank)
            sections = heard.heartbeat.sections.get(rank, ())
            yield RankView(
                replica=replica.id,
                rank=rank,
                node=node.name,
                step=step,
                lag=None if step is None or fastest is None else int(max(0.0, fastest - step)),
                quiet_s=None if quiet_s is None else quiet_s + age_s,
                sections=tuple([SectionView(name=name, open_s=open_s + age_s) for name, open_s in sections]),
            )


class _Moving(NamedTuple):
    """The fastest rank of a node: which step it had reached at the moment `t`, and how many it makes a second (None:
    one heartbeat alone does not say)."""

    t: float
    reached: int
    rate: float | None


def _moving(view: JobView, current: Mapping[str, ReceivedHeartbeat]) -> list[_Moving]:
    found = []
    for name, heard in current.items():
        reached = max(heard.heartbeat.steps.values(), default=None)
        if reached is None:
            continue
        before, rate = view.heard_before.get(name), None
        if before is not None and before.heartbeat.steps and before.t < heard.t:
            rate = max(0.0, (reached - max(before.heartbeat.steps.values())) / (heard.t - before.t))
        found.append(_Moving(heard.t, reached, rate))
    return found


def _fastest(moving: Sequence[_Moving], at: float) -> float:
    """Which step the fastest rank of the replica had reached at the moment `at`: one that reported `step` then was so
    many behind.

    Nodes send their heartbeats at different times, and some late: the newest of one and the newest of another are of
    different moments. What another node's ranks had reached at `at` follows from its last two heartbeats; a node with
    one only, which is newer, does not count.
    """
    fastest = 0.0
    for t, reached, rate in moving:
        newer_s = t - at
        if rate is None:
            step = float(reached) if newer_s <= JITTER_S else 0.0
        else:
            step = reached - rate * ((newer_s if newer_s > 0.0 else 0.0) + JITTER_S)
        if step > fastest:
            fastest = step
    return fastest


def beat_age_s(view: JobView, name: str, store_now: float | None) -> float | None:
    """Seconds since the node's last heartbeat reached the store, by the store's own clock; None: not known."""
    heard = view.last_heartbeat(name)
    return None if heard is None or store_now is None else max(0.0, store_now - heard.t)


def worst(every: Sequence[RankView], most: int) -> list[RankView]:
    """Those without a step where others have one, then those furthest behind, then those quiet longest."""
    stepping = {rank.replica for rank in every if rank.step is not None}

    def how_bad(rank: RankView) -> tuple[float, float]:
        # A rank that has never stepped while others have is the worst of all, however quiet these are.
        unborn = rank.lag is None and rank.replica in stepping
        return inf if unborn else rank.lag or 0, rank.quiet_s or 0.0

    return nlargest(most, every, how_bad)
