"""The phases of a recovery, in order, such that they add up to its total.

The controller journals `recovered` with the phases since the failure was noticed, and `first_step_reached` when all
nodes have stepped. If another failure happened before the replica ran again, these cover the last attempt only; the
time lost before it is the first phase here.
"""

from __future__ import annotations

import msgspec

from nvrx_slurm.journal.records import FirstStepReached, Recovered
from nvrx_slurm.report import words
from nvrx_slurm.report.model import CycleView, FailureView, Recovery

# Every phase's name in the journal → in words, in their order.
PHASES: dict[str, str] = {
    "earlier_attempts": "earlier attempts",
    "decided": "decided",
    "torn_down": "torn down",
    "closed": "rendezvous closed",
    "spawned": "spawned",
}

# What follows the phases: the user's own start-up, until the first step.
STARTUP = "startup"

# The same in `first_step_reached`.
FIRST_STEP = "first_step"

SAME_MOMENT_S = 0.001


def complete(
    record: Recovered, at: float, outage: FailureView | None, cycle: CycleView, reached: int | None = None
) -> Recovery:
    """The recovery that `record`, journaled at `at`, completes. `outage` is the first failure it recovers from;
    `reached`: the last step of any rank before it."""
    failed_at = outage.step if outage else None
    noticed_at = at - record.total_s
    before = 0.0 if outage is None else noticed_at - outage.at
    # Both are differences of rounded times: so close to each other they are the same moment.
    if before <= SAME_MOMENT_S:
        before = 0.0
    recovery = Recovery(
        replica=record.replica,
        generation=cycle.generation,
        cycle=record.cycle,
        why=outage.why if outage else "unknown",
        node=outage.node if outage else "",
        noticed_at=noticed_at - before,
        recovered_at=at,
        phases={"earlier_attempts": before, **record.phases} if before else dict(record.phases),
        total_s=record.total_s + before,
        promoted=cycle.promoted,
        step_before=max((each for each in (reached, failed_at) if each is not None), default=None),
        warm=cycle.warm,
        cold=cycle.cold,
        kind=outage.kind if outage else "unknown",
    )
    if cycle.first_step_at is None or cycle.first_step is None:
        return recovery
    return with_first_step(recovery, cycle.first_step_at, cycle.first_step)


def with_first_step(recovery: Recovery, at: float, step: int) -> Recovery:
    """The recovery with the first step after it. A step reported before the last node had started counts as 0 s."""
    startup_s = max(0.0, at - recovery.recovered_at)
    return msgspec.structs.replace(recovery, startup_s=startup_s, first_step=step)


def with_all_stepped(recovery: Recovery, record: FirstStepReached) -> Recovery:
    """The recovery once every node has reported its first step."""
    # Of the last node, instead of the first one's: training goes on only with all of them.
    startup_s = record.phases.get(FIRST_STEP, recovery.startup_s)
    return msgspec.structs.replace(recovery, startup_s=startup_s, first_step=record.step, last_to_step=record.node)


def describe(recovery: Recovery) -> str:
    """`first step after 905 ms: decided 2.0 ms, …, first step 400 ms; 8 workers warm`; without a step its total."""
    until = recovery.to_first_step_s
    reached = f"runs after {words.seconds(recovery.total_s)}"
    if until is not None:
        reached = f"first step after {words.seconds(until)}"
    phases = ", ".join(f"{label} {words.seconds(took)}" for _, label, took in in_order(recovery))
    last = f" on {recovery.last_to_step}" if recovery.last_to_step is not None else ""
    how = words.how_started(recovery.warm, recovery.cold)
    return f"{reached}: {phases}{last}{f'; {how}' if how else ''}"


def steps(recovery: Recovery) -> str:
    """`failed at step 80, resumed from step 60: 20 steps lost`, as far as that is known; nothing, if nothing is."""
    before, first = recovery.step_before, recovery.first_step
    parts = [] if before is None else [f"failed at step {before}"]
    if first is not None:
        lost = "" if recovery.steps_lost is None else f": {words.plural(recovery.steps_lost, 'step')} lost"
        parts.append(f"resumed from step {first}{lost}")
    return ", ".join(parts)


def in_order(recovery: Recovery) -> list[tuple[str, str, float]]:
    """Each phase: name, label, seconds; the user's own start-up last, if it is known."""
    order = list(PHASES)
    known = sorted(recovery.phases.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    parts = [(name, PHASES.get(name, name.replace("_", " ")), took) for name, took in known]
    return parts if recovery.startup_s is None else [*parts, (STARTUP, "first step", recovery.startup_s)]
