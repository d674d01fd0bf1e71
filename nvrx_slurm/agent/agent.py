"""The agent: one a node. Owns its node's processes and nothing else; decides nothing.

Everything that happens is posted to one inbox (an order, a worker's end, a signal), and one loop changes the state.
What the agent has to say goes out through `_tell`, in order, from a task of its own, so that an ill store never keeps
the loop from its workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from nvrx_slurm.agent.beats import BeatBoard
from nvrx_slurm.agent.environment import worker_environment
from nvrx_slurm.agent.events import Assigned, Crash, Cycle, Event, Mode, Signal
from nvrx_slurm.agent.output import Output
from nvrx_slurm.agent.ports import HeldPort
from nvrx_slurm.agent.tethering import Tethering
from nvrx_slurm.agent.workers import Exited, Spawned, Stopped, SupervisorDied, Workers
from nvrx_slurm.clock import Clock
from nvrx_slurm.errors import EXIT_DONE, EXIT_UNREACHABLE, StoreUnreachable
from nvrx_slurm.folder import JobFolder
from nvrx_slurm.ids import new_incarnation
from nvrx_slurm.log import get_logger
from nvrx_slurm.records import (
    Beat,
    ControllerUp,
    Fence,
    FromAgent,
    NodeJoined,
    NodeLeft,
    NodeReady,
    Plan,
    Progress,
    ReplicaEnded,
    RolePlan,
    RoundClosed,
    RoundOpened,
    Shutdown,
    WorkerFailed,
    WorkersDone,
    WorkersStarted,
)
from nvrx_slurm.store.client import Store

log = get_logger("agent")

GOODBYE_S = 5.0
"""How long the agent tries to say its last words once its workers are gone."""


class Agent:
    """Runs one node's part of a job; `run` returns the exit code of the process."""

    def __init__(
        self,
        *,
        plan: Plan,
        folder: JobFolder,
        node: str,
        addr: str,
        generation: int,
        store: Store,
        tethering: Tethering,
        output: Output,
        clock: Clock,
        beats: Callable[[Callable[[int, int], None]], BeatBoard],
    ) -> None:
        self.plan, self.folder, self.node, self.addr = plan, folder, node, addr
        self.generation, self.store, self.tethering = generation, store, tethering
        self.output, self.clock = output, clock
        self.incarnation = new_incarnation()
        self.inbox: asyncio.Queue[Event] = asyncio.Queue()
        self.outbox: asyncio.Queue[FromAgent | None] = asyncio.Queue()
        self.workers = Workers(self.inbox.put_nowait)
        self.board = beats(self._first_step)
        self.mode = Mode.STANDBY
        self.cycle: Cycle | None = None
        self.port = HeldPort()
        self.opened: dict[str, int] = {}  # replica → the newest cycle it was called to
        self.fenced = False
        self.leaving: tuple[str, int] | None = None  # why, and with what exit code
        self.when_stopped: Callable[[], None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stop_began = 0.0
        self._seq = 0
        self._exit_code: int | None = None

    # ---- life

    async def run(self) -> int:
        """Join, serve until the job ends, leave no process behind."""
        self.workers.start()
        self.board.open()
        sending = self._go(self._send())
        for work in (self._read_orders(), self._beat()):
            self._go(work)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.inbox.put_nowait, Signal(number.name))
        try:
            while self._exit_code is None:
                self._handle(await self.inbox.get())
            self.outbox.put_nowait(None)
            await asyncio.wait([sending], timeout=GOODBYE_S)
            return self._exit_code
        finally:
            for task in self._tasks:
                task.cancel()
            self.workers.close()
            await asyncio.to_thread(self.output.close, GOODBYE_S)
            await self.tethering.close(goodbye=self._exit_code is not None)
            self.board.close()

    async def _read_orders(self) -> None:
        """Join, then read every order from that moment on."""
        try:
            last = await self._join()
            while True:
                for identity, order in await self.store.orders(last):
                    last = identity
                    self.inbox.put_nowait(order)
        except StoreUnreachable as error:
            self.inbox.put_nowait(error)

    async def _join(self) -> str:
        fact = self._fact(NodeJoined, addr=self.addr, port=self.port.number, pid=os.getpid())
        last, shutdown, controller = await self.store.join(fact)
        log.info("joined as %s", self.incarnation)
        for order in (controller, shutdown):
            if order is not None:
                self.inbox.put_nowait(order)
        return last

    async def _send(self) -> None:
        """Tell the controller, in order; each fact as often as it takes."""
        while (fact := await self.outbox.get()) is not None:
            await self.store.tell(fact)

    async def _beat(self) -> None:
        interval_s = self.plan.fault_tolerance.heartbeat_interval_s
        keep = 2 * self.plan.total_nodes + 16
        while True:
            with contextlib.suppress(Exception):  # the next beat is as good as this one
                await asyncio.wait_for(self.store.beat(self._sign_of_life(), keep), interval_s)
            await asyncio.sleep(interval_s)

    def _sign_of_life(self) -> Beat:
        cycle = self.cycle
        return Beat(
            node=self.node,
            incarnation=self.incarnation,
            generation=self.generation,
            state=self.mode.value,
            replica=cycle.replica if cycle else None,
            cycle=cycle.number if cycle else 0,
            steps=self.board.steps(),
        )

    # ---- the loop

    def _handle(self, event: Event) -> None:
        if handler := _HANDLERS.get(type(event)):  # an order of a newer version is none of ours
            handler(self, event)

    def _on_round_opened(self, order: RoundOpened) -> None:
        if order.generation == self.generation:
            self._cycle_is_over(order.replica, order.cycle)

    def _on_replica_ended(self, order: ReplicaEnded) -> None:
        self._cycle_is_over(order.replica, order.cycle + 1)

    def _cycle_is_over(self, replica: str, next_cycle: int) -> None:
        self.opened[replica] = next_cycle
        cycle = self.cycle
        if cycle is None or self.leaving or self.fenced:
            return
        if replica == cycle.replica and next_cycle > cycle.number:
            self._stop(partial(self._get_ready, replica, next_cycle))

    def _on_round_closed(self, order: RoundClosed) -> None:
        if order.generation == self.generation and self.mode is Mode.STANDBY and not self.leaving:
            self._go(self._look_up(order.replica, order.cycle))

    async def _look_up(self, replica: str, cycle: int) -> None:
        assignment = await self.store.assignment(replica, cycle, self.node)
        self.inbox.put_nowait(Assigned(replica, cycle, assignment))

    def _on_assigned(self, event: Assigned) -> None:
        if event.assignment is None or self.mode is not Mode.STANDBY or self.leaving or self.fenced:
            return
        if (newer := self.opened.get(event.replica, 0)) > event.cycle:
            self._get_ready(event.replica, newer)  # its cycle was over before we could start
            return
        role = next(role for role in self.plan.roles if role.name == event.assignment.role)
        self.cycle = Cycle(event.replica, event.cycle, event.assignment, began=self.clock.monotonic())
        self.mode = Mode.ACTIVE
        log.info("%s cycle %d: group rank %d", event.replica, event.cycle, event.assignment.group_rank)
        self.port.release()
        logs = self.folder.cycle_logs(event.replica, self.generation, event.cycle)
        logs.mkdir(parents=True, exist_ok=True)
        for local_rank in range(event.assignment.workers):
            self._spawn(self.cycle, role, local_rank)

    def _spawn(self, cycle: Cycle, role: RolePlan, local_rank: int) -> None:
        rank = cycle.assignment.first_rank + local_rank
        env = worker_environment(
            cycle.assignment,
            local_rank=local_rank,
            job_id=self.folder.job_id,
            max_restarts=self.plan.fault_tolerance.max_restarts,
            generation=self.generation,
            replica=cycle.replica,
            cycle=cycle.number,
            node=self.node,
            own=role.env,
        )
        env |= self.board.prepare(rank, cycle.number)
        logs = self.folder.cycle_logs(cycle.replica, self.generation, cycle.number)
        prefix = f"[{cycle.replica} {rank}] "
        out = self.output.capture(logs / f"rank-{rank}.out", prefix)
        err = self.output.capture(logs / f"rank-{rank}.err", prefix)
        cycle.running.add(rank)
        self.workers.spawn(rank, role.command, env, role.workdir or self.plan.workdir, out, err)

    def _on_spawned(self, event: Spawned) -> None:
        cycle = self.cycle
        if cycle is None:
            return
        cycle.pids[event.rank] = event.pid
        if len(cycle.pids) == cycle.assignment.workers:
            spawn_s = self.clock.monotonic() - cycle.began
            self._tell(
                WorkersStarted, replica=cycle.replica, cycle=cycle.number, pids=dict(cycle.pids), spawn_s=spawn_s
            )

    def _on_exited(self, event: Exited) -> None:
        cycle = self.cycle
        if cycle is None:
            return
        cycle.running.discard(event.rank)
        if self.mode is not Mode.ACTIVE or self.leaving or self.fenced:
            return
        about = {"replica": cycle.replica, "cycle": cycle.number}
        if event.code != 0:
            cycle.failed = True
            step = self.board.steps().get(event.rank)
            ended = {"exit_code": event.code, "signal": event.signal, "error": event.error}
            self._tell(WorkerFailed, **about, rank=event.rank, **ended, step=step)
        elif not cycle.running and not cycle.failed:
            self._tell(WorkersDone, **about, step=max(self.board.steps().values(), default=None))

    def _first_step(self, rank: int, step: int) -> None:
        cycle = self.cycle
        if cycle is not None and self.mode is Mode.ACTIVE and not cycle.has_stepped:
            cycle.has_stepped = True  # once a node: thousands of ranks would all say the same
            self._tell(Progress, replica=cycle.replica, cycle=cycle.number, rank=rank, step=step)

    def _on_fence(self, order: Fence) -> None:
        if order.incarnation == self.incarnation and not self.leaving:
            log.warning("fenced: the controller gave this node up; its workers are stopped, and it joins anew")
            self.fenced = True
            self._stop(self._join_anew, grace_s=0.0)

    def _on_shutdown(self, order: Shutdown) -> None:
        self._leave(order.reason, order.exit_code)

    def _on_signal(self, event: Signal) -> None:
        self._leave(event.name, EXIT_DONE)

    def _on_store_unreachable(self, error: StoreUnreachable) -> None:
        log.error("%s", error)
        self._leave(str(error), EXIT_UNREACHABLE)

    def _on_controller_up(self, order: ControllerUp) -> None:
        self.tethering.controller_is(order, self.incarnation, self.workers.hold)

    # ---- stopping

    def _stop(self, then: Callable[[], None], grace_s: float | None = None) -> None:
        """Stop all workers, then go on with `then`; a later call replaces the `then` of an earlier one."""
        self.when_stopped = then
        if self.mode is not Mode.STOPPING or grace_s == 0.0:
            self.mode = Mode.STOPPING
            self._stop_began = self.clock.monotonic()
            self.workers.stop(self.plan.fault_tolerance.teardown_grace_s if grace_s is None else grace_s)

    def _on_stopped(self, event: Stopped | SupervisorDied) -> None:
        if isinstance(event, SupervisorDied):
            log.error("the supervisor died; this node leaves")
            self._exit("its supervisor died", EXIT_DONE, ())
            return
        if event.survivors:
            log.error("processes that SIGKILL did not end: %s; this node leaves", event.survivors)
            self._exit("processes survived SIGKILL", EXIT_DONE, event.survivors)
        elif self.when_stopped is not None:
            self.mode, then, self.when_stopped = Mode.STANDBY, self.when_stopped, None
            self.board.clear()
            self.cycle = None
            then()

    def _get_ready(self, replica: str, cycle: int) -> None:
        self.port.release()
        self.port = HeldPort()
        took = self.clock.monotonic() - self._stop_began
        self._tell(NodeReady, replica=replica, cycle=cycle, port=self.port.number, teardown_s=took)

    def _join_anew(self) -> None:
        self.incarnation, self._seq, self.fenced = new_incarnation(), 0, False
        self.port.release()
        self.port = HeldPort()
        self._go(self._join())

    def _leave(self, reason: str, exit_code: int) -> None:
        """End for good. The first reason wins; a second one only cuts the grace short."""
        again = self.leaving is not None
        if not again:
            log.info("leaving: %s", reason)
            self.leaving = (reason, exit_code)
        why, code = self.leaving or (reason, exit_code)
        self._stop(partial(self._exit, why, code, ()), grace_s=0.0 if again else None)

    def _exit(self, reason: str, exit_code: int, survivors: tuple[int, ...]) -> None:
        self._tell(NodeLeft, reason=reason, survivors=survivors)
        self._exit_code = exit_code

    # ---- words

    def _fact(self, kind: type[Any], **fields: Any) -> Any:
        self._seq += 1
        return kind(node=self.node, incarnation=self.incarnation, seq=self._seq, generation=self.generation, **fields)

    def _tell(self, kind: type[FromAgent], **fields: Any) -> None:
        self.outbox.put_nowait(self._fact(kind, **fields))

    def _go(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run beside the loop. What goes wrong there comes into the inbox; nothing fails unheard."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.inbox.put_nowait(error if isinstance(error, StoreUnreachable) else Crash(error))

    def _on_crash(self, event: Crash) -> None:
        raise event.error


_HANDLERS: dict[type[Any], Callable[[Agent, Any], None]] = {
    RoundOpened: Agent._on_round_opened,
    RoundClosed: Agent._on_round_closed,
    ReplicaEnded: Agent._on_replica_ended,
    Fence: Agent._on_fence,
    Shutdown: Agent._on_shutdown,
    ControllerUp: Agent._on_controller_up,
    Assigned: Agent._on_assigned,
    Spawned: Agent._on_spawned,
    Exited: Agent._on_exited,
    Stopped: Agent._on_stopped,
    SupervisorDied: Agent._on_stopped,
    Signal: Agent._on_signal,
    StoreUnreachable: Agent._on_store_unreachable,
    Crash: Agent._on_crash,
}
