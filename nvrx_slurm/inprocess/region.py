"""Where a restart interrupts the main thread: a signal's handler raises RankShouldRestart, inside of one call only.

The interrupter thread sends the main thread a signal, whose Python handler raises. The handler runs in the main
thread, on top of the code that it interrupts, so nothing that it reads changes while it runs. It raises only if that
code is below `_inside`, which does nothing but call the function. So the exception always passes through
`Region.call`, which is never interrupted itself. A blocking system call (a sleep, a lock, a socket) ends at once:
EINTR.

Code may swallow the exception: `except BaseException`, a `__del__`, a callback of the garbage collector. So signals
are sent at growing intervals until the call is left. Each of them finds out where the last exception was caught.

`AtomicBlocks` defers the exception, for a block of the user's code and for its own steps into and out of one: the
handler reads a flag. Why a flag and not the kernel's signal mask: docs/decisions/0028-restart-signal.md.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic
from types import CodeType, FrameType, TracebackType
from typing import Any, ClassVar, Generic, TypeVar

from nvrx_slurm.inprocess.exception import NestedCallError, RankShouldRestart, RestartAbort
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.threads import SignalSafeEvent, in_thread

T = TypeVar("T")

# Next to `nvrx_slurm.diagnostics.stacks.hook_client.DUMP_SIGNAL`: other software rarely uses either.
RESTART_SIGNAL: int = signal.SIGRTMAX - 4
FIRST_PAUSE_S = 0.0005
GROWTH = 1.5  # how much longer each pause between two signals is than the one before
# A main thread whose handler has not run for so long waits in native code.
NATIVE_AFTER_S = 0.05
# The longest that the innermost `__enter__`, `__exit__`, `acquire` or `release` is spared. On a busy machine a thread
# may be without a processor for tens of milliseconds.
MOMENT_S = 0.1
# Orders to end the process, or this rank: no restart may hide them.
ENDS = (KeyboardInterrupt, SystemExit, RestartAbort)
TAKING_OR_GIVING_BACK = frozenset({"__enter__", "__exit__", "acquire", "release"})

_log = get_logger("inprocess")


@dataclass(frozen=True, slots=True)
class Returned(Generic[T]):
    """The function returned, and no restart was delivered to it."""

    value: T


@dataclass(frozen=True, slots=True)
class Raised:
    """The function raised, and no restart was delivered to it."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class CallInterrupted:
    """A restart was delivered. `error`: one of `ENDS`, if the function was raising or handling one before or after
    that; else another exception, if any, that it was raising or handling at that moment, or that it failed with after
    it had swallowed the restart. A value that it returned is no result."""

    error: BaseException | None = None


@dataclass(slots=True)
class _OpenCall:
    """One call, as the handler and the interrupter share it."""

    left: SignalSafeEvent = field(default_factory=SignalSafeEvent)
    patience_s: float = 0.0
    is_wanted: bool = False  # the interrupter sets it last
    is_heard: bool = False  # the handler has run since the last signal
    since: float = 0.0  # when it was last interrupted, or first wanted
    delivered: RankShouldRestart | None = None
    where: str = ""  # the place that was last interrupted
    in_finalizer: bool = False  # that place was in one: what was raised there is swallowed
    swallowed: deque[str] = field(default_factory=deque)

    def note_swallowed(self) -> None:
        """Keep the place where the last exception was caught; without a traceback, where it was raised."""
        if self.delivered is not None:
            trace = self.delivered.__traceback__
            self.swallowed.append(_place(trace.tb_frame.f_code, trace.tb_lineno) if trace else self.where)


class Region:
    """Calls functions in the main thread such that restarts can be delivered to them, one call after the other.

    A context: inside of it RESTART_SIGNAL belongs to this object; the former handler, and the thread's signal mask,
    come back at the end. `on_signal` is called first whenever the handler runs, in the main thread. `free_native` is
    called by the interrupter where the main thread has run no Python for 50 ms, and again at growing intervals, since
    no signal ends a wait of native code. It is given a function that says whether the call has been left. Raises
    NestedCallError in any other thread, and inside of another region.
    """

    _is_in_child: ClassVar[bool] = False

    def __init__(
        self,
        on_signal: Callable[[], None] | None = None,
        free_native: Callable[[Callable[[], bool]], None] | None = None,
    ) -> None:
        try:
            # Python refuses this outside of the main thread of the main interpreter.
            signal.signal(RESTART_SIGNAL, signal.getsignal(RESTART_SIGNAL) or signal.SIG_DFL)
        except ValueError:
            raise NestedCallError(
                f"a wrapped function was called in thread {threading.current_thread().name}: a restart is a signal,"
                " which Python handles only in the main thread of the main interpreter. Call it there, or in a"
                " process of its own"
            ) from None
        self._main = threading.get_ident()
        self._seen, self._free_native = on_signal, free_native
        self._blocks = AtomicBlocks()
        self._sending = threading.Lock()
        self._current: _OpenCall | None = None

    def __enter__(self) -> Region:
        if Region._is_in_child:
            raise NestedCallError(
                "this process was forked inside of a wrapped function: it is no rank, and cannot become one. Start it"
                " as a program of its own, with a rank of its own (subprocess, or multiprocessing's spawn)"
            )
        self._former = signal.getsignal(RESTART_SIGNAL)
        if getattr(self._former, "__func__", None) is Region._on_signal:
            raise NestedCallError(
                "a wrapped function was called inside of another one: restarts go to one call at a time. "
                "Wrap the outer function only"
            )
        signal.signal(RESTART_SIGNAL, self._on_signal)
        self._former_hook, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {RESTART_SIGNAL})
        return self

    def __exit__(self, *_: object) -> None:
        # `call` does it too, unless another signal's handler raised there.
        self._leave()
        signal.pthread_sigmask(signal.SIG_BLOCK, {RESTART_SIGNAL})
        # A signal that is still pending would end the process once the former handler is back.
        while signal.sigtimedwait({RESTART_SIGNAL}, 0):
            pass
        self._restore()

    def leave_to_child(self) -> None:
        """In a process that was forked in the call: locks and threads are its parent's, handler and hook its own."""
        Region._is_in_child = True
        self._restore()

    def _restore(self) -> None:
        signal.signal(RESTART_SIGNAL, self._former or signal.SIG_DFL)
        # The user may have set another one meanwhile.
        if getattr(sys.unraisablehook, "__func__", None) is Region._on_unraisable:
            sys.unraisablehook = self._former_hook
        if RESTART_SIGNAL not in self._mask:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {RESTART_SIGNAL})

    def call(self, function: Callable[[], T]) -> Returned[T] | Raised | CallInterrupted:
        """Call the function, in the main thread. Neither its exceptions nor a restart leave this method."""
        call = self._current = _OpenCall()
        error: BaseException | None = None
        try:
            try:
                value = _inside(function)
            except BaseException as caught:
                error = caught
            return _outcome(call, error) or Returned(value)
        finally:
            self._leave()
            # Their tracebacks hold the function's frames, and this frame.
            call.delivered = error = None

    def interrupt(self, *, again_s: float) -> None:
        """Raise RankShouldRestart in the function, from another thread, again and again until the call is left.

        Returns at once if no call is open. The first signal goes out at once, and more follow at growing intervals of
        at most `again_s` / 4. For `again_s` seconds code that cleans up is spared: an `except`, `finally` or
        `__exit__` that the last exception passes through, a `__del__`, the handler of another signal. Each place that
        swallowed the exception is logged.
        """
        call = self._current
        if call is None:
            return
        call.patience_s, call.since = again_s, monotonic()
        # Last: from now on the handler reads the two values above.
        call.is_wanted = True
        pause_s, logging = FIRST_PAUSE_S, None
        unheard_since, patience_s = call.since, NATIVE_AFTER_S
        while self._send(call):
            call.left.wait(pause_s)
            if call.is_heard:
                unheard_since, patience_s = monotonic(), NATIVE_AFTER_S
            elif self._free_native is not None and monotonic() >= unheard_since + patience_s:
                self._free_native(call.left.is_set)
                unheard_since, patience_s = monotonic(), 2 * patience_s
            if call.swallowed and (logging is None or logging.done()):
                logging = _log_swallowed(call.swallowed)
            pause_s = min(GROWTH * pause_s, again_s / 4)
        if call.swallowed:
            _log_swallowed(call.swallowed)

    def atomic(self) -> contextlib.AbstractContextManager[None]:
        """A block that no restart cuts, in any thread; it nests. Waits to enter while the blocks are held."""
        return self._blocks

    def held(self, on_wait: Callable[[], None] = lambda: None) -> contextlib.AbstractContextManager[None]:
        """Wait until no atomic block is open, and keep new ones out until this ends. `on_wait` is called first if
        one is open."""
        return self._blocks.held(on_wait)

    def ask(self) -> None:
        """From another thread: have `on_signal` called in the main one as soon as that runs Python again."""
        # In the calling thread: so no system call of the main thread is interrupted.
        signal.raise_signal(RESTART_SIGNAL)

    def _leave(self) -> None:
        if sys.gettrace() is _trace_no_call:
            # The frame that was to be interrupted has been left.
            sys.settrace(None)
        # Once this lock is released, no signal is sent for this call.
        with self._sending:
            call, self._current = self._current, None
        if call is not None:
            call.left.set()

    def _send(self, call: _OpenCall) -> bool:
        """Send a signal if the call is still open. Returns whether it is."""
        with self._sending:
            if self._current is call:
                call.is_heard = False
                # An OSError: too many signals are pending. Another one follows.
                with contextlib.suppress(OSError):
                    signal.pthread_kill(self._main, RESTART_SIGNAL)
            return self._current is call

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """A restart that a finalizer has swallowed is logged as such. To print its traceback as well would run Python
        code, in which the next restart would be swallowed too."""
        call = self._current
        if call is None or unraisable.exc_value is not call.delivered:
            self._former_hook(unraisable)

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        if self._seen is not None:
            self._seen()
        call = self._current
        if call is None or not call.is_wanted:
            return
        call.is_heard = True
        if self._blocks.defer(self._main):
            return
        interrupted: list[FrameType] = []  # from the innermost out to `_inside`
        while frame is not None and frame.f_code is not _inside.__code__:
            interrupted.append(frame)
            frame = frame.f_back
        if frame is None:
            # The main thread is not below `_inside`: the call has not begun yet, or has been left.
            return
        interrupted.append(frame)
        if any(each.f_code is Region._on_unraisable.__code__ for each in interrupted):
            # On the way out of a finalizer: it would be swallowed too.
            return
        now = monotonic()
        if now < call.since + _spared_s(interrupted, call):
            return
        # The last exception, if any, did not get out of the function.
        call.note_swallowed()
        call.where = _place(interrupted[0].f_code, interrupted[0].f_lineno)
        call.since, call.delivered = now, RankShouldRestart("the group restarts")
        call.in_finalizer = _is_in_finalizer(interrupted)
        if call.in_finalizer:
            self._raise_behind_finalizer(interrupted)
        raise call.delivered

    def _raise_behind_finalizer(self, interrupted: list[FrameType]) -> None:
        """Python swallows what is raised in a finalizer, and a function that makes and drops objects whose finalizers
        wait is nearly always in one: no signal comes between two of them. So the frame that the outermost of them
        returns to is traced, and interrupted at its next step. Not where the user traces: then only signals remain.
        """
        place = max(at for at, frame in enumerate(interrupted) if frame.f_code.co_name == "__del__")
        if sys.gettrace() is not None or place + 1 >= len(interrupted):
            return
        behind, call = interrupted[place + 1], self._current

        def step(frame: FrameType, event: str, _: object) -> None:
            if frame is not behind:
                return
            sys.settrace(None)
            behind.f_trace, behind.f_trace_opcodes = None, False
            if call is None or call is not self._current or self._blocks.defer(self._main):
                return
            call.note_swallowed()
            call.where, call.in_finalizer = _place(frame.f_code, frame.f_lineno), False
            call.since, call.delivered = monotonic(), RankShouldRestart("the group restarts")
            raise call.delivered

        behind.f_trace, behind.f_trace_opcodes = step, True
        sys.settrace(_trace_no_call)


class AtomicBlocks:
    """Blocks of the user's code that no restart interrupts, and which abort waits for; they may be nested.

    They are open in any number of threads at once. While a holder (the interrupter) holds them, no block opens.
    """

    def __init__(self) -> None:
        # By thread; each thread changes only its own entry, so this needs no lock.
        self._depths: dict[int, int] = {}
        # The thread whose restart was deferred.
        self._deferred: int | None = None
        # Its lock is reentrant: a signal's handler may enter a block too.
        self._changed = threading.Condition()
        self._open = 0
        self._holders = 0
        # Set when the present holders have released the blocks.
        self._released = SignalSafeEvent()

    def defer(self, thread: int) -> bool:
        """Whether a restart must wait, since the thread is in a block or on its way in or out; it is then sent again
        once the thread is out."""
        if thread not in self._depths:
            return False
        self._deferred = thread
        return True

    def __enter__(self) -> None:
        """Waits while the blocks are held, unless this thread is in one already."""
        me = threading.get_ident()
        while True:
            depth = self._depths.get(me, 0)
            # Before a lock is taken: from here on restarts are deferred in this thread.
            self._depths[me] = depth + 1
            if depth:
                return
            with self._changed:
                if not self._holders:
                    self._open += 1
                    return
                released = self._released
            self._end_deferral(me)
            released.wait()  # a restart is raised in here

    def __exit__(self, *_: object) -> None:
        me = threading.get_ident()
        if self._depths[me] > 1:
            self._depths[me] -= 1
            return
        with self._changed:
            self._open -= 1
            self._changed.notify_all()
        self._end_deferral(me)

    @contextlib.contextmanager
    def held(self, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Wait until no block is open, and let none open until this ends. Not from inside of one."""
        with self._changed:
            if not self._holders:
                self._released = SignalSafeEvent()
            self._holders += 1
            must_wait = self._open > 0
        try:
            if must_wait:
                on_wait()
            with self._changed:
                self._changed.wait_for(lambda: not self._open)
            yield
        finally:
            with self._changed:
                self._holders -= 1
                if not self._holders:
                    self._released.set()

    def _end_deferral(self, me: int) -> None:
        # Only after all locks are released: a restart may be raised from here on.
        del self._depths[me]
        if self._deferred == me:
            self._deferred = None
            signal.raise_signal(RESTART_SIGNAL)


def _trace_no_call(*_: object) -> None:
    """With it Python calls the trace functions of single frames."""


def _inside(function: Callable[[], T]) -> T:
    """The only frame below which a restart is raised."""
    return function()


def _spared_s(interrupted: list[FrameType], call: _OpenCall) -> float:
    """How long after the last exception this place is spared, because another one here would do harm."""
    if any(error is call.delivered for error in _with_contexts(sys.exception())):
        # An `except` or `finally` deals with the last one.
        return call.patience_s
    codes = {frame.f_code for frame in interrupted}
    handlers = (_code_of(signal.getsignal(number)) for number in range(1, signal.NSIG))
    # One finalizer has had its time: those that follow it are cut.
    if (_is_in_finalizer(interrupted) and not call.in_finalizer) or not codes.isdisjoint(handlers):
        # Python would swallow it; and a signal's handler, once cut, is not called again.
        return call.patience_s
    # A lock (of a queue.Queue, for example) that is taken and not yet in a `with` block would stay taken.
    return MOMENT_S if interrupted[0].f_code.co_name in TAKING_OR_GIVING_BACK else 0.0


def _code_of(handler: Any) -> CodeType | None:
    """The code of a function or method, of one in a `functools.partial`, or of an object's `__call__`."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    own = getattr(handler, "__code__", None)
    # SIG_DFL and SIG_IGN are not callable.
    return own or (getattr(type(handler).__call__, "__code__", None) if callable(handler) else None)


def _is_in_finalizer(interrupted: list[FrameType]) -> bool:
    return any(frame.f_code.co_name == "__del__" for frame in interrupted)


def _outcome(call: _OpenCall, error: BaseException | None) -> Raised | CallInterrupted | None:
    """The outcome of the call; None if it just returned."""
    if call.delivered is None:
        return None if error is None else Raised(_without_our_frames(error))
    chain = list(_with_contexts(error))
    if not any(link is call.delivered for link in chain):
        call.note_swallowed()
    restarts = [place for place, link in enumerate(chain) if isinstance(link, RankShouldRestart)]
    # The links before that were raised while the function cleaned up after a restart.
    own = chain[restarts[-1] + 1 :] if restarts else chain
    ends = [link for link in chain if isinstance(link, ENDS)]
    # A GeneratorExit is no failure: so a generator ends.
    failures = [link for link in own if not isinstance(link, GeneratorExit)]
    failure = next(iter([*ends, *failures]), None)
    return CallInterrupted(None if failure is None else _without_our_frames(failure))


def _with_contexts(error: BaseException | None) -> Iterator[BaseException]:
    """The error, the error that was being handled when it was raised, and so on."""
    seen = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__context__


def _without_our_frames(error: BaseException) -> BaseException:
    """The error as the function's own code raised it."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code in (_inside.__code__, Region.call.__code__):
        trace = trace.tb_next
    return error.with_traceback(trace)


def _place(code: CodeType, line: int) -> str:
    return f"{code.co_filename}:{line}, in {code.co_qualname}"


def _log_swallowed(swallowed: deque[str]) -> Future[None]:
    """Log these places, in a thread of its own: the main one may be stuck while it holds the lock of a log."""

    def write() -> None:
        # An IndexError: all are logged, here or by another such thread.
        with contextlib.suppress(IndexError):
            while True:
                place = swallowed.popleft()
                _log.warning("RankShouldRestart was caught and did not get out of the wrapped function: %s", place)

    return in_thread(write, "nvrx-swallowed")
