"""Keeps a job's three kinds of processes going: one store, one controller, the agents."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from logging import ERROR, INFO
from typing import Any

import msgspec

from nvrx_slurm.batch import children, ending
from nvrx_slurm.batch.agents import AgentSteps
from nvrx_slurm.batch.allocation import AllocationKeeper
from nvrx_slurm.batch.children import ManagedService
from nvrx_slurm.batch.ending import EXIT_CODES, Ending
from nvrx_slurm.batch.store import StoreKeeper
from nvrx_slurm.cluster.allocation import HeldAllocation, step_environment
from nvrx_slurm.cluster.commands import SystemRunner
from nvrx_slurm.cluster.slurm_job import signalled_job
from nvrx_slurm.cluster.slurm_nodes import JobNodes
from nvrx_slurm.errors import EXIT_FAILED, EXIT_RETRY, EXIT_UNREACHABLE, NvrxError, StoreUnreachable
from nvrx_slurm.jobspec.env import HOST_FD, handed_on, node_name
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.folder import JobFolder, JobInfo, Result, StoreAddress, clear_runtime_folders
from nvrx_slurm.journal.records import PREEMPTED, AgentsStarted
from nvrx_slurm.store.keys import in_namespace
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.ids import new_incarnation, new_secret
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import AGAIN_S, CANNOT_RUN, HURRY, HURRY_AGAIN_S, send_signal
from nvrx_slurm.util.secret_file import secret_in
from nvrx_slurm.util.tasks import settle, start

log = get_logger("batch")

# How long agents may take to exit once the job has ended; a step on a dead node never does.
AGENTS_EXIT_S = 5.0

# The same where a node was given up: then srun is known not to end by itself, and the other agents leave at once.
WITHOUT_NODE_S = 1.0

# The same for agents that leave at this host's signal, without the controller's order: they still try to post their
# last facts.
AGENTS_LEAVE_S = 12.0

# How long after the last agent's exit the controller may take to conclude by itself.
AGENTS_GONE_S = 3.0

REQUEUED_S = 10.0
# slurmctld may be busy just then, or be started again.
REQUEUE_QUESTIONS, REQUEUE_PAUSE_S = 3, 1.0

# A controller that lived this long does not count as a failed start. So many in a row take five minutes at least.
STABLE_S, MOST_FAILURES = 5.0, 300

SAY_EVERY_S = 5.0
# How long agents that are to be started wait for the journal.
TELL_S = 5.0


class Host:
    """Runs one job in its folder; `run` returns the job's exit code.

    `launcher`: the one command that starts all agents (srun); empty: one process a node, here. `own_flags`: its nodes
    are not those of the whole allocation, or not as many as it says.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        info: JobInfo,
        folder: JobFolder,
        launcher: tuple[str, ...],
        own_flags: bool,
        store_password: str | None,
        env: Mapping[str, str],
        clock: Clock,
    ) -> None:
        self.plan, self.info, self.folder, self.clock = plan, info, folder, clock
        self.launcher, self.own_flags = launcher, own_flags
        self.env = {**env, "NVRX_JOB_FOLDER": str(folder.path)}
        self.store_password = store_password
        self.store: StoreKeeper | None = None
        self.controller: Process | None = None
        self.local_agents: list[Process] = []
        self.steps: AgentSteps | None = None  # where Slurm starts the agents
        self.allocation: AllocationKeeper | None = None
        if info.allocation is not None:
            held = HeldAllocation(info.allocation)
            self.allocation = AllocationKeeper(info.allocation, held, plan.fault_tolerance, clock)
        self.service = ManagedService(plan, folder, self.env)
        # Slurm alone sends a signal twice where it means it once.
        again_s = AGAIN_S if info.cluster == "slurm" else 0.0
        self.ending = Ending(plan.fault_tolerance, info.kill_wait_s, again_s=again_s)
        self.giving_up: asyncio.TimerHandle | None = None
        self.gave_up = False
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.wanted = asyncio.Event()  # the lease has been touched, or there is none
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Start everything, keep it going until the job has ended, end everything."""
        loop, preempted = asyncio.get_running_loop(), False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            loop.add_signal_handler(number, self._ask, number)
        # For workers, as `scancel --signal=USR2` sends it: its default action would end the job.
        loop.add_signal_handler(signal.SIGUSR2, log.info, "SIGUSR2: nothing to do here, it is for workers")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, EXIT_CODES)
        if self.info.cluster == "slurm":
            # Slurm announces a suspension with SIGTSTP, two seconds ahead of SIGSTOP. In those two seconds agents,
            # store and controller, which inherit this, agree on it.
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        # Slurm sends it to its own jobs, and to no run in an allocation of the user's.
        is_untimed = self.info.cluster == "local" or self.allocation is not None
        if is_untimed and self.plan.time_limit_s is not None:
            limit_s = self.plan.time_limit_s
            notice_s = self.plan.fault_tolerance.teardown.notice_s(limit_s)
            loop.call_later(limit_s - notice_s, self._ask, signal.SIGUSR1)
        if self.allocation is not None:
            self._go(self.allocation.watch_time_limit(lambda: self._ask(signal.SIGUSR1)))
        try:
            await self._start_store()
            self._go(self._keep_controller())
            self._go(self._keep_lease())
            if self.plan.fault_tolerance.attribution.manage_attrsvc:
                self._go(self.service.keep())
            self._go(self._keep_agents())
            exit_code = await self.ended
            if (result := self.folder.read_result()) is not None and result.reason == PREEMPTED:
                preempted = True
        except BaseException as error:
            await self._end(error)
            raise
        await self._end()
        if self.info.allocation is not None:
            pass  # a script of the user's has an end of its own
        elif preempted and self.info.cluster == "slurm":
            await self._requeue()
        elif self.info.left_in_grace:
            # Slurm 24.11 still takes the job for one in its GraceTime: `scontrol requeue` clears no GRACE_PREEMPT
            # (job_mgr.c). At the end of the script it would requeue the job, done or not, and so on without end.
            await self._scontrol("update", f"JobId={self.info.job_id}", "Requeue=0")
        return exit_code

    async def _requeue(self) -> None:
        """Back into the queue, where the user allows that and Slurm has not done it."""
        # Else a job that leaves within its GraceTime would end for good, and one that PreemptMode=CANCEL preempts.
        for _ in range(REQUEUE_QUESTIONS):
            if (job := await signalled_job(self.info.job_id, self.info.generation)) is not None:
                break
            await asyncio.sleep(REQUEUE_PAUSE_S)
        if job is None:
            log.error("preempted, and Slurm does not say whether job %s may be requeued", self.info.job_id)
        elif job.preempted and job.may_requeue:
            log.info("preempted: asking Slurm to requeue job %s", self.info.job_id)
            if job.has_grace:  # written first: Slurm may end this process before scontrol returns
                self.folder.write_info(msgspec.structs.replace(self.info, left_in_grace=True))
            await self._scontrol("requeue", self.info.job_id)

    async def _scontrol(self, *words: str) -> None:
        try:
            answer = await asyncio.to_thread(SystemRunner(), ["scontrol", *words], timeout_s=REQUEUED_S)
        except OSError as error:
            log.error("scontrol %s: %s", words[0], error)
        else:
            log.log(INFO if answer.ok else ERROR, "scontrol %s: %s", words[0], "done" if answer.ok else answer.reason)

    # ---- start

    async def _start_store(self) -> None:
        known = self.folder.read_store()
        token = known.token if known else new_secret()
        job = self.folder.job_id
        if self.plan.store.url is not None:
            # Several clusters may share the site's store, and each counts its jobs from 1.
            fresh = in_namespace(self.plan.store.namespace, f"{job}-{new_incarnation()}")
            job = known.job if known else fresh
            password, file = self.store_password, self.plan.store.password_file
            if file is not None:  # here: where it is gone by now, the job's result says so
                password = secret_in(file, key="store.password_file").strip()
            address = StoreAddress(url=self.plan.store.url, password=password, job=job, token=token)
            self.folder.write_store(address)
        else:
            self.store = StoreKeeper(self.folder, self.info, asked=self.plan.store.server, job=job, token=token)
            await self.store.start()
            self._go(self.store.keep())

    # ---- keep going

    async def _keep_controller(self) -> None:
        argv = (sys.executable, "-P", "-m", "nvrx_slurm.controller")
        failures = 0
        while True:
            began = self.clock.monotonic()
            reports, write_end = os.pipe()
            code: int | str
            try:
                await self._start_controller(argv, write_end)
            except (OSError, RuntimeError) as error:  # no process can be started now, or no thread that waits for it
                os.close(reports)
                code = f"it did not start: {error}"
            else:
                assert self.controller is not None
                # Once more: the signal may have met a controller that died. It is blocked there until it can be
                # handled.
                self._signal_controller()
                hearing = asyncio.create_task(self._hear(reports))
                code = await self.controller.wait()
                hearing.cancel()
            result = self.folder.read_result()
            if result is not None:
                settle(self.ended, result.exit_code)
                return
            if code == EXIT_RETRY:
                raise NvrxError("another controller has taken this job over")
            if code == EXIT_UNREACHABLE:  # the store was away for too long, or refused it: a new one fares no better
                raise StoreUnreachable(f"the controller gave the store up; see {self.folder.node_log('controller')}")
            failures = 0 if self.clock.monotonic() - began > STABLE_S else failures + 1
            if failures > MOST_FAILURES:
                log_path = self.folder.node_log("controller")
                raise NvrxError(f"the controller ended {failures} times in a row ({code}); see {log_path}")
            pause = children.restart_pause_s(failures)
            log.warning("the controller ended (%s); starting it again in %.1f s", code, pause)
            await asyncio.sleep(pause)

    async def _start_controller(self, argv: Sequence[str], write_end: int) -> None:
        try:
            with handed_on() as (variables, descriptors):  # the attribution process, its child, needs the secrets
                self.controller = await children.start(
                    argv,
                    {**self.env, **variables, HOST_FD: str(write_end)},
                    on_death=signal.SIGKILL,
                    pending=EXIT_CODES,
                    pass_fds=(*descriptors, write_end),
                )
        finally:
            os.close(write_end)

    async def _hear(self, reports: int) -> None:
        """Pass on which nodes the controller has lost, and which have joined, until it has ended."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reports, "rb", buffering=0)
        )
        try:
            while line := await reader.readline():
                word, _, node = line.decode().strip().partition(" ")
                if self.steps is not None:
                    (self.steps.lost if word == "lost" else self.steps.joined)(node)
                if self.allocation is not None and word == "lost":
                    self._go(self.allocation.node_lost(node))
        finally:
            transport.close()  # and with it the pipe

    async def _keep_lease(self) -> None:
        if self.plan.lease is None:
            self.wanted.set()
            return
        await ending.kept(self.plan.lease, self.clock, self.wanted.set)
        log.error("%s was not touched for %g s", self.plan.lease.file, self.plan.lease.timeout)
        self._ask(signal.SIGQUIT)

    async def _keep_agents(self) -> None:
        """Start the agents, and end the job should all of them end before it."""
        await self.wanted.wait()  # the job may have been in the queue for longer than its lease
        if self.info.cluster == "slurm" and self.launcher:
            environment = step_environment(self.env, own_job=self.info.allocation is None)
            self.steps = AgentSteps(
                self.info.nodes,
                own_flags=self.own_flags,
                own_node=node_name(),
                command=self.launcher,
                start=lambda command: self._start_agents(command, environment),
                slurm=JobNodes(self.info.slurm_id),
                tell=self._tell,
                is_over=lambda: self.ended.done() or self.folder.read_result() is not None,
                generation=self.info.generation,
                clock=self.clock,
            )
            codes = await self.steps.run()
        else:
            if self.launcher:
                starts = [(self.launcher, self.env)]
            else:
                agent = (sys.executable, "-P", "-m", self.plan.agent_module)
                starts = [(agent, {**self.env, "NVRX_NODE": node}) for node in self.info.nodes]
            for argv, env in starts:
                self.local_agents.append(await self._start_agents(argv, env))
            codes = list(await asyncio.gather(*(agent.wait() for agent in self.local_agents)))
        await asyncio.sleep(AGENTS_GONE_S)
        if not self.ended.done() and (result := self.folder.read_result()) is not None:
            log.warning("the job has ended, and its controller has not: it is ended from here")
            settle(self.ended, result.exit_code)
        if not self.ended.done():
            log.warning("every agent is gone (exit codes %s) and the job has not ended", sorted(set(codes)))
            self._ask(signal.SIGALRM if set(codes) == {CANNOT_RUN} else signal.SIGUSR2)

    async def _start_agents(self, argv: Sequence[str], env: Mapping[str, str]) -> Process:
        # In sessions of their own: where Slurm signals process groups (proctrack/pgid), SIGTERM is not for srun.
        return await children.start(argv, env, on_death=signal.SIGTERM)

    async def _tell(self, fact: AgentsStarted) -> None:
        """Journal that agents are started, if the store takes it in time: they start all the same."""
        from nvrx_slurm.store.client import StoreClient  # most jobs never need it here

        if (address := self.folder.read_store()) is None:
            return
        store = StoreClient(address, clock=self.clock, generation=self.info.generation, look=self.folder.read_store)
        try:
            async with asyncio.timeout(TELL_S):
                await store.post(fact)
        except (TimeoutError, StoreUnreachable) as error:
            log.warning("the journal does not say that agents are started: %s", error or "the store does not answer")
        finally:
            await store.close()

    def _agents(self) -> list[Process]:
        return self.steps.processes if self.steps is not None else self.local_agents

    # ---- signals

    def _ask(self, number: signal.Signals) -> None:
        """Have the controller end the job; if that does not happen within its bound, end it from here."""
        if self.steps is not None:  # before all else: no more agents for a job that ends
            self.steps.close()
        loop, now, first = asyncio.get_running_loop(), self.clock.monotonic(), self.ending.asked is None
        hurry_in_s = self.ending.take(number, now)
        log.info("%s: ending the job%s", number.name, " at once" if hurry_in_s == 0.0 else "")
        self._signal_controller()
        if hurry_in_s is not None:
            loop.call_later(hurry_in_s, self._hurry)
        if self.giving_up is not None:
            self.giving_up.cancel()
        self.giving_up = loop.call_later(self.ending.give_up_at - now, self._give_up)
        if first:
            self._go(self._say_what_is_awaited())

    def _signal_controller(self) -> None:
        if self.controller is not None and self.ending.asked is not None:
            send_signal(self.controller, self.ending.asked)

    async def _say_what_is_awaited(self) -> None:
        while not self.ended.done():
            await asyncio.wait([self.ended], timeout=SAY_EVERY_S)
            if not self.ended.done():
                left_s = self.ending.give_up_at - self.clock.monotonic()
                log.info("waiting for agents to leave, and for the controller to end the job: %.0f s left", left_s)

    def _hurry(self) -> None:
        """Have the agents kill their workers now, and leave."""
        for after_s in (0.0, HURRY_AGAIN_S):  # the first alone counts as the user's where an agent does not leave yet
            for agent in self._agents():
                asyncio.get_running_loop().call_later(after_s, send_signal, agent, HURRY)

    def _give_up(self) -> None:
        if not self.ended.done():
            log.error("the job did not end in time; ending it from here")
            self.gave_up = True
            # The result first: Slurm may be about to kill this process.
            self._write_result(self.ending.exit_code, "it did not end in time, and was ended by the batch host")
            settle(self.ended, self.ending.exit_code)

    # ---- end

    async def _end(self, error: BaseException | None = None) -> None:
        """Agents first, then the controller, then the store, which no process reads any more."""
        if error is not None:
            self._write_result(error.exit_code if isinstance(error, NvrxError) else EXIT_FAILED, str(error))
        cut_off = error is not None or self.gave_up
        if cut_off:  # no controller has ordered them to leave
            self._hurry()
        if self.steps is not None:
            agents = {f"the agents of step {n}": each for n, each in enumerate(self._agents(), 1)}
        else:
            names = ["the agents"] if self.launcher else [f"the agent of {node}" for node in self.info.nodes]
            agents = dict(zip(names, self.local_agents, strict=False))  # the start may have failed half way
        exit_s = WITHOUT_NODE_S if self.allocation is not None and self.allocation.gave_up else AGENTS_EXIT_S
        await children.ended(agents, within_s=self._in_time(AGENTS_LEAVE_S if cut_off else exit_s))
        # Only now: until the agents have left, controller and store are started again when they die.
        for task in self.tasks:
            task.cancel()
        await children.end(agents, polite_s=self._in_time(exit_s))
        rest = {
            "the controller": self.controller,
            "the attribution service": self.service.process,
            "the store": self.store.process if self.store else None,
        }
        await children.end({name: child for name, child in rest.items() if child}, polite_s=self._in_time(2.0))
        self.service.clear_away()
        self.folder.remove_store()
        if self.store is not None:
            self.store.clear_away()
        clear_runtime_folders(self.folder)

    def _in_time(self, wait_s: float) -> float:
        return self.ending.in_time(wait_s, self.clock.monotonic())

    def _write_result(self, exit_code: int, reason: str) -> None:
        """Unless the controller has written one, which holds the reason. On a full disk the job ends all the same."""
        try:
            if self.folder.read_result() is None:
                self.folder.write_result(Result(exit_code=exit_code, reason=reason, ended_at=self.clock.wall()))
        except OSError as error:
            log.error("how the job ended (%d: %s) cannot be written: %s", exit_code, reason, error)

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        start(work, self.tasks, partial(settle, self.ended))
