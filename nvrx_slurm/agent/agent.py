"""The agent: one a node. Owns its node's processes and nothing else; decides nothing.

Everything that happens is posted to one inbox (an order, a worker's end, a hang, a signal), and one loop changes the
state. Beside the loop, each in a task of its own:

    heartbeat.py   heartbeats, the liveness connection, and the lease that the workers live by
    reporting.py   the facts that go to the controller, in order
    watching.py    which worker makes no progress (`hangs.py` decides)
    stacks.py      the stacks of all workers, written down

The rest, by when it is used: `joining.py` (the join, and the orders from then on), `starting.py`, `progress.py` (how
far the workers have come), `output.py`, `stopping.py`, `node_health.py`, `log_reader.py` (what the logs of a failed
cycle hold). `machine.py` lists what an agent touches of its node, `linux.py` is that on Linux.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from nvrx_slurm.agent import stopping
from nvrx_slurm.agent.commands import Commands
from nvrx_slurm.agent.events import (
    AgentMode,
    Assigned,
    Crash,
    Cycle,
    Done,
    Dumped,
    Event,
    Failing,
    JoinLost,
    Resumed,
    Signal,
    Terminated,
)
from nvrx_slurm.agent.hangs import Hang
from nvrx_slurm.agent.heartbeat import ControllerSilent, HeartbeatSender, LivenessClient
from nvrx_slurm.agent.joining import Joining, Orders
from nvrx_slurm.agent.machine import Machine
from nvrx_slurm.agent.prewarming import Prewarming
from nvrx_slurm.agent.reporting import FactPublisher, Reporting
from nvrx_slurm.agent.stacks import DUMP_FIRST_S, Dumping
from nvrx_slurm.agent.starting import start_workers
from nvrx_slurm.agent.stopping import Stopping
from nvrx_slurm.agent.watching import HangWatch
from nvrx_slurm.agent.workers import (
    CommandExited,
    Exited,
    Released,
    Spawned,
    Stopped,
    SupervisorDied,
    Tearing,
    WarmSaid,
)
from nvrx_slurm.errors import EXIT_DONE, EXIT_FAILED, EXIT_UNREACHABLE, StoreUnreachable
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import (
    PREEMPTED,
    CommandOrdered,
    ControllerUp,
    DumpOrdered,
    Fence,
    Heartbeat,
    JobSuspended,
    LogFindings,
    NodeIsolated,
    NodeLeft,
    NodeReady,
    NodeResumed,
    RendezvousClosed,
    RendezvousOpened,
    ReplicaEnded,
    Shutdown,
    Suspending,
    Terminating,
)
from nvrx_slurm.journal.restarts import InProcessRestart
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import AGAIN_S, HURRY, HURRY_WITHIN_S
from nvrx_slurm.util.standstill import standstill
from nvrx_slurm.util.tasks import end, start

log = get_logger("agent")

# How long the agent tries to post its last facts once its workers are gone.
GOODBYE_S = 5.0

# How long what the workers have printed may take to the job's log. Less than the batch host waits for an agent: its
# SIGTERM would end the rest.
OUTPUT_S = 4.0

# How long an agent that got a signal waits for the controller's shutdown order, which holds the reason.
REASON_S = 2.0

# After so many deaths of its supervisor within so long the agent leaves. Where none can run, as in a full memory
# cgroup, each is a join and a loss in the journal. The batch host starts agents again, with pauses and a bound.
MOST_SUPERVISORS, SUPERVISORS_S = 5, 60.0


class Agent:
    """Runs one node's part of a job; `run` returns the exit code of the process.

    `ending_grace_s`: what Slurm leaves of the teardown's grace when it is Slurm that ends the job.
    `shares_signals`: Slurm started the agent, and signals it and its workers at once.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        folder: JobFolder,
        node: str,
        addr: str,
        generation: int,
        store: StoreClient,
        token: str,
        machine: Machine,
        clock: Clock,
        ending_grace_s: float,
        shares_signals: bool,
    ) -> None:
        self.plan, self.folder, self.node, self.generation, self.store = plan, folder, node, generation, store
        self.clock, self.ending_grace_s, self.machine = clock, ending_grace_s, machine
        bounds = plan.fault_tolerance
        self.inbox: asyncio.Queue[Event] = asyncio.Queue()
        post = self.inbox.put_nowait
        self.publisher = FactPublisher(
            node=node, generation=generation, store=store, incarnation=machine.new_incarnation()
        )
        self.workers, self.output, self.stacks = machine.workers(post), machine.output, machine.stacks
        self.liveness = LivenessClient(
            machine.connect,
            machine.random_s,
            hold=self.workers.hold,
            fenced=lambda incarnation: post(Fence(node=node, incarnation=incarnation)),
            nodes=plan.total_nodes,
        )
        self.board = machine.board(self._first_step, lambda *words: post(Failing(*words)), self._restarted_in_process)
        self.watch = HangWatch(bounds.hang, board=self.board, output=self.output, clock=clock, post=post)
        self.reporting = Reporting(
            self.publisher,
            board=self.board,
            watch=self.watch,
            output=self.output,
            clock=clock,
            post=post,
            shares_signals=shares_signals,
        )
        self.dumping = Dumping(self.stacks, publisher=self.publisher, go=self._go, post=post)
        self.commands = Commands(
            store=store, workers=self.workers, publisher=self.publisher, clock=clock, go=self._go
        )
        self.prewarming = Prewarming(
            plan,
            folder=folder,
            node=node,
            workers=self.workers,
            stacks=self.stacks,
            publisher=self.publisher,
            clock=clock,
            go=self._go,
        )
        self.stopping = Stopping(bounds, workers=self.workers, board=self.board, dumping=self.dumping, clock=clock)
        self.orders = Orders(store, node, post)
        self.joining = Joining(
            machine, addr=addr, token=token, store=store, publisher=self.publisher, workers=self.workers, post=post
        )
        self.heartbeat = HeartbeatSender(
            bounds=bounds,
            nodes=plan.total_nodes,
            store=store,
            liveness=self.liveness,
            clock=clock,
            make=self._heartbeat,
            lease=self.workers.lease,
            post=post,
        )
        self.mode = AgentMode.STANDBY
        self.cycle: Cycle | None = None
        self.opened: dict[str, int] = {}  # replica → the newest cycle it was called to
        self.fenced = False
        self.leaving: tuple[str, int] | None = None  # why, and with what exit code
        self._tasks: set[asyncio.Task[Any]] = set()
        self._signalled_at: float | None = None
        self._hurry_at = -math.inf
        self._supervisors_died: list[float] = []  # when, within the last `SUPERVISORS_S`
        self._suspended: asyncio.Task[None] | None = None  # sits out a suspension
        self._stood_still_s = 0.0
        self._exit_code: int | None = None
        self._last_step: int | None = None  # of the workers that were stopped last

    # ---- life

    async def run(self) -> int:
        """Join, serve until the job ends, leave no process behind."""
        self.workers.start()  # first: the supervisor keeps the warm processes and takes the fence socket
        self.prewarming.begin()
        self.joining.open_fence()
        self.board.open()
        publishing = self._go(self.publisher.run())
        self._go(self._read_orders())
        self._go(self.heartbeat.run())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTSTP, HURRY):
            self.machine.on_signal(number, lambda name: self.inbox.put_nowait(Signal(name)))
        # `sbatch --signal` and `scancel --signal` signal every process of a step: these are for its workers.
        for number in (signal.SIGUSR1, signal.SIGHUP):
            self.machine.on_signal(number, lambda name: log.info("%s: left to the workers", name))
        try:
            while self._exit_code is None:
                event = await self.inbox.get()
                if handler := _HANDLERS.get(type(event)):  # an order that only a newer version knows is skipped
                    handler(self, event)
            self.publisher.finish()
            await asyncio.wait([publishing], timeout=GOODBYE_S)
            return self._exit_code
        finally:
            for task in self._tasks:
                task.cancel()
            # The workers end before the liveness connection does: to the controller its end means that none is left.
            self.workers.close()
            output = asyncio.to_thread(self.output.close, OUTPUT_S)
            await asyncio.gather(output, self.machine.health.close(), self.machine.log_reader.close())
            await self.liveness.close(goodbye=self._exit_code is not None)
            self.board.close()
            await end(self._tasks)

    async def _read_orders(self) -> None:
        """Join, then read every order from that moment on."""
        newest = await self.joining.join()
        self.prewarming.joined()
        await self.orders.read(newest)

    def _heartbeat(self) -> Heartbeat:
        cycle = self.cycle
        self.prewarming.look(self.board)
        return Heartbeat(
            node=self.node,
            incarnation=self.publisher.incarnation,
            generation=self.generation,
            state=self.mode.value,
            replica=cycle.replica if cycle else None,
            cycle=cycle.number if cycle else 0,
            **self.watch.summary(),
            teardown=self.stopping.phase,
        )

    # ---- the loop

    def _on_rendezvous_opened(self, order: RendezvousOpened) -> None:
        if order.generation == self.generation:
            self._cycle_is_over(order.replica, order.cycle, order.dump)

    def _on_replica_ended(self, order: ReplicaEnded) -> None:
        self._cycle_is_over(order.replica, order.cycle + 1)

    def _cycle_is_over(self, replica: str, next_cycle: int, dump: str | None = None) -> None:
        # Kept by a standby node, too: an assignment that is being looked up may be out of date when it arrives.
        self.opened[replica] = next_cycle
        self.prewarming.stop_waiting()
        cycle = self.cycle
        if cycle is None or self.leaving or self.fenced:
            return
        if replica == cycle.replica and next_cycle > cycle.number:
            self._stop(partial(self._get_ready, replica, next_cycle, cycle), dump=dump)

    def _on_rendezvous_closed(self, order: RendezvousClosed) -> None:
        if order.generation == self.generation and self.mode is AgentMode.STANDBY and not self.leaving:
            self._go(self._look_up(order.replica, order.cycle))

    async def _look_up(self, replica: str, cycle: int) -> None:
        # Taken before the wait: while the store answers, this agent may be fenced and join under another name.
        asked_by = self.publisher.incarnation
        assignment = await self.orders.assignment(replica, cycle, asked_by)
        self.inbox.put_nowait(Assigned(replica, cycle, assignment, asked_by))

    def _on_assigned(self, event: Assigned) -> None:
        if event.assignment is None or self.mode is not AgentMode.STANDBY or self.leaving or self.fenced:
            return
        if event.asked_by != self.publisher.incarnation:
            return  # it was given to an incarnation that is fenced by now: another node may have it
        if (newer := self.opened.get(event.replica, 0)) > event.cycle:
            self._get_ready(event.replica, newer)  # its cycle was over before we could start
            return
        if not self.heartbeat.is_in_touch:
            # After a partition orders may arrive before a heartbeat does; workers wait for that.
            self._go(self._assign_after(self.heartbeat.touch(), event))
            return
        role = event.assignment.role
        if self.prewarming.is_warming(role):
            # Workers that started now would import the same, each for itself.
            self._go(self._assign_after(self.prewarming.settled(role), event))
            return
        self.cycle = Cycle(event.replica, event.cycle, event.assignment, began=self.clock.monotonic())
        self.mode = AgentMode.ACTIVE
        log.info("%s cycle %d: group rank %d", event.replica, event.cycle, event.assignment.group_rank)
        # The port stays held: seconds may pass before its user listens. The lease comes before the workers: the
        # supervisor starts none on one that has lapsed.
        self.heartbeat.renew()
        self.watch.begin(event.assignment.seen)
        start_workers(
            self.cycle,
            plan=self.plan,
            folder=self.folder,
            node=self.node,
            generation=self.generation,
            workers=self.workers,
            board=self.board,
            output=self.output,
            stacks=self.stacks,
            post=self.inbox.put_nowait,
            warm=self.prewarming.assigned(self.cycle),
            learn=self.prewarming.learns(role),
        )
        for rank in self.cycle.ranks:  # one that never gets to its program hangs too; `Spawned` starts its time again
            self.watch.started(rank)
        self.machine.health.begin()

    async def _assign_after(self, wait: Coroutine[Any, Any, None], event: Assigned) -> None:
        await wait
        self.inbox.put_nowait(event)  # once more through the inbox: meanwhile the cycle may be over

    def _on_spawned(self, event: Spawned) -> None:
        if self.cycle is not None and self.reporting.spawned(self.cycle, event):
            self.prewarming.started(self.cycle)

    def _on_warm_said(self, event: WarmSaid) -> None:
        self.prewarming.heard(event)

    def _on_exited(self, event: Exited) -> None:
        if self.cycle is not None:
            at_work, restarting = self._is_at_work(), self._is_restarting()
            self.reporting.exited(self.cycle, event, at_work=at_work, restarting=restarting)

    def _on_terminated(self, event: Terminated) -> None:
        if event.cycle is self.cycle and (self._is_at_work() or self._is_restarting()):
            self.reporting.terminated(event.cycle, event.rank)

    def _on_done(self, event: Done) -> None:
        if event.cycle is self.cycle and self._is_at_work():
            self.reporting.done(event.cycle)

    def _on_failing(self, event: Failing) -> None:
        if self.cycle is not None and (self._is_at_work() or self._is_restarting()):
            asked_at = self.stopping.began if self._is_restarting() else None
            self.reporting.failing(self.cycle, event, asked_at=asked_at)

    def _first_step(self, rank: int, step: int) -> None:
        if self.cycle is not None and self.mode is AgentMode.ACTIVE:
            self.reporting.first_step(self.cycle, rank, step)
            self.prewarming.stepped(self.cycle, rank)
        self.watch.look()

    def _restarted_in_process(self, restart: InProcessRestart) -> None:
        if self.cycle is not None and self._is_at_work():
            log.info("%s restarted in process: %s", self.cycle.replica, restart.cause)
            self.reporting.restarted(self.cycle, restart)
        self.watch.look()

    def _is_at_work(self) -> bool:
        return self.mode is AgentMode.ACTIVE and not self.leaving and not self.fenced

    def _is_restarting(self) -> bool:
        """The workers are stopped for the next rendezvous."""
        return self.mode is AgentMode.STOPPING and not self.leaving and not self.fenced

    # ---- hangs and stacks

    def _on_hang(self, event: Hang) -> None:
        cycle = self.cycle
        if cycle is None or not self._is_at_work() or event.rank in cycle.reported or event.rank not in cycle.running:
            return
        log.warning("rank %d hangs: %s", event.rank, event.why)
        cycle.reported.add(event.rank)
        # The stacks of all workers are written first: the report of the hang names the file.
        self.dumping.begin(cycle, f"rank {event.rank}: {event.why}", DUMP_FIRST_S, hang=event)
        self._look_at_node(cycle, f"rank {event.rank} hangs")

    def _on_dumped(self, event: Dumped) -> None:
        event.cycle.dumped = True
        self.dumping.publish(event, at_work=event.cycle is self.cycle and self._is_at_work())
        # Also where the cycle is over: a stop that waits for its stacks must go on.
        if event.then is not None:
            event.then()

    def _on_dump_ordered(self, order: DumpOrdered) -> None:
        cycle = self.cycle
        if cycle is None or order.replica not in (None, cycle.replica):
            return
        here = cycle.ranks.intersection(order.ranks) if order.ranks else cycle.ranks
        if here:  # even if none of them runs any more: the requester waits for an answer
            self.dumping.begin(cycle, f"asked for ({order.request})", DUMP_FIRST_S, ranks=here, request=order.request)

    def _on_command_ordered(self, order: CommandOrdered) -> None:
        if order.node != self.node or order.generation != self.generation:
            return
        cycle = self.cycle
        # The order may be read late: by then its cycle is over, or this node has lost its ranks.
        is_its = cycle is not None and (order.replica, order.cycle) == (cycle.replica, cycle.number)
        self.commands.begin(order, cycle if is_its and self._is_at_work() else None)

    def _on_command_exited(self, event: CommandExited) -> None:
        self.commands.exited(event, at_work=self._is_at_work())

    # ---- ends

    def _on_fence(self, order: Fence) -> None:
        self._begin_again(order.incarnation, "fenced: the controller gave this node up")

    def _on_join_lost(self, event: JoinLost) -> None:
        self._begin_again(event.incarnation, "the store has lost the join of this node with its data")

    def _begin_again(self, incarnation: str, why: str) -> None:
        if incarnation == self.publisher.incarnation and not self.leaving and not self.fenced:
            log.warning("%s; its workers are killed, and it joins again", why)
            self.fenced = True
            self._stop(self._join_again, grace_s=0.0)

    def _on_shutdown(self, order: Shutdown) -> None:
        ends_for_slurm = order.reason in ("cancelled", "interrupted", PREEMPTED)
        grace_s = self.ending_grace_s if ends_for_slurm else None
        self._leave(order.reason, order.exit_code, grace_s=grace_s, checkpoint=order.checkpoint, dump=order.dump)

    def _on_signal(self, event: Signal) -> None:
        if event.name == signal.SIGTSTP.name:  # Slurm sends it to suspend a job, and SIGSTOP two seconds later
            self.publisher.publish(Suspending)
            self._suspend()
            return
        first, now = self.leaving is None, self.clock.monotonic()
        if event.name == HURRY.name and first:
            before, self._hurry_at = self._hurry_at, now
            if now - before > HURRY_WITHIN_S:
                log.info("%s: left to the workers", event.name)
                return
        self._signalled_at = now if self._signalled_at is None else self._signalled_at
        hurry = event.name == HURRY.name or now - self._signalled_at > AGAIN_S
        if first or hurry:  # else it is the same one: srun passes on what Slurm has sent already
            self._leave(event.name, EXIT_DONE, grace_s=0.0 if hurry else self.ending_grace_s)
        if first and event.name == signal.SIGTERM.name:
            self.publisher.publish(Terminating)  # a preemption with a GraceTime signals no other process than these
        if first and not hurry:
            # Slurm signals every process of a job at once, so the controller's shutdown order, with the reason, will
            # follow. An agent that left without it would look like a lost node. After `REASON_S` it leaves anyway:
            # the same signal again means "now".
            loop = asyncio.get_running_loop()
            self.stopping.then = partial(loop.call_later, REASON_S, self.inbox.put_nowait, event)

    def _on_store_unreachable(self, error: StoreUnreachable) -> None:
        log.error("%s", error)
        # With EXIT_UNREACHABLE the agent's process takes the batch host for lost, and has the job requeued.
        self._leave(str(error), EXIT_FAILED if error.refused else EXIT_UNREACHABLE, checkpoint=True)

    def _on_controller_silent(self, event: ControllerSilent) -> None:
        if not self.leaving:
            log.error("no controller for %.0f s", event.for_s)
            self._leave(f"no controller for {event.for_s:.0f} s", EXIT_UNREACHABLE, checkpoint=True)

    # ---- suspensions

    def _on_job_suspended(self, order: JobSuspended) -> None:
        if self.publisher.incarnation in order.incarnations:
            self.heartbeat.hold(order.suspension)
            self._suspend()

    def _suspend(self) -> None:
        if self._suspended is not None:  # Slurm's signal and the controller's order announce the same suspension
            self._suspended.cancel()
        self.watch.pause()
        self._suspended = self._go(self._sit_out_suspension())

    async def _sit_out_suspension(self) -> None:
        self.inbox.put_nowait(Resumed(await standstill(self.clock)))

    def _on_resumed(self, event: Resumed) -> None:
        self._suspended, self._stood_still_s = None, event.stood_still_s
        log.info("resumed: this node stood still for %.1f s", event.stood_still_s)
        self.watch.resume(event.stood_still_s)
        self.heartbeat.release(event.stood_still_s)

    def _on_released(self, event: Released) -> None:
        self.publisher.publish(NodeResumed, stood_still_s=self._stood_still_s, suspension=event.grant)

    def _on_controller_up(self, order: ControllerUp) -> None:
        self.liveness.controller_is(order, self.publisher.incarnation)
        self._go(self.joining.look_for_join(order))

    # ---- stopping

    def _stop(self, then: Callable[[], object], **how: Any) -> None:
        """Stop all workers, then go on with `then`; see `Stopping.stop`."""
        begins, cycle = self.mode is not AgentMode.STOPPING, self.cycle
        if begins:
            self.mode = AgentMode.STOPPING
            self.watch.end()
            if cycle is not None:
                self.reporting.publish_restarts(cycle)
                self.reporting.publish_learned(cycle)
        self.stopping.stop(cycle, then, **how)
        if begins and cycle is not None and (cycle.running or cycle.reported):  # else all has gone well
            self._look_at_node(cycle, "its workers are stopped")  # only now: nothing delays the stop
            if not self.leaving and not self.fenced:
                self._read_logs(cycle)

    def _on_tearing(self, event: Tearing) -> None:
        self.stopping.goes_on(event, self.cycle)

    def _on_stopped(self, event: Stopped) -> None:
        self.stopping.phase = None
        if event.survivors:
            self._exit_with_survivors(event.survivors)
        elif event.lapsed and self.mode is AgentMode.ACTIVE and (cycle := self.cycle) is not None:
            # The agent did not ask for this stop: the lease lapsed. The report waits until the controller is back.
            for_s = self.plan.fault_tolerance.fence_timeout
            log.error("neither store nor controller has answered for %.0f s: this node's workers were killed", for_s)
            cycle.running.clear()
            self.watch.end()
            self.publisher.publish(NodeIsolated, replica=cycle.replica, cycle=cycle.number, for_s=for_s)
        elif (then := self.stopping.over()) is not None:
            self.machine.log_reader.whole()
            # Before `then`, which may get this node ready for another cycle.
            self._forget_cycle()
            then()

    def _read_logs(self, cycle: Cycle) -> None:
        """Have the logs of this node's ranks read, and publish what is found."""
        logs = self.folder.cycle_logs(cycle.replica, self.generation, cycle.number)
        incarnation = self.publisher.incarnation

        def found(whole: bool, data: bytes) -> None:
            if incarnation == self.publisher.incarnation and not self.fenced and not self.leaving:
                self.publisher.publish(LogFindings, replica=cycle.replica, cycle=cycle.number, whole=whole, data=data)

        self.machine.log_reader.begin(logs, cycle.assignment, found)

    def _look_at_node(self, cycle: Cycle, why: str) -> None:
        self.machine.health.look(self._health_of(cycle), f"{cycle.replica} cycle {cycle.number}: {why}")

    def _health_of(self, cycle: Cycle) -> Path:
        return self.folder.cycle_health(cycle.replica, self.generation, cycle.number)

    def _forget_cycle(self) -> None:
        if self.cycle is not None:
            self.cycle.step = max(self.board.steps().values(), default=None)
            # An agent that stays reports the step with `NodeReady`; for one that leaves `NodeLeft` is the last fact.
            self._last_step = self.cycle.step if self.leaving else None
        self.commands.end_all()
        self.mode, self.cycle = AgentMode.STANDBY, None
        self.board.clear()
        self.stacks.clear()

    def _on_supervisor_died(self, event: SupervisorDied) -> None:
        if event.survivors:
            self._exit_with_survivors(event.survivors)
            return
        if self.leaving is not None:
            self._exit(*self.leaving, ())
            return
        now = self.clock.monotonic()
        self._supervisors_died = [at for at in self._supervisors_died if now - at < SUPERVISORS_S] + [now]
        if len(self._supervisors_died) >= MOST_SUPERVISORS:
            log.error(
                "the supervisor ended %d times within %.0f s; this node leaves", MOST_SUPERVISORS, SUPERVISORS_S
            )
            self._exit("its supervisor ends again and again", EXIT_FAILED, ())
            return
        log.warning("the supervisor was killed, and its workers with it; this node joins again")
        self.workers.start()
        self.prewarming.begin()
        self.watch.end()
        self.stopping.over()
        self._forget_cycle()
        self._join_again()

    def _get_ready(self, replica: str, cycle: int, over: Cycle | None = None) -> None:
        """`over`: the cycle before, if this node was in it."""
        bounds, files = self.plan.fault_tolerance.teardown, self.machine.step_files
        waits: list[Coroutine[Any, Any, Any]] = []
        if bounds.gpu_memory_below is not None:
            left_s = max(0.0, bounds.gpu_reclaim_timeout - self.stopping.took_s())  # the stop is part of the budget
            waits.append(stopping.reclaim(bounds.gpu_memory_below, left_s, self.clock))
        if over is not None and files.are_named:
            waits.append(self._read_step(over))
        if waits:
            self._go(self._get_ready_after(waits, replica, cycle, over))
        else:
            self._say_ready(replica, cycle, over)

    async def _get_ready_after(
        self, waits: list[Coroutine[Any, Any, Any]], replica: str, cycle: int, over: Cycle | None
    ) -> None:
        await asyncio.gather(*waits)  # at once: the GPUs' memory comes back while files are read
        if self.mode is AgentMode.STANDBY and not self.leaving and not self.fenced:
            self._say_ready(replica, cycle, over)

    async def _read_step(self, over: Cycle) -> None:
        logs = self.folder.cycle_logs(over.replica, self.generation, over.number)
        on_file = await self.machine.step_files.last_step(logs, over.ranks)
        # Slots and files may report different steps: the furthest counts.
        over.step = max((step for step in (over.step, on_file) if step is not None), default=None)

    def _say_ready(self, replica: str, cycle: int, over: Cycle | None) -> None:
        port, took_s = self.joining.hold_port(), self.stopping.took_s() if over is not None else 0.0
        step: int | None = None
        peers_lost: tuple[int, ...] = ()
        if over is not None:
            self.reporting.terminated(over)  # first: the rendezvous may close with the next fact
            step, peers_lost = over.step, tuple(sorted(over.peers_lost))
        self.publisher.publish(
            NodeReady,
            replica=replica,
            cycle=cycle,
            port=port,
            teardown_s=took_s,
            step=step,
            peers_lost=peers_lost,
        )
        if over is not None:
            self.machine.health.look_for_news(self._health_of(over))

    def _join_again(self) -> None:
        self.heartbeat.release_now()  # the next incarnation has no grant to outlive its lease
        self.publisher.renew_incarnation()
        # An order that the store has lost may have opened a later cycle than the one that this agent gets now. What
        # was looked up before is for the incarnation before alone.
        self.opened.clear()
        self.fenced = False
        # Only now: the key is the new incarnation's. The old one may have been sent over the network.
        self.joining.open_fence()
        self.joining.hold_port()
        self._go(self.joining.join())

    def _leave(self, reason: str, exit_code: int, **how: Any) -> None:
        """End for good. The first reason wins, and the first grace; a later one of 0 skips to the kill."""
        if self.leaving is None:
            log.info("leaving: %s", reason)
            self.leaving = (reason, exit_code)
            self.prewarming.leave()
            self.store.hurry(GOODBYE_S + self.plan.fault_tolerance.teardown.grace)
        self._stop(partial(self._exit, *self.leaving, ()), **how)

    def _exit_with_survivors(self, survivors: tuple[int, ...]) -> None:
        log.error("processes that SIGKILL did not end: %s; this node leaves", survivors)
        self._exit("processes survived SIGKILL", EXIT_DONE, survivors)

    def _exit(self, reason: str, exit_code: int, survivors: tuple[int, ...]) -> None:
        self.publisher.publish(NodeLeft, reason=reason, survivors=survivors, step=self._last_step)
        self._exit_code = exit_code

    # ---- tasks

    def _go(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run beside the loop. What goes wrong there comes into the inbox; nothing fails unheard."""

        def failed(error: BaseException) -> None:
            self.inbox.put_nowait(error if isinstance(error, StoreUnreachable) else Crash(error))

        return start(work, self._tasks, failed)

    def _on_crash(self, event: Crash) -> None:
        raise event.error


_HANDLERS: dict[type[Any], Callable[[Agent, Any], None]] = {
    RendezvousOpened: Agent._on_rendezvous_opened,
    RendezvousClosed: Agent._on_rendezvous_closed,
    ReplicaEnded: Agent._on_replica_ended,
    Fence: Agent._on_fence,
    JoinLost: Agent._on_join_lost,
    Shutdown: Agent._on_shutdown,
    DumpOrdered: Agent._on_dump_ordered,
    CommandOrdered: Agent._on_command_ordered,
    CommandExited: Agent._on_command_exited,
    ControllerUp: Agent._on_controller_up,
    JobSuspended: Agent._on_job_suspended,
    Resumed: Agent._on_resumed,
    Released: Agent._on_released,
    Assigned: Agent._on_assigned,
    Spawned: Agent._on_spawned,
    WarmSaid: Agent._on_warm_said,
    Exited: Agent._on_exited,
    Failing: Agent._on_failing,
    Terminated: Agent._on_terminated,
    Done: Agent._on_done,
    Hang: Agent._on_hang,
    Dumped: Agent._on_dumped,
    Tearing: Agent._on_tearing,
    Stopped: Agent._on_stopped,
    SupervisorDied: Agent._on_supervisor_died,
    Signal: Agent._on_signal,
    StoreUnreachable: Agent._on_store_unreachable,
    ControllerSilent: Agent._on_controller_silent,
    Crash: Agent._on_crash,
}
