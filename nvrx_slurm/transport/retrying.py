"""When to ask again, whom, and when to give up: three layers under one total deadline. Pure: no clock, no random
numbers.

    layer      repeats                                          until
    ─────────  ───────────────────────────────────────────────  ──────────────────────────────────────────
    call       the next port of the node (`choose`)             no healthy port is left to try
    slot       fresh calls for one ref, after a pause           `calls` of them have failed
    batch      rounds over all refs that are missing            `rounds` of them have passed

A stale ref ends all three at once. A busy slot is no fault: it is asked for again until the deadline. Each attempt
is bounded too, so that a silent port does not use up the deadline.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ldexp
from typing import NamedTuple

from nvrx_slurm.transport import arguments


@dataclass(frozen=True, slots=True)
class Limits:
    """How patient a client is, within the deadline of a read.

    `answer_s`: from asking a port until its answer, connecting and greeting included; `bytes_per_s`: the slowest pace
    of a payload; `pause_s`: before the second call, doubled before each later one, 1 s at most.
    """

    answer_s: float = 2.0
    bytes_per_s: float = 16e6
    calls: int = 3
    rounds: int = 3
    pause_s: float = 0.05

    def __post_init__(self) -> None:
        """Raises UsageError for what cannot be."""
        arguments.seconds("Limits: answer_s", self.answer_s, least=0.001)
        arguments.number("Limits: bytes_per_s", self.bytes_per_s, 1, math.inf)
        arguments.whole("Limits: calls", self.calls, 1)
        arguments.whole("Limits: rounds", self.rounds, 1)
        arguments.seconds("Limits: pause_s", self.pause_s)


# Pauses and bounds are doubled so often at most.
MOST_DOUBLINGS = 16

LONGEST_PAUSE_S = 1.0
BUSY_PAUSE_S = 0.002
LONGEST_BUSY_PAUSE_S = 0.1


class AttemptOutcome(StrEnum):
    """How an attempt ended, other than with the payload."""

    STALE = "stale"  # the payload is gone
    BUSY = "busy"  # another reader has it
    MOVED = "moved"  # a healthy server, but this ring is not its
    FAULT = "fault"  # the port is sick


class Try(NamedTuple):
    """Ask this port. Stop at `until`, or at `answer_by` where it has not answered by then."""

    port: str
    until: float
    answer_by: float


class Pause(NamedTuple):
    """Wait until then, and ask again."""

    until: float


class EndRead(NamedTuple):
    """End the read. `reason`: STALE; FAULT, for which the last attempt's error is raised; None: the deadline."""

    reason: AttemptOutcome | None


Next = Try | Pause | EndRead


class ReadPlan:
    """One read of one ref through the layers `call` and `slot`. `ended` reports an attempt, `next` returns the next
    step."""

    def __init__(self, tiers: Sequence[Sequence[str]], size: int, deadline: float, limits: Limits) -> None:
        self._tiers, self._size, self._deadline, self._limits = tiers, size, deadline, limits
        self._tried: list[str] = []
        self._moved = 0
        self._calls = 0
        self._busy = 0
        self._resume_at = 0.0
        self._end: EndRead | None = None

    def next(self, health: Mapping[str, PortHealth], *, now: float, turn: int) -> Next:
        """The next step. `health`: of the ports, as the client knows it."""
        if self._end is not None:
            return self._end
        if now >= self._deadline:
            return EndRead(None)
        if now < self._resume_at:
            return Pause(min(self._resume_at, self._deadline))
        port = choose(self._tiers, health, now=now, turn=turn, tried=self._tried)
        if port is None:
            # No healthy port is left to try: this call is over.
            if self._tried and self._moved == len(self._tried):
                # Another server has each port by now, so the ring is gone.
                self._end = EndRead(AttemptOutcome.STALE)
                return self._end
            self._calls += 1
            if self._calls >= self._limits.calls or not self._tried:
                self._end = EndRead(AttemptOutcome.FAULT)
                return self._end
            self._tried.clear()
            self._moved = 0
            self._resume_at = now + pause_s(self._limits, self._calls)
            return self.next(health, now=now, turn=turn)
        # With each call a port gets twice the time: the server or the network may be slower than the limits say.
        doublings = min(self._calls, MOST_DOUBLINGS)
        answer_s = ldexp(self._limits.answer_s, doublings)
        payload_s = ldexp(self._size / self._limits.bytes_per_s, doublings)
        until = min(self._deadline, now + answer_s + payload_s)
        return Try(port, until, min(until, now + answer_s))

    def ended(self, port: str, outcome: AttemptOutcome, *, now: float) -> None:
        """The attempt at `port` has brought no payload."""
        if outcome is AttemptOutcome.STALE:
            self._end = EndRead(outcome)
        elif outcome is AttemptOutcome.BUSY:
            # A busy slot is no fault: after the pause each port may be asked again, also those that failed before.
            self._tried.clear()
            self._moved = 0
            self._resume_at = now + min(BUSY_PAUSE_S * 2 ** min(self._busy, MOST_DOUBLINGS), LONGEST_BUSY_PAUSE_S)
            self._busy += 1
        else:
            self._tried.append(port)
            self._moved += outcome is AttemptOutcome.MOVED


def pause_s(limits: Limits, failed: int) -> float:
    """Before the next call, or the next round, after so many have failed."""
    return min(ldexp(limits.pause_s, min(failed - 1, MOST_DOUBLINGS)), LONGEST_PAUSE_S)


QUARANTINE_S = 30.0
GROWTH = 2.0
LONGEST_S = 600.0
HURRIED_S = 5.0
# A quarantine is longer or shorter by up to this share: clients that saw one fault do not come back at one moment.
JITTER = 0.2


@dataclass(frozen=True, slots=True)
class PortHealth:
    """One port as this client has seen it. `sick_until`: the moment its quarantine ends."""

    failures: int = 0
    sick_until: float = 0.0

    def is_sick(self, now: float) -> bool:
        return now < self.sick_until


WELL = PortHealth()


def choose(
    tiers: Sequence[Sequence[str]],
    health: Mapping[str, PortHealth],
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
    # One of them may have recovered meanwhile.
    sick = [(health.get(port, WELL), port) for tier in tiers for port in tier]
    return min(sick, key=lambda each: (each[0].sick_until, each[0].failures), default=(WELL, None))[1]


def failed(health: PortHealth, *, now: float, dice: float) -> PortHealth:
    """After a fault of the port. `dice`: a random number from 0 to 1."""
    # A fault while it is quarantined (it was the least sick) counts too, so its quarantine grows.
    failures = health.failures + 1
    lasts_s = min(QUARANTINE_S * GROWTH ** min(failures - 1, 32), LONGEST_S)
    return PortHealth(failures, now + lasts_s * (1 + JITTER * (2 * dice - 1)))


def hurried(health: PortHealth, *, now: float) -> PortHealth:
    """After a deadline that left the port less time than any may take: it may be well."""
    # Others come first for a while, or a silent port would take the whole of every short deadline.
    return PortHealth(health.failures, max(health.sick_until, now + HURRIED_S))
