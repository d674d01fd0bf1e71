"""One budget from the first signal to SIGKILL: which phase of a teardown is on, and when it must give way.

    checkpoint   the checkpoint signal, to each worker: save what you can  (its own bound, before the budget)
    ask          the stop signal, to each worker
    dump         the stacks of all that are left are dumped
    terminate    SIGTERM, to every descendant
    kill         SIGKILL, to every descendant, again and again          (bounded by `KILL_S`, after the budget)

A phase ends when its time is up, or earlier when nothing is left for it to do. When every worker has ended and only
what they had started is left, `ask` gives way to `terminate` at once, and that has the rest of the budget. Pure, and
standard library only: the supervisor runs this.
"""

from __future__ import annotations

from typing import Literal

Phase = Literal["checkpoint", "ask", "dump", "terminate", "kill"]
ORDER: tuple[Phase, ...] = ("checkpoint", "ask", "dump", "terminate", "kill")

FOR_WORKERS = ("checkpoint", "ask", "dump")

# How long after SIGKILL a process may linger before it is reported: it is in uninterruptible sleep (D).
KILL_S = 5.0

# And for how long beyond that while it is exiting: the kernel takes seconds to give tens of GB back.
EXITING_S = 60.0

DUMP_SHARE, MOST_DUMP_S = 0.2, 2.0
TERMINATE_SHARE, MOST_TERMINATE_S = 0.1, 1.0


class Teardown:
    """Where a teardown stands. `ends`: the moment at which each phase must be over, in seconds on a monotonic clock.

    No dataclass: importing what makes one would double the size of the supervisor, which forks for every worker.
    """

    def __init__(self, ends: dict[Phase, float]) -> None:
        self.ends = ends
        self.phase: Phase | None = None
        self.extended_s = 0.0

    @classmethod
    def plan(cls, now: float, grace_s: float, checkpoint_s: float = 0.0) -> Teardown:
        """Fit the phases into `grace_s`; without a grace there is only `kill`."""
        asked_at = now + (checkpoint_s if grace_s > 0.0 else 0.0)
        killed_at = asked_at + grace_s
        terminated_at = killed_at - min(MOST_TERMINATE_S, TERMINATE_SHARE * grace_s)
        dumped_at = terminated_at - min(MOST_DUMP_S, DUMP_SHARE * grace_s)
        ends = (asked_at, dumped_at, terminated_at, killed_at, killed_at + KILL_S)
        return cls(dict(zip(ORDER, ends, strict=True)))

    def hurry(self, now: float) -> None:
        """Skip to the kill, unless it is on already."""
        if self.phase != "kill":
            self.ends = dict.fromkeys(ORDER, now) | {"kill": now + KILL_S}

    def advance(self, now: float, *, workers_left: bool, work_done: Phase | None = None) -> Phase | None:
        """The phase that begins now, or None while the one that is on goes on. `work_done`: a phase whose work is."""
        at = 0 if self.phase is None else ORDER.index(self.phase)
        while ORDER[at] != "kill" and (
            now >= self.ends[ORDER[at]] or ORDER[at] == work_done or (ORDER[at] in FOR_WORKERS and not workers_left)
        ):
            at += 1
        if ORDER[at] == self.phase:
            return None
        self.phase = ORDER[at]
        return self.phase

    def deadline(self) -> float:
        """When the phase that is on must be over."""
        return self.ends[self.phase or ORDER[0]]

    def extend(self) -> bool:
        """Give the kill a second more, for processes that are exiting. False: it has had `EXITING_S` more."""
        self.ends["kill"] += 1.0
        self.extended_s += 1.0
        return self.extended_s <= EXITING_S

    def over(self, now: float) -> bool:
        """Whether even the kill has had its time: who is left now is a survivor."""
        return self.phase == "kill" and now >= self.ends["kill"]
