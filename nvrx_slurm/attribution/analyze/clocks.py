"""How far the nodes' clocks are apart, estimated from events that all of them see at one moment.

A collective times out on every rank within the same second, and torchrun's agents speak of the same moment. Where two
nodes tell of one such event at different times, their clocks differ by that much. The median over all common events
makes up for the few that were not simultaneous.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median

from nvrx_slurm.attribution.scan import Hit
from nvrx_slurm.journal.verdicts import Inquiry

SLACK_S = 3.0
"""Events that are common to all nodes are told within this time anyway: a smaller difference is no clock's."""

_Event = tuple[str, ...]


def domain(hit: Hit, inquiry: Inquiry) -> str | None:
    """Whose clock a line's time is from: its node's; where the node is not known, its rank's, if that is."""
    if hit.node is not None or hit.rank is None:
        return hit.node
    return inquiry.node_of(hit.rank) or f"rank {hit.rank}"


def offsets(hits: Iterable[Hit], inquiry: Inquiry) -> dict[str, float]:
    """Domain → seconds its clock is ahead of the middle of all. Domains without a common event are left out."""
    per_domain: dict[str, list[float]] = defaultdict(list)
    for times in _common_events(hits, inquiry).values():
        middle = median(times.values())
        for where, t in times.items():
            per_domain[where].append(t - middle)
    found = {where: median(ahead) for where, ahead in per_domain.items()}
    return {where: ahead for where, ahead in found.items() if abs(ahead) > SLACK_S}


def _common_events(hits: Iterable[Hit], inquiry: Inquiry) -> Mapping[_Event, Mapping[str, float]]:
    """Event → domain → when it told of it first; only events that at least two domains tell of."""
    events: dict[_Event, dict[str, float]] = defaultdict(dict)
    for hit in hits:
        where = domain(hit, inquiry)
        if hit.rule.role == "consequence" and hit.t is not None and where is not None:
            told = events[_event(hit)]
            told[where] = min(hit.t, told.get(where, hit.t))
    return {event: told for event, told in events.items() if len(told) > 1}


def _event(hit: Hit) -> _Event:
    """The same rule, and where the line tells it the same collective."""
    return (hit.rule.name, *(hit.groups.get(name, "") for name in ("seq", "collective")))
