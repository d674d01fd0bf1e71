"""The facts that an agent sends: that a cycle's workers run, step, restart, fail, and are done. Each once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import msgspec

from nvrx_slurm.agent.events import Cycle, Done, Failing, Terminated
from nvrx_slurm.agent.machine import BoardPort, OutputPort
from nvrx_slurm.agent.peers import ended_by_peer, says_peer_lost
from nvrx_slurm.agent.watching import HangWatch
from nvrx_slurm.agent.workers import Exited, Spawned
from nvrx_slurm.journal.records import (
    FromAgent,
    Learned,
    Progress,
    RestartedInProcess,
    WorkerFailed,
    WorkersDone,
    WorkersStarted,
)
from nvrx_slurm.journal.restarts import InProcessRestart
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.ids import succeeding

# How long after a worker's end by SIGTERM the agent may get that signal too, if it is Slurm's.
OUR_SIGNAL_S = 0.2

# So many restarts in process are reported one by one in a cycle, and then all of so many seconds as one: a function
# that fails at once, again and again, does so a hundred times a second, and the journal is kept for weeks.
RESTARTS_AT_ONCE = 16
RESTARTS_EVERY_S = 10.0


class Reporting(msgspec.Struct, eq=False):
    """Keeps count in the cycle itself: who runs, and of whom the controller knows.

    `shares_signals`: Slurm started the agent, and signals it and its workers at once.
    """

    publisher: FactPublisher
    board: BoardPort
    watch: HangWatch
    output: OutputPort
    clock: Clock
    post: Callable[[Terminated | Done], None]
    shares_signals: bool

    def spawned(self, cycle: Cycle, event: Spawned) -> bool:
        """Whether it was the last one of this node."""
        cycle.pids[event.rank] = event.pid
        cycle.warm += event.warm
        cycle.cold = event.cold or cycle.cold
        self.watch.started(event.rank)
        if len(cycle.pids) == cycle.assignment.workers:
            spawn_s = self.clock.monotonic() - cycle.began
            self._publish(
                WorkersStarted, cycle, pids=dict(cycle.pids), spawn_s=spawn_s, warm=cycle.warm, cold=cycle.cold
            )
            return True
        return False

    def exited(self, cycle: Cycle, event: Exited, *, at_work: bool, restarting: bool) -> None:
        """`at_work`: it was not asked to. `restarting`: it was, since something in its cycle has failed; how it ended
        may show what that was."""
        cycle.running.discard(event.rank)
        self.watch.ended(event.rank, well=event.code == 0)
        if event.rank in cycle.reported or not (at_work or restarting):
            return
        # After the stop signal a worker may end in any way; only SIGKILL then comes from elsewhere for certain.
        if event.sent and (event.signal != signal.SIGKILL or signal.SIGKILL in event.sent):
            return
        if event.signal == signal.SIGTERM:
            # Slurm ends a job by signals to workers and agents at once: that is no failure, and costs no restart.
            # So wait whether this agent gets the signal too.
            cycle.reported.add(event.rank)
            cycle.terminated[event.rank] = self.clock.monotonic() if event.at is None else event.at
            asyncio.get_running_loop().call_later(OUR_SIGNAL_S, self.post, Terminated(cycle, event.rank))
        elif event.code != 0:
            error = event.error or (self.board.recorded_error(event.rank) if event.signal is None else None)
            how = {"exit_code": event.code, "signal": event.signal}
            unexplained = error is None and (event.code is not None or event.signal == signal.SIGABRT)
            peer_lost = ended_by_peer(self.output.last_lines(event.rank)) if unexplained else False
            self._failed(cycle, event.rank, event.at, restarting=restarting, peer_lost=peer_lost, error=error, **how)
        elif not cycle.running and not cycle.reported:
            if self.shares_signals:
                # A worker may save at SIGTERM and exit with 0: a job that is cancelled is not done for that.
                asyncio.get_running_loop().call_later(OUR_SIGNAL_S, self.post, Done(cycle))
            else:
                self.done(cycle)

    def done(self, cycle: Cycle) -> None:
        """All workers ended with 0, and of themselves."""
        self.publish_restarts(cycle)
        self._publish(WorkersDone, cycle, step=max(self.board.steps().values(), default=None))
        self.publish_learned(cycle)

    def terminated(self, cycle: Cycle, rank: int | None = None) -> None:
        """The agent itself has got no signal since that worker died by SIGTERM; None: since any did."""
        for each in sorted(cycle.terminated) if rank is None else [rank]:
            if (at := cycle.terminated.pop(each, None)) is not None:
                self._failed(cycle, each, at, signal=int(signal.SIGTERM))

    def failing(self, cycle: Cycle, event: Failing, *, asked_at: float | None) -> None:
        """`asked_at`: when the workers were asked to stop, on the monotonic clock; None: they were not."""
        # The interpreter reports it before it ends; the kernel only when the memory of the process is freed.
        rank, is_current = event.rank, cycle.pids.get(event.rank) == event.pid
        if not is_current or rank not in cycle.running or rank in cycle.reported:
            return
        if asked_at is None or (event.at is not None and event.at < asked_at):
            restarting = asked_at is not None
            # A worker that is a launcher (torchrun) ends with its own exception, and its error file has the first one
            # of its children. Of a worker's own exception the datagram says more: what it came from.
            recorded = self.board.recorded_error(rank)
            error = event.what if recorded is None or event.what.startswith(recorded) else recorded
            self._failed(cycle, rank, event.at, restarting=restarting, exit_code=1, error=error)
        elif says_peer_lost(event.what):
            cycle.peers_lost.add(rank)

    def first_step(self, cycle: Cycle, rank: int, step: int) -> None:
        if not cycle.has_stepped:  # once a node: thousands of ranks would all report the same
            cycle.has_stepped = True
            self._publish(Progress, cycle, rank=rank, step=step)

    def restarted(self, cycle: Cycle, restart: InProcessRestart) -> None:
        """A group of ranks, of which one of this node's reports, has begun its function again."""
        cycle.restarts += 1
        cycle.unreported += 1
        cycle.newest = restart
        if cycle.restarts <= RESTARTS_AT_ONCE:
            self.publish_restarts(cycle)
        elif cycle.unreported == 1:
            asyncio.get_running_loop().call_later(RESTARTS_EVERY_S, self.publish_restarts, cycle)

    def publish_restarts(self, cycle: Cycle) -> None:
        """Report those that have not been reported yet, as one."""
        if cycle.unreported:
            self._publish(RestartedInProcess, cycle, restart=cycle.newest, times=cycle.unreported)
            cycle.unreported = 0

    def publish_learned(self, cycle: Cycle) -> None:
        if seen := self.watch.news():
            self.publisher.publish(Learned, role=cycle.assignment.role, seen=seen)

    def _failed(
        self,
        cycle: Cycle,
        rank: int,
        at: float | None,
        *,
        restarting: bool = False,
        peer_lost: bool = False,
        error: str | None = None,
        **how: Any,
    ) -> None:
        cycle.reported.add(rank)
        peer_lost = peer_lost or (error is not None and says_peer_lost(error))
        if peer_lost:
            cycle.peers_lost.add(rank)
            if restarting:  # a consequence of what is known already: `node_ready` counts it
                return
        # A worker's own word may be anything: it did not end before the cycle began, nor later than now.
        ago_s = 0.0 if at is None else max(0.0, self.clock.monotonic() - max(at, cycle.began))
        step = self.board.steps().get(rank)
        self._publish(WorkerFailed, cycle, rank=rank, **how, error=error, step=step, ago_s=ago_s, peer_lost=peer_lost)

    def _publish(self, kind: type[Any], cycle: Cycle, **what: Any) -> None:
        self.publisher.publish(kind, replica=cycle.replica, cycle=cycle.number, **what)


class FactPublisher:
    """Sends from a task of its own: a slow store never delays the agent's handling of its workers. `joined` is set
    when the join of the present incarnation has been answered, or has failed."""

    def __init__(self, *, node: str, generation: int, store: StoreClient, incarnation: str) -> None:
        self._node, self._generation, self._store = node, generation, store
        self._outbox: asyncio.Queue[FromAgent | None] = asyncio.Queue()
        self.joined = asyncio.Event()
        self._seq = self._joins = 0
        self._process = self.incarnation = incarnation

    def renew_incarnation(self) -> None:
        """Use a new incarnation from now on. Its name shows that it is newer: joins may overtake each other."""
        self._joins += 1
        self.incarnation, self._seq, self.joined = succeeding(self._process, self._joins), 0, asyncio.Event()

    def fact(self, kind: type[Any], **fields: Any) -> Any:
        """The next fact of this incarnation."""
        self._seq += 1
        own = {"node": self._node, "incarnation": self.incarnation, "seq": self._seq, "generation": self._generation}
        return kind(**own, **fields)

    def publish(self, kind: type[FromAgent], **fields: Any) -> None:
        self._outbox.put_nowait(self.fact(kind, **fields))

    def finish(self) -> None:
        """Publish no more; `run` returns once all is sent."""
        self._outbox.put_nowait(None)

    async def run(self) -> None:
        while (fact := await self._outbox.get()) is not None:
            if fact.incarnation == self.incarnation:
                await self.joined.wait()  # a fact that overtook its join would be stale
            await self._store.post(fact)
