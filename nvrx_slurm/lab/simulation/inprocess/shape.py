"""What a seed draws for a group of ranks: its size and bounds, what its function does, and the faults."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from random import Random

GROUP = "group"


class GroupFault(enum.StrEnum):
    """What the adversary does to a rank, its host, or the store."""

    RAISE = "the function raises"
    HANG = "the function hangs, in a call that a signal ends"
    STUCK = "the function hangs, in a call that no signal ends"
    LEAVE = "the function raises what is no Exception"
    UNFIT = "the health check fails"
    KILL = "the rank is killed"
    KILL_MONITOR = "its monitor is killed"
    STOP = "the rank is stopped"
    STOP_MONITOR = "its monitor is stopped"
    STOP_BOTH = "rank and monitor are stopped"
    POWER_OFF = "its host loses power"
    CUT_OFF = "its host does not reach the store"
    STORE_DOWN = "the store does not answer"
    LOSSY = "messages to the store are lost"
    GARBAGE = "what is no entry is put into the log"


STORE_FAULTS = frozenset({GroupFault.CUT_OFF, GroupFault.STORE_DOWN, GroupFault.LOSSY})
LASTING = STORE_FAULTS | {GroupFault.STOP, GroupFault.STOP_MONITOR, GroupFault.STOP_BOTH}
# After these a rank can go on, and complete.
HARMLESS = STORE_FAULTS | {GroupFault.RAISE, GroupFault.HANG, GroupFault.GARBAGE}
# These happen to a rank in its function, in the next step that it takes there.
IN_FUNCTION = frozenset({GroupFault.RAISE, GroupFault.HANG, GroupFault.STUCK, GroupFault.LEAVE, GroupFault.UNFIT})


# Kinds of entries at which an act aims.
AIMS = ("sealed", "opened", "opened", "interrupted", "settled", "completed", "completed", "lost")


@dataclass(frozen=True, slots=True)
class GroupAct:
    """One fault: of which member, when, and for how long. `on`: after the log has taken an entry of this kind."""

    at_s: float
    fault: GroupFault
    member: int
    lasts_s: float = 0.0
    on: str = ""

    def __str__(self) -> str:
        lasts = f", for {self.lasts_s:.3f} s" if self.fault in LASTING else ""
        on = f", after the next {self.on}" if self.on else ""
        return f"{self.at_s:8.3f} s{on}: member {self.member}: {self.fault}{lasts}"


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A group and its bounds, in seconds. `hosts`: by member. `active`: how many call the function at most. `in_c`:
    its collectives wait in C, where no Python runs."""

    hosts: tuple[str, ...]
    active: int
    calls: int
    steps: int
    step_s: float
    pings: bool
    atomic: bool
    in_c: bool
    replaced: bool
    abort_s: float
    patience_s: float
    soft_s: float
    hard_s: float
    heartbeat_s: float
    interval_s: float
    barrier_s: float
    last_call_s: float
    grace_s: float

    def __str__(self) -> str:
        hosts = ", ".join(f"{self.hosts.count(host)} on {host}" for host in sorted(set(self.hosts)))
        return (
            f"{len(self.hosts)} ranks ({hosts}), {self.active} active, {self.calls} calls of {self.steps} steps of"
            f" {self.step_s:.2f} s; soft {self.soft_s:.1f} s, hard {self.hard_s:.1f} s, heartbeats within"
            f" {self.heartbeat_s:.1f} s, barriers within {self.barrier_s:.0f} s, store within {self.patience_s:.0f} s"
            f"{', replaced by its launcher' if self.replaced else ''}"
        )

    @property
    def members(self) -> int:
        return len(self.hosts)


def draw_shape(chance: Random) -> GroupShape:
    members = chance.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 8))
    machines = min(chance.choice((1, 2, 2, 3, members)), members)
    hosts = tuple(f"h{member * machines // members}" for member in range(members))
    interval_s = chance.uniform(0.4, 1.0)
    heartbeat_s = chance.uniform(4.0, 10.0)
    soft_s = chance.uniform(3.0, 8.0)
    gap_s = chance.uniform(1.0, 8.0)
    shape = GroupShape(
        hosts=hosts,
        active=members if chance.random() < 0.6 else chance.randint(1, members),
        calls=2 if chance.random() < 0.3 else 1,
        steps=chance.randint(2, 8),
        step_s=chance.uniform(0.05, 0.6),
        pings=chance.random() < 0.5,
        atomic=chance.random() < 0.3,
        in_c=chance.random() < 0.5,
        replaced=chance.random() < 0.1,
        abort_s=chance.choice((0.0, 0.0, 0.1, 0.5)),
        patience_s=chance.uniform(6.0, 30.0),
        soft_s=soft_s,
        hard_s=soft_s + gap_s,
        heartbeat_s=heartbeat_s,
        interval_s=interval_s,
        # The ranks of lost hosts are found within two timeouts of their heartbeats.
        barrier_s=max(soft_s + gap_s, 2 * heartbeat_s) + chance.uniform(8.0, 30.0),
        last_call_s=chance.choice((0.0, 0.3, 1.0)),
        grace_s=chance.choice((0.0, 0.5, 2.0)),
    )
    # As docs/inprocess.md asks for: a rank that waits for a hung one is interrupted before its hard timeout. The
    # first second is the default of `monitor_process_interval`, and the last half covers what the group's log takes.
    least_s = 1.0 + shape.last_call_s + shape.abort_s + 0.5
    return replace(shape, hard_s=soft_s + max(gap_s, least_s))


def draw_acts(chance: Random, shape: GroupShape) -> tuple[GroupAct, ...]:
    """A tenth of the histories has no fault. Each history knows a subset of the kinds, so that few overlap often."""
    if chance.random() < 0.1:
        return ()
    known = [fault for fault in GroupFault if chance.random() < 0.4] or [chance.choice(list(GroupFault))]
    acts = []
    at_s = 0.0
    for _ in range(chance.choice((1, 1, 2, 2, 3, 4, 6))):
        # Faults close together race; those far apart meet a group that has recovered.
        at_s += chance.choice((0.0, 0.002, 0.05, 0.5, 2.0, 8.0)) * chance.random()
        # A host takes all of its ranks along: that is tried more often than its share.
        fault = GroupFault.POWER_OFF if chance.random() < 0.08 else chance.choice(known)
        lasts_s = chance.choice((0.3, 2.0, shape.heartbeat_s, 1.5 * shape.heartbeat_s, 40.0)) * chance.random()
        # Half of them aim at an entry of the log: what happens around it is where ranks disagree, if ever.
        on = chance.choice(AIMS) if chance.random() < 0.5 else ""
        if fault is GroupFault.GARBAGE:
            on = chance.choice(("sealed", "opened", "completed", "completed"))
        member = chance.randrange(shape.members)
        acts.append(GroupAct(at_s, fault, member, lasts_s if fault in LASTING else 0.0, on))
    return tuple(sorted(acts, key=lambda act: act.at_s))
