"""Simulated processes: killed, frozen and thawed as one.

Every task and callback of a process carries its mark in its context, and what it schedules inherits the mark.
Killing and freezing are therefore as sudden as SIGKILL and SIGSTOP: the loop takes no further step of it.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from nvrx_slurm.lab.simulation.loop import OWNER, Handle, VirtualLoop

FAILED = 1


class SimulatedProcess:
    """One simulated process: `run` starts it, and it ends with its main coroutine, by a signal, or by `kill`.

    `exit_code` is what its main coroutine returned (None counts as 0), 1 with `error` set if that raised, or the
    negative number of the signal that ended it; None while it lives.
    """

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.running = False  # neither dead nor frozen; the loop reads it before each step
        self.alive = True
        self.exit_code: int | None = None
        self.error: BaseException | None = None
        self._loop = loop
        self._held: deque[Handle] = deque()
        self._steps_left: int | None = None  # until it freezes by itself
        self._handlers: dict[int, Callable[[], object]] = {}
        self._when_dead: list[Callable[[], object]] = []
        self._context = Context()
        self._context.run(OWNER.set, self)
        self.running = True

    def __repr__(self) -> str:
        return f"<SimulatedProcess {self.name}>"

    @property
    def frozen(self) -> bool:
        return self.alive and not self.running and self._steps_left is None

    def run(self, main: Coroutine[Any, Any, int | None]) -> asyncio.Task[None]:
        """Start it. As with asyncio.run, when `main` is over the process's other tasks are cancelled and awaited."""
        return self._loop.create_task(self._live(main), name=self.name, context=self._context.copy())

    def on_death(self, callback: Callable[[], object]) -> None:
        """Have the kernel call this when the process dies, in the order of registration, as a step of no process;
        at once, if it is dead."""
        if self.alive:
            self._when_dead.append(callback)
        else:
            Context().run(callback)

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> Handle:
        """Have it take a step: what its kernel brings it. Held while it is frozen, dropped when it is dead."""
        return self._loop.call_at(self._loop.now_s + delay_s, callback, *args, context=self._context)

    # ---- what is done to it

    def kill(self, number: int = signal.SIGKILL) -> None:
        """As SIGKILL: it takes no step more, no `finally` and no callback of it runs. A dead one stays as it is.

        Not for the process itself to call: the step that it is in would go on to its next await.
        """
        self._die(-number)

    def freeze(self) -> None:
        """As SIGSTOP: its steps and its timers that fall due are held back."""
        self.running, self._steps_left = False, None

    def freeze_after(self, steps: int) -> None:
        """Freeze it between two steps of its own, so many from now: at any `await` that it reaches."""
        if self.running:
            # It still runs, but only of what is not `running` the loop asks `holds`, which counts the steps.
            self.running, self._steps_left = False, steps

    def thaw(self) -> None:
        """As SIGCONT: what was held back runs now, in its order."""
        if self.alive and not self.running:
            self.running, self._steps_left = True, None
            self._loop.resume_steps(self._held)
            self._held.clear()

    def signal(self, number: int) -> None:
        """Send it a signal: its handler runs, or it dies of it; a frozen one only after the thaw, of SIGKILL at
        once."""
        if number == signal.SIGKILL:
            self.kill()
        elif number == signal.SIGSTOP:
            self.freeze()
        elif number == signal.SIGCONT:
            self.thaw()
        elif self.alive:
            self._loop.call_soon(self._deliver, number, context=self._context)

    # ---- what the loop asks of it

    def holds(self, handle: Handle) -> bool:
        """A step that is due while it is not running: kept for the thaw, or dropped. False: it is one of the steps
        before a freeze, and is taken."""
        if self._steps_left:
            self._steps_left -= 1
            return False
        self._steps_left = None  # from now on it counts as frozen
        if self.alive:
            self._held.append(handle)
        return True

    def on_signal(self, number: int, handler: Callable[[], object]) -> None:
        """Its own handler for a signal."""
        self._handlers[number] = handler

    # ---- its life

    async def _live(self, main: Coroutine[Any, Any, int | None]) -> None:
        try:
            code = await main or 0
        except (Exception, asyncio.CancelledError) as error:
            self.error, code = error, FAILED
        # As asyncio.run does: cancel the other tasks and await them, before the kernel closes what the process holds.
        rest = self._loop.tasks_of(self)
        rest.remove(asyncio.current_task())  # type: ignore[arg-type]  # this one
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest)
        self._loop.report_errors_of(self)
        self._die(code)

    def _deliver(self, number: int) -> None:
        if (handler := self._handlers.get(number)) is not None:
            handler()
        elif number != signal.SIGTSTP:  # the process groups of a job are orphaned: it does not stop them
            self._die(-number)

    def _die(self, code: int) -> None:
        if not self.alive:
            return
        self.alive = self.running = False
        self.exit_code, self._steps_left = code, None
        self._held.clear()
        self._handlers.clear()
        # Each in a context of its own: what it schedules is a step of no process, and not of the one that killed.
        watchers, self._when_dead = self._when_dead, []
        for watcher in watchers:
            Context().run(watcher)


class Held:
    """Something open, such as a socket: it closes when its last holder lets go of it or dies."""

    def __init__(self, closed: Callable[[], object]) -> None:
        self._closed = closed
        self._holders: list[SimulatedProcess] = []

    def held_by(self, process: SimulatedProcess) -> None:
        self._holders.append(process)
        process.on_death(lambda: self.release(process))

    def release(self, process: SimulatedProcess) -> None:
        if process in self._holders:
            self._holders.remove(process)
            if not self._holders:
                self._closed()
