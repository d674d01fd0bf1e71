"""Each rank as the heartbeats report it: its step, how far it is behind, how long it has been quiet. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nlargest
from math import inf

from nvrx_slurm.journal.records import Heartbeat
from nvrx_slurm.report.model import Heard, JobView, NodeView, RankView, ReplicaView, SectionView

_WITH_WORKERS = ("starting", "running")


def ranks(view: JobView, store_now: float | None) -> tuple[RankView, ...]:
    """Every rank that has a worker, by replica and number.

    `store_now` is the store's clock: what a heartbeat reported has grown older by the time since. Without it, or
    without a beat of its node in the running cycle, only a rank's place is known.
    """
    running = (replica for replica in view.replicas.values() if replica.phase in _WITH_WORKERS)
    return tuple(rank for replica in running for rank in _world(view, replica, store_now))


def is_current(view: JobView, node: NodeView, beat: Heartbeat) -> bool:
    """Whether a beat speaks of the workers that the node has now: of its present agent, generation and cycle."""
    replica = view.replicas.get(beat.replica or "")
    if replica is None or node.state != "active" or node.replica != beat.replica:
        return False
    fresh = node.incarnation in ("", beat.incarnation) and beat.generation == view.generation
    return fresh and beat.cycle == replica.cycle


def beat_age_s(view: JobView, name: str, store_now: float | None) -> float | None:
    """Seconds since the node's last beat reached the store, by the store's own clock; None: not known."""
    heard = view.last_beat(name)
    return None if heard is None or store_now is None else max(0.0, store_now - heard.t)


def worst(every: Sequence[RankView], most: int) -> list[RankView]:
    """Those without a step where others have one, then those furthest behind, then those quiet longest."""
    stepping = {rank.replica for rank in every if rank.step is not None}

    def how_bad(rank: RankView) -> tuple[float, float]:
        unborn = rank.lag is None and rank.replica in stepping
        return inf if unborn else rank.lag or 0, rank.quiet_s or 0.0

    return nlargest(most, every, how_bad)


def _world(view: JobView, replica: ReplicaView, store_now: float | None) -> Iterator[RankView]:
    nodes = [node for name in replica.nodes if (node := view.nodes.get(name)) and node.state == "active"]
    beats = [_current_beat(view, node) for node in nodes]
    steps = (step for heard in beats if heard for step in heard.beat.steps.values())
    fastest = max(steps, default=None)
    for node, heard in zip(nodes, beats, strict=True):
        for rank in node.ranks:
            if heard is None:
                yield RankView(replica=replica.id, rank=rank, node=node.name)
            else:
                yield _told(node, rank, heard, fastest, store_now)


def _current_beat(view: JobView, node: NodeView) -> Heard | None:
    heard = view.heard.get(node.name)
    return heard if heard is not None and is_current(view, node, heard.beat) else None


def _told(node: NodeView, rank: int, heard: Heard, fastest: int | None, store_now: float | None) -> RankView:
    beat = heard.beat
    age_s = 0.0 if store_now is None else max(0.0, store_now - heard.t)
    step, quiet_s = beat.steps.get(rank), beat.quiet.get(rank)
    return RankView(
        replica=beat.replica or "",
        rank=rank,
        node=node.name,
        step=step,
        lag=None if step is None or fastest is None else fastest - step,
        quiet_s=None if quiet_s is None else quiet_s + age_s,
        sections=tuple(SectionView(name=name, open_s=s + age_s) for name, s in beat.sections.get(rank, ())),
    )
