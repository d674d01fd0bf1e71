"""When a flow's faults are due. Pure: journal, heartbeats, states and injected faults come in; due ones go out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvrx_slurm.journal.records import (
    AnyRecord,
    Entry,
    JobEnded,
    JobStarted,
    ReplicaEnded,
    RoundClosed,
    RoundOpened,
    Shutdown,
    WorkersStarted,
)
from nvrx_slurm.lab.flow.language.model import (
    PROGRESS,
    Fault,
    JobStateName,
    OnAll,
    OnAny,
    OnEvent,
    OnFault,
    OnState,
    Trigger,
    leaves,
)
from nvrx_slurm.lab.flow.language.patterns import Bindings, EventPattern, Trial
from nvrx_slurm.report.words import event_name, plural


@dataclass(frozen=True, slots=True)
class RankProgress:
    """A rank has reported this step, in a heartbeat or in the journal."""

    t: float
    replica: str
    rank: int
    node: str
    step: int
    cycle: int


@dataclass(frozen=True, slots=True)
class StateIs:
    """The job is in this state, which its journal cannot say: it is pending."""

    t: float
    state: JobStateName


Observation = Entry | RankProgress | StateIs


@dataclass(frozen=True, slots=True)
class DueFault:
    """A fault to inject now, and the values of its file's captures."""

    fault: Fault
    bindings: Mapping[str, Any]


@dataclass(slots=True)
class _Leaf:
    """A trigger's smallest part, and what has come of it. `almost`: what its event lacked when it came closest."""

    on: OnEvent | OnState | OnFault
    came: int = 0
    met_at: float | None = None
    almost: tuple[str, ...] = ()

    def count(self, t: float) -> None:
        """What it waits for has come, once more."""
        self.came += 1
        if self.came == (self.on.times if isinstance(self.on, OnEvent) else 1):
            self.met_at = t + self.on.after_s

    def missed(self, lacking: tuple[str, ...]) -> None:
        """Its event has come, but otherwise."""
        if not self.almost or len(lacking) <= len(self.almost):
            self.almost = lacking


@dataclass(slots=True)
class _Plot:
    """A fault that has not happened. `due`: it was handed out."""

    fault: Fault
    leaves: dict[int, _Leaf]
    due: bool = False

    def at(self, trigger: Trigger) -> float | None:
        """When the trigger is met; None: that is not known yet."""
        if not isinstance(trigger, (OnAll, OnAny)):
            return self.leaves[id(trigger)].met_at
        times = [self.at(part) for part in trigger.of]
        known = [time for time in times if time is not None]
        if not known or (isinstance(trigger, OnAll) and len(known) < len(times)):
            return None
        return trigger.after_s + (max(known) if isinstance(trigger, OnAll) else min(known))

    def lacks(self, trigger: Trigger) -> str:
        """What has not come, in words."""
        if isinstance(trigger, (OnAll, OnAny)):
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
    bound by that fault alone.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._plots = {
            fault.number: _Plot(fault, {id(leaf): _Leaf(leaf) for leaf in leaves(fault.when)}) for fault in faults
        }
        self._states = JobStates()
        self._bindings: dict[str, Any] = {}

    def feed(self, sign: Observation, known: Bindings | None = None) -> None:
        """Something has come. `known`: the values of the expectations' captures by now."""
        self._bindings = {**(known or {}), **self._bindings}
        if isinstance(sign, StateIs):
            self._state(sign.t, sign.state)
        elif isinstance(sign, RankProgress):
            self._event(sign.t, PROGRESS, sign)
        else:
            self._entry(sign)

    def fault_happened(self, fault: Fault, t: float, bindings: Bindings | None = None) -> None:
        """The fault happened at `t`. `bindings`: what its `as` names."""
        self._plots.pop(fault.number, None)
        self._bindings.update(bindings or {})
        for leaf in self._leaves():
            if isinstance(leaf.on, OnFault) and leaf.on.number == fault.number:
                leaf.count(t)

    def due(self, t: float) -> list[DueFault]:
        """The faults to inject at `t`, in the order of their times. Each is handed out once."""
        ready = sorted((at, number) for number in self._plots if (at := self._at(number)) is not None and at <= t)
        plots = [self._plots[number] for _, number in ready]
        for plot in plots:
            plot.due = True
        return [DueFault(plot.fault, dict(self._bindings)) for plot in plots]

    def next_at(self) -> float | None:
        """When the next fault is due if nothing comes; None: something must come first."""
        return min((at for number in self._plots if (at := self._at(number)) is not None), default=None)

    @property
    def waiting(self) -> list[Fault]:
        """The faults that have not happened, in the file's order."""
        return [plot.fault for plot in self._plots.values()]

    def why_not(self, fault: Fault) -> str:
        """Why a fault that waits has not happened."""
        plot = self._plots[fault.number]
        if plot.due:
            return "it was due, and its effect was not seen"
        if plot.at(fault.when) is None:
            return plot.lacks(fault.when)
        if unknown := self._unknown(fault):
            return f"${unknown[0]} had no value"
        return "its moment had not come"

    # ------------------------------------------------------------------------------------------------- signs

    def _entry(self, entry: Entry) -> None:
        before, state = self._states.state, self._states.feed(entry.record)
        if state is not None and state != before:
            self._state(entry.t, state)
        self._event(entry.t, event_name(entry.record), entry.record)

    def _state(self, t: float, state: JobStateName) -> None:
        for leaf in self._leaves():
            if isinstance(leaf.on, OnState) and leaf.on.state == state:
                leaf.count(t)

    def _event(self, t: float, event: str, describe: AnyRecord | RankProgress) -> None:
        for leaf in self._leaves():
            if isinstance(leaf.on, OnEvent) and leaf.on.pattern.event == event and leaf.met_at is None:
                self._try(leaf, leaf.on.pattern, t, describe)

    def _try(self, leaf: _Leaf, pattern: EventPattern, t: float, describe: AnyRecord | RankProgress) -> None:
        trial = Trial(self._bindings, self._may_bind)
        lacking = tuple(pattern.differences(describe, trial))
        if lacking:
            leaf.missed(lacking)
            return
        leaf.count(t)
        if leaf.met_at is not None:
            self._bindings.update(trial.new)

    def _leaves(self) -> Iterator[_Leaf]:
        return (leaf for plot in self._plots.values() for leaf in plot.leaves.values())

    # ------------------------------------------------------------------------------------------------ captures

    def _may_bind(self, name: str) -> bool:
        return all(plot.fault.binds != name for plot in self._plots.values())

    def _unknown(self, fault: Fault) -> list[str]:
        return [name for name in fault.captures() if name not in self._bindings]

    def _at(self, number: int) -> float | None:
        """When to inject it; None: its trigger is not met, its target is not known, or it was handed out."""
        plot = self._plots[number]
        return None if plot.due or self._unknown(plot.fault) else plot.at(plot.fault.when)


@dataclass(slots=True)
class _Replica:
    """`missing`: the nodes of the closed round whose workers do not run yet; None: the round is open."""

    cycle: int
    missing: set[str] | None = None


@dataclass(slots=True)
class JobStates:
    """Takes in a journal. None: none of the states that have a name, such as cycle 0 coming together."""

    state: JobStateName | None = None
    _replicas: dict[str, _Replica] = field(default_factory=dict)

    def feed(self, record: AnyRecord) -> JobStateName | None:
        """The state after this record, the journal's next."""
        if isinstance(record, JobStarted):
            self._replicas, self.state = {}, None
        elif isinstance(record, Shutdown):
            self.state = "shutting_down"
        elif isinstance(record, JobEnded):
            self.state = "ended"
        elif self._moved(record) and self.state not in ("shutting_down", "ended"):
            self.state = self._of_replicas()
        return self.state

    def _moved(self, record: AnyRecord) -> bool:
        if isinstance(record, RoundOpened):
            self._replicas[record.replica] = _Replica(record.cycle)
        elif isinstance(record, RoundClosed):
            self._replicas[record.replica] = _Replica(record.cycle, set(record.nodes))
        elif isinstance(record, ReplicaEnded):
            self._replicas.pop(record.replica, None)
        elif isinstance(record, WorkersStarted):
            self._started(record)
        else:
            return False
        return True

    def _started(self, record: WorkersStarted) -> None:
        replica = self._replicas.get(record.replica)
        if replica is not None and replica.cycle == record.cycle and replica.missing is not None:
            replica.missing.discard(record.node)

    def _of_replicas(self) -> JobStateName | None:
        """Recovering: a round after cycle 0 is open. Running: every replica that has not ended runs in full."""
        replicas = self._replicas.values()
        if any(replica.missing is None and replica.cycle > 0 for replica in replicas):
            return "recovering"
        return "running" if replicas and all(replica.missing == set() for replica in replicas) else None
