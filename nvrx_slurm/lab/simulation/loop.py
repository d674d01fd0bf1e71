"""Virtual time: an event loop on which nothing waits.

When nothing is ready, time jumps to the next timer. There is no selector, no thread and no signal: what a seed
decides happens in the same order in each run, on any machine, with any hash seed, under any load. asyncio's own
tasks and futures (in C) run on it unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import logging
import math
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec

from nvrx_slurm.errors import SimulationStuck
from nvrx_slurm.util.log import get_logger

MOST_AWAITS_WHILE_CLOSING = 16

_T = TypeVar("_T")


class Owner(Protocol):
    """The process that a step belongs to. While it is not `running`, a step that it `holds` is not taken."""

    name: str
    running: bool

    def holds(self, handle: Handle) -> bool: ...
    def on_signal(self, number: int, handler: Callable[[], object]) -> None: ...


# Whose step this is. Tasks and callbacks inherit it with their context; without it a step is the world's own.
OWNER: ContextVar[Owner | None] = ContextVar("owner")


class Handle(msgspec.Struct, eq=False):
    """A step to be: what asyncio.Handle and TimerHandle are to their callers, and four times as cheap to make."""

    callback: Callable[..., object] | None
    args: tuple[Any, ...]
    context: Context
    due_s: float = 0.0

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self.due_s


class Task(asyncio.Task[_T]):
    """asyncio's own, but a set of them is walked in the same order in each run: their hash is no address."""

    __slots__ = ("number", "owner")

    def __init__(
        self, number: int, owner: Owner | None, coro: Any, loop: VirtualLoop, name: str, context: Context | None
    ) -> None:
        self.number, self.owner = number, owner  # first: the constructor below hashes it
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number

    @property
    def has_unread_error(self) -> bool:
        """Whether it failed, and no code has read its exception."""
        return self.done() and self._log_traceback


def close(task: Task[Any]) -> None:
    """Leave an unfinished task through all its `finally`s; one that awaits in them is pushed on. What it raises is
    ignored."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine: Any = task.get_coro()
    for _ in range(MOST_AWAITS_WHILE_CLOSING):
        try:
            coroutine.close()
        except BaseException as error:
            if isinstance(error, RuntimeError) and "ignored GeneratorExit" in str(error):
                continue
        return


log = get_logger("simulation")

# The monotonic clock when a run begins: not 0, which code may take for "never".
BEGIN_S = 1_000.0

MOST_STEPS = 10_000_000


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose `time` is virtual.

    `run_in_executor` (and so `asyncio.to_thread`) calls at once: a thread's work takes no virtual time. An exception
    in a callback of a process, or in a task of it that no code awaits, is kept in `troubles`, with the process's
    name; one in a callback of the world itself is a mistake of the simulation, and ends the run. Close it: it keeps
    every unfinished task.
    """

    def __init__(self) -> None:
        self.now_s = BEGIN_S
        self.steps = 0
        self.troubles: list[tuple[str, BaseException | str]] = []
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._outside = Context()
        self._numbers = itertools.count(1)
        self._tasks: list[Task[Any]] = []
        self._most_tasks = 256
        self._until_s = math.inf
        self._open = True
        # Returns False, as BaseEventLoop's does. Every future calls it, and a method in C costs a third of the time.
        self.get_debug = False.__bool__  # type: ignore[method-assign]

    # ---- what callers of a loop use

    def time(self) -> float:
        return self.now_s

    def call_soon(  # type: ignore[override]  # a Handle of our own, here and below
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, copy_context() if context is None else context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there are no threads

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, copy_context() if context is None else context, when)
        self._add(handle)
        return handle

    def call_outside(self, delay_s: float, callback: Callable[..., object], *args: Any) -> Handle:
        """Call it as the world's own step: no death and no freeze of the caller's process keeps it from happening."""
        handle = Handle(callback, args, self._outside, self.now_s + delay_s)
        self._add(handle)
        return handle

    def _add(self, handle: Handle) -> None:
        if handle.due_s > self.now_s:
            heappush(self._timers, (handle.due_s, next(self._numbers), handle))
        else:
            self._ready.append(handle)

    def create_task(
        self,
        coro: Generator[Any, None, _T] | Coroutine[Any, Any, _T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> Task[_T]:
        owner = OWNER.get(None) if context is None else context.get(OWNER)
        task: Task[_T] = Task(next(self._numbers), owner, coro, self, str(name or "task"), context)
        # asyncio itself holds tasks weakly: this list keeps those of a killed process from being finalised in a run.
        self._tasks.append(task)
        # Not while it closes: `close` walks this list, and closes the tasks that a `finally` starts there, too.
        if len(self._tasks) > self._most_tasks and self._open:
            self._tasks = [task for task in self._tasks if not task.done() or task.has_unread_error]
            # In proportion: so the walks cost each task a constant time, however many live.
            self._most_tasks = 2 * len(self._tasks) + 256
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., _T], *args: Any) -> asyncio.Future[_T]:  # type: ignore[override]
        future: asyncio.Future[_T] = asyncio.Future(loop=self)
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def add_signal_handler(  # type: ignore[override]  # its type variables stand in stubs alone
        self, sig: int, callback: Callable[..., object], *args: Any
    ) -> None:
        """For the process that calls. The world itself gets no signals."""
        if (owner := OWNER.get(None)) is None:
            raise RuntimeError("only a simulated process can handle signals: call it inside SimulatedProcess.run")
        owner.on_signal(sig, functools.partial(callback, *args))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._open:
            return
        task = context.get("task") or context.get("future")
        owner = task.owner if isinstance(task, Task) else OWNER.get(None)
        error = context.get("exception") or str(context.get("message"))
        log.error("%s: %s: %r", owner.name if owner else "the world", context.get("message"), error)
        self.troubles.append((owner.name if owner else "", error))

    def is_running(self) -> bool:
        return asyncio._get_running_loop() is self

    def is_closed(self) -> bool:
        return not self._open

    # ---- running

    def run(
        self,
        main: Coroutine[Any, Any, _T] | asyncio.Future[_T],
        *,
        until_s: float = math.inf,
        most_steps: int = MOST_STEPS,
    ) -> _T:
        """Run until `main` is done; returns its result, or raises its exception.

        `until_s`: virtual seconds from now. Raises SimulationStuck when nothing is left to do and `main` is not
        done, or when a bound has passed; it lists where each task waits.
        """
        task = self.create_task(main) if asyncio.iscoroutine(main) else main
        assert isinstance(task, asyncio.Future)
        self._until_s = self.now_s + until_s
        # The cycle collector is off: when it runs depends on all that ran before, so what it finalises would act at a
        # moment that no seed decides.
        ready, owner_mark, is_done = self._ready, OWNER, task.done
        with _running(self), uncollected():
            while not is_done():
                self.steps = steps = self.steps + 1
                if steps > most_steps:
                    self._give_up(f"took more than {most_steps:,} steps")
                if not ready:
                    self._advance()
                handle = ready.popleft()
                if (callback := handle.callback) is None:
                    continue
                context = handle.context
                owner = context.get(owner_mark)
                if owner is None:
                    # A step of the world itself. What it raises is a mistake of the simulation, and ends the run.
                    context.run(callback, *handle.args)
                elif owner.running or not owner.holds(handle):
                    try:
                        context.run(callback, *handle.args)
                    except Exception as error:
                        context.run(self.call_exception_handler, {"message": f"in {callback!r}", "exception": error})
        return task.result()

    run_until_complete = run  # type: ignore[assignment]

    def _advance(self) -> None:
        """Time jumps to the next timer that is not cancelled."""
        timers, ready = self._timers, self._ready
        while timers and timers[0][2].callback is None:
            heappop(timers)
        if not timers:
            self._give_up("has nothing left to do, and waits for ever")
        now_s, _, handle = heappop(timers)  # later than now: what is due earlier is ready at once
        if now_s > self._until_s:
            heappush(timers, (now_s, 0, handle))  # back: a caller may go on with a later bound
            self._give_up("did not end in its virtual time")
        self.now_s = now_s
        ready.append(handle)
        # All that is due at this moment, in the order in which it was scheduled.
        while timers and timers[0][0] <= now_s:
            ready.append(heappop(timers)[2])

    def _give_up(self, why: str) -> NoReturn:
        waiting = "".join(f"\n  {line}" for line in self.waiting()) or " no process"
        raise SimulationStuck(
            f"the run {why}: {self.now_s - BEGIN_S:.3f} virtual seconds and {self.steps:,} steps after its begin."
            f" What waits:{waiting}"
        )

    def resume_steps(self, held: Iterable[Handle]) -> None:
        """Steps that were held back are due now."""
        self._ready.extend(held)

    def tasks_of(self, owner: Owner) -> list[Task[Any]]:
        """The unfinished tasks of a process, oldest first."""
        return [task for task in self._tasks if task.owner is owner and not task.done()]

    def report_errors_of(self, owner: Owner) -> None:
        """A process ends in good order: an exception of its tasks that no code has read is a trouble."""
        for task in self._tasks:
            if task.owner is owner and task.has_unread_error:
                self.call_exception_handler({"message": "never read", "exception": task.exception(), "task": task})

    def waiting(self) -> Iterator[str]:
        """Where each unfinished task of a living process, or of the world itself, stands."""
        for task in self._tasks:
            if task.done() or (task.owner is not None and not task.owner.running):
                continue
            name = task.owner.name if task.owner else "the world"
            for frame in task.get_stack(limit=1):
                code = frame.f_code
                yield f"{name}: {code.co_qualname} at {code.co_filename}:{frame.f_lineno}"

    # ---- the end

    def close(self) -> None:
        """Forget everything. Unfinished tasks are closed here; what they raise at that is ignored."""
        self._open = False
        with _running(self):
            for task in self._tasks:
                if not task.done():
                    close(task)
        for kept in (self._tasks, self._ready, self._timers):
            kept.clear()

    def __del__(self) -> None:
        """An unclosed one needs no warning: it holds nothing of the machine."""


class VirtualClock:
    """A simulated machine's clocks. They run `rate` times as fast as virtual time, and the wall clock is `ahead_s` of
    the monotonic one."""

    def __init__(self, loop: VirtualLoop, *, rate: float = 1.0, ahead_s: float = 1_700_000_000.0 - BEGIN_S) -> None:
        self._loop, self.rate, self._ahead_s = loop, rate, ahead_s

    @property
    def pace(self) -> float:
        """Virtual seconds in one of its own."""
        return 1.0 / self.rate

    def at(self, moment: float) -> float:
        """What the monotonic clock says at a moment of virtual time."""
        return moment * self.rate

    def monotonic(self) -> float:
        return self._loop.now_s * self.rate

    def wall(self) -> float:
        return self._loop.now_s * self.rate + self._ahead_s

    def sleep(self, seconds: float) -> None:
        raise RuntimeError(f"a simulated process would block its event loop for {seconds:g} s")

    def set_by(self, seconds: float) -> None:
        """This machine's wall clock is set forward, or back."""
        self._ahead_s += seconds


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Without the log lines of thousands of agents: the journal has the facts."""
    logger = logging.getLogger("nvrx")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def unawaited() -> Iterator[list[str]]:
    """What Python warns of in here: coroutines that were never awaited."""
    seen: list[str] = []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def keep(message: Warning | str, *where: Any) -> None:
            if "was never awaited" in str(message):
                seen.append(str(message))
            else:
                show(message, *where)

        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = keep  # type: ignore[assignment]  # it passes on all that it gets
        yield seen


@contextlib.contextmanager
def _running(loop: VirtualLoop) -> Iterator[None]:
    before = asyncio._get_running_loop()
    asyncio._set_running_loop(loop)
    try:
        yield
    finally:
        asyncio._set_running_loop(before)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No cycle is collected in here, but by `collect_garbage`, between two runs."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def collect_garbage() -> list[str]:
    """Collect the cycles that a run has left. Returns what Python warns of: coroutines that were never awaited."""
    # After each run, not after many: its memory is still in the processor's caches, and the next run uses it again.
    with unawaited() as forgotten:
        gc.collect()
    # What has outlived the first run, such as the modules, is not looked at again: a collection costs a third as much
    # so. What has outlived a later one is its result, which would never be collected.
    _freeze_once()
    return forgotten


@functools.cache
def _freeze_once() -> None:
    """`gc.get_freeze_count` would say whether it has been done, but walks all that is frozen: 6 ms after each run."""
    gc.freeze()
