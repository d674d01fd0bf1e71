"""The simulated batch host, by the real one's rules (`batch/host.py`), and what Slurm does to a job.

It keeps store and controller running, asks the controller to end the job when it must end, and ends it itself when
that takes too long. With the batch host the job ends, and Slurm kills what is left of it on every node.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

from nvrx_slurm.batch.children import restart_pause_s
from nvrx_slurm.batch.ending import Ending
from nvrx_slurm.batch.host import AGENTS_EXIT_S, AGENTS_GONE_S, AGENTS_LEAVE_S, STABLE_S
from nvrx_slurm.errors import EXIT_FAILED, EXIT_RETRY
from nvrx_slurm.lab.simulation.loop import Handle
from nvrx_slurm.lab.simulation.process import SimulatedProcess
from nvrx_slurm.util.processes import HURRY, HURRY_AGAIN_S

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.run import SimulationRun

# What a fresh interpreter takes.
SLOWEST_START_S = 0.3


class BatchHost:
    """Runs one job; `ended` holds its exit code."""

    def __init__(self, run: SimulationRun) -> None:
        self.run, self.loop = run, run.loop
        self.chance = run.chance(f"batch host {run.info.generation}" if run.info.generation else "batch host")
        self.process: SimulatedProcess = SimulatedProcess(self.loop, "batch host")
        self.ended: asyncio.Future[int] = asyncio.Future(loop=self.loop)
        self.agents_left = asyncio.Event()  # srun has ended, since every agent has
        self.ending = Ending(run.plan.fault_tolerance, run.shape.kill_wait_s)
        self.gave_up = False
        self.killed_suspended = False  # no process of the job could run then, and end it in order
        self._giving_up: Handle | None = None
        self._controller_over = asyncio.Event()

    def start(self) -> None:
        self.process.run(self._main())
        # Store and controller die with it (PR_SET_PDEATHSIG), and Slurm takes the allocation back.
        self.process.on_death(self.run.control_plane_dies)

    def kill(self) -> None:
        """What Slurm does to a cancelled job after KillWait."""
        self.killed_suspended = self.process.frozen
        self.process.kill()

    def start_another_controller(self) -> None:
        """Although this one may live: as where Slurm takes a host for lost, and requeues its job."""
        self._controller_over.set()

    # ---- its life

    async def _main(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            self.loop.add_signal_handler(number, self._ask, number)
        tasks = [asyncio.create_task(self._keep_controller()), asyncio.create_task(self._watch_agents())]
        exit_code = await self.ended
        cut_off = self.gave_up
        if cut_off:
            self._hurry()  # it no longer waits: agents skip to the kill
        await self._agents_end(AGENTS_LEAVE_S if cut_off else AGENTS_EXIT_S)
        for task in tasks:
            task.cancel()
        self.run.signal_agents(signal.SIGTERM)
        await self._agents_end(AGENTS_EXIT_S)
        return exit_code

    async def _keep_controller(self) -> None:
        failures = 0
        while True:
            await asyncio.sleep(self.chance.uniform(0.05, SLOWEST_START_S))
            began, controller = self.loop.time(), self.run.start_controller()
            # A signal of before it began was sent to the controller before it, or to none.
            self._signal_controller()
            # Each has an event of its own: the late death of one that was overtaken does not count for its successor.
            self._controller_over = over = asyncio.Event()
            controller.on_death(over.set)
            await over.wait()
            if (result := self.run.result) is not None:
                self._has_ended(result.exit_code)
                return
            if controller.exit_code == EXIT_RETRY:
                self.gave_up = True
                self._has_ended(EXIT_FAILED)
                return
            failures = 0 if self.loop.time() - began > STABLE_S else failures + 1
            await asyncio.sleep(restart_pause_s(failures))

    async def _watch_agents(self) -> None:
        await self.agents_left.wait()
        await asyncio.sleep(AGENTS_GONE_S)
        if not self.ended.done():
            self._ask(signal.SIGUSR2)

    async def _agents_end(self, within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.ending.in_time(within_s, self.loop.time())):
                await self.agents_left.wait()

    # ---- signals

    def _ask(self, number: signal.Signals) -> None:
        now = self.loop.time()
        hurry_in_s = self.ending.take(number, now)
        self._signal_controller()
        if hurry_in_s is not None:
            self.loop.call_later(hurry_in_s, self._hurry)
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._giving_up = self.loop.call_later(self.ending.give_up_at - now, self._give_up)

    def _signal_controller(self) -> None:
        if self.ending.asked is not None and self.run.controller is not None:
            self.run.controller.signal(self.ending.asked)

    def _hurry(self) -> None:
        self.run.signal_agents(HURRY)
        self.loop.call_later(HURRY_AGAIN_S, self.run.signal_agents, HURRY)

    def _give_up(self) -> None:
        if not self.ended.done():
            self.gave_up = True
            self._has_ended(self.ending.exit_code)

    def _has_ended(self, exit_code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(exit_code)
