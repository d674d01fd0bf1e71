"""Virtual threads: blocking code, with its locks and waits, stepped by a seed in virtual time.

The event loop of `loop.py` drives what awaits. `inprocess` and `transport` block instead: they take locks, wait for
events, poll descriptors and sleep. Here each of their threads is a greenlet, which runs until it waits, or until the
seed has another thread take its turn. `Substitution` gives the product's modules these names for `threading`, `time`
and `select` while a history runs: the product itself is unchanged, and pays nothing for it.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, NoReturn, TypeVar

from greenlet import getcurrent, greenlet

from nvrx_slurm.errors import SimulationStuck
from nvrx_slurm.lab.simulation.loop import BEGIN_S, uncollected, unlogged

T = TypeVar("T")
ShapeT = TypeVar("ShapeT")
ActT = TypeVar("ActT")

# Of one history: twenty times what the longest take. One that takes more goes in circles.
MOST_STEPS = 300_000

# How often a thread that could go on lets another one take its turn: at a lock, an event, a look at the clock.
SWITCH_SHARE = 0.1

# How often it loses its processor there instead, and for how long at most.
STALL_SHARE, STALL_S = 0.002, 0.05

AHEAD_S = 1_700_000_000.0 - BEGIN_S
MOST_CLOSINGS = 16

# One wait of a thread: by its number, since the thread may have gone on to another wait when it is woken.
Ticket = tuple["VirtualThread", int]


class HistoryClosed(BaseException):
    """Raised in every thread that is left when a history has ended; no code of the product may go on after it."""


class VirtualProcess:
    """What is killed, frozen and continued together. `main`: its first thread. `host`: where it runs."""

    def __init__(self, scheduler: ThreadScheduler, name: str, host: str) -> None:
        self.scheduler, self.name, self.host = scheduler, name, host
        self.pid = next(scheduler.pids)
        self.began = int(scheduler.now_s * 100)
        self.alive, self.frozen = True, False
        self.frozen_s = self._frozen_at = 0.0
        self.exit_code: int | None = None
        self.main: VirtualThread | None = None
        self.held: list[VirtualThread] = []
        self._when_dead: list[Callable[[], object]] = []

    def start(self, main: Callable[[], int | None]) -> None:
        """Run `main` in its first thread; the process ends with it."""
        self.main = VirtualThread(self.scheduler, self, lambda: self.exit(main() or 0), "main")
        self.main.start()

    def on_death(self, callback: Callable[[], object]) -> None:
        """Call it when this process has ended, or now if it has."""
        if self.alive:
            self._when_dead.append(callback)
        else:
            callback()

    def kill(self) -> None:
        """As SIGKILL: none of its threads takes another step, and no `finally` of it runs."""
        self.exit(-9)

    def exit(self, code: int) -> None:
        """As os._exit."""
        if self.alive:
            self.alive, self.exit_code = False, code
            self.held.clear()
            watchers, self._when_dead = self._when_dead, []
            for watcher in watchers:
                watcher()
        # Where one of its own threads has ended it, that thread goes no further.
        self.scheduler.leave_if_dead(self)

    def freeze(self) -> None:
        """As SIGSTOP."""
        if not self.frozen:
            self.frozen, self._frozen_at = True, self.scheduler.now_s

    def thaw(self) -> None:
        """As SIGCONT."""
        if self.frozen:
            self.frozen = False
            self.frozen_s += self.scheduler.now_s - self._frozen_at
            self.scheduler.runnable += self.held
            self.held.clear()


class VirtualThread:
    """What `threading.Thread` is to the product."""

    def __init__(
        self, scheduler: ThreadScheduler, process: VirtualProcess, work: Callable[[], object], name: str
    ) -> None:
        self.scheduler, self.process, self.name = scheduler, process, name
        self.ident: int | None = None
        self.is_done = self.is_woken = False
        self.stalled_s = 0.0  # how long it had no processor
        self.waits = 0  # how often it has begun to wait
        self.is_waiting = False
        self.is_interruptible = False
        self.pending: BaseException | None = None  # raised in its next step, while it is interruptible
        self._work = work
        self._joined: list[Ticket] = []
        self.greenlet = greenlet(self._run, scheduler.hub)

    def start(self) -> None:
        self.ident = next(self.scheduler.numbers)
        self.scheduler.threads.append(self)
        self.scheduler.runnable.append(self)

    def join(self, timeout: float | None = None) -> None:
        scheduler = self.scheduler
        until = math.inf if timeout is None else scheduler.now_s + timeout
        while not self.is_done and scheduler.now_s < until:
            self._joined.append(scheduler.ticket())
            scheduler.park(until)

    def _run(self) -> None:
        try:
            self._work()
        except HistoryClosed:
            pass
        except BaseException as error:
            if not self.scheduler.is_closing:
                self.scheduler.on_trouble(self, error)
        self.is_done = True
        for ticket in self._joined:
            self.scheduler.wake(ticket)


class ThreadScheduler:
    """Whose turn it is, and what time it is: `run` decides both by its seed.

    `on_trouble` gets what a thread has raised and no code has caught. `close` it after a history.
    """

    def __init__(self, chance: Random, on_trouble: Callable[[VirtualThread, BaseException], object]) -> None:
        self.now_s = BEGIN_S
        self.steps = 0
        self.on_trouble = on_trouble
        self.hub = getcurrent()
        self.threads: list[VirtualThread] = []
        self.runnable: list[VirtualThread] = []
        self.current: VirtualThread | None = None
        self.is_closing = False
        self.numbers = itertools.count(1)
        self.pids = itertools.count(100)
        self._random = chance.random
        self._timers: list[tuple[float, int, Callable[[], object]]] = []

    # ---- for threads

    @property
    def process(self) -> VirtualProcess:
        """That of the current thread."""
        assert self.current is not None, "only a virtual thread has a process"
        return self.current.process

    def park(self, until: float = math.inf) -> bool:
        """The current thread waits until it is woken, or until then. Returns whether it was woken."""
        thread = self.current
        assert thread is not None, "only a virtual thread can wait"
        self._check(thread)
        thread.waits += 1
        thread.is_waiting, thread.is_woken = True, False
        if until < math.inf:
            self.call_at(until, partial(self.wake, (thread, thread.waits), in_time=False))
        self._away(thread)
        return thread.is_woken

    def ticket(self) -> Ticket:
        """For the current thread's next wait."""
        assert self.current is not None, "only a virtual thread can wait"
        return self.current, self.current.waits + 1

    def wake(self, ticket: Ticket, *, in_time: bool = True) -> None:
        """That wait is over. Nothing happens where it has ended before."""
        thread, number = ticket
        if thread.is_waiting and thread.waits == number:
            thread.is_waiting, thread.is_woken = False, in_time
            self.runnable.append(thread)

    def maybe_switch(self) -> None:
        """Another thread may have its turn here."""
        if self.current is None or self.is_closing or (chance := self._random()) >= SWITCH_SHARE:
            return
        if chance < STALL_SHARE:
            thread, stall_s = self.current, STALL_S * self._random()
            thread.stalled_s += stall_s
            # Nothing interrupts it: it has no processor.
            was_interruptible, thread.is_interruptible = thread.is_interruptible, False
            self.sleep(stall_s)
            thread.is_interruptible = was_interruptible
        else:
            self.switch()

    def switch(self) -> None:
        thread = self.current
        assert thread is not None
        if self.is_closing:
            raise HistoryClosed
        self.runnable.append(thread)
        self._away(thread)

    def sleep(self, seconds: float) -> None:
        until = self.now_s + seconds
        while self.now_s < until:
            self.park(until)

    def interrupt(self, thread: VirtualThread, error: BaseException) -> None:
        """Raise it in that thread: at once where it waits, else in its next step; only while it is interruptible."""
        thread.pending = error
        if thread.is_interruptible:
            self.wake((thread, thread.waits))

    def leave_if_dead(self, process: VirtualProcess) -> None:
        """The current thread's process has ended: it takes no step more."""
        if self.current is not None and self.current.process is process and not process.alive:
            self._away(self.current)
            raise AssertionError("a dead process has taken a step")

    def _away(self, thread: VirtualThread) -> None:
        self.hub.switch()
        self._check(thread)

    def _check(self, thread: VirtualThread) -> None:
        """Raise what waits for this thread."""
        if self.is_closing:
            raise HistoryClosed
        if thread.pending is not None and thread.is_interruptible:
            error, thread.pending = thread.pending, None
            raise error

    # ---- for the world

    def call_at(self, when: float, callback: Callable[[], object]) -> None:
        heapq.heappush(self._timers, (when, next(self.numbers), callback))

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> None:
        self.call_at(self.now_s + delay_s, callback)

    def run(self, is_over: Callable[[], bool], until_s: float) -> None:
        """Until it is over. Raises SimulationStuck where that is not so within `until_s` virtual seconds."""
        self.hub = getcurrent()
        ends_at = self.now_s + until_s
        runnable, timers, random = self.runnable, self._timers, self._random
        while not is_over():
            if not runnable:
                if not timers:
                    self._give_up("has nothing left to do")
                # A timer may be set for a moment that is over: time does not go back to it.
                self.now_s = max(self.now_s, timers[0][0])
                if self.now_s > ends_at:
                    self._give_up("did not end in its virtual time")
                while timers and timers[0][0] <= self.now_s:
                    heapq.heappop(timers)[2]()
                continue
            self.steps += 1
            if self.steps > MOST_STEPS:
                self._give_up(f"took more than {MOST_STEPS:,} steps")
            # The last one takes the place of the chosen one: the order of the list means nothing.
            chosen = int(random() * len(runnable))
            thread, last = runnable[chosen], runnable.pop()
            if thread is not last:
                runnable[chosen] = last
            process = thread.process
            if process.frozen or not process.alive:
                if process.alive:
                    process.held.append(thread)
                continue
            self.current = thread
            thread.greenlet.switch()
            self.current = None

    def close(self) -> None:
        """Leave every thread through its `finally`s. What it raises at that is ignored."""
        self.is_closing = True
        for thread in self.threads:
            self.current = thread
            # Again where it comes back: `exit` of its process, which a `finally` may call, switches to this greenlet.
            for _ in range(MOST_CLOSINGS):
                if thread.greenlet.dead or not thread.greenlet:
                    break
                thread.greenlet.throw(HistoryClosed)
            thread._work = thread.pending = None  # type: ignore[assignment]  # what they hold goes with this history
        self.current = None
        # Python keeps what a client's finalizer uses, locks of this scheduler among it, until the client is
        # collected. Through here they would refer to the whole history, and so to the client: none would ever be.
        self.on_trouble = lambda thread, error: None
        for kept in (self.threads, self.runnable, self._timers):
            kept.clear()

    def waiting(self) -> Iterator[str]:
        """Where each thread of a living process stands."""
        for thread in self.threads:
            if thread.is_done or not thread.process.alive or (frame := thread.greenlet.gr_frame) is None:
                continue
            # The frame that waits is one of this module. The reader wants the one of the product that called it.
            while frame.f_back is not None and frame.f_code.co_filename == __file__:
                frame = frame.f_back
            state = ", frozen" if thread.process.frozen else ""
            name = f"{thread.process.name}, {thread.name}{state}"
            yield f"{name}: {frame.f_code.co_qualname} at {frame.f_code.co_filename}:{frame.f_lineno}"

    def _give_up(self, why: str) -> NoReturn:
        waiting = "".join(f"\n  {line}" for line in self.waiting()) or " no thread"
        raise SimulationStuck(
            f"the history {why}, {self.now_s - BEGIN_S:.3f} s after its begin. What waits:{waiting}"
        )


# ---- what the standard library has for real threads


class VirtualLock:
    """threading.Lock."""

    def __init__(self, scheduler: ThreadScheduler) -> None:
        self._scheduler = scheduler
        self._is_locked = False
        self._waiting: deque[Ticket] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        scheduler.maybe_switch()
        until = math.inf if timeout < 0 else scheduler.now_s + timeout
        # While the history closes no other thread releases a lock any more: each `finally` gets the ones it takes.
        while self._is_locked and not scheduler.is_closing:
            if not blocking or scheduler.now_s >= until:
                return False
            self._waiting.append(scheduler.ticket())
            scheduler.park(until)
        self._is_locked = True
        return True

    def release(self) -> None:
        if not self._is_locked:
            raise RuntimeError("release unlocked lock")
        self._is_locked = False
        # All: one that was taken away by an exception, or whose time was over, does not wake the next.
        while self._waiting:
            self._scheduler.wake(self._waiting.popleft())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class VirtualRLock(VirtualLock):
    """threading.RLock."""

    def __init__(self, scheduler: ThreadScheduler) -> None:
        super().__init__(scheduler)
        self._owner: VirtualThread | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._depth and self._owner is self._scheduler.current:
            self._depth += 1
            return True
        if not super().acquire(blocking, timeout):
            return False
        self._owner, self._depth = self._scheduler.current, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            super().release()


class VirtualCondition:
    """threading.Condition, with any lock above."""

    def __init__(self, scheduler: ThreadScheduler, lock: VirtualLock | None = None) -> None:
        self._scheduler, self._lock = scheduler, VirtualRLock(scheduler) if lock is None else lock
        self._waiting: list[Ticket] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        until = math.inf if timeout is None else scheduler.now_s + timeout
        self._lock.release()  # without a switch: a wake-up that comes before the wait would be lost
        ticket = scheduler.ticket()
        self._waiting.append(ticket)
        try:
            return scheduler.park(until)
        finally:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            self._lock.acquire()

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        scheduler = self._scheduler
        until = math.inf if timeout is None else scheduler.now_s + timeout
        while not (result := predicate()) and scheduler.now_s < until:
            self.wait(None if timeout is None else until - scheduler.now_s)
        return result

    def notify(self, count: int = 1) -> None:
        chosen, self._waiting = self._waiting[:count], self._waiting[count:]
        for ticket in chosen:
            self._scheduler.wake(ticket)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class VirtualEvent:
    """threading.Event."""

    def __init__(self, scheduler: ThreadScheduler) -> None:
        self._condition = VirtualCondition(scheduler)
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._condition.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._is_set, timeout)


class VirtualQueue(Generic[T]):
    """queue.SimpleQueue."""

    def __init__(self, scheduler: ThreadScheduler) -> None:
        self._items: deque[T] = deque()
        self._condition = VirtualCondition(scheduler)

    def put(self, item: T) -> None:
        self._items.append(item)
        self._condition.notify()

    def get(self) -> T:
        with self._condition:
            self._condition.wait_for(lambda: self._items)
            return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class VirtualFuture(Future[T]):
    """concurrent.futures.Future, for which virtual threads wait."""

    def __init__(self, scheduler: ThreadScheduler) -> None:
        super().__init__()
        self._condition = VirtualCondition(scheduler)  # type: ignore[assignment]  # all that a future uses of it


class VirtualDescriptor:
    """What a poller waits for."""

    def __init__(self, scheduler: ThreadScheduler) -> None:
        self._scheduler = scheduler
        self.pollers: list[VirtualPoller] = []
        self.is_readable = False

    def becomes_readable(self) -> None:
        self.is_readable = True
        for poller in self.pollers:
            poller.look()


class VirtualPoller:
    """select.poll, for reading only. Descriptors are numbers of `VirtualDescriptors`."""

    def __init__(self, scheduler: ThreadScheduler, descriptors: VirtualDescriptors) -> None:
        self._scheduler, self._descriptors = scheduler, descriptors
        self._registered: dict[int, VirtualDescriptor] = {}
        self._waiting: Ticket | None = None

    def register(self, number: int, _: int = 0) -> None:
        descriptor = self._registered[number] = self._descriptors[number]
        descriptor.pollers.append(self)

    def unregister(self, number: int) -> None:
        self._registered.pop(number).pollers.remove(self)

    def look(self) -> None:
        if self._waiting is not None:
            self._scheduler.wake(self._waiting)

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        scheduler = self._scheduler
        scheduler.maybe_switch()
        until = math.inf if milliseconds is None or milliseconds < 0 else scheduler.now_s + milliseconds / 1000
        while True:
            ready = [(number, 1) for number, each in self._registered.items() if each.is_readable]
            if ready or scheduler.now_s >= until:
                return ready
            self._waiting = scheduler.ticket()
            try:
                scheduler.park(until)
            finally:
                self._waiting = None


class VirtualDescriptors:
    """The open files of all processes of a history, by number, and the calls of `os` that make and use them."""

    def __init__(self, scheduler: ThreadScheduler) -> None:
        self._scheduler = scheduler
        self._open: dict[int, VirtualDescriptor] = {}
        self._numbers = itertools.count(1000)

    def __getitem__(self, number: int) -> VirtualDescriptor:
        return self._open[number]

    def add(self) -> tuple[int, VirtualDescriptor]:
        number = next(self._numbers)
        self._open[number] = VirtualDescriptor(self._scheduler)
        return number, self._open[number]

    def eventfd(self, _: int, __: int = 0) -> int:
        return self.add()[0]

    def eventfd_write(self, number: int, _: int) -> None:
        self._open[number].becomes_readable()

    def eventfd_read(self, number: int) -> int:
        self._open[number].is_readable = False
        return 1

    def close(self, number: int) -> None:
        self._open.pop(number, None)


# ---- a history


class Substitution:
    """Names that modules of the product have during a history. `over(module, name=value, …)`, then `installed`."""

    def __init__(self, scheduler: ThreadScheduler) -> None:
        self.scheduler = scheduler
        self._names: list[tuple[ModuleType, str, object]] = []

        def thread(
            target: Callable[..., object],
            args: tuple[object, ...] = (),
            kwargs: Mapping[str, object] | None = None,
            name: str = "thread",
            daemon: bool = True,
        ) -> VirtualThread:
            return VirtualThread(scheduler, scheduler.process, partial(target, *args, **(kwargs or {})), name)

        def now() -> float:
            scheduler.maybe_switch()
            return scheduler.now_s

        self.threading = SimpleNamespace(
            Lock=partial(VirtualLock, scheduler),
            RLock=partial(VirtualRLock, scheduler),
            Condition=partial(VirtualCondition, scheduler),
            Event=partial(VirtualEvent, scheduler),
            Thread=thread,
            current_thread=lambda: scheduler.current,
            main_thread=lambda: scheduler.current and scheduler.current.process.main,
        )
        self.time = SimpleNamespace(
            monotonic=now,
            monotonic_ns=lambda: int(now() * 1e9),
            time=lambda: now() + AHEAD_S,
            time_ns=lambda: int((now() + AHEAD_S) * 1e9),
            sleep=scheduler.sleep,
        )
        self.queue = SimpleNamespace(SimpleQueue=partial(VirtualQueue, scheduler))
        self.future = partial(VirtualFuture, scheduler)

        def wait(futures: Sequence[VirtualFuture[Any]], timeout: float | None = None) -> None:
            until = None if timeout is None else scheduler.now_s + timeout
            for future in futures:
                with suppress(TimeoutError):
                    future.exception(None if until is None else max(0.0, until - scheduler.now_s))

        self.wait = wait

    def over(self, module: ModuleType, **names: Any) -> None:
        """While it is installed the module has these. Raises AttributeError for a name that it does not have."""
        for name, value in names.items():
            getattr(module, name)
            self._names.append((module, name, value))

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = [(module, name, getattr(module, name)) for module, name, _ in self._names]
        try:
            for module, name, value in self._names:
                setattr(module, name, value)
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)


@dataclass(frozen=True, slots=True)
class HistoryResult:
    """What a history came to. `what`: its shape; `lines`: what happened; `broken`: the first promise that was, in a
    sentence; `digest`: of all that happened."""

    seed: int
    what: str
    acts: tuple[Any, ...]
    lines: tuple[str, ...]
    promise: str | None
    broken: str | None
    digest: str


class HistoryPromises:
    """Notes what happens in one history, and keeps the first promise that is broken.

    What threads do while the history is closed does not count: those of dead processes take steps then, too.
    """

    def __init__(self, scheduler: ThreadScheduler) -> None:
        self._scheduler = scheduler
        self.promise: StrEnum | None = None
        self.broken: str | None = None
        self.lines: list[str] = []

    def broke(self, promise: StrEnum, sentence: str) -> None:
        if self.broken is None and not self._scheduler.is_closing:
            at_s = self._scheduler.now_s - BEGIN_S
            self.promise, self.broken = promise, f"{promise}: {sentence} (at {at_s:.3f} s)"

    def note(self, what: str) -> None:
        if not self._scheduler.is_closing:
            self.lines.append(f"{self._scheduler.now_s - BEGIN_S:10.4f} s: {what}")

    def check_the_end(self) -> None:
        """Check what only a whole history shows."""


class VirtualHistory(ABC, Generic[ShapeT, ActT]):
    """The history of one seed. `run` once. It ends at the first broken promise: `stuck` is the one that is broken
    where threads wait for ever, `sound` where one of them fails."""

    promises: HistoryPromises
    names: Substitution
    stuck: StrEnum
    sound: StrEnum

    def __init__(self, seed: int, shape: ShapeT, acts: tuple[ActT, ...]) -> None:
        self.seed, self.shape, self.acts = seed, shape, acts
        self.chance = Random(f"{seed}/work")
        self.scheduler = ThreadScheduler(Random(f"{seed}/turns"), self._on_trouble)

    @abstractmethod
    def begin(self) -> float:
        """Start the processes and the faults. Returns how long the history may take, in virtual seconds."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether every process that ends by itself has ended."""

    def run(self) -> HistoryResult:
        found, scheduler = self.promises, self.scheduler
        # Without the cycle collector: what it finalises would act at a moment that no seed decides.
        with unlogged(), uncollected(), self.names.installed():
            try:
                until_s = self.begin()
                scheduler.run(lambda: found.broken is not None or self.is_over(), until_s)
            except SimulationStuck as error:
                found.broke(self.stuck, str(error))
            if found.broken is None:
                found.check_the_end()
            # Before the threads are closed: what they do in their `finally`s does not count.
            end = f"{scheduler.steps} {scheduler.now_s!r}"
            scheduler.close()
        digest = hashlib.sha256("\n".join(found.lines).encode())
        digest.update(f"{found.broken} {end}".encode())
        return HistoryResult(
            seed=self.seed,
            what=str(self.shape),
            acts=self.acts,
            lines=tuple(found.lines),
            promise=found.promise,
            broken=found.broken,
            digest=digest.hexdigest(),
        )

    def _on_trouble(self, thread: VirtualThread, error: BaseException) -> None:
        self.promises.broke(self.sound, f"{thread.process.name}, {thread.name}: {error!r}")
