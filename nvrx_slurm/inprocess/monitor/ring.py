"""Whom a monitor watches by beats in the store, and when that one is dead for sure. Pure.

Each watches the next member in the ring who is left and has begun. That one's lease ends after three quarters of the
heartbeat timeout (`lease.py`), counted from a beat that the store had; whoever has seen no further beat for the whole
of it, from that beat on and by its own clock, may call it dead. Contact that breaks begins the time anew, so that
after an outage nobody is judged by what it could not send.

    who has begun       ·  ·  ●  ·  ●          ● beats   · has not begun: nobody judges it
    the ring        me ─▶ 1  2  3  4  5        3 is watched; 1 and 2 are probed in turn, until one of them beats
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nvrx_slurm.inprocess.ledger import Ledger

BREAK_SHARE = 0.25
"""Of the heartbeat timeout: a gap between two answers that is longer than this (and a beat) is no contact."""


@dataclass(frozen=True, slots=True)
class Sibling:
    """Who is watched: how many beats it had given at the last answer, and since when it has not been more."""

    member: int
    beats: int
    since: float
    seen_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """One monitor's view. `probed`: who was last looked at, of those between it and its sibling."""

    member: int
    timeout_s: float
    interval_s: float
    sibling: Sibling | None = None
    probed: int | None = None

    def asked(self, ledger: Ledger) -> tuple[int | None, ...]:
        """Whose beats to read next, at least one; None if there is nobody else."""
        sibling = self._sibling(ledger)
        nearest = ledger.next_member(self.member)
        if sibling is None or sibling == nearest:
            return (self._probe(ledger, None),) if sibling is None else (sibling,)
        return (sibling, self._probe(ledger, sibling))

    def _sibling(self, ledger: Ledger) -> int | None:
        return None if self.sibling is None or self.sibling.member in ledger.lost else self.sibling.member

    def _probe(self, ledger: Ledger, end: int | None) -> int | None:
        """The one after the last one that was probed, within what lies between this member and `end`."""
        following = ledger.next_member(self.member if self.probed is None else self.probed)
        return ledger.next_member(self.member) if following in (None, self.member, end) else following

    def answered(self, member: int | None, beats: int, now: float) -> Ring:
        """This many beats of a member were in the store at some moment up to `now`, on the monotonic clock."""
        if member is None:
            return self
        if self.sibling is not None and member == self.sibling.member:
            return self._watched(self.sibling, beats, now)
        if beats == 0:
            return dataclasses.replace(self, probed=member)
        return dataclasses.replace(self, sibling=Sibling(member, beats, now, now), probed=None)

    def _watched(self, before: Sibling, beats: int, now: float) -> Ring:
        unbroken = now - before.seen_at <= self.interval_s + BREAK_SHARE * self.timeout_s
        since = before.since if unbroken and beats == before.beats else now
        return dataclasses.replace(self, sibling=Sibling(before.member, beats, since, now))

    def out_of_touch(self) -> Ring:
        """The store did not answer: what is known of the sibling begins anew."""
        if self.sibling is None:
            return self
        return dataclasses.replace(self, sibling=dataclasses.replace(self.sibling, seen_at=float("-inf")))

    def silent(self, asked_at: float) -> int | None:
        """Who is dead: its beats were asked for at `asked_at`, and are what they were a timeout earlier."""
        sibling = self.sibling
        return sibling.member if sibling is not None and asked_at - sibling.since >= self.timeout_s else None

    def beats_since(self, asked_at: float) -> bool:
        """Whether the sibling was seen to beat, or to be another one, after `asked_at`."""
        return self.sibling is not None and self.sibling.since >= asked_at
