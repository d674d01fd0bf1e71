from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import itertools
import logging
import os
import queue
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from nvrx_slurm.inprocess import region as module
from nvrx_slurm.inprocess.exception import NestedCallError, RankShouldRestart
from nvrx_slurm.inprocess.region import RESTART_SIGNAL, CallInterrupted, Raised, Region, Returned
from nvrx_slurm.util.threads import SignalSafeEvent
from tests.unit.inprocess.bytecodes import another_thread_can_take, at_bytecode, locked

DEADLINE_S = 30.0
SOON_S = 0.05
"""For `again_s`, where a test waits for it."""


@pytest.fixture
def region():
    with Region() as made:
        yield made


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


class Interrupt:
    """An interrupt of a call by another thread, once `begins` is set and, if `blocked`, the main thread blocks."""

    def __init__(self, region: Region, *, again_s: float = DEADLINE_S, blocked: bool = False) -> None:
        self.begins = threading.Event()
        self._region, self._again_s, self._blocked = region, again_s, blocked
        self._main = threading.get_native_id()

    def at(self, function: Callable[[], Any]) -> Returned[Any] | Raised | CallInterrupted:
        """The outcome of calling this function."""
        thread = threading.Thread(target=self._run)
        thread.start()
        outcome = self._region.call(function)
        self.begins.set()
        thread.join()
        return outcome

    def _run(self) -> None:
        self.begins.wait()
        if self._blocked:
            eventually(self._main_sleeps)
        self._region.interrupt(again_s=self._again_s)

    def _main_sleeps(self) -> bool:
        if self._region._current is None:
            return False
        return Path(f"/proc/self/task/{self._main}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@contextlib.contextmanager
def signals_seen() -> Iterator[Callable[[int], None]]:
    """A function that returns after this many more restart signals have reached the process."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    former = signal.set_wakeup_fd(writes)
    try:
        yield lambda count: [os.read(reads, 1) for _ in range(count)] and None
    finally:
        signal.set_wakeup_fd(former)
        os.close(reads)
        os.close(writes)


@contextlib.contextmanager
def unraisable() -> Iterator[list[type[BaseException]]]:
    """The exceptions that Python could not raise anywhere."""
    seen: list[type[BaseException]] = []
    former, sys.unraisablehook = sys.unraisablehook, lambda args: seen.append(args.exc_type)
    try:
        yield seen
    finally:
        sys.unraisablehook = former


def logged(caplog: pytest.LogCaptureFixture, *parts: str) -> None:
    """Wait until one line has all of these."""
    eventually(lambda: any(all(part in line for part in parts) for line in caplog.messages))


def forever() -> None:
    while True:
        pass


# ---- the outcome of a call without an interrupt


class Picky(Exception):
    """An exception that cannot be made again from its args."""

    def __init__(self, one: int, two: int, *, three: int) -> None:
        super().__init__(f"{one} {two} {three}")


@pytest.mark.parametrize(
    "error", [ValueError("x"), Picky(1, 2, three=3), SystemExit(3), GeneratorExit(), RankShouldRestart()], ids=repr
)
def test_returns_how_the_function_ended(region, error):
    """A value or an error of any kind is returned as it is; the error's traceback has only the function's own
    frames."""

    def fail() -> None:
        raise error

    assert region.call(lambda: 7) == Returned(7)
    outcome = region.call(fail)
    assert isinstance(outcome, Raised)
    assert outcome.error is error
    assert error.__traceback__ is not None
    assert error.__traceback__.tb_frame.f_code is fail.__code__


# ---- an interrupt gets the main thread out of any code


def joined() -> None:
    thread = threading.Thread(target=select.select, args=([], [], [], DEADLINE_S), daemon=True)
    thread.start()
    thread.join()


def received() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.recv(1)


def generator_closed() -> None:
    def generate() -> Iterator[int]:
        try:
            yield 1
        finally:
            time.sleep(DEADLINE_S)

    made = generate()
    next(made)
    made.close()


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(lambda: time.sleep(DEADLINE_S), id="sleep"),
        pytest.param(functools.partial(time.sleep, DEADLINE_S), id="C callable"),
        pytest.param(lambda: locked().acquire(), id="lock"),
        pytest.param(lambda: threading.Condition(locked()).__enter__(), id="condition"),
        pytest.param(lambda: queue.Queue().get(), id="queue"),
        pytest.param(lambda: threading.Event().wait(), id="event"),
        pytest.param(received, id="socket"),
        pytest.param(lambda: select.select([], [], []), id="select"),
        pytest.param(lambda: subprocess.run(["sleep", str(DEADLINE_S)], check=False), id="subprocess"),
        pytest.param(lambda: asyncio.run(asyncio.sleep(DEADLINE_S)), id="asyncio"),
        pytest.param(joined, id="thread"),
        pytest.param(generator_closed, id="generator"),
    ],
)
def test_leaves_a_blocking_call(region, block):
    """The first signals end the main thread's wait in any of these calls; the process is then as before."""
    interrupt = Interrupt(region, blocked=True, again_s=1.0)
    interrupt.begins.set()
    assert interrupt.at(block) == CallInterrupted(None)
    assert region.call(lambda: 7) == Returned(7)


def test_leaves_a_loop(region):
    """Bytecode without calls is left too."""
    interrupt = Interrupt(region)

    def loop() -> None:
        interrupt.begins.set()
        forever()

    assert interrupt.at(loop) == CallInterrupted(None)


def test_interrupts_only_the_call_that_it_found(region):
    """Without a call an interrupt does nothing; a late signal does not interrupt the next call."""
    thread = threading.Thread(target=region.interrupt, kwargs={"again_s": 1.0})
    thread.start()
    thread.join()
    signal.raise_signal(RESTART_SIGNAL)
    assert region.call(lambda: signal.raise_signal(RESTART_SIGNAL)) == Returned(None)


# ---- until it is out


def test_interrupts_until_it_is_out(region, caplog):
    """Code that catches every exception is interrupted again each time, and each place is logged."""
    interrupt = Interrupt(region)

    def swallow() -> None:
        caught = 0
        while caught < 5:
            try:
                interrupt.begins.set()
                forever()
            except BaseException:
                caught += 1
        forever()

    with caplog.at_level(logging.WARNING, "nvrx.inprocess"):
        assert interrupt.at(swallow) == CallInterrupted(None)
        eventually(lambda: len(caplog.messages) == 5)
    line = swallow.__code__.co_firstlineno + 5
    logged(caplog, f"{__file__}:{line}, in test_interrupts_until_it_is_out.<locals>.swallow")


def test_a_function_that_swallowed_the_last_interrupt_is_interrupted_all_the_same(region, caplog):
    """Its return value is no result, its later error is reported, and the place is logged."""
    interrupt = Interrupt(region)

    def swallow(then: Callable[[], int]) -> int:
        try:
            interrupt.begins.set()
            forever()
        except BaseException:
            return then()
        return 0

    error = ValueError("of its own")

    def fail() -> int:
        error.__context__ = None
        raise error

    with caplog.at_level(logging.WARNING, "nvrx.inprocess"):
        assert interrupt.at(lambda: swallow(lambda: 7)) == CallInterrupted(None)
        logged(caplog, "swallow")
    interrupt = Interrupt(region)
    outcome = interrupt.at(lambda: swallow_then_fail(interrupt, error))
    assert outcome == CallInterrupted(error)


def swallow_then_fail(interrupt: Interrupt, error: BaseException) -> None:
    with contextlib.suppress(BaseException):
        interrupt.begins.set()
        forever()
    raise error


class Finalized:
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def __del__(self) -> None:
        self._work()


def in_del(work: Callable[[], None]) -> None:
    Finalized(work)


def in_weakref(work: Callable[[], None]) -> None:
    target = threading.Event()
    watch = weakref.ref(target, lambda _: work())
    del target
    del watch


def in_collector(work: Callable[[], None]) -> None:
    gc.callbacks.append(lambda phase, _: work() if phase == "start" else None)
    try:
        gc.collect()
    finally:
        gc.callbacks.pop()


@pytest.mark.parametrize("place", [in_del, in_weakref, in_collector])
def test_interrupts_again_where_python_swallows(region, caplog, place):
    """An exception that no code can catch, as in `__del__`, is raised again outside of it."""
    interrupt = Interrupt(region, again_s=SOON_S)

    def work() -> None:
        interrupt.begins.set()
        forever()

    def function() -> None:
        place(work)
        forever()

    with unraisable() as seen, caplog.at_level(logging.WARNING, "nvrx.inprocess"):
        assert interrupt.at(function) == CallInterrupted(None)
        logged(caplog, __file__)
    assert set(seen) == {RankShouldRestart}


def test_the_users_trace_function_stays(region):
    """This also holds if the call was interrupted in a finalizer."""
    interrupt = Interrupt(region, again_s=SOON_S)

    def work() -> None:
        interrupt.begins.set()
        forever()

    def trace(frame: FrameType, event: str, _: object) -> None:
        return None

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        with unraisable():
            assert interrupt.at(lambda: in_del(work)) == CallInterrupted(None)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(former)


def test_cleaning_up_is_not_interrupted(region):
    """A `finally` block that an interrupt runs through is completed, however many signals arrive meanwhile."""
    interrupt, done = Interrupt(region), []

    def function() -> None:
        with signals_seen() as wait_for:
            try:
                interrupt.begins.set()
                forever()
            finally:
                wait_for(5)
                with contextlib.suppress(KeyError):
                    raise KeyError  # handled inside: still the same `finally` block
                done.append(True)

    assert interrupt.at(function) == CallInterrupted(None)
    assert done == [True]


def test_cleaning_up_for_too_long_is_interrupted(region, caplog):
    """A `finally` block that blocks is left after `again_s`, and logged."""
    interrupt = Interrupt(region, again_s=SOON_S)

    def function() -> None:
        try:
            interrupt.begins.set()
            forever()
        finally:
            time.sleep(DEADLINE_S)

    with caplog.at_level(logging.WARNING, "nvrx.inprocess"):
        assert interrupt.at(function) == CallInterrupted(None)
        logged(caplog, "function", __file__)


def test_a_stuck_log_does_not_stop_the_interrupts(region):
    """The main thread is interrupted even if it has a log handler's lock while it swallows and blocks."""
    held = threading.Event()

    class Blocking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if threading.current_thread() is threading.main_thread():
                held.set()
                interrupt.begins.set()
                with contextlib.suppress(BaseException):
                    forever()
                forever()

    interrupt, handler, log = Interrupt(region), Blocking(), logging.getLogger("nvrx.inprocess")
    log.addHandler(handler)
    try:
        assert interrupt.at(lambda: log.warning("from the function")) == CallInterrupted(None)
    finally:
        log.removeHandler(handler)
    assert held.is_set()


# ---- what must not be cut


class Handler:
    """An object that handles a signal."""

    def __init__(self, handle: Callable[[int, FrameType | None], None]) -> None:
        self._handle = handle

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._handle(signum, frame)


@pytest.mark.parametrize(
    "made", [lambda handle: handle, functools.partial, Handler], ids=["function", "partial", "object"]
)
def test_the_handler_of_another_signal_is_not_cut(region, made):
    """The handler of a signal that arrives during an interrupt is completed, since that signal is sent only once."""
    interrupt, done = Interrupt(region), []

    def handler(signum: int, frame: FrameType | None) -> None:
        with signals_seen() as wait_for:
            interrupt.begins.set()
            wait_for(5)
            done.append(signum)

    former = signal.signal(signal.SIGUSR1, made(handler))
    try:
        assert interrupt.at(lambda: (signal.raise_signal(signal.SIGUSR1), forever())) == CallInterrupted(None)
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert done == [signal.SIGUSR1]


def waits_to_enter(thread: threading.Thread) -> bool:
    """Whether the thread waits to enter an atomic block."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is SignalSafeEvent.wait.__code__


def test_a_restart_that_an_atomic_block_defers_is_raised_at_its_end(region):
    """One signal is enough, even in the middle of the block."""
    done: list[str] = []

    def function() -> None:
        with region.atomic():
            with region.atomic():
                want_restart(region, patience_s=DEADLINE_S)
                signal.raise_signal(RESTART_SIGNAL)
                done.append("inner")
            done.append("outer")
        done.append("after")

    assert region.call(function) == CallInterrupted(None)
    assert done == ["inner", "outer"]


def test_an_atomic_block_is_not_cut(region):
    """Nor is a nested block, or the code between the ends of both; the interrupt comes after the outer block."""
    interrupt, done = Interrupt(region, again_s=SOON_S), []

    def function() -> None:
        with signals_seen() as wait_for, region.atomic():
            interrupt.begins.set()
            wait_for(2)
            with region.atomic():
                wait_for(2)
            wait_for(2)
            done.append(True)
        forever()

    assert interrupt.at(function) == CallInterrupted(None)
    assert done == [True]


def test_holding_waits_for_open_blocks_and_keeps_new_ones_out(region):
    """`held` returns when the last open block has ended, and until it is left no new block begins."""
    opened, ends, order = threading.Event(), threading.Event(), []

    def first() -> None:
        with region.atomic():
            opened.set()
            ends.wait()
            with region.atomic():
                order.append("first")

    def second() -> None:
        with region.atomic():
            order.append("second")

    def hold() -> None:
        with region.held():
            order.append("held")
            asks = threading.Thread(target=second)
            asks.start()
            threads.append(asks)
            eventually(lambda: waits_to_enter(asks))

    threads = [threading.Thread(target=first), threading.Thread(target=hold)]
    threads[0].start()
    opened.wait()
    threads[1].start()
    eventually(lambda: region._blocks._holders == 1)
    ends.set()
    for thread in threads:
        thread.join()
    assert order == ["first", "held", "second"]


def test_a_thread_that_waits_to_enter_a_block_is_interrupted_there(region):
    """While the blocks are held the main thread cannot enter one; interrupted there, it leaves no state behind."""

    def interrupt() -> None:
        with region.held():
            held.set()
            eventually(lambda: waits_to_enter(threading.main_thread()))
            region.interrupt(again_s=DEADLINE_S)

    def function() -> None:
        held.wait()
        with region.atomic():
            entered.append(True)

    held, entered = threading.Event(), []
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert region.call(function) == CallInterrupted(None)
    thread.join()
    with region.held():
        assert not region._blocks.defer(threading.get_ident())
    with region.atomic():
        assert not entered


# ---- native code


class Mutex:
    """A mutex of C. A thread that waits for it runs no Python, and no signal ends its wait."""

    def __init__(self) -> None:
        self._mutex = ctypes.create_string_buffer(64)
        self.lock()

    def lock(self) -> None:
        ctypes.CDLL(None).pthread_mutex_lock(self._mutex)

    def unlock(self) -> None:
        ctypes.CDLL(None).pthread_mutex_unlock(self._mutex)


def test_native_code_that_waits_is_freed():
    """This holds if it waits again, too; the restart is raised when it has returned for good."""
    mutexes, free = [Mutex(), Mutex()], iter(range(2))
    with Region(free_native=lambda has_left: None if has_left() else mutexes[next(free)].unlock()) as region:

        def function() -> None:
            interrupt.begins.set()
            try:
                mutexes[0].lock()
            finally:
                mutexes[1].lock()

        interrupt = Interrupt(region, blocked=True)
        assert interrupt.at(function) == CallInterrupted(None)
    assert next(free, None) is None


def test_python_code_is_not_taken_for_native_code(monkeypatch):
    """Code that swallows restarts handles each signal."""
    monkeypatch.setattr(module, "NATIVE_AFTER_S", 1.0)  # longer than any thread waits for a processor
    freed: list[object] = []
    with Region(free_native=freed.append) as region:

        def function() -> None:
            interrupt.begins.set()
            end = time.monotonic() + 2.0
            while time.monotonic() < end:
                with contextlib.suppress(RankShouldRestart):
                    signal.pause()

        interrupt = Interrupt(region, again_s=DEADLINE_S)
        assert isinstance(interrupt.at(function), CallInterrupted)
    assert freed == []


# ---- what the function was doing


def test_returns_the_error_that_the_function_was_raising(region):
    """A function that is interrupted while its own error runs through a `finally` has failed with that error."""
    interrupt, error = Interrupt(region), Picky(1, 2, three=3)

    def function() -> None:
        try:
            raise error
        finally:
            interrupt.begins.set()
            forever()

    assert interrupt.at(function) == CallInterrupted(error)


def test_what_cleaning_up_raises_is_not_the_cause(region):
    """An error caused by an interrupt is no failure of the function."""
    interrupt = Interrupt(region)

    def function() -> None:
        try:
            interrupt.begins.set()
            forever()
        except BaseException as caught:
            raise RuntimeError("could not clean up") from caught

    assert interrupt.at(function) == CallInterrupted(None)


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_an_order_to_end_is_not_hidden(region, first):
    """A SystemExit, for example of a SIGTERM handler, is reported, whether it was raised before the interrupt or
    after."""
    interrupt, error = Interrupt(region), SystemExit(3)

    def function() -> None:
        try:
            if first:
                raise error
            interrupt.begins.set()
            forever()
        finally:
            interrupt.begins.set()
            if not first:
                raise error
            forever()

    assert interrupt.at(function) == CallInterrupted(error)


def test_the_exception_has_the_reason(region):
    """The exception has the reason for code that catches it."""
    said: list[str] = []

    def function() -> None:
        try:
            interrupt.begins.set()
            forever()
        except RankShouldRestart as caught:
            said.append(str(caught))
            raise

    interrupt = Interrupt(region)
    assert interrupt.at(function) == CallInterrupted(None)
    assert said == ["the group restarts"]


def test_nothing_of_the_function_stays_in_memory(region):
    """Its objects are freed with its frames, without the garbage collector."""

    class Tensor:
        pass

    alive: list[weakref.ref[Tensor]] = []
    interrupt = Interrupt(region)

    def function() -> None:
        tensor = Tensor()
        alive.append(weakref.ref(tensor))
        interrupt.begins.set()
        with contextlib.suppress(BaseException):
            forever()
        forever()

    gc.disable()
    try:
        assert interrupt.at(function) == CallInterrupted(None)
        assert alive[0]() is None
    finally:
        gc.enable()


# ---- at any moment


def interrupted_at(
    region: Region, number: int, watches: Callable[[FrameType], bool], function: Callable[[], Any]
) -> tuple[Any, bool]:
    """The call's outcome if an interrupt comes before this bytecode, without waiting for any clean-up."""

    def act(_: FrameType) -> None:
        want_restart(region, patience_s=0.0)
        signal.raise_signal(RESTART_SIGNAL)

    return at_bytecode(number, watches, act, lambda: region.call(function))


def want_restart(region: Region, patience_s: float) -> None:
    """Requests a restart, as the interrupter does before its first signal."""
    if (call := region._current) is not None:
        call.patience_s, call.since, call.is_wanted = patience_s, time.monotonic(), True


OWN_CODE = {Region.call.__code__, Region._leave.__code__, module._inside.__code__, module._outcome.__code__}


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_no_bytecode_of_the_call_itself_lets_a_restart_out(region, fails):
    """Interrupted before any bytecode of `call` and of the code that it uses, the call returns the function's own
    outcome or CallInterrupted, and raises nothing."""
    error = ValueError()

    def function() -> int:
        if fails:
            raise error
        return 7

    outcomes = []
    for number in itertools.count():
        outcome, interrupted = interrupted_at(region, number, lambda frame: frame.f_code in OWN_CODE, function)
        if not interrupted:
            break
        outcomes.append(outcome)
    own = Raised(error) if fails else Returned(7)
    assert len(outcomes) > 60
    assert all(outcome == own or isinstance(outcome, CallInterrupted) for outcome in outcomes)
    assert own in outcomes
    assert any(isinstance(outcome, CallInterrupted) for outcome in outcomes)


def test_no_bytecode_of_an_atomic_block_leaves_anything_behind(region):
    """Interrupted anywhere in a block, or while entering or leaving it, its body was completed or never began. The
    restart is still raised, and other threads can use the blocks afterwards."""
    began: list[bool] = []
    ended: list[bool] = []

    def function() -> None:
        with region.atomic(), region.atomic():
            began.append(True)
            ended.append(True)

    def in_atomic_code(frame: FrameType) -> bool:
        return (
            frame.f_code is function.__code__
            or frame.f_code.co_qualname.startswith("AtomicBlocks.")
            or frame.f_code.co_filename.endswith("/threading.py")
        )

    outcomes = []
    for number in itertools.count():
        outcome, interrupted = interrupted_at(region, number, in_atomic_code, function)
        assert began == ended
        if not interrupted:
            break
        outcomes.append(outcome)
        assert not region._blocks.defer(threading.get_ident())
        assert another_thread_can_take(region.held)
    assert len(outcomes) > 100
    assert {CallInterrupted(None)} == set(outcomes)


def test_no_lock_of_a_condition_is_left_taken(region, monkeypatch):
    """Interrupted anywhere while it acquires or releases a condition's lock, as `queue.Queue` does for each item, the
    function leaves it free."""
    condition = threading.Condition(threading.Lock())
    monkeypatch.setattr(module, "MOMENT_S", DEADLINE_S)  # otherwise the time may be over before the handler checks it

    def function() -> None:
        with condition:
            pass

    def in_condition(frame: FrameType) -> bool:
        taken = (threading.Condition.__enter__.__code__, threading.Condition.__exit__.__code__)
        return region._current is not None and frame.f_code in taken

    def act(frame: FrameType) -> None:
        want_restart(region, patience_s=DEADLINE_S)
        region._on_signal(RESTART_SIGNAL, frame)  # a real signal would have the trace function as frame

    for number in itertools.count():
        _, interrupted = at_bytecode(number, in_condition, act, lambda: region.call(function))
        assert condition.acquire(blocking=False)
        condition.release()
        if not interrupted:
            break
    assert number > 6


def test_interrupts_at_random_moments_around_the_end_of_a_call(region):
    """In fifty thousand calls that end while another thread interrupts, no exception escapes, and each call either
    returns its value or reports that it was interrupted."""
    rounds, rng, interval = 50_000, random.Random(5), sys.getswitchinterval()
    over = threading.Event()

    def interrupt() -> None:
        while not over.is_set():
            region.interrupt(again_s=0.01)

    def function(number: int, length: int) -> int:
        for _ in range(length):
            pass
        return number

    sys.setswitchinterval(5e-6)
    thread = threading.Thread(target=interrupt)
    thread.start()
    interrupted = 0
    try:
        for number in range(rounds):
            outcome = region.call(functools.partial(function, number, rng.randrange(200)))
            assert outcome in (Returned(number), CallInterrupted(None))
            interrupted += outcome == CallInterrupted(None)
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert 0 < interrupted < rounds


# ---- ownership of signal and thread


def test_gives_signal_and_mask_back(region):
    """After a region the signal's former handler and the thread's mask are as before."""
    former = []

    def mine(signum: int, frame: FrameType | None) -> None:
        former.append(signum)

    region.__exit__()
    signal.signal(RESTART_SIGNAL, mine)
    signal.pthread_sigmask(signal.SIG_BLOCK, {RESTART_SIGNAL})
    try:
        with Region() as inner:
            assert inner.call(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ())) == Returned(
                {s for s in signal.pthread_sigmask(signal.SIG_BLOCK, ()) if s != RESTART_SIGNAL}
            )
        assert RESTART_SIGNAL in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert signal.getsignal(RESTART_SIGNAL) is mine
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {RESTART_SIGNAL})
        signal.signal(RESTART_SIGNAL, signal.SIG_DFL)
        region.__enter__()
    assert former == []


def test_a_signal_still_pending_at_the_end_does_not_kill_the_process():
    """A signal that is pending when the region ends is discarded; its default action would kill the process."""
    with Region() as region:
        assert region.call(blocked_and_sent) == Returned(None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {RESTART_SIGNAL})
    assert signal.getsignal(RESTART_SIGNAL) == signal.SIG_DFL


def blocked_and_sent() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {RESTART_SIGNAL})
    signal.raise_signal(RESTART_SIGNAL)
    signal.raise_signal(RESTART_SIGNAL)


def test_is_refused_outside_of_the_main_thread():
    """The error for another thread says what to do."""
    said: list[str] = []

    def run() -> None:
        with pytest.raises(NestedCallError) as caught:
            Region()
        said.append(str(caught.value))

    thread = threading.Thread(target=run, name="loader")
    thread.start()
    thread.join()
    assert "in thread loader" in said[0]
    assert "Call it there" in said[0]


def test_is_refused_inside_of_another_one(region):
    """The inner region is refused, and the outer one still works."""

    def nest() -> None:
        with Region():
            pass

    outcome = region.call(nest)
    assert isinstance(outcome, Raised)
    assert isinstance(outcome.error, NestedCallError)
    assert "Wrap the outer function only" in str(outcome.error)
    interrupt = Interrupt(region)
    assert interrupt.at(lambda: (interrupt.begins.set(), forever())) == CallInterrupted(None)


def test_native_code_that_holds_the_gil_is_interrupted_when_it_releases_it(region):
    """The signal is handled at the first bytecode after a C call that cannot be interrupted."""
    interrupt = Interrupt(region)

    def function() -> None:
        interrupt.begins.set()
        ctypes.PyDLL(None).usleep(20_000)
        forever()

    assert interrupt.at(function) == CallInterrupted(None)
