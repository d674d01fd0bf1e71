"""What ends the function when its iteration is interrupted, while the main thread may be anywhere in it."""

from __future__ import annotations

import threading

from nvrx_slurm.inprocess import barriers
from nvrx_slurm.inprocess.cycle import CyclePhase, Event
from nvrx_slurm.inprocess.group import Group
from nvrx_slurm.inprocess.ledger import Interrupted
from nvrx_slurm.inprocess.options import WrapperOptions
from nvrx_slurm.inprocess.progress import ProgressStamps
from nvrx_slurm.inprocess.region import Region
from nvrx_slurm.inprocess.state import FrozenState
from nvrx_slurm.util.log import get_logger

log = get_logger("inprocess")


class Interrupter:
    """A thread for each interruption: the last call, then abort, then interrupts until the main thread is out. The
    time from the abort to that end is bounded by the hard timeout.

    `own` is this rank's own fault in the iteration, if it had one. `begin` returns at once.
    """

    def __init__(self, group: Group, region: Region, stamps: ProgressStamps, options: WrapperOptions) -> None:
        self._group, self._region, self._stamps, self._abort = group, region, stamps, options.abort
        self._last_call_s = options.last_call_wait.total_seconds()
        self._again_s = options.monitor_thread_interval.total_seconds()
        self._thread: threading.Thread | None = None
        self._refusal: BaseException | None = None
        self._has_aborted = False
        self.own: Interrupted | None = None

    def begin(self, state: FrozenState) -> None:
        work = (self._thread, state)
        self._thread = threading.Thread(target=self._run_after, args=work, name="nvrx-interrupter", daemon=True)
        self._thread.start()

    def join(self) -> BaseException | None:
        """Wait for the thread, which ends once the main thread is out of the function. Returns the BaseException,
        if any, that Abort has raised and that is no Exception: it takes this rank out."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.own, self._has_aborted = None, False
        refusal, self._refusal = self._refusal, None
        return refusal

    def _run_after(self, former: threading.Thread | None, state: FrozenState) -> None:
        """A group that fails in the middle of an interruption interrupts once more: Abort is called once, and the
        former thread is waited for."""
        if former is not None:
            former.join()
        if not self._has_aborted:
            self._run(state)

    def _run(self, state: FrozenState) -> None:
        try:
            # The last call: all ranks may report what they know of this interruption, for at most this long.
            if self._group.phase is CyclePhase.INTERRUPTED and not self._group.wait_while(
                CyclePhase.INTERRUPTED, within_s=self._last_call_s
            ):
                self._group.feed(Event.LAST_CALL_OVER)
            iteration, waited = self._group.cycle.iteration, False

            def report_wait() -> None:
                nonlocal waited
                waited = True
                self._group.report_atomic(iteration, barriers.OPEN)

            self._stamps.interrupted()
            with self._region.held(report_wait):
                if waited:
                    self._group.report_atomic(iteration, b"")
                self._has_aborted = True
                self._stamps.expect_end()
                if self._abort is not None:
                    try:
                        self._abort(state)
                    except Exception:
                        log.exception("rank %s: Abort raised; the restart goes on", state.rank)
                    except BaseException as refusal:
                        # The main thread raises it, once it is out of the function.
                        self._refusal = refusal
                self._group.feed(Event.ABORTED)
                self._region.interrupt(again_s=self._again_s)
        except Exception as error:
            # Otherwise the main thread would wait for this thread without end.
            self._group.fail(error)
