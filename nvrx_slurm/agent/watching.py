"""Which of this node's workers make no progress: reads their slots, has them judged, wakes at the next deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from nvrx_slurm.agent.hangs import NS, Hang, Seen, Standstill, Watched, judge, learned, merge, next_look, seen_by
from nvrx_slurm.agent.machine import BoardPort, OutputPort
from nvrx_slurm.jobspec.model import HangSpec
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.workload.slot import Reading

SHORTEST_WAIT_S = 0.01
# A longest time is reported again when it has grown by so much.
GROWN = 1.1


class HangWatch:
    """Posts one `Hang` for each worker that hangs. It wakes when the nearest deadline passes; `look` may be called at
    any time, and is called for each heartbeat, since a section that was opened meanwhile may have a nearer one."""

    def __init__(
        self, bounds: HangSpec, *, board: BoardPort, output: OutputPort, clock: Clock, post: Callable[[Hang], None]
    ) -> None:
        self._limits = bounds
        self._board, self._output, self._clock, self._post = board, output, clock, post
        self._known: Seen = {}
        self._started: dict[int, int] = {}  # rank → when, nanoseconds
        self._ended_well: dict[int, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._suspended: list[Standstill] = []

    def begin(self, known: Seen) -> None:
        """A cycle begins; `known` is what its role has taken so far."""
        self.end()
        self._known, self._suspended = known, []

    def started(self, rank: int) -> None:
        now_ns = self._started[rank] = self._now_ns()
        self._wake_at(now_ns)  # not at once: 64 workers start together, and one look serves all of them

    def ended(self, rank: int, *, well: bool) -> None:
        """A worker ended; `well`: with exit code 0."""
        now_ns = self._now_ns()
        if well and rank in self._started:
            self._ended_well[rank] = now_ns
        else:
            self._started.pop(rank, None)
        self._wake_at(now_ns)

    def end(self) -> None:
        """No worker is to be watched any more."""
        self._started, self._ended_well = {}, {}
        self._wake_at(None)

    def pause(self) -> None:
        """The job is about to be suspended: judge no worker until `resume`."""
        self._paused = True

    def resume(self, stood_still_s: float) -> None:
        """The job runs again: the time that it stood still counts for no deadline."""
        self._paused = False
        if stood_still_s > 0.0:
            self._suspended.append((self._now_ns(), round(stood_still_s * NS)))
        self.look()

    def look(self) -> Mapping[int, Reading]:
        """Judge, and set the clock for the next deadline. Returns what was read for it."""
        readings, hung = self._judged()
        if hung:
            # After a freeze the loop runs its timers before it reads which workers have ended. So judge again in the
            # next turn, and post what still hangs then.
            asyncio.get_running_loop().call_later(0.0, self._post_hangs)
        return readings

    def _post_hangs(self) -> None:
        for hang in self._judged()[1]:
            self._started.pop(hang.rank)
            self._post(hang)

    def _judged(self) -> tuple[Mapping[int, Reading], list[Hang]]:
        now_ns, readings = self._now_ns(), self._board.readings()
        if self._paused:
            return readings, []
        bounds = learned(merge(self._known, seen_by(readings.values())), self._limits) if self._limits.learn else {}
        watched = []
        for rank, started_ns in self._started.items():
            output_s = self._output.last_at(rank)
            watched.append(
                Watched(
                    rank=rank,
                    started_ns=started_ns,
                    reading=readings.get(rank, Reading()),
                    last_output_ns=None if output_s is None else max(started_ns, round(output_s * NS)),
                    ended_ok_ns=self._ended_well.get(rank),
                )
            )
        self._wake_at(next_look(watched, self._limits, bounds, now_ns, self._suspended))
        return readings, judge(watched, self._limits, bounds, now_ns, self._suspended)

    def news(self) -> dict[str, tuple[int, float]]:
        """What the role has taken by now, if that is worth a record: a longest time that has grown, or a count that
        still matters."""
        if not self._limits.learn:
            return {}
        now = merge(self._known, seen_by(self._board.readings().values()))
        for name, (count, longest_s) in now.items():
            known_count, known_s = self._known.get(name, (0, 0.0))
            if longest_s > GROWN * known_s or (known_count < self._limits.warmup and count > known_count):
                return dict(now)
        return {}

    def summary(self) -> dict[str, Any]:
        """What a heartbeat holds of each rank: its step, how long it has been quiet, which sections are open."""
        readings, now_ns = self.look(), self._now_ns()
        steps = {rank: reading.step for rank, reading in readings.items() if reading.step is not None}
        quiet = {rank: _since(reading.sign_ns, now_ns) for rank, reading in readings.items() if reading.beats}
        sections = {
            rank: tuple((each.name, _since(each.started_ns, now_ns)) for each in reading.open)
            for rank, reading in readings.items()
            if reading.open
        }
        return {"steps": steps, "quiet": quiet, "sections": sections}

    def _wake_at(self, moment_ns: int | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if moment_ns is not None:
            wait_s = max(SHORTEST_WAIT_S, (moment_ns - self._now_ns()) / NS)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.look)

    def _now_ns(self) -> int:
        return round(self._clock.monotonic() * NS)


def _since(moment_ns: int, now_ns: int) -> float:
    return round(max(0, now_ns - moment_ns) / NS, 3)
