"""When a source that keeps failing is left alone, and when it is tried again. Pure: the time is an argument.

closed ── three failures in a row ──▶ open ── the pause is over ──▶ half-open (one try)
  ▲                                     ▲                               │      │
  └────────── the try succeeds ─────────┼───────────────────────────────┘      │
                                        └── it fails: a longer pause ──────────┘
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FAILURES = 3
"""So many in a row open the circuit."""

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
JITTER = 0.5
"""A pause is up to so much longer, so that many jobs do not come back to one service at one moment."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """One source's circuit. `retry_at` is None while it is closed; `trying`: a half-open circuit's one try runs."""

    failures: int = 0
    pauses: int = 0
    retry_at: float | None = None
    trying: bool = False

    def pause_left(self, now: float) -> float:
        """For how many seconds nothing is asked; 0 where it may be."""
        if self.retry_at is None:
            return 0.0
        left = max(0.0, self.retry_at - now)
        return left or (FIRST_PAUSE_S if self.trying else 0.0)

    def admits(self, now: float) -> bool:
        """Whether the source may be asked now."""
        return self.pause_left(now) == 0.0

    def asked(self) -> Breaker:
        """After it was admitted: an ask is under way."""
        return self if self.retry_at is None else replace(self, trying=True)

    def succeeded(self) -> Breaker:
        """After an answer, whichever ask it belongs to: the source works."""
        return Breaker()

    def given_up(self) -> Breaker:
        """After an ask that was called off: it tells nothing."""
        return replace(self, trying=False)

    def failed(self, now: float, *, chance: float) -> Breaker:
        """After a failure. `chance`, from 0 to 1, is where in its bounds the pause comes to lie."""
        if self.retry_at is not None and not self.trying:
            return self  # an ask of before it opened: that failure is old news
        failures = self.failures + 1
        if failures < FAILURES and not self.trying:
            return replace(self, failures=failures)
        return Breaker(failures, self.pauses + 1, now + pause_s(self.pauses, chance))


def pause_s(pauses: int, chance: float) -> float:
    """How long the circuit stays open after so many pauses in a row."""
    doubled = FIRST_PAUSE_S * 2.0 ** min(pauses, 16)
    return min(LONGEST_PAUSE_S, doubled * (1.0 + JITTER * chance))
