"""Which of a node's ports to ask: rotation, quarantine, and the least sick of the sick. Pure: no clock, no dice.

A port that resets, truncates, lies or stays silent is quarantined, for longer each time; one success forgives it all.
While one port is healthy no sick one is asked. Where none is, the one that comes back soonest is: nobody starves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

QUARANTINE_S = 30.0
GROWTH = 2.0
LONGEST_S = 600.0
HURRIED_S = 5.0
JITTER = 0.2
"""A quarantine is longer or shorter by up to this share: clients that saw one fault do not come back at one
moment."""


@dataclass(frozen=True, slots=True)
class Health:
    """One port as this client has seen it. `sick_until`: the moment its quarantine ends."""

    failures: int = 0
    sick_until: float = 0.0

    def is_sick(self, now: float) -> bool:
        return now < self.sick_until


WELL = Health()


def choose(
    tiers: Sequence[Sequence[str]],
    health: Mapping[str, Health],
    *,
    now: float,
    turn: int,
    tried: Collection[str] = (),
) -> str | None:
    """The port to ask next in a call that has `tried` these; None when the call is over.

    `tiers`: the ports by transport, the preferred one first. It is the `turn`-th of the untried healthy ports of the
    first tier that has one. With none healthy in any, a call asks one port, the least sick.
    """
    for tier in tiers:
        well = [port for port in tier if port not in tried and not health.get(port, WELL).is_sick(now)]
        if well:
            return well[turn % len(well)]
    if tried:
        return None
    sick = [port for tier in tiers for port in tier]
    return min(sick, key=lambda port: _sickness(health.get(port, WELL)), default=None)  # one may be well by now


def _sickness(health: Health) -> tuple[float, int]:
    return health.sick_until, health.failures


def failed(health: Health, *, now: float, dice: float) -> Health:
    """After a fault of the port. `dice`: a random number from 0 to 1.

    A fault while it is quarantined (it was the least sick) counts as another: nobody asks it in vain for ever.
    """
    failures = health.failures + 1
    lasts_s = min(QUARANTINE_S * GROWTH ** min(failures - 1, 32), LONGEST_S)
    return Health(failures, now + lasts_s * (1 + JITTER * (2 * dice - 1)))


def hurried(health: Health, *, now: float) -> Health:
    """After a deadline that left the port less time than any may take: it may be well. Others come first for a while,
    or a port that is silent would take the whole of every short deadline."""
    return Health(health.failures, max(health.sick_until, now + HURRIED_S))
