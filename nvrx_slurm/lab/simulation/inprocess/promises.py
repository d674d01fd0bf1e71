"""What must hold in every history of a group, by a model of the log that shares no code with the product's."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvrx_slurm.inprocess import barriers
from nvrx_slurm.inprocess.exception import TimeoutError
from nvrx_slurm.lab.simulation.inprocess.shape import GROUP, STORE_FAULTS
from nvrx_slurm.lab.simulation.loop import BEGIN_S
from nvrx_slurm.lab.simulation.threads import HistoryPromises

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.inprocess.history import GroupHistory, SimulatedMember

_DEATHS = ("hard_timeout", "terminated", "unresponsive", "monitor_process_exception", "unhealthy")


class GroupPromise(enum.StrEnum):
    """What is promised to the ranks of a group."""

    ONE_OUTCOME = "one outcome for each cycle"
    LATE = "no interruption counts after its cycle has closed"
    COUNTED = "no barrier closes without all that are left, and none counts a lost rank"
    DEAD = "who is said to be dead is dead"
    ALONE = "no two cycles run the function at the same time"
    BOUND = "every rank that waits leaves within its bound"
    PROGRESS = "once faults stop, the ranks that are left complete"
    SOUND = "no thread fails"


@dataclass
class CallOutcome:
    """How a member's call has ended."""

    member: int
    call: int
    value: str | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class LogModel:
    """What the log of a call says, by the rules in docs/inprocess.md, one entry at a time."""

    members: int
    iteration: int = 0
    stage: str = "gathering"
    settled: bool = False
    lost: frozenset[int] = frozenset()

    @property
    def left(self) -> int:
        return self.members - len(self.lost)

    def counts(self, entry: dict[str, Any]) -> bool:
        is_current = entry.get("iteration") == self.iteration
        match entry.get("entry"):
            case _ if self.stage == "broken":
                return False
            case "lost":
                return 0 <= entry["member"] < self.members and entry["member"] not in self.lost
            case "sealed":
                there = entry["world_size"] - len(entry.get("missing", ()))
                return is_current and self.stage == "gathering" and there == self.left
            case "opened":
                return is_current and self.stage == "starting"
            case "interrupted":
                return is_current and self.stage in ("starting", "running") and entry["member"] not in self.lost
            case "settled":
                return entry["iteration"] == self.iteration - 1 and self.stage == "gathering" and not self.settled
            case "completed":
                return is_current and self.stage == "running"
            case "broken":
                return is_current and self.stage != "completed"
        return False

    def after(self, entry: dict[str, Any]) -> LogModel:
        """The model after an entry that counts."""
        restarted = dataclasses.replace(self, iteration=self.iteration + 1, stage="gathering", settled=False)
        match entry["entry"]:
            case "lost":
                lost = self.lost | {entry["member"]}
                interrupts = self.stage == "running" or (
                    self.stage == "starting" and entry["interruption"] != "discarded"
                )
                return dataclasses.replace(restarted if interrupts else self, lost=lost)
            case "interrupted":
                return restarted
            case "settled":
                return dataclasses.replace(self, settled=True)
        stage = {"sealed": "starting", "opened": "running", "completed": "completed", "broken": "broken"}
        return dataclasses.replace(self, stage=stage[entry["entry"]])


def _entry(data: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(data)
    except ValueError:
        return {}
    known = ["sealed", "opened", "interrupted", "settled", "completed", "lost", "broken"]
    return entry if isinstance(entry, dict) and entry.get("entry") in known and "iteration" in entry else {}


@dataclass
class _CallHistory:
    """The log of one call: the model after each of its entries, and how each iteration ended."""

    models: list[LogModel]
    opened: set[int] = field(default_factory=set)
    outcomes: dict[int, str] = field(default_factory=dict)


class GroupPromises(HistoryPromises):
    """Watches one history of a group."""

    def __init__(self, history: GroupHistory) -> None:
        super().__init__(history.scheduler)
        self._history = history
        self._calls: defaultdict[int, _CallHistory] = defaultdict(
            lambda: _CallHistory([LogModel(history.shape.members)])
        )
        self._inside: dict[int, tuple[int, int]] = {}  # member → the call and the iteration whose function it runs
        self._returned: set[tuple[int, int, int]] = set()  # call, iteration, member
        self._outcomes: list[CallOutcome] = []

    def model(self, call: int) -> LogModel:
        """What the log of a call says now."""
        return self._calls[call].models[-1]

    # ---- while it runs

    def appended(self, number: int, data: bytes) -> None:
        """The log of a call has another entry."""
        call, entry = self._calls[number], _entry(data)
        before = after = call.models[-1]
        is_counted = bool(entry) and before.counts(entry)
        self.note(f"call {number}: {'' if is_counted else '(means nothing) '}{data.decode(errors='replace')[:200]}")
        if is_counted:
            after = before.after(entry)
            self._check_entry(number, before, entry)
            ended = after.iteration > before.iteration or after.stage == "completed"
            if ended:
                outcome = "completed" if after.stage == "completed" else "interrupted"
                if call.outcomes.setdefault(before.iteration, outcome) != outcome:
                    self.broke(GroupPromise.ONE_OUTCOME, f"iteration {before.iteration} has ended twice")
            if entry["entry"] == "opened":
                call.opened.add(before.iteration)
        call.models.append(after)
        self._check_ledgers()
        if is_counted:
            self._history.aim(entry["entry"])

    def _check_entry(self, number: int, before: LogModel, entry: dict[str, Any]) -> None:
        iteration = before.iteration
        match entry["entry"]:
            case "lost" if entry["interruption"] in _DEATHS:
                member = self._history.members[entry["member"]]
                joined = self._history.server.memory.connect(GROUP, number).arrivals(barriers.JOIN)
                # One that has not joined is in no iteration: if it comes back, it finds that it is out.
                if member.process.alive and member.member in joined:
                    self.broke(GroupPromise.DEAD, f"member {entry['member']} is recorded as lost, and lives")
            case "sealed":
                self._check_barrier(number, barriers.ready(iteration), before)
            case "settled":
                self._check_barrier(number, barriers.notice(iteration - 1), before)
            case "opened":
                self._check_barrier(number, barriers.start(iteration), before)
                places = self._places(number, iteration, before)
                if sorted(place["rank"] for place in places.values()) != list(range(len(places))):
                    self.broke(GroupPromise.COUNTED, f"iteration {iteration} begins with the ranks of {places}")
            case "completed":
                for member, place in self._places(number, iteration, before).items():
                    is_active = place["active_rank"] is not None
                    if is_active and (number, iteration, member) not in self._returned:
                        self.broke(
                            GroupPromise.COUNTED, f"iteration {iteration} is completed, and member {member} has not"
                        )

    def _check_barrier(self, number: int, barrier: str, model: LogModel) -> None:
        arrived = self._history.server.memory.connect(GROUP, number).arrivals(barrier)
        missing = set(range(model.members)) - model.lost - set(arrived)
        if missing:
            self.broke(GroupPromise.COUNTED, f"{barrier} has closed without members {sorted(missing)}")

    def _places(self, number: int, iteration: int, model: LogModel) -> dict[int, dict[str, Any]]:
        arrived = self._history.server.memory.connect(GROUP, number).arrivals(barriers.start(iteration))
        return {
            member: {"active_rank": None} | json.loads(data)
            for member, data in arrived.items()
            if member not in model.lost
        }

    def _check_ledgers(self) -> None:
        """What each rank has made of the entries that it has read."""
        for member in self._history.members:
            group = getattr(member.call, "_group", None)
            if group is None or not member.process.alive:
                continue
            ledger, models = group.cycle.ledger, self._calls[member.call._call].models  # type: ignore[union-attr]
            if ledger.length >= len(models):
                continue  # it is before the reply, or a call that no rank has begun
            model = models[ledger.length]
            seen = (ledger.iteration, ledger.stage.value, frozenset(ledger.lost))
            if seen != (model.iteration, model.stage, model.lost):
                is_late = ledger.iteration > model.iteration and model.stage in ("completed", "gathering")
                promise = GroupPromise.LATE if is_late else GroupPromise.ONE_OUTCOME
                should = f"iteration {model.iteration}, {model.stage}, lost {sorted(model.lost)}"
                has = f"iteration {seen[0]}, {seen[1]}, lost {sorted(seen[2])}"
                self.broke(promise, f"after {ledger.length} entries member {member.member} has {has}, not {should}")

    def function_begins(self, member: SimulatedMember, call: int, iteration: int) -> None:
        self.note(f"member {member.member} begins the function, call {call}, iteration {iteration}")
        for other, inside in self._inside.items():
            if inside != (call, iteration):
                sentence = f"member {member.member} begins iteration {iteration}, and {other} is in {inside[1]}"
                self.broke(GroupPromise.ALONE, sentence)
        if member.member in self._calls[call].models[-1].lost:
            self.broke(GroupPromise.COUNTED, f"member {member.member} is lost, and begins iteration {iteration}")
        if iteration not in self._calls[call].opened:
            self.broke(GroupPromise.COUNTED, f"member {member.member} begins iteration {iteration} before it is open")
        self._inside[member.member] = (call, iteration)
        self._check_ledgers()

    def function_returned(self, member: SimulatedMember, call: int, iteration: int) -> None:
        self._returned.add((call, iteration, member.member))

    def function_ends(self, member: SimulatedMember) -> None:
        self._inside.pop(member.member, None)

    def call_ended(self, outcome: CallOutcome) -> None:
        said = f"returns {outcome.value}" if outcome.error is None else f"raises {outcome.error!r}"
        self.note(f"member {outcome.member}: call {outcome.call} {said}")
        self._outcomes.append(outcome)
        self._check_ledgers()
        model = self._calls[outcome.call].models[-1]
        if outcome.error is not None:
            return
        if model.stage != "completed":
            self.broke(GroupPromise.ONE_OUTCOME, f"member {outcome.member} returns, and nothing is completed")
        elif outcome.value not in (None, f"{outcome.call}/{model.iteration}"):
            sentence = f"member {outcome.member} returns {outcome.value}, where iteration {model.iteration} completed"
            self.broke(GroupPromise.ONE_OUTCOME, sentence)

    # ---- a whole history

    def bound_s(self) -> float:
        """How long the history may take: after the last fault each wait has its bound, and no fault brings more than
        two restarts."""
        shape, history = self._history.shape, self._history
        restart_s = 2 * shape.barrier_s + shape.hard_s + shape.grace_s + shape.heartbeat_s + shape.patience_s
        work_s = 2 * shape.steps * shape.step_s + 5.0
        return history.faults_over_s - BEGIN_S + shape.calls * (2 * len(history.acts) + 2) * (restart_s + work_s)

    def check_the_end(self) -> None:
        """Who was harmed by no fault has completed, unless the store was away for too long."""
        history, shape = self._history, self._history.shape
        away_s = sum(act.lasts_s for act in history.acts if act.fault in STORE_FAULTS)
        # A rank that waits for another in the function must hear of the interruption before its own hard timeout.
        if away_s > min(shape.heartbeat_s / 4, shape.patience_s / 4, (shape.hard_s - shape.soft_s) / 3):
            return
        if shape.replaced:
            return
        first = barriers.ready(0)
        if any(isinstance(outcome.error, TimeoutError) and first in str(outcome.error) for outcome in self._outcomes):
            return  # a fault before its first heartbeat: no monitor judges a member that has not begun
        done = {each.member for each in self._outcomes if each.error is None and each.call == shape.calls - 1}
        for member in history.members:
            if not member.was_harmed and member.member not in done:
                ended = [outcome for outcome in self._outcomes if outcome.member == member.member]
                why = repr(ended[-1].error) if ended else f"its process ended with {member.process.exit_code}"
                self.broke(GroupPromise.PROGRESS, f"member {member.member} has not completed: {why}")
