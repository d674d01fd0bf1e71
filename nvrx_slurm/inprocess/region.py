"""Where a restart strikes: an exception that another thread raises in the main one, inside of one call only.

The interrupter sends the main thread a signal, whose Python handler raises. Handler and interrupted code are one
thread, so what the handler sees holds still: it raises only if the frame that it interrupts is below `_inside`, which
does nothing but call the function, and never in an atomic block. Whatever it raises therefore passes through
`Region.call`, which itself is never struck. A system call that blocks (a sleep, a lock, a socket) is left at once,
since the kernel ends it for the signal.

Code may swallow what it is struck with: `except BaseException`, a `__del__`, a callback of the garbage collector. So
signals go on coming, at growing intervals, until the call is left; each finds out where the last strike went.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic
from types import CodeType, FrameType, TracebackType
from typing import Generic, TypeVar

from nvrx_slurm.inprocess.bells import silent
from nvrx_slurm.inprocess.exception import NestedCallError, RankShouldRestart, RestartAbort
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.threads import in_thread

T = TypeVar("T")

STRIKE_SIGNAL: int = signal.SIGRTMAX - 4
"""Beside `nvrx_slurm.diagnostics.stacks.environment.DUMP_SIGNAL`, and as little used by anybody else."""
FIRST_PAUSE_S = 0.0005
GROWTH = 1.5
"""How much longer each pause between two signals is than the one before."""
MOMENT_S = 0.01
"""What entering or leaving a `with` block, or taking a lock, may need at most before it is struck all the same."""
ENDS = (KeyboardInterrupt, SystemExit, RestartAbort)
"""What nobody raises by accident: no restart may hide that a process was told to end."""
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
class Struck:
    """A restart was delivered. `error`: one of `ENDS`, if the function was raising or handling one before or after
    that; else what else it was raising or handling just then, if anything, or failed with after it had swallowed the
    restart. What it may have returned is no result."""

    error: BaseException | None = None


@dataclass(slots=True)
class _Call:
    """One call, as the handler and the interrupter share it."""

    left: threading.Lock = field(default_factory=silent)  # a bell
    patience_s: float = 0.0
    is_wanted: bool = False  # set last by the interrupter
    since: float = 0.0  # when it was last struck, or first wanted
    delivered: RankShouldRestart | None = None
    where: str = ""  # the last strike hit
    swallowed: deque[str] = field(default_factory=deque)

    def strike(self, frame: FrameType) -> RankShouldRestart:
        """A new exception to raise in this frame; the one before, if any, has been swallowed."""
        self.note_swallowed()
        self.where = _place(frame.f_code, frame.f_lineno)
        self.since = monotonic()
        self.delivered = RankShouldRestart("the group restarts")
        return self.delivered

    def note_swallowed(self) -> None:
        """Keep the place where the last exception was caught; without a traceback, where it was raised."""
        if self.delivered is not None:
            trace = self.delivered.__traceback__
            self.swallowed.append(_place(trace.tb_frame.f_code, trace.tb_lineno) if trace else self.where)


class Region:
    """Calls functions in the main thread such that restarts can be delivered to them, one call after the other.

    A context: inside of it STRIKE_SIGNAL is ours; its former handler, and the thread's signal mask, come back at the
    end. Raises NestedCallError in another thread than the main one, and inside of another region.
    """

    def __init__(self) -> None:
        self._main = _main_thread()
        self._blocks = AtomicBlocks()
        self._sending = threading.Lock()
        self._current: _Call | None = None

    def __enter__(self) -> Region:
        self._former = signal.getsignal(STRIKE_SIGNAL)
        if getattr(self._former, "__func__", None) is Region._on_signal:
            raise NestedCallError(
                "a wrapped function was called inside of another one: restarts go to one call at a time. "
                "Wrap the outer function only"
            )
        signal.signal(STRIKE_SIGNAL, self._on_signal)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {STRIKE_SIGNAL})
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()  # again, in case that an error of somebody else's signal kept `call` from it
        signal.pthread_sigmask(signal.SIG_BLOCK, {STRIKE_SIGNAL})
        while signal.sigtimedwait({STRIKE_SIGNAL}, 0):  # else one that is still on its way would end the process
            pass
        signal.signal(STRIKE_SIGNAL, self._former or signal.SIG_DFL)
        if STRIKE_SIGNAL not in self._mask:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {STRIKE_SIGNAL})

    def call(self, function: Callable[[], T]) -> Returned[T] | Raised | Struck:
        """Call it, in the main thread. Nothing that it raises gets out of here, nor does a restart."""
        call = self._current = _Call()
        error: BaseException | None = None
        try:
            try:
                value = _inside(function)
            except BaseException as caught:
                error = caught
            return _outcome(call, error) or Returned(value)
        finally:
            self._leave()
            call.delivered = error = None  # their tracebacks hold the function's frames, and this one

    def strike(self, *, again_s: float) -> None:
        """Raise RankShouldRestart in the function, from another thread, again and again until the call is left.

        Returns at once if no call is open. The first signal goes out at once, and then more at growing intervals of
        at most `again_s` / 4. For `again_s` seconds whoever cleans up is left alone: an `except`, `finally` or
        `__exit__` that the last strike runs through, a `__del__`, the handler of another signal. Each place that
        swallowed a strike is logged.
        """
        call = self._current
        if call is None:
            return
        call.patience_s, call.since = again_s, monotonic()
        call.is_wanted = True
        pause_s, telling = FIRST_PAUSE_S, None
        while self._send(call):
            call.left.acquire(timeout=pause_s)
            if call.swallowed and (telling is None or telling.done()):
                telling = _tell(call.swallowed)
            pause_s = min(GROWTH * pause_s, again_s / 4)
        if call.swallowed:
            _tell(call.swallowed)

    def atomic(self) -> contextlib.AbstractContextManager[None]:
        """A block that no restart cuts, in any thread; it nests. Waits to enter while they are held."""
        return self._blocks

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Wait until no atomic block is open, and keep new ones out until this ends."""
        return self._blocks.held()

    def _leave(self) -> None:
        with self._sending:  # afterwards no signal is sent on behalf of this call
            call, self._current = self._current, None
        if call is not None:
            call.left.release()

    def _send(self, call: _Call) -> bool:
        """Send a signal if the call is still open. A kernel that refuses one (too many wait) gets another later."""
        with self._sending:
            if self._current is call:
                with contextlib.suppress(OSError):
                    signal.pthread_kill(self._main, STRIKE_SIGNAL)
            return self._current is call

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        call = self._current
        if call is None or not call.is_wanted or self._blocks.is_inside(self._main):
            return
        frames = _frames_inside(frame)
        if frames and monotonic() >= call.since + _spared_s(frames, call):
            raise call.strike(frames[0])


def _main_thread() -> int:
    """The main thread's number, if this is it."""
    try:
        signal.signal(STRIKE_SIGNAL, signal.getsignal(STRIKE_SIGNAL) or signal.SIG_DFL)
    except ValueError:
        raise NestedCallError(
            f"a wrapped function was called in thread {threading.current_thread().name}: restarts are delivered by a "
            "signal, which Python gets in the main thread of the main interpreter only. Call it there, or in a "
            "process of its own"
        ) from None
    return threading.get_ident()


def _inside(function: Callable[[], T]) -> T:
    """The only frame below which a restart strikes."""
    return function()


def _frames_inside(frame: FrameType | None) -> list[FrameType]:
    """The frames from this one out to `_inside`; none if it is not below that."""
    frames = []
    while frame is not None:
        frames.append(frame)
        if frame.f_code is _inside.__code__:
            return frames
        frame = frame.f_back
    return []


def _spared_s(frames: list[FrameType], call: _Call) -> float:
    """How long after the last strike this place is left alone, as a strike here could do harm and no good."""
    codes = {frame.f_code for frame in frames}
    if any(error is call.delivered for error in _with_contexts(sys.exception())):
        return call.patience_s  # an `except` or `finally` deals with the last strike
    if any(code.co_name == "__del__" for code in codes) or codes & _handlers():
        return call.patience_s  # it would be swallowed; and a signal's handler, once cut, is not called again
    return MOMENT_S if frames[0].f_code.co_name in TAKING_OR_GIVING_BACK else 0.0


def _handlers() -> set[CodeType]:
    """What the process has for signal handlers, ours included."""
    handlers = map(signal.getsignal, range(1, signal.NSIG))
    return {code for handler in handlers if isinstance(code := getattr(handler, "__code__", None), CodeType)}


def _outcome(call: _Call, error: BaseException | None) -> Raised | Struck | None:
    """What the call came to; None if it just returned."""
    if call.delivered is None:
        return None if error is None else Raised(_without_our_frames(error))
    chain = list(_with_contexts(error))
    if not any(link is call.delivered for link in chain):
        call.note_swallowed()
    strikes = [place for place, link in enumerate(chain) if isinstance(link, RankShouldRestart)]
    own = chain[strikes[-1] + 1 :] if strikes else chain
    ends = [link for link in chain if isinstance(link, ENDS)]
    failures = [link for link in own if not isinstance(link, GeneratorExit)]  # that is how a generator ends
    failure = next(iter([*ends, *failures]), None)
    return Struck(None if failure is None else _without_our_frames(failure))


def _with_contexts(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what was being handled when it was raised, and so on."""
    seen = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__context__


def _without_our_frames(error: BaseException) -> BaseException:
    """As the function's own code raised it."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code in (_inside.__code__, Region.call.__code__):
        trace = trace.tb_next
    return error.with_traceback(trace)


def _place(code: CodeType, line: int) -> str:
    return f"{code.co_filename}:{line}, in {code.co_qualname}"


def _tell(swallowed: deque[str]) -> Future[None]:
    """Log these places, in a thread of its own: the main one may be stuck while it holds the lock of a log."""

    def tell() -> None:
        with contextlib.suppress(IndexError):  # another such thread may take some
            while True:
                place = swallowed.popleft()
                _log.warning("RankShouldRestart was caught and did not get out of the wrapped function: %s", place)

    return in_thread(tell, "nvrx-swallowed")


class AtomicBlocks:
    """Open in any number of threads at once; entering nests. Whoever holds them keeps new ones out.

    A thread counts as inside (`is_inside`) before anything of this object is locked for it, and until all is unlocked
    again. So whoever raises errors only in a thread that is not inside leaves no lock behind, and no count.
    """

    def __init__(self) -> None:
        self._depths: dict[int, int] = {}  # by thread, and changed by that thread alone
        self._lock = threading.RLock()  # reentrant: a signal's handler may enter a block too
        self._changed = threading.Condition(self._lock)  # for holders; taken by its lock alone, see `bells.py`
        self._open = 0
        self._holders = 0
        self._waiting: list[threading.Lock] = []

    def is_inside(self, thread: int) -> bool:
        """Whether a thread is in a block, or in the midst of entering or leaving one."""
        return thread in self._depths

    def __enter__(self) -> None:
        """Waits while somebody holds the blocks, unless this thread is in one already."""
        me = threading.get_ident()
        while True:
            depth = self._depths.get(me, 0)
            self._depths[me] = depth + 1
            if depth or (turn := self._admitted()) is None:
                return
            del self._depths[me]
            _wait_for(turn)

    def __exit__(self, *_: object) -> None:
        me = threading.get_ident()
        if self._depths[me] > 1:
            self._depths[me] -= 1
            return
        with self._lock:
            self._open -= 1
            self._changed.notify_all()
        del self._depths[me]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait until no block is open, and let none open until this ends. Not from inside of one."""
        with self._lock:
            self._holders += 1
        try:
            with self._lock:
                self._changed.wait_for(lambda: not self._open)
            yield
        finally:
            self._let_go()

    def _admitted(self) -> threading.Lock | None:
        """None if this thread may open its block; else a lock that is released when it is worth asking again."""
        with self._lock:
            if not self._holders:
                self._open += 1
                return None
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
            return turn

    def _let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                for turn in self._waiting:
                    turn.release()
                self._waiting.clear()


def _wait_for(turn: threading.Lock) -> None:
    """Each waits for a lock of its own, which nobody misses: an error raised in here harms nothing."""
    turn.acquire()
