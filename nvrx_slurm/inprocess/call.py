"""One call of a wrapped function, from its start to its end. Which thread does what:

main          goes from phase to phase, and calls the function in the region that a restart may interrupt (`rank.py`)
listener      reads what the group has agreed on, and moves the cycle on (`group.py`)
interrupter   while the main thread is in the function: last call, abort, interrupt (`interrupter.py`)
watchdog      notes that the main thread runs Python (`progress.py`)
monitor       a process of its own: sees that this one dies, hangs or makes no progress (`monitor.py`)
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from nvrx_slurm.inprocess.attribution import Interruption, in_words
from nvrx_slurm.inprocess.barriers import MemberProcess, Noticing
from nvrx_slurm.inprocess.cycle import CyclePhase, Event, RankCycle
from nvrx_slurm.inprocess.environment import RankIdentity, RankVariables, watchdog_method
from nvrx_slurm.inprocess.exception import RankDiscarded, RankShouldRestart, StoreError
from nvrx_slurm.inprocess.group import Group
from nvrx_slurm.inprocess.interrupter import Interrupter
from nvrx_slurm.inprocess.ledger import GroupLedger, IterationStage, Lost
from nvrx_slurm.inprocess.monitor import MonitorOptions, MonitorProcess
from nvrx_slurm.inprocess.options import WrapperOptions
from nvrx_slurm.inprocess.progress import HAS_PENDING_CALLS, ProgressStamps, SignalWatchdog, Watchdog
from nvrx_slurm.inprocess.rank import ForkedChild, Rank
from nvrx_slurm.inprocess.region import CallInterrupted, Raised, Region, Returned
from nvrx_slurm.inprocess.state import Mode, State
from nvrx_slurm.inprocess.store_wait import free_main_thread, mend_stores
from nvrx_slurm.inprocess.timeline import Restart, RestartPart, RestartReporter, Stopwatch
from nvrx_slurm.util.log import get_logger

log = get_logger("inprocess")

KEPT_RANKS = 20_000  # how many timelines of ranks are kept, over all restarts of a call: each takes a kilobyte

# Which part of a restart has ended when a phase begins.
_ENDS: Mapping[CyclePhase, RestartPart] = {
    CyclePhase.INTERRUPTED: RestartPart.DETECTED,
    CyclePhase.ABORTING: RestartPart.LAST_CALL,
    CyclePhase.UNWINDING: RestartPart.ABORTED,
    CyclePhase.RECOVERING: RestartPart.LEFT,
    CyclePhase.REASSIGNING: RestartPart.SYNCHRONISED,
    CyclePhase.RE_ENTERING: RestartPart.REASSIGNED,
    CyclePhase.RUNNING: RestartPart.RE_ENTERED,
}


class CallWrapper:
    """A wrapped function's handle on the call that it is in; passed to parameters annotated with this class.

    `restarts`: the timelines of the group's latest restarts in this call, on the rank that reported them.
    `interruptions`: how many iterations of this call were interrupted so far. `lost`: the members that were out when
    it ended.
    """

    def __init__(self, options: WrapperOptions, launch: RankIdentity, call: int, process: MemberProcess) -> None:
        self._options, self._launch, self._call, self._process = options, launch, call, process
        self._watch = Stopwatch()
        self.restarts: list[Restart] = []
        self.interruptions = 0
        self.lost: Mapping[int, Lost] = {}

    # ---- for the wrapped function

    @property
    def iteration(self) -> int:
        """How many iterations of this call have failed before; one that never called the function counts too."""
        return self._rank.state.iteration

    def ping(self) -> None:
        """The function makes progress. From the first ping of an iteration on, a rank that does not ping for
        `soft_timeout` is restarted, and for `hard_timeout` is killed. Costs less than a microsecond."""
        self._stamps.manual()

    def atomic(self) -> AbstractContextManager[None]:
        """`with call.atomic():` a block that no restart interrupts: abort waits for its end. It may be nested. While
        a restart is under way no thread enters such a block; the main thread is interrupted at its start instead."""
        return self._region.atomic()

    @contextlib.contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """`with call.disable_hang_protection():` a block that may take longer than the soft and the hard timeout.
        It may be nested. The monitor still sees the death of the process, and once the iteration is interrupted the
        block, too, must end within the hard timeout."""
        suspended = self._stamps.suspend()
        try:
            yield
        finally:
            self._stamps.resume(suspended)

    # ---- the call

    def run(self, function: Callable[[], Any], lost: Mapping[int, Lost], *, key: int | None = None) -> Any:
        """Call the function until all active ranks have completed it together; `lost` were lost in earlier calls.
        `key`: the call's number in the store (`admission.py`); by default, as in a store of its own."""
        self.lost = lost
        self._key = self._call if key is None else key
        with ExitStack() as stack:
            self._build(stack)
            try:
                # The time that the monitor takes to start is no silence of this rank.
                with self.disable_hang_protection():
                    self._monitor.wait_ready(self._options.barrier_timeout.total_seconds())
                self._group.join(self._process, lost)
                # The garbage collection that each restart needs skips what exists by now, all modules among it: that
                # would take longer than the rest of the restart. Now, since all threads have begun: what they have
                # allocated is skipped too. Where the user has frozen objects, only the user unfreezes.
                if not gc.get_freeze_count():
                    gc.freeze()
                    stack.callback(gc.unfreeze)
                value = self._rank.drive(function)
                if self._options.completion is not None:
                    try:
                        self._options.completion(self._rank.state.freeze())
                    except Exception:
                        log.exception("rank %s: Completion raised", self._rank.state.rank)
            except BaseException as error:
                if isinstance(error, ForkedChild):
                    outcome = error.outcome
                elif os.getpid() != self._process.pid:  # a callback has forked it
                    outcome = Raised(error)
                else:
                    self._leave_because(error)
                    raise
                # All else that this process has inherited belongs to its parent.
                stack.pop_all()
                self._region.leave_to_child()
            else:
                self.lost = self._group.ledger.lost
                return value
        match outcome:
            # In a forked child the function ends as if it were not wrapped.
            case Returned(value):
                return value
            case Raised(failure):
                raise failure
            case CallInterrupted(cause):
                raise cause or RankShouldRestart
        return None

    def _build(self, stack: ExitStack) -> None:
        """Make all parts, in the order in which they may be used; they are closed in the reverse order."""
        options, launch = self._options, self._launch
        self._stamps = ProgressStamps.create()
        stack.callback(self._stamps.close)
        by_signal = watchdog_method() == "signal" or not HAS_PENDING_CALLS
        on_signal = self._stamps.automatic if by_signal else None
        self._region = stack.enter_context(Region(on_signal, free_main_thread if options.abort is not None else None))
        self._group = Group(
            options.store_factory(**options.store_kwargs),
            launch.group,
            self._key,
            RankCycle(launch.rank, GroupLedger(launch.world_size), replaced=launch.replaced),
            tick=self._stamps.automatic,
            tick_s=options.progress_watchdog_interval.total_seconds(),
            on_phase=self._on_phase,
            on_heard=self._on_heard,
        )
        stack.callback(self._group.close)
        try:
            self._build_watched(stack, by_signal)
        except BaseException as error:
            # No monitor says it: the others would wait for this rank until `barrier_timeout`.
            kind, text = Interruption.BASE_EXCEPTION, in_words(error)
            self._group.propose_loss(
                Lost(iteration=0, member=launch.rank, interruption=kind, text=text, host=launch.host)
            )
            raise

    def _build_watched(self, stack: ExitStack, by_signal: bool) -> None:
        """The monitor, and all that runs beside the function."""
        options, launch = self._options, self._launch
        monitor_options = MonitorOptions(
            store_factory=options.store_factory,
            store_kwargs=dict(options.store_kwargs),
            group=launch.group,
            call=self._key,
            member=launch.rank,
            members=launch.world_size,
            rank=launch.rank,
            host=launch.host,
            soft_timeout_s=options.soft_timeout.total_seconds(),
            hard_timeout_s=options.hard_timeout.total_seconds(),
            heartbeat_timeout_s=options.heartbeat_timeout.total_seconds(),
            heartbeat_interval_s=options.heartbeat_interval.total_seconds(),
            interval_s=options.monitor_process_interval.total_seconds(),
            grace_s=options.termination_grace_time.total_seconds(),
            logfile=options.monitor_process_logfile,
        )
        self._monitor = MonitorProcess(monitor_options, self._stamps)
        self._monitored = stack.enter_context(ExitStack())
        self._monitored.callback(self._monitor.leave)
        interval_s = options.progress_watchdog_interval.total_seconds()
        watchdog = SignalWatchdog(self._region.ask, interval_s) if by_signal else Watchdog(self._stamps, interval_s)
        stack.callback(watchdog.stop)
        watchdog.start()
        self._reporter = RestartReporter(self._group, launch.group, self._call)
        self._interrupter = Interrupter(
            self._group,
            self._region,
            self._stamps,
            options,
        )
        # An Abort may outlast the function; the monitor bounds it.
        stack.callback(mend_stores)
        stack.callback(self._interrupter.join)
        self._rank = Rank(
            options=options,
            launch=launch,
            process=self._process,
            stamps=self._stamps,
            region=self._region,
            monitor=self._monitor,
            variables=stack.enter_context(RankVariables()),
            group=self._group,
            interrupter=self._interrupter,
            watch=self._watch,
            state=State(rank=launch.rank, world_size=launch.world_size),
        )

    # ---- called by the thread that moves the cycle on

    def _on_phase(self, cycle: RankCycle) -> None:
        if cycle.phase in _ENDS:
            self._watch.mark(_ENDS[cycle.phase])
        if cycle.phase is CyclePhase.INTERRUPTED:
            self.interruptions += 1
        ends_by_force = cycle.phase is CyclePhase.LEAVING and cycle.ledger.stage is not IterationStage.COMPLETED
        if cycle.phase is CyclePhase.INTERRUPTED or (ends_by_force and not self._group.leaves):
            self._interrupter.begin(self._rank.state.freeze())

    def _on_heard(self, before: CyclePhase) -> None:
        """The listener calls this after each read of the log; here it may use the store."""
        cycle = self._group.cycle
        if cycle.phase is CyclePhase.INTERRUPTED:
            own = self._interrupter.own
            self._group.notice(cycle.iteration, Noticing(fault=None if own is None else own.record()))
        begins_again = cycle.phase is CyclePhase.RUNNING is not before and cycle.iteration > 0
        if begins_again and self._rank.state.active_rank == 0:
            restart = self._reporter.report(self._watch.parts().get(RestartPart.RE_ENTERED.value, 0.0))
            self.restarts.append(restart)
            del self.restarts[: -max(1, KEPT_RANKS // restart.world_size)]
        elif begins_again:
            self._reporter.skip()

    # ---- the end

    def _leave_because(self, error: BaseException) -> None:
        """This rank is out. The group's log says so at once, or, if this rank is unfit, once this process is dead."""
        self._group.leaves = True
        self._group.feed(Event.LEAVES)
        kind = Interruption.BASE_EXCEPTION
        if isinstance(error, RankDiscarded):
            kind = Interruption.DISCARDED
        if self._rank.unfit:
            kind = Interruption.UNHEALTHY
        lost = Lost(
            iteration=self._group.ledger.iteration,
            member=self._launch.rank,
            interruption=kind,
            rank=self._rank.state.rank,
            text=in_words(error),
            host=self._launch.host,
        )
        self.lost = {**self._group.ledger.lost, lost.member: lost}
        if self._rank.unfit:
            self._monitor.terminate_within(lost, self._options.termination_grace_time.total_seconds())
            # The monitor stays until this process has ended.
            self._monitored.pop_all()
        elif not isinstance(error, StoreError):
            # Where the store is gone it would be waited for once more, and the lease would end meanwhile.
            self._group.propose_loss(lost)
        self._rank.state.mode = Mode.TERMINATED
        if self._options.terminate is not None:
            # The pings of the function are over: what the callback does in Python is progress.
            self._stamps.begin_iteration()
            try:
                self._options.terminate(self._rank.state.freeze())
            except Exception as failure:
                raise failure from error
