"""Keeps a job's three kinds of processes going: one store, one controller, the agents."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvrx_slurm.batch import children
from nvrx_slurm.clock import Clock
from nvrx_slurm.errors import EXIT_FAILED, EXIT_RETRY, NvrxError, StoreUnreachable
from nvrx_slurm.folder import JobFolder, JobInfo, Result, StoreAddress
from nvrx_slurm.ids import new_incarnation, new_secret
from nvrx_slurm.log import get_logger
from nvrx_slurm.processes import dies_with_parent
from nvrx_slurm.records import Plan
from nvrx_slurm.store.embedded import EmbeddedStore

log = get_logger("batch")

AGENTS_EXIT_S = 5.0
"""How long agents may take to exit once the job has ended; a step on a dead node never does."""

AGENTS_GONE_S = 3.0
"""How long after the last agent's exit the controller may take to conclude by itself."""

RESTART_PAUSES_S = (0.0, 0.1, 0.2, 0.5, 1.0)
STABLE_S = 5.0
"""A controller that lived this long was no failed start."""

STORE_RESTARTS = 20
ENDING_MARGIN_S = 25.0


@dataclass(frozen=True, slots=True)
class Launch:
    """Where the agents come from: one command that starts all of them (srun), or one process a node, here."""

    command: tuple[str, ...]
    nodes: tuple[str, ...]


class Host:
    """Runs one job in its folder; `run` returns the job's exit code."""

    def __init__(
        self,
        *,
        plan: Plan,
        info: JobInfo,
        folder: JobFolder,
        launch: Launch,
        store_password: str | None,
        env: Mapping[str, str],
        clock: Clock,
    ) -> None:
        self.plan, self.info, self.folder, self.launch, self.clock = plan, info, folder, launch, clock
        self.env = {**env, "NVRX_JOB_FOLDER": str(folder.path)}
        self.store_password = store_password
        self.store: EmbeddedStore | None = None
        self.store_process: Process | None = None
        self.controller: Process | None = None
        self.agents: list[Process] = []
        self.asked: signal.Signals | None = None  # the signal by which the controller was told to end the job
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.tasks: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        """Start everything, keep it going until the job has ended, end everything."""
        self._listen()
        try:
            await self._start_store()
            self._go(self._keep_controller())
            await self._start_agents()
            self._go(self._watch_agents())
            return await self.ended
        finally:
            await self._end()

    # ---- start

    async def _start_store(self) -> None:
        known = self.folder.read_store()
        token = known.token if known else new_secret()
        job = self.folder.job_id
        if self.plan.store_url is not None:
            # Several clusters may share the site's store, and each counts its jobs from 1.
            job = known.job if known else f"{job}-{new_incarnation()}"
            address = StoreAddress(url=self.plan.store_url, password=self.store_password, job=job, token=token)
        else:
            local = self.info.cluster == "local"
            password = known.password if known and known.password else new_secret()
            self.store = EmbeddedStore(
                self.folder.store_dir,
                bind="127.0.0.1" if local else "*",
                password=password,
                adopt=dies_with_parent(signal.SIGKILL),
            )
            self.store_process = await self.store.start()
            url = f"redis://{self.info.addr}:{self.store.port}"
            address = StoreAddress(url=url, password=password, job=job, token=token)
            self._go(self._keep_store())
        self.folder.write_store(address)

    async def _start_agents(self) -> None:
        if self.launch.command:
            self.agents = [
                await children.start(self.launch.command, self.env, on_death=signal.SIGTERM, own_session=False)
            ]
            return
        agent = (sys.executable, "-P", "-m", "nvrx_slurm.agent")
        for node in self.launch.nodes:
            env = {**self.env, "NVRX_NODE": node}
            self.agents.append(await children.start(agent, env, on_death=signal.SIGTERM, own_session=True))

    # ---- keep going

    async def _keep_store(self) -> None:
        for _ in range(STORE_RESTARTS):
            assert self.store_process is not None and self.store is not None
            code = await self.store_process.wait()
            log.warning("the store ended (%s); starting it again", code)
            self.store_process = await self.store.start()
        raise StoreUnreachable(
            f"the embedded store ended {STORE_RESTARTS} times; see {self.folder.store_dir}/server.log"
        )

    async def _keep_controller(self) -> None:
        argv = (sys.executable, "-P", "-m", "nvrx_slurm.controller")
        failures = 0
        while True:
            began = self.clock.monotonic()
            self.controller = await children.start(argv, self.env, on_death=signal.SIGKILL, own_session=True)
            if self.asked is not None:
                children.send_signal(self.controller, self.asked)
            code = await self.controller.wait()
            result = self.folder.read_result()
            if result is not None:
                self._has_ended(result.exit_code)
                return
            if code == EXIT_RETRY:
                raise NvrxError("another controller has taken this job over")
            failures = 0 if self.clock.monotonic() - began > STABLE_S else failures + 1
            pause = RESTART_PAUSES_S[min(failures, len(RESTART_PAUSES_S) - 1)]
            log.warning("the controller ended (%s); starting it again in %.1f s", code, pause)
            await asyncio.sleep(pause)

    async def _watch_agents(self) -> None:
        await asyncio.gather(*(agent.wait() for agent in self.agents))
        await asyncio.sleep(AGENTS_GONE_S)
        if not self.ended.done():
            codes = sorted({agent.returncode for agent in self.agents if agent.returncode is not None})
            log.warning("every agent is gone (exit codes %s) and the job has not ended", codes)
            self._ask(signal.SIGUSR2)

    # ---- signals

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            loop.add_signal_handler(number, self._ask, number)
        if self.info.cluster == "local" and self.plan.time_limit_s is not None:
            loop.call_later(self.plan.time_limit_s, self._ask, signal.SIGUSR1)

    def _ask(self, number: signal.Signals) -> None:
        """Have the controller end the job; if that does not happen within the teardown's bound, end it from here."""
        log.info("%s: ending the job", number.name)
        first, self.asked = self.asked is None, self.asked or number
        if self.controller is not None:
            children.send_signal(self.controller, self.asked)
        if first:
            bound_s = self.plan.fault_tolerance.teardown_grace_s + ENDING_MARGIN_S
            asyncio.get_running_loop().call_later(bound_s, self._give_up)

    def _give_up(self) -> None:
        if not self.ended.done():
            log.error("the job did not end in time; ending it from here")
            codes = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 124, signal.SIGUSR2: EXIT_RETRY}
            self._has_ended(codes[self.asked] if self.asked else EXIT_FAILED)

    # ---- end

    def _has_ended(self, exit_code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(exit_code)

    async def _end(self) -> None:
        """Agents first, then the controller, then the store, which nobody reads any more."""
        if self.agents:
            leaving = [asyncio.ensure_future(agent.wait()) for agent in self.agents]
            await asyncio.wait(leaving, timeout=AGENTS_EXIT_S)
        for task in self.tasks:
            task.cancel()
        await children.end(self.agents, polite_s=AGENTS_EXIT_S)
        await children.end([child for child in (self.controller, self.store_process) if child], polite_s=2.0)
        if self.folder.read_result() is None:
            code = self.ended.result() if self.ended.done() and not self.ended.exception() else EXIT_FAILED
            self.folder.write_result(
                Result(exit_code=code, reason="ended by the batch host", ended_at=self.clock.wall())
            )
        self.folder.remove_store()
        shutil.rmtree(self.folder.store_dir, ignore_errors=True)
        _clear_runtime_folders(self.folder)

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._task_done)
        self.tasks.append(task)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.ended.done():
            self.ended.set_exception(error)


def _clear_runtime_folders(job: JobFolder) -> None:
    """What agents that were killed on this host could not clear away themselves."""
    for root in (Path("/dev/shm"), Path("/tmp")):
        for folder in root.glob(f"{job.runtime_name}-*"):
            if folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


def local_nodes(count: int) -> tuple[str, ...]:
    """The names of the pretended nodes of a local job: n1, n2, …"""
    return tuple(f"n{index}" for index in range(1, count + 1))
