"""Which workers of a node hang, and when to look again. Pure: no I/O, and no clock.

A worker has up to five kinds of deadlines, each a moment since which it runs and a length. One that has passed is a
hang, without regard to the others: so an open inner section does not hide an outer one that has expired.

| deadline | runs since | while |
|---|---|---|
| `startup_s` | the worker's start, or the end of its last restart in process | it has not beaten since |
| `step_s` | its last beat, or the end of its last main-thread section | it has, and no such section is open |
| a section's own | the section's start | the section is open |
| `no_output_s` | the last byte it printed, its start, or the end of its last restart in process | always |
| `exit_skew_s` | the first end of another rank of this node with exit code 0 | always |

While a restart in process is under way, start-up and output count for nothing: it is a section with a bound.

All moments are CLOCK_MONOTONIC in nanoseconds. A moment that cannot be (none, before the worker's start) starts no
deadline, and one that is still to come has not passed: a torn reading never makes a hang. For the same reason
`now_ns` must be taken before the readings are: then a sign that comes in between is newer, and not overlooked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from nvrx_slurm.jobspec.model import HangSpec
from nvrx_slurm.workload.layout import OTHERS
from nvrx_slurm.workload.slot import Reading

# No bound that is taken from the run is shorter.
SHORTEST_LEARNED_S = 30.0

NS = 1_000_000_000
NOT_REPORTED = Reading()
# The name under which the time from one sign of progress to the next is kept; no section has it.
STEP = ""

# Section → how often it ended, and its longest duration in seconds.
Seen = Mapping[str, tuple[int, float]]


class Watched(msgspec.Struct, frozen=True):
    """A worker of this cycle that runs, or (`ended_ok_ns`) that has ended with exit code 0."""

    rank: int
    started_ns: int
    reading: Reading = NOT_REPORTED
    last_output_ns: int | None = None
    ended_ok_ns: int | None = None


class Hang(msgspec.Struct, frozen=True):
    """A deadline that has passed: `why` for people; `since_s` is how long ago it began to run."""

    rank: int
    why: str
    since_s: float
    limit_s: float
    step: int | None = None


class _Deadline(msgspec.Struct, frozen=True):
    """A deadline. The reason of its hang is `before`, how long it has lasted, `after`."""

    rank: int
    since_ns: int
    limit_s: float
    before: str
    after: str = ""
    step: int | None = None
    later_ns: int = 0

    @property
    def at_ns(self) -> int:
        return self.since_ns + round(self.limit_s * NS) + self.later_ns

    def hang(self, now_ns: int) -> Hang:
        since_s = (now_ns - self.since_ns) / NS
        why = f"{self.before} {_seconds(since_s)}{self.after}"
        return Hang(self.rank, why, since_s, self.limit_s, self.step)


# The whole job was suspended: until when, and for how long, both in nanoseconds. No deadline counts that time.
Standstill = tuple[int, int]


def judge(
    workers: Iterable[Watched],
    limits: HangSpec,
    learned: Mapping[str, float],
    now_ns: int,
    suspended: Sequence[Standstill] = (),
) -> list[Hang]:
    """The workers that hang, by rank: each once, with the deadline that passed first."""
    first: dict[int, _Deadline] = {}
    for deadline in _deadlines(workers, limits, learned, suspended):
        known = first.get(deadline.rank)
        if deadline.at_ns <= now_ns and (known is None or deadline.at_ns < known.at_ns):
            first[deadline.rank] = deadline
    return [first[rank].hang(now_ns) for rank in sorted(first)]


def next_look(
    workers: Iterable[Watched],
    limits: HangSpec,
    learned: Mapping[str, float],
    now_ns: int,
    suspended: Sequence[Standstill] = (),
) -> int | None:
    """The earliest moment after `now_ns` at which a deadline passes as things stand; None if there is none."""
    # Progress only moves deadlines back, but a section that is opened later may bring a nearer one: the caller asks
    # again whenever it takes readings anyhow.
    deadlines = _deadlines(workers, limits, learned, suspended)
    return min((each.at_ns for each in deadlines if each.at_ns > now_ns), default=None)


def seen_by(workers: Iterable[Reading]) -> Seen:
    """What the workers of one cycle have seen."""
    # They go in step, so eight of them know no more than one: the largest count, the largest duration.
    together: dict[str, tuple[int, float]] = {}
    for reading in workers:
        gaps = {STEP: (reading.beats - 1, reading.largest_gap_ns / NS)} if reading.beats > 1 else {}
        for name, (count, largest_s) in {**reading.seen, **gaps}.items():
            known_count, known_s = together.get(name, (0, 0.0))
            together[name] = (max(count, known_count), max(largest_s, known_s))
    return together


def merge(earlier: Seen, later: Seen) -> Seen:
    """What two cycles have seen, one after the other: counts add up, of durations the largest stays.

    Readings hold totals of their cycle. So keep the merged past of the cycles that are over, and merge it afresh with
    the running one's readings; one that is merged twice is counted twice.
    """
    merged = dict(earlier)
    for name, (count, largest_s) in later.items():
        known_count, known_s = merged.get(name, (0, 0.0))
        merged[name] = (known_count + count, max(known_s, largest_s))
    return merged


def learned(seen: Seen, limits: HangSpec) -> dict[str, float]:
    """Section (or `STEP`) → deadline in seconds, for what was seen often enough; empty where none is learned."""
    if not limits.learn:
        return {}
    # `OTHERS` is the shared name of the sections that found no row of their own: it says nothing about any of them.
    return {
        name: max(largest_s * limits.safety_factor, SHORTEST_LEARNED_S)
        for name, (count, largest_s) in seen.items()
        if count >= limits.warmup and name != OTHERS
    }


def _deadlines(
    workers: Iterable[Watched], limits: HangSpec, learned: Mapping[str, float], suspended: Sequence[Standstill]
) -> Iterator[_Deadline]:
    watched = list(workers)
    first_end = min(((w.ended_ok_ns, w.rank) for w in watched if w.ended_ok_ns is not None), default=None)
    for worker in watched:
        if worker.ended_ok_ns is not None:
            continue
        # A moment before the worker's start cannot be: there is none yet, or the reading is torn.
        own = _own_deadlines(worker, limits, learned)
        deadlines = [deadline for deadline in own if deadline.since_ns >= worker.started_ns > 0]
        if first_end is not None and limits.exit_skew is not None:
            ended_ns, rank = first_end
            before, after = f"rank {rank} ended with exit code 0", " ago and this one still runs"
            deadlines.append(
                _Deadline(worker.rank, ended_ns, limits.exit_skew, before, after, step=worker.reading.step)
            )
        for deadline in deadlines:
            # A standstill that was over before the deadline began has taken nothing from it.
            later_ns = sum(for_ns for until_ns, for_ns in suspended if until_ns > deadline.since_ns)
            yield replace(deadline, later_ns=later_ns) if later_ns else deadline


def _own_deadlines(worker: Watched, limits: HangSpec, learned: Mapping[str, float]) -> Iterator[_Deadline]:
    """Those that the worker's own signs of progress start: all but `exit_skew`, in the order of the table above."""
    rank, reading, step = worker.rank, worker.reading, worker.reading.step
    if not reading.has_begun:
        if limits.startup_timeout is not None and not reading.restarting:
            since_ns = max(worker.started_ns, reading.restarted_ns)
            after = " after its restart in process" if reading.restarted_ns else " after its start"
            yield _Deadline(rank, since_ns, limits.startup_timeout, "no first step", after)
    elif not reading.in_section and (limit := _limit(limits.step_timeout, learned.get(STEP))):
        after = f" ({limit.words}) after step {step}"
        yield _Deadline(rank, reading.sign_ns, limit.seconds, "no step for", after, step=step)
    for section in reading.open:
        if limit := _limit(section.timeout_s, learned.get(section.name)):
            before = f'section "{section.name}" open for'
            after = f" ({limit.words})"
            yield _Deadline(rank, section.started_ns, limit.seconds, before, after, step)
    if limits.no_output is not None and not reading.restarting:
        since_ns = max(worker.last_output_ns or worker.started_ns, reading.restarted_ns)
        yield _Deadline(rank, since_ns, limits.no_output, "no output for", step=step)


class _Limit(NamedTuple):
    seconds: float
    words: str


def _limit(given_s: float | None, learned_s: float | None) -> _Limit | None:
    """The deadline that was given; else the one that was learned, if there is one."""
    if given_s is not None:
        return _Limit(given_s, f"limit {_seconds(given_s)}")
    return None if learned_s is None else _Limit(learned_s, f"learned limit {_seconds(learned_s)}")


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.3g} s"
