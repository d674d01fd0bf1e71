"""One rank in one call: what the main thread does in each phase of the cycle (`cycle.py`)."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nvrx_slurm.inprocess import barriers
from nvrx_slurm.inprocess.abort import close_cut_connections, drop_aborted_groups
from nvrx_slurm.inprocess.attribution import Interruption, clear_frames, in_words, place_of, stack_of
from nvrx_slurm.inprocess.barriers import MemberProcess, NewPlace, Ready, unpacked
from nvrx_slurm.inprocess.cycle import CyclePhase, Event
from nvrx_slurm.inprocess.environment import RankIdentity, RankVariables
from nvrx_slurm.inprocess.exception import (
    HealthCheckError,
    InternalError,
    NestedCallError,
    RankShouldRestart,
    RestartError,
    TimeoutError,
)
from nvrx_slurm.inprocess.group import Barrier, Group
from nvrx_slurm.inprocess.interrupter import Interrupter
from nvrx_slurm.inprocess.ledger import Broken, Completed, Interrupted, IterationOpened, IterationStage, Sealed
from nvrx_slurm.inprocess.monitor import MonitorProcess
from nvrx_slurm.inprocess.options import WrapperOptions
from nvrx_slurm.inprocess.progress import ProgressStamps
from nvrx_slurm.inprocess.rank_assignment import RankAssignmentCtx, published_by
from nvrx_slurm.inprocess.region import ENDS, CallInterrupted, Raised, Region, Returned
from nvrx_slurm.inprocess.state import Mode, State
from nvrx_slurm.inprocess.store_wait import mend_stores
from nvrx_slurm.inprocess.timeline import RestartPart, Stopwatch
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.workload.restarting import restarting
from nvrx_slurm.workload.sections import LONGEST_S

log = get_logger("inprocess")

_BEFORE_ABORT = (CyclePhase.RUNNING, CyclePhase.COMPLETING, CyclePhase.INTERRUPTED)


# Where a rank goes on to another iteration.
_ONWARD = (
    CyclePhase.RECOVERING,
    CyclePhase.SYNCHRONISING,
    CyclePhase.REASSIGNING,
    CyclePhase.OVERTAKEN,
    CyclePhase.RE_ENTERING,
    CyclePhase.RUNNING,
)


class ForkedChild(BaseException):
    """The function was left in a process that it has forked: that process is no rank, and reports nothing."""

    def __init__(self, outcome: Returned[Any] | Raised | CallInterrupted) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@dataclass(slots=True, kw_only=True)
class Rank:
    """Used by the main thread only. `state`: this rank's place; `unfit`: it must be dead before the others go on."""

    options: WrapperOptions
    launch: RankIdentity
    process: MemberProcess
    stamps: ProgressStamps
    region: Region
    monitor: MonitorProcess
    variables: RankVariables
    group: Group
    interrupter: Interrupter
    watch: Stopwatch
    state: State
    value: Any = None
    unfit: bool = False
    _restart: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def drive(self, function: Callable[[], Any]) -> Any:
        """Go from phase to phase until the call ends. Returns what the function returned in the iteration that was
        completed (None in reserve), and raises the error that takes this rank out."""
        steps: Mapping[CyclePhase, Callable[[], None]] = {
            CyclePhase.ENTERING: self._synchronise,
            CyclePhase.REASSIGNING: self._reassign,
            CyclePhase.OVERTAKEN: self._reassign,
            CyclePhase.RE_ENTERING: self._re_enter,
            CyclePhase.RUNNING: lambda: self._run(function),
            CyclePhase.COMPLETING: self._await_others,
            CyclePhase.INTERRUPTED: self._await_interrupter,
            CyclePhase.ABORTING: self._await_interrupter,
            CyclePhase.UNWINDING: self._get_out,
            CyclePhase.RECOVERING: self._recover,
            CyclePhase.SYNCHRONISING: self._synchronise,
            CyclePhase.STANDING_ASIDE: self._stand_aside,
        }
        group = self.group
        try:
            while (phase := group.phase) is not CyclePhase.LEAVING:
                if phase in _ONWARD and self.stamps.kill_pending:
                    self.unfit = True
                    raise RestartError("this rank made no progress, and its monitor is about to end its process")
                steps[phase]()
        finally:
            self._restart.close()
            close_cut_connections()
        if group.failure is not None:
            raise group.failure
        if group.ledger.stage is IterationStage.BROKEN:
            raise InternalError(group.ledger.reason)
        return self.value

    # ---- into an iteration

    def _synchronise(self) -> None:
        """All healthy ranks arrive; the last of them proposes the entry that names the ranks that are out."""
        self._begin_restart()
        self.state.iteration = self.group.ledger.iteration
        published = published_by(self.options.rank_assignment, self.state.freeze())
        here = Ready(rank=_number(self.state), published=published)
        phases = (CyclePhase.ENTERING, CyclePhase.SYNCHRONISING)
        barrier = self._barrier(barriers.ready(self.state.iteration), self._seal, *phases)
        in_atomic = barriers.atomic(self.state.iteration - 1)
        self.group.arrive(dataclasses.replace(barrier, atomic=in_atomic, extended=self._begin_restart), here)

    def _seal(self, here: Mapping[int, bytes]) -> Sealed:
        iteration, world_size = self.state.iteration, self.state.world_size
        missing = set(range(world_size)) - {each.rank for each in unpacked(here, Ready).values()}
        return Sealed(iteration=iteration, world_size=world_size, missing=tuple(sorted(missing)))

    def _reassign(self) -> None:
        # No rank is in the function: none can wait for a peer that it finds gone.
        close_cut_connections()
        options, sealed = self.options, self.group.sealed
        # The assignment decides again which ranks are active. The mode is kept: Tree reads it.
        before = dataclasses.replace(self.state, active_rank=None, active_world_size=None)
        state = options.rank_assignment(RankAssignmentCtx(before, self._published, set(sealed.missing))).state
        if options.rank_filter is not None:
            state = options.rank_filter(_activated(state))
        self.state = _activated(state)
        self.monitor.iteration(sealed.iteration, _number(self.state))
        self.group.feed(Event.ASSIGNED)

    def _published(self) -> Mapping[int, tuple[str, ...]]:
        group = self.group
        here = group.arrivals(barriers.ready(group.sealed.iteration), Ready)
        return {each.rank: each.published for each in here.values() if each.rank not in group.sealed.missing}

    def _re_enter(self) -> None:
        """All ranks that are left arrive with their new ranks; the last of them checks that these make one world."""
        state = self.state
        here = NewPlace(
            rank=_number(state),
            world_size=state.world_size,
            active_rank=state.active_rank,
            active_world_size=state.active_world_size or 0,
            process=self.process,
            phases=self.watch.parts(),
        )
        start = self._barrier(barriers.start(state.iteration), self._open, CyclePhase.RE_ENTERING)
        self.group.arrive(start, here)

    def _open(self, here: Mapping[int, bytes]) -> IterationOpened | Broken:
        iteration, reason = self.state.iteration, barriers.disagreement(unpacked(here, NewPlace))
        return Broken(iteration=iteration, reason=reason) if reason else IterationOpened(iteration=iteration)

    def _barrier(self, name: str, close: Callable[[Mapping[int, bytes]], Any], *phases: CyclePhase) -> Barrier:
        bound_s = self.options.barrier_timeout.total_seconds()
        return Barrier(name, phases, bound_s, lambda ledger: ledger.left, close)

    # ---- the function

    def _run(self, function: Callable[[], Any]) -> None:
        if self.state.mode is Mode.ACTIVE:
            self.variables.set(self.state)
        self.stamps.begin_iteration()
        self._restart.close()

        def body() -> Any:
            """What a restart may interrupt."""
            # A restart that came before the region was entered is obeyed now.
            if self.group.phase is not CyclePhase.RUNNING:
                raise RankShouldRestart
            if self.options.initialize is not None:
                self.options.initialize(self.state.freeze())
            self._check_health()
            return function() if self.state.mode is Mode.ACTIVE else None

        match self.region.call(body):
            case outcome if os.getpid() != self.process.pid:
                raise ForkedChild(outcome)
            case Returned(value):
                self.value = value
                self.group.feed(Event.RETURNED)
            # A RankShouldRestart is obeyed if the group restarts; one that the function itself has made is a fault.
            case Raised(error) if not (
                isinstance(error, RankShouldRestart) and self.group.phase is not CyclePhase.RUNNING
            ):
                self._failed(error)
            case CallInterrupted(error) if isinstance(error, ENDS):
                raise error

    def _failed(self, error: BaseException, *, here: bool = True) -> None:
        """The function has failed here, or (not `here`) others did not return in time, which the text names: the
        iteration has failed for all ranks."""
        # A nested call takes this rank out too: each iteration would make it again, without end.
        if not isinstance(error, Exception | RankShouldRestart) or isinstance(error, NestedCallError):
            raise error
        if self.group.phase not in _BEFORE_ABORT:
            # It may only be a consequence of the abort.
            log.info("restart in process: raised once a restart had begun: %s", in_words(error))
            return
        self.watch.begin()
        if here:
            self.state.fn_exception = error
        who = f"rank {self.state.rank}, iteration {self.state.iteration}"
        log.error("restart in process: %s: %s (%s)", who, in_words(error), place_of(error))
        failure = Interrupted(
            iteration=self.state.iteration,
            member=self.launch.rank,
            rank=self.state.rank if here else None,
            interruption=Interruption.EXCEPTION,
            text=in_words(error),
            host=self.launch.host if here else "",
            stack=stack_of(error) if here else "",
        )
        self.interrupter.own = failure
        self.group.interrupt(failure)
        self.group.wait_while(CyclePhase.RUNNING, CyclePhase.COMPLETING)

    def _await_others(self) -> None:
        # No further ping is expected.
        self.stamps.begin_iteration()
        if self.state.mode is not Mode.ACTIVE:
            self.group.wait_while(CyclePhase.COMPLETING)
            return
        iteration, active = self.state.iteration, self.state.active_world_size or 0
        bound_s = self.options.completion_timeout.total_seconds()
        completed, name = Completed(iteration=iteration), barriers.complete(iteration)
        barrier = Barrier(name, (CyclePhase.COMPLETING,), bound_s, lambda _: active, lambda _: completed)
        try:
            self.group.arrive(barrier)
        except TimeoutError as error:
            self._failed(error, here=False)

    # ---- out of it

    def _await_interrupter(self) -> None:
        self._begin_restart()
        self.group.wait_while(CyclePhase.INTERRUPTED, CyclePhase.ABORTING)

    def _get_out(self) -> None:
        self._begin_restart()
        # The hang, if any, is over, and no ping is expected.
        self.stamps.begin_iteration()
        refusal = self.interrupter.join()
        mend_stores()  # Finalize and HealthCheck may use them
        if refusal is not None:
            raise refusal
        self.group.feed(Event.OUT)

    def _recover(self) -> None:
        """Finalize, and check whether this rank is fit; an error of either takes it out."""
        # Unfit until proven fit: an exception below leaves it so.
        error, self.unfit = self.state.fn_exception, True
        try:
            if self.options.finalize is not None:
                self.options.finalize(self.state.freeze())
            self.watch.mark(RestartPart.FINALIZED)
            self._check_health()
            self.watch.mark(RestartPart.CHECKED)
        except Exception as failure:
            raise failure from (failure.__cause__ or error)
        self.unfit = False
        # The frames of the function's traceback may hold memory, and communicators that are aborted; so may those of
        # the errors that led to it, and of a caller that keeps the error.
        if error is not None:
            clear_frames(error)
        self.state.fn_exception = None
        # Nothing here may hold the error while its frames are collected.
        self.value = error = None
        gc.collect()
        drop_aborted_groups()
        self.group.feed(Event.FIT)

    def _check_health(self) -> None:
        if self.options.health_check is not None:
            try:
                self.options.health_check(self.state.freeze())
            except Exception as error:
                raise HealthCheckError(f"rank {self.state.rank} is unfit: {in_words(error)}") from error

    def _stand_aside(self) -> None:
        """The launcher replaces the dead process by starting all ranks again: it will end this process too."""
        self._begin_restart()
        bound_s = self.options.barrier_timeout.total_seconds()
        if not self.group.wait_while(CyclePhase.STANDING_ASIDE, within_s=bound_s):
            raise RestartError(f"a rank has died, and the launcher has not ended this process within {bound_s:g} s")

    def _begin_restart(self) -> None:
        """Report to the agent, if there is one, that no step is due during the restart."""
        if self.state.iteration or self.group.ledger.iteration:
            self._restart.close()
            bounds = (self.options.hard_timeout, 2 * self.options.barrier_timeout)
            bound_s = sum(bound.total_seconds() for bound in bounds)
            self._restart.enter_context(restarting(min(bound_s, LONGEST_S / 2)))


def _number(state: State) -> int:
    if state.rank is None:
        raise InternalError("the rank assignment left this rank without a number, and did not raise RankDiscarded")
    return state.rank


def _activated(state: State) -> State:
    """The state itself, or, where the assignment did not say which ranks are active, the state with all active."""
    if state.active_world_size is not None:
        return state
    return dataclasses.replace(state, mode=Mode.ACTIVE, active_rank=state.rank, active_world_size=state.world_size)
