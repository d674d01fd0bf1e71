"""When a flow's faults are due. Pure: journal, heartbeats, states and injected faults come in; due ones go out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nvrx_slurm.journal.records import AnyRecord, Entry, Progress
from nvrx_slurm.lab.flow.model import Fault, JobStateName, OnEvent, OnFault, OnSeveral, OnState, Trigger, leaves
from nvrx_slurm.lab.flow.patterns import Bindings, Trial
from nvrx_slurm.report.model import JobView, ReceivedHeartbeat
from nvrx_slurm.report.view import ENDED, fold
from nvrx_slurm.report.words import event_name, plural


@dataclass(slots=True)
class _Leaf:
    """A trigger's smallest part. `came`: how often it was seen; `almost`: what its event lacked when closest."""

    on: OnEvent | OnState | OnFault
    came: int = 0
    met_at: float | None = None
    almost: tuple[str, ...] = ()

    def count(self, t: float) -> None:
        """What it waits for was seen, once more."""
        self.came += 1
        if self.came == (self.on.times if isinstance(self.on, OnEvent) else 1):
            self.met_at = t + self.on.after_s


@dataclass(slots=True)
class _PendingFault:
    """A fault that has not happened. `due`: it was handed out."""

    fault: Fault
    leaves: dict[int, _Leaf]
    due: bool = False

    def at(self, trigger: Trigger) -> float | None:
        """When the trigger is met; None: that is not known yet."""
        if not isinstance(trigger, OnSeveral):
            return self.leaves[id(trigger)].met_at
        times = [self.at(part) for part in trigger.of]
        known = [time for time in times if time is not None]
        if not known or (trigger.needs_all and len(known) < len(times)):
            return None
        return trigger.after_s + (max(known) if trigger.needs_all else min(known))

    def lacks(self, trigger: Trigger) -> str:
        """What has not come, in words."""
        if isinstance(trigger, OnSeveral):
            return "; ".join(self.lacks(part) for part in trigger.of if self.at(part) is None)
        if isinstance(trigger, OnState):
            return f"the job was never {trigger.state.replace('_', ' ')}"
        if isinstance(trigger, OnFault):
            return f"fault {trigger.number} had not happened"
        leaf = self.leaves[id(trigger)]
        if leaf.came:
            return f"{trigger.pattern} came {plural(leaf.came, 'time')} of {trigger.times}"
        nearest = f"; nearest: {'; '.join(leaf.almost)}" if leaf.almost else ""
        return f"{trigger.pattern} never came{nearest}"


class FaultScheduler:
    """Says which faults are due. All times are seconds on the journal's clock.

    Its captures are those of the expectations too: the first that meets one binds it. What a fault names by `as` is
    bound by that fault alone. `bindings`: their values so far.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        # By `id`, not by value: two parts of a trigger may say the same, and each is counted for itself.
        self._pending = {
            fault.number: _PendingFault(fault, {id(leaf): _Leaf(leaf) for leaf in leaves(fault.when)})
            for fault in faults
        }
        self._view = JobView()
        self._state: JobStateName | None = None
        self.bindings: dict[str, Any] = {}

    def feed(self, seen: Entry | ReceivedHeartbeat, known: Bindings | None = None) -> None:
        """Something was seen. `known`: the values of the expectations' captures by now."""
        # The first value of a capture stays: expectations that are matched again after a fault may bind another.
        self.bindings = {**(known or {}), **self.bindings}
        if isinstance(seen, ReceivedHeartbeat):
            beat = seen.heartbeat
            for rank, step in beat.steps.items():
                # As the journal has a first step; only there it has a number, by which no trigger asks.
                progress = Progress(
                    node=beat.node,
                    incarnation=beat.incarnation,
                    seq=0,
                    replica=beat.replica or "",
                    cycle=beat.cycle,
                    rank=rank,
                    step=step,
                )
                self._event(seen.t, progress)
            return
        before, self._state = self._state, state_of(fold(self._view, seen))
        if self._state is not None and self._state != before:
            self.in_state(seen.t, self._state)
        self._event(seen.t, seen.record)

    def fault_happened(self, fault: Fault, t: float, bindings: Bindings | None = None) -> None:
        """The fault happened at `t`. `bindings`: what its `as` names."""
        self._pending.pop(fault.number, None)
        self.bindings.update(bindings or {})
        for leaf in self._leaves():
            if isinstance(leaf.on, OnFault) and leaf.on.number == fault.number:
                leaf.count(t)

    def due(self, t: float) -> list[Fault]:
        """The faults to inject at `t`, in the order of their times. Each is handed out once."""
        ready = [self._pending[number] for at, number in sorted(self._moments()) if at <= t]
        for pending in ready:
            pending.due = True
        return [pending.fault for pending in ready]

    def next_at(self) -> float | None:
        """When the next fault is due if nothing comes; None: something must come first."""
        return min((at for at, _ in self._moments()), default=None)

    @property
    def waiting(self) -> list[Fault]:
        """The faults that have not happened, in the file's order."""
        return [pending.fault for pending in self._pending.values()]

    def why_not(self, fault: Fault) -> str:
        """Why a fault that waits has not happened."""
        pending = self._pending[fault.number]
        if pending.due:
            return "it was due, and its effect was not seen"
        if pending.at(fault.when) is None:
            return pending.lacks(fault.when)
        unknown = [name for name in fault.captures() if name not in self.bindings]
        return f"${unknown[0]} had no value" if unknown else "its moment had not come"

    def _moments(self) -> Iterator[tuple[float, int]]:
        """When to inject which fault; those whose trigger is not met, or whose target is not known, are left out."""
        for number, pending in self._pending.items():
            if not pending.due and all(name in self.bindings for name in pending.fault.captures()):
                at = pending.at(pending.fault.when)
                if at is not None:
                    yield at, number

    def in_state(self, t: float, state: JobStateName) -> None:
        """The job is in this state from `t` on. That it is pending its journal cannot say."""
        for leaf in self._leaves():
            if isinstance(leaf.on, OnState) and leaf.on.state == state:
                leaf.count(t)

    def _event(self, t: float, record: AnyRecord) -> None:
        named = {pending.fault.binds for pending in self._pending.values()}  # only those faults bind these
        for leaf in self._leaves():
            if isinstance(leaf.on, OnEvent) and leaf.on.pattern.event == event_name(record) and leaf.met_at is None:
                trial = Trial(self.bindings, lambda name: name not in named)
                lacking = tuple(leaf.on.pattern.differences(record, trial))
                if not lacking:
                    # Only the entry that meets the trigger binds: of `times: 3`, the third.
                    leaf.count(t)
                    if leaf.met_at is not None:
                        self.bindings.update(trial.new)
                elif not leaf.almost or len(lacking) <= len(leaf.almost):
                    leaf.almost = lacking

    def _leaves(self) -> Iterator[_Leaf]:
        return (leaf for pending in self._pending.values() for leaf in pending.leaves.values())


def state_of(view: JobView) -> JobStateName | None:
    """The state that a flow file can name. None: none of them, such as cycle 0 coming together."""
    if view.ended_at is not None:
        return "ended"
    if view.shutdown is not None:
        return "shutting_down"
    replicas = [replica for replica in view.replicas.values() if replica.phase not in ENDED]
    # An open rendezvous of cycle 0 is the job's start; of a later cycle, a recovery.
    if any(replica.phase in ("joining", "stopping") and replica.cycle > 0 for replica in replicas):
        return "recovering"
    return "running" if replicas and all(replica.phase == "running" for replica in replicas) else None
