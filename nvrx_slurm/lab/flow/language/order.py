"""Which events of a journal can come after which. Pure.

A sequence of expectations is impossible where an item can only come before one that stands ahead of it. Only what the
core never does counts as impossible, and only where the file says enough to know: see `SPANS` and `AFTER_SHUTDOWN`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from nvrx_slurm.lab.flow.language.events import EventPattern
from nvrx_slurm.lab.flow.language.expected import AnyOrder, Eventually, Expectation, Happens
from nvrx_slurm.lab.flow.language.patterns import Equals

STRETCHES = 6
"""How many stretches a cycle has."""

SPANS: dict[str, tuple[int, int]] = {
    "round_opened": (0, 0),
    "node_ready": (1, 1),
    "round_closed": (2, 2),
    "workers_started": (3, 3),
    "recovered": (4, 4),
    "progress": (3, 5),
    "worker_failed": (3, 5),
    "worker_hung": (3, 5),
    "workers_done": (3, 5),
    "node_isolated": (3, 5),
    "attribution_asked": (3, 5),
    "restart_decided": (3, STRETCHES + 1),
    "replica_ended": (3, 5),
}
"""Event → the first and the last stretch of its replica's cycle in which it can come. The cycle's round is opened,
nodes get ready, it closes, workers start; once all have, it has recovered. A restart that waits for evidence is
decided while the next cycle's nodes get ready."""

AFTER_SHUTDOWN = frozenset({"round_opened", "round_closed", "restart_decided", "shutdown", "signalled"})
"""What never follows a shutdown in the same generation: it is final, and the first reason wins."""

AFTER_THE_END = frozenset({"job_started", "controller_started"})
"""What can follow job_ended: the next generation."""

_Moment = int
"""A stretch, counted from the first of cycle 0."""


@dataclass(frozen=True, slots=True)
class Impossible:
    """`event` can never come after `earlier`."""

    event: EventPattern
    earlier: EventPattern
    why: str


@dataclass(slots=True)
class _Reached:
    """How far the job must have come at a point of a sequence, and which item says so."""

    generation: tuple[int, EventPattern] | None = None
    ended: EventPattern | None = None
    shutdown: EventPattern | None = None
    moments: dict[str, tuple[_Moment, EventPattern]] = field(default_factory=dict)

    def join(self, other: _Reached) -> None:
        """What holds after both of two branches."""
        self.ended, self.shutdown = self.ended or other.ended, self.shutdown or other.shutdown
        self.generation = max(self.generation, other.generation, key=lambda known: known[0] if known else -1)
        for replica, reached in other.moments.items():
            if replica not in self.moments or reached[0] > self.moments[replica][0]:
                self.moments[replica] = reached


def impossible(items: Sequence[Expectation], replicas: Sequence[str]) -> Iterator[Impossible]:
    """The items that can never come where they stand. `replicas`: those that the job has."""
    yield from _walk(items, _Reached(), replicas)


def _walk(items: Sequence[Expectation], reached: _Reached, replicas: Sequence[str]) -> Iterator[Impossible]:
    for item in items:
        if isinstance(item, AnyOrder):
            branches = [replace(reached, moments=dict(reached.moments)) for _ in item.branches]
            for branch, at in zip(item.branches, branches, strict=True):
                yield from _walk(branch, at, replicas)
            for at in branches:
                reached.join(at)
        elif isinstance(item, (Happens, Eventually)):
            found = _check(item.event, reached, replicas)
            if found is not None:
                yield found
            elif isinstance(item, Happens):
                _reach(item.event, reached, replicas)


def _check(event: EventPattern, reached: _Reached, replicas: Sequence[str]) -> Impossible | None:
    if _is_of_a_later_generation(event, reached):
        return None
    generation = _number(event, "generation")
    if generation is not None and reached.generation is not None and generation < reached.generation[0]:
        return Impossible(event, reached.generation[1], f"generation {generation} is over by then")
    if reached.ended is not None and event.event not in AFTER_THE_END:
        why = "nothing comes after the end but the next generation's job_started"
        return Impossible(event, reached.ended, why)
    if reached.shutdown is not None and event.event in AFTER_SHUTDOWN:
        return Impossible(event, reached.shutdown, "a shutdown is final, and the first one wins")
    replica, span = _replica(event, replicas), SPANS.get(event.event)
    cycle = _number(event, "cycle")
    if replica not in reached.moments or span is None or cycle is None:
        return None
    moment, earlier = reached.moments[replica]
    if _moment(cycle, span[1]) >= moment:
        return None
    why = f"cycle {cycle} is over by then" if cycle < moment // STRETCHES else "in a cycle it comes first"
    return Impossible(event, earlier, why)


def _reach(event: EventPattern, reached: _Reached, replicas: Sequence[str]) -> None:
    """The event has come: nothing that comes before it can come any more."""
    if _is_of_a_later_generation(event, reached):
        reached.ended, reached.shutdown, reached.moments = None, None, {}
    generation = _number(event, "generation")
    reached.generation = reached.generation if generation is None else (generation, event)
    if event.event == "job_ended":
        reached.ended = event
    if event.event == "shutdown":
        reached.shutdown = event
    replica, cycle, span = _replica(event, replicas), _number(event, "cycle"), SPANS.get(event.event)
    if replica is not None and cycle is not None and span is not None:
        known = reached.moments.get(replica)
        if known is None or _moment(cycle, span[0]) > known[0]:
            reached.moments[replica] = (_moment(cycle, span[0]), event)


def _moment(cycle: int, stretch: int) -> _Moment:
    return cycle * STRETCHES + stretch


def _is_of_a_later_generation(event: EventPattern, reached: _Reached) -> bool:
    """A new generation begins anew; one that the file does not number may be any."""
    generation = _number(event, "generation")
    if event.event == "job_started":
        return generation != 0
    return generation is not None and generation > (reached.generation[0] if reached.generation else 0)


def _replica(event: EventPattern, replicas: Sequence[str]) -> str | None:
    """Whose cycle it is; None where it may be that of several."""
    said = _literal(event, "replica")
    if isinstance(said, str):
        return said
    return replicas[0] if len(replicas) == 1 else None


def _number(event: EventPattern, name: str) -> int | None:
    value = _literal(event, name)
    return value if isinstance(value, int) else None


def _literal(event: EventPattern, name: str) -> object:
    return next((part.value for key, part in event.fields if key == name and isinstance(part, Equals)), None)
