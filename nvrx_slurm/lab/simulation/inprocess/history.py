"""One history of a group of ranks: their processes, the function that they call, and the faults."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

from nvrx_slurm.inprocess.abort import Abort
from nvrx_slurm.inprocess.attribution import Interruption
from nvrx_slurm.inprocess.barriers import MemberProcess
from nvrx_slurm.inprocess.call import CallWrapper
from nvrx_slurm.inprocess.compose import Compose
from nvrx_slurm.inprocess.environment import RankIdentity
from nvrx_slurm.inprocess.exception import RestartAbort, RestartError
from nvrx_slurm.inprocess.health_check import HealthCheck
from nvrx_slurm.inprocess.ledger import Interrupted, Lost, encode
from nvrx_slurm.inprocess.options import WrapperOptions
from nvrx_slurm.inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks
from nvrx_slurm.inprocess.state import FrozenState
from nvrx_slurm.inprocess.wrap import Wrapper
from nvrx_slurm.lab.simulation.inprocess.kernel import RankKernel
from nvrx_slurm.lab.simulation.inprocess.promises import CallOutcome, GroupPromise, GroupPromises
from nvrx_slurm.lab.simulation.inprocess.shape import (
    GROUP,
    HARMLESS,
    IN_FUNCTION,
    LASTING,
    STORE_FAULTS,
    GroupAct,
    GroupFault,
    GroupShape,
    draw_acts,
    draw_shape,
)
from nvrx_slurm.lab.simulation.inprocess.store import SimulatedGroupStore, StoreServer
from nvrx_slurm.lab.simulation.loop import BEGIN_S
from nvrx_slurm.lab.simulation.threads import HistoryResult, Ticket, VirtualHistory, VirtualProcess

# How long a process may go on after its call: it ends by itself.
EXIT_S = 0.5

# How long a launcher that replaces dead ranks takes to end the others.
LAUNCHER_S = 2.0


class FunctionFailed(Exception):
    """What the function raises."""


class SimulatedMember:
    """One rank's process, and what it does besides its calls."""

    def __init__(self, history: GroupHistory, member: int) -> None:
        self.history, self.member = history, member
        shape, kernel = history.shape, history.kernel
        self.host = shape.hosts[member]
        self.process: VirtualProcess = kernel.process(f"rank {member}", self.host)
        self.process.on_death(lambda: history.member_ended(self))
        self.call: CallWrapper | None = None
        self.due: list[GroupFault] = []  # what happens to it in the function
        self.unfit = False
        self.was_harmed = False
        self.process.start(self._main)

    @property
    def monitor(self) -> VirtualProcess | None:
        monitor = getattr(self.call, "_monitor", None)
        return None if monitor is None else monitor._process

    def _main(self) -> int:
        history, lost = self.history, dict[int, Lost]()
        process = MemberProcess(host=self.host, pid=self.process.pid, began=self.process.began)
        identity = RankIdentity(
            rank=self.member,
            world_size=history.shape.members,
            local_rank=None,
            group=GROUP,
            host=self.host,
            replaced=history.shape.replaced,
        )
        history.scheduler.sleep(history.chance.random() * 0.3)
        for number in range(history.shape.calls):
            self.call = call = CallWrapper(history.options, identity, number, process)
            outcome = CallOutcome(self.member, number)
            try:
                outcome.value = call.run(partial(history.function, self, call), lost)
            except (RestartError, RestartAbort, FunctionFailed) as error:
                outcome.error = error
            history.promises.call_ended(outcome)
            lost.update(call.lost)
            if outcome.error is not None:
                break
        history.scheduler.sleep(history.chance.random() * EXIT_S)
        return 0 if outcome.error is None else 1


class GroupHistory(VirtualHistory[GroupShape, GroupAct]):
    """One history of a group."""

    stuck, sound = GroupPromise.BOUND, GroupPromise.SOUND
    promises: GroupPromises

    def __init__(self, seed: int, acts: tuple[GroupAct, ...] | None = None) -> None:
        shape = draw_shape(Random(f"{seed}/shape"))
        super().__init__(seed, shape, draw_acts(Random(f"{seed}/adversary"), shape) if acts is None else acts)
        self.kernel = RankKernel(self.scheduler)
        self.names = self.kernel.substituted()
        self.promises = GroupPromises(self)
        self.server = StoreServer(self.scheduler, Random(f"{seed}/store"), self.promises.appended)
        self.members: list[SimulatedMember] = []
        self.collectives: Counter[tuple[int, int, int]] = Counter()  # call, iteration, step → how many have come
        self._at_collective: dict[tuple[int, int, int], list[Ticket]] = {}
        self.faults_over_s = BEGIN_S + max((act.at_s + act.lasts_s for act in self.acts), default=0.0)
        self.options = self._options()
        self._aimed: list[GroupAct] = []  # acts that wait for an entry

    def _options(self) -> WrapperOptions:
        shape, scheduler = self.shape, self.scheduler
        seconds = {
            "monitor_thread_interval": 0.5,
            "monitor_process_interval": min(1.0, shape.soft_s / 3),
            "heartbeat_interval": shape.interval_s,
            "progress_watchdog_interval": 0.8,
            "soft_timeout": shape.soft_s,
            "hard_timeout": shape.hard_s,
            "heartbeat_timeout": shape.heartbeat_s,
            "barrier_timeout": shape.barrier_s,
            "completion_timeout": shape.barrier_s,
            "last_call_wait": shape.last_call_s,
            "termination_grace_time": shape.grace_s,
        }
        bounds: dict[str, Any] = {name: timedelta(seconds=value) for name, value in seconds.items()}
        history = self

        class SlowAbort(Abort):
            """Takes its time."""

            def __call__(self, state: FrozenState) -> FrozenState:
                scheduler.sleep(shape.abort_s)
                return state

        class FailingCheck(HealthCheck):
            """Fails where the adversary says so."""

            def __call__(self, state: FrozenState) -> FrozenState:
                assert state.initial_rank is not None
                if history.members[state.initial_rank].unfit:
                    raise FunctionFailed("unfit")
                return state

        store = type(
            "StoreOfHistory", (SimulatedGroupStore,), {"server": self.server, "patience_s": shape.patience_s}
        )
        wrapper = Wrapper(
            store_factory=store,
            abort=SlowAbort(),
            health_check=FailingCheck(),
            rank_assignment=Compose(MaxActiveWorldSize(shape.active), ShiftRanks()),
            **bounds,
        )
        return wrapper.options

    # ---- the function

    def function(self, member: SimulatedMember, call: CallWrapper) -> str:
        """Steps with a collective in each, as a training has: without one of its ranks the others wait for ever."""
        number, iteration = call._call, call.iteration
        state = call._rank.state
        self.promises.function_begins(member, number, iteration)
        try:
            for step in range(self.shape.steps):
                self._suffer(member)
                if self.shape.atomic and step % 2:
                    with call.atomic():
                        self.scheduler.sleep(self.shape.step_s * self.chance.random() / 2)
                else:
                    self.scheduler.sleep(self.shape.step_s * self.chance.random())
                if self.shape.pings:
                    call.ping()
                self._collective((number, iteration, step), state.active_world_size or 0)
            self._suffer(member)
            self.promises.function_returned(member, number, iteration)
            return f"{number}/{iteration}"
        finally:
            # When the history closes every thread passes here, and none of these functions has ended in it.
            if not self.scheduler.is_closing:
                self.promises.function_ends(member)

    def _collective(self, key: tuple[int, int, int], size: int) -> None:
        self.collectives[key] += 1
        if self.collectives[key] >= size:
            for ticket in self._at_collective.pop(key, ()):
                self.scheduler.wake(ticket)
            return
        pid = self.scheduler.process.pid
        if self.shape.in_c:
            self.kernel.quiet.add(pid)
        try:
            while self.collectives[key] < size:
                self._at_collective.setdefault(key, []).append(self.scheduler.ticket())
                self.scheduler.park()
        finally:
            self.kernel.quiet.discard(pid)

    def _suffer(self, member: SimulatedMember) -> None:
        while member.due:
            fault = member.due.pop(0)
            match fault:
                case GroupFault.RAISE:
                    raise FunctionFailed(f"member {member.member}")
                case GroupFault.HANG | GroupFault.STUCK:
                    self.kernel.quiet.add(member.process.pid)
                    if fault is GroupFault.STUCK:
                        self.kernel.deaf.add(member.process.pid)
                    try:
                        self.scheduler.park()
                    finally:
                        self.kernel.quiet.discard(member.process.pid)
                case GroupFault.LEAVE:
                    raise RestartAbort("the function has had enough")
                case GroupFault.UNFIT:
                    member.unfit = True
                    raise FunctionFailed(f"member {member.member}, unfit from now on")

    # ---- faults

    def aim(self, kind: str) -> None:
        """The log has taken an entry of this kind: what waits for that happens within a few messages' time."""
        for act in [act for act in self._aimed if act.on == kind]:
            # What is late comes again and again: in each iteration some process is behind.
            if act.fault is not GroupFault.GARBAGE:
                self._aimed.remove(act)
            self.scheduler.call_later(self.chance.choice((0.0, 0.001, 0.005)), partial(self._perform, act))

    def _perform(self, act: GroupAct) -> None:
        self.faults_over_s = max(self.faults_over_s, self.scheduler.now_s + act.lasts_s)
        member = self.members[act.member]
        fault, server = act.fault, self.server
        if fault not in HARMLESS:
            member.was_harmed = True
        if fault in IN_FUNCTION:
            member.due.append(fault)
            return
        monitor = member.monitor
        # By which the server counts it: several of a kind may last at one time.
        trouble = member.host if fault is GroupFault.CUT_OFF else fault
        stopped: list[VirtualProcess] = []
        match fault:
            case GroupFault.STOP:
                stopped = [member.process]
            case GroupFault.STOP_MONITOR if monitor is not None:
                stopped = [monitor]
            case GroupFault.STOP_BOTH:
                stopped = [member.process] if monitor is None else [member.process, monitor]
            case GroupFault.KILL:
                member.process.kill()
            case GroupFault.KILL_MONITOR if monitor is not None:
                monitor.kill()
            case GroupFault.POWER_OFF:
                # At one moment: nothing of the host is left that could report it.
                for process in list(self.kernel.processes.values()):
                    if process.host == member.host:
                        process.kill()
                for other in self.members:
                    other.was_harmed |= other.host == member.host
            case GroupFault.CUT_OFF | GroupFault.STORE_DOWN | GroupFault.LOSSY:
                server.faults[trouble] += 1
                server.drop_readers()
            case GroupFault.GARBAGE:
                connection = server.memory.connect(GROUP, 0)
                log = connection.read(0, 0.0)
                # What a monitor may still send that has not read the log since the iteration, which is over.
                model = self.promises.model(0)
                late = Interrupted(
                    iteration=model.iteration - (model.stage != "completed"),
                    member=act.member,
                    rank=None,
                    interruption=Interruption.SOFT_TIMEOUT,
                )
                # An entry of a dead process, of one that was slow to send it, or of no process at all.
                entry = self.chance.choice([b"", b'{"entry":"rumour"}', *log, *2 * [encode(late)]])
                connection.append(entry, len(log))
                self.promises.appended(0, entry)
                server.wake_readers(0)
        for process in stopped:
            process.freeze()

        def heal() -> None:
            if fault in STORE_FAULTS:
                server.faults[trouble] -= 1
            for process in stopped:
                process.thaw()
            server.drop_readers()

        if fault in LASTING:
            self.scheduler.call_later(act.lasts_s, heal)

    def member_ended(self, member: SimulatedMember) -> None:
        """A launcher that replaces dead ranks ends all others."""
        self.promises.function_ends(member)
        if self.shape.replaced and member.process.exit_code:
            for other in self.members:
                other.was_harmed = True
                self.scheduler.call_later(LAUNCHER_S * self.chance.random(), other.process.kill)

    # ---- running it

    def begin(self) -> float:
        self.members.extend(SimulatedMember(self, member) for member in range(self.shape.members))
        for act in self.acts:
            wait = self._aimed.append if act.on else self._perform
            self.scheduler.call_later(act.at_s, partial(wait, act))
        return self.promises.bound_s()

    def is_over(self) -> bool:
        return not any(process.alive for process in self.kernel.processes.values())


def run_group(seed: int, acts: tuple[GroupAct, ...] | None = None) -> HistoryResult:
    """One history. The same arguments give the same result, byte for byte."""
    return GroupHistory(seed, acts).run()
