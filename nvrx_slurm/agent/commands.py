"""Commands that users run beside a worker (`nvrx-slurm exec`): in its environment, its folder and its container.

The controller's order names the request, the rank and the cycle. The supervisor starts the command, as it starts
workers, so it dies with the agent, with the lease, with the fence, and when the workers of its cycle are stopped.
What it prints goes into a stream of the store (`journal/commands.py`), no faster than its user reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from nvrx_slurm.agent.events import Cycle
from nvrx_slurm.agent.machine import WorkersPort
from nvrx_slurm.agent.reporting import FactPublisher
from nvrx_slurm.agent.workers import CommandExited
from nvrx_slurm.errors import StoreUnreachable
from nvrx_slurm.journal.commands import ASKER_GONE_S, CHUNK_BYTES, WINDOW, CommandEnd, CommandWord
from nvrx_slurm.journal.records import CommandEnded, CommandOrdered
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.tasks import settle

log = get_logger("agent")

# How often the agent says that it is there while the command prints nothing.
ALIVE_S = 2.0

# A command that its user has left gets SIGTERM, and SIGKILL so much later.
KILL_AFTER_S = 3.0

# How long the pipes of a command that has ended are read: what it has left behind may hold them open for ever.
LAST_OUTPUT_S = 0.5

STOPPED = "the workers of its cycle are stopped"


class Commands(msgspec.Struct, eq=False):
    """The commands on this node, each a task beside the agent's loop (`go`)."""

    store: StoreClient
    workers: WorkersPort
    publisher: FactPublisher
    clock: Clock
    go: Callable[[Coroutine[Any, Any, None]], object]
    _running: dict[str, _Command] = {}

    def begin(self, order: CommandOrdered, cycle: Cycle | None) -> None:
        """Run it; `cycle`: with the worker that it is to run beside. None: there is no such worker any more."""
        command = _Command(order, self.store, self.workers, self.clock)
        if cycle is not None:
            self._running[order.request] = command
        self.go(self._run(command, cycle))

    def exited(self, event: CommandExited, *, at_work: bool) -> None:
        """The supervisor reports the end of one. `at_work`: the workers are not being stopped, and it with them."""
        if (command := self._running.get(event.request)) is not None:
            stopped = not at_work and event.end.signal == signal.SIGKILL
            command.has_ended(CommandEnd(error=STOPPED) if stopped else event.end)

    def end_all(self) -> None:
        """No worker is left, and no command beside one."""
        for command in self._running.values():
            command.has_ended(CommandEnd(error=STOPPED))

    async def _run(self, command: _Command, cycle: Cycle | None) -> None:
        order, began = command.order, self.clock.monotonic()
        try:
            if cycle is None:
                end = CommandEnd(error=f"rank {order.rank} has no worker any more")
                await command.say(CommandWord(over=end))
            else:
                end = await command.run(cycle)
        except StoreUnreachable as error:
            end = CommandEnd(error=str(error))
            command.signal(signal.SIGKILL)
        except Exception as error:  # a fault of a user's command must not cost the node its workers
            log.exception("request %s", order.request)
            end = CommandEnd(error=f"the agent could not run it: {error}")
            command.signal(signal.SIGKILL)
        finally:
            self._running.pop(order.request, None)
        self.publisher.publish(
            CommandEnded,
            request=order.request,
            exit_code=end.exit_code,
            signal=end.signal,
            error=end.error,
            took_s=self.clock.monotonic() - began,
        )


class _Command:
    def __init__(self, order: CommandOrdered, store: StoreClient, workers: WorkersPort, clock: Clock) -> None:
        self.order, self._store, self._workers, self._clock = order, store, workers, clock
        self._number = self._taken = 0
        self._one_at_a_time = asyncio.Lock()
        self._news = asyncio.Event()
        self._heard_at = clock.monotonic()
        self._is_asked = False  # to end
        loop = asyncio.get_running_loop()
        self._is_there: asyncio.Future[None] = loop.create_future()  # the user
        self._end: asyncio.Future[CommandEnd] = loop.create_future()

    def has_ended(self, end: CommandEnd) -> None:
        settle(self._end, end)

    def signal(self, number: int) -> None:
        self._workers.signal_command(self.order.request, number)

    async def run(self, cycle: Cycle) -> CommandEnd:
        """From the user's first word to the command's last."""
        beside = [asyncio.ensure_future(self._listen())]
        try:
            # The order may be read late, by an agent that was frozen: nothing starts for a user who has left since.
            # What counts is a word that arrives from now on.
            with contextlib.suppress(TimeoutError):
                # Shielded: a timeout would cancel the future itself, and `_listen` could not set it any more.
                await asyncio.wait_for(asyncio.shield(self._is_there), ASKER_GONE_S)
            order = self.order
            if not self._is_there.done() or self._is_asked:
                end = CommandEnd(error="its user is gone")
            elif order.rank not in cycle.running or order.rank not in cycle.pids:
                end = CommandEnd(error=f"rank {order.rank} has no worker any more")
            else:
                log.info("request %s of %s: %s", order.request, order.by, order.argv[0])
                out, err = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
                self._workers.run_command(
                    order.request,
                    order.argv,
                    cycle.environments[order.rank],
                    cycle.pids[order.rank],
                    out[1],
                    err[1],
                    without=cycle.slot_names,
                )
                beside.append(asyncio.ensure_future(self._watch()))
                pumps = [
                    asyncio.ensure_future(self._pump(out[0], is_error=False)),
                    asyncio.ensure_future(self._pump(err[0], is_error=True)),
                ]
                beside += pumps
                end = await self._end
                await asyncio.wait(pumps, timeout=LAST_OUTPUT_S)
                # What is read and waits for its user still goes out, while the user is there.
                while any(not pump.done() for pump in pumps) and self._number - self._taken >= WINDOW:
                    if self._is_asked:
                        break
                    await asyncio.wait(pumps, timeout=LAST_OUTPUT_S)
            await self.say(CommandWord(over=end))
            return end
        finally:
            self._end.cancel()
            for task in beside:
                task.cancel()
            # Not for ever: redis-py may take a cancellation that meets an answer for its own timeout. What is left
            # of it then ends with its next answer.
            await asyncio.wait(beside, timeout=LAST_OUTPUT_S)

    async def say(self, word: CommandWord) -> None:
        async with self._one_at_a_time:
            self._number += 1
            await self._store.say_of_command(self.order.request, word, self._number)

    async def _pump(self, descriptor: int, *, is_error: bool) -> None:
        reader = asyncio.StreamReader(limit=CHUNK_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
        )
        try:
            while data := await reader.read(CHUNK_BYTES):  # the pipe fills up while its reader waits here
                while self._number - self._taken >= WINDOW:
                    self._news.clear()
                    await self._news.wait()
                await self.say(CommandWord(data=data, is_error=is_error))
        finally:
            transport.close()

    async def _listen(self) -> None:
        """Take the user's words that arrive from now on."""
        request, passed = self.order.request, 0
        after = await self._store.newest_asker_word(request)
        while not self._end.done():
            after, passed, words = await self._store.asker_words(request, after, passed)
            for word in words:
                self._heard_at = self._clock.monotonic()
                self._taken = max(self._taken, word.taken)
                self._news.set()
                if word.gone:
                    self._leave()
                elif word.signal:
                    self.signal(word.signal)
                if not self._is_there.done():
                    self._is_there.set_result(None)

    async def _watch(self) -> None:
        """Say that this agent is there, and end the command when its user is not."""
        while True:
            await self.say(CommandWord())
            await asyncio.sleep(ALIVE_S)
            if self._clock.monotonic() - self._heard_at > ASKER_GONE_S:
                self._leave()

    def _leave(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            self.signal(signal.SIGTERM)
            asyncio.get_running_loop().call_later(KILL_AFTER_S, self.signal, signal.SIGKILL)
