"""The simulated supervisor, by the real one's rules (`agent/supervisor.py`), on what its kernel guarantees.

- It serves the agent's messages in their order, and looks at the lease before each: after a freeze as well.
- The lease's self-fence timer is the kernel's: it kills a supervisor that is frozen, too.
- When it dies, the kernel closes its fence socket and its end of the liveness connection, and kills its workers a
  moment later.
- When the agent dies, it kills the workers, and ends.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nvrx_slurm.agent.supervisor import SAY_EVERY_S, SELF_FENCE_S
from nvrx_slurm.agent.teardown import Phase, Teardown
from nvrx_slurm.agent.workers import Exited, Released, Spawned, Stopped, SupervisorDied, Tearing, WorkerEvent
from nvrx_slurm.lab.simulation.loop import Handle
from nvrx_slurm.lab.simulation.process import Held, SimulatedProcess
from nvrx_slurm.lab.simulation.sockets import SimulatedFenceSocket
from nvrx_slurm.lab.simulation.workers import EXEC_S, SimulatedWorker

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.node import SimulatedNode

# A dying process closes its sockets up to so long before the kernel kills its children.
DEATH_S = 0.002


class SimulatedSupervisor(SimulatedProcess):
    """One supervisor process of a node, started by the agent process `agent`; `post` takes what it reports."""

    def __init__(self, node: SimulatedNode, agent: SimulatedProcess, post: Callable[[WorkerEvent], None]) -> None:
        super().__init__(node.loop, f"supervisor of {node.name}")
        self.node, self.agent, self._post = node, agent, post
        self.workers: dict[int, SimulatedWorker] = {}
        self.held: dict[str, Held] = {}
        self.teardown: Teardown | None = None
        self.signals: dict[Phase, int] = {}
        self.sent: set[int] = set()
        self.lapsed = self._closed = False
        self._may_spawn = True
        self._grant: int | None = None
        self._lease_until: float | None = None
        self._lease_timers: tuple[Handle, ...] = ()
        self._report_at = 0.0
        self._due: Handle | None = None  # when the phase of a teardown must give way, or is reported again
        self.on_death(lambda: None if self._closed else node.supervisor_deaths.append(node.loop.now_s))
        # What it held is closed by now. The kernel kills its children (PR_SET_PDEATHSIG) a moment later.
        self.on_death(lambda: node.loop.call_outside(node.chance.uniform(0.0, DEATH_S), self._kill_orphans))
        # The agent's end of the socket closes.
        agent.on_death(lambda: self.call_later(0.0, self.close) if self.alive else None)

    # ---- what the agent asks for

    def ask(self, order: Callable[..., None], *args: Any) -> None:
        """A message of the agent's, one of the methods below: served when this process gets to it, in order."""
        if self.alive:
            self.call_later(0.0, self._serve, order, args)

    def _serve(self, order: Callable[..., None], args: tuple[Any, ...]) -> None:
        # The lease first: after a freeze it may be over, and no order starts a worker then.
        self._check_lease()
        order(self, *args)
        self._advance()

    def _look(self) -> None:
        """Something is due, or has happened."""
        self._check_lease()
        self._advance()

    def spawn(self, rank: int, env: Mapping[str, str]) -> None:
        if not self._may_spawn:
            self._report(Stopped(survivors=(), lapsed=True))
            return
        worker = self.node.fork(self, rank, env)
        self.workers[worker.pid] = worker
        self.call_later(self.node.chance.uniform(0.0, EXEC_S), self._has_started, worker)

    def _has_started(self, worker: SimulatedWorker) -> None:
        if worker.pid in self.workers:
            self._report(Spawned(rank=worker.rank, pid=worker.pid))

    def renew_lease(self, until_s: float, grant: int | None) -> None:
        left_s = until_s - self.node.loop.now_s
        self._may_spawn, self._lease_until = left_s > 0.0, until_s
        self._cancel_lease_timers()
        self_fence_s = max(0.0, left_s + SELF_FENCE_S * self.node.clock.pace)
        self._lease_timers = (
            self.call_later(max(0.0, left_s), self._look),
            # The kernel's timer: a step of no process, so it fires while this one is frozen.
            self.node.loop.call_outside(self_fence_s, self.kill),
        )
        released, self._grant = self._grant, grant
        if released is not None and grant is None:
            self._report(Released(released))

    def stop(self, number: int, grace_s: float, checkpoint: tuple[int, float] | None) -> None:
        now_s = self.node.loop.now_s
        if self.teardown is not None:
            if grace_s == 0.0:
                self.teardown.hurry(now_s)
            return
        saving, checkpoint_s = checkpoint or (0, 0.0)
        self.signals = {"checkpoint": saving, "ask": number, "terminate": signal.SIGTERM}
        self.teardown = Teardown.plan(now_s, grace_s, checkpoint_s)

    def phase_done(self, phase: Phase) -> None:
        if self.teardown is not None:
            self._enter(self.teardown.advance(self.node.loop.now_s, workers_left=bool(self.workers), work_done=phase))

    def keep_open(self, kind: str, held: Held) -> None:
        """Keep the liveness connection or the fence socket open; one of each."""
        if isinstance(held, SimulatedFenceSocket):
            held.armed_by = self
        if (older := self.held.pop(kind, None)) is not None:
            older.release(self)
        self.held[kind] = held

    def close(self) -> None:
        """The agent has closed its end, or is dead: end the workers, and this process."""
        self._closed = True  # so no SupervisorDied is sent
        self._kill_all()
        self.node.loop.call_outside(0.0, self.kill)  # not here: it is in a step of its own

    # ---- the lease

    def _cancel_lease_timers(self) -> None:
        for timer in self._lease_timers:
            timer.cancel()

    def _check_lease(self) -> None:
        now_s = self.node.loop.now_s
        if self._lease_until is None or now_s < self._lease_until:
            return
        self._lease_until, self._may_spawn = None, False
        self._cancel_lease_timers()
        if self.workers or self.teardown is not None:
            self.lapsed = True
            self.teardown = self.teardown or Teardown.plan(now_s, 0.0)
            self.teardown.hurry(now_s)
            self._kill_all()

    # ---- the end of the workers

    def child_ended(self, worker: SimulatedWorker, code: int | None, number: int | None) -> None:
        """SIGCHLD."""
        if self.alive:
            self.call_later(0.0, self._reap, worker, code, number)

    def _reap(self, worker: SimulatedWorker, code: int | None, number: int | None) -> None:
        if self.workers.pop(worker.pid, None) is not None and not self.lapsed:
            at, sent = self.node.clock.monotonic(), frozenset(self.sent)
            self._report(Exited(rank=worker.rank, code=code, signal=number, at=at, sent=sent))
        self._look()

    def _advance(self) -> None:
        """Go on with a teardown, if there is one, and come back when its phase must give way."""
        if (teardown := self.teardown) is None:
            return
        if not self.workers:
            self.teardown = None
            self.sent.clear()
            self._report(Stopped(survivors=(), lapsed=self.lapsed))
            self.lapsed = False
            return
        now_s = self.node.loop.now_s
        self._enter(teardown.advance(now_s, workers_left=True))
        if now_s >= self._report_at:
            assert teardown.phase is not None
            self._report_at = now_s + SAY_EVERY_S
            ends_in_s = max(0.0, teardown.deadline() - now_s)
            self._report(Tearing(phase=teardown.phase, left=tuple(self.workers), ends_in_s=ends_in_s))
        if self._due is not None:
            self._due.cancel()
        self._due = self.call_later(max(0.0, min(teardown.deadline(), self._report_at) - now_s), self._look)

    def _enter(self, phase: Phase | None) -> None:
        if phase is None:
            return
        self._report_at = 0.0
        if phase != "dump":
            self.sent.add(signal.SIGKILL if phase == "kill" else self.signals[phase])
        if phase == "kill":
            self._kill_all()
        elif phase != "dump":
            for worker in list(self.workers.values()):
                worker.signal(self.signals[phase])
                worker.thaw()  # a stopped one cannot obey

    def _kill_all(self) -> None:
        for worker in list(self.workers.values()):
            worker.kill()

    def _kill_orphans(self) -> None:
        self._kill_all()
        if not self._closed:
            self._report(SupervisorDied())

    def _report(self, event: WorkerEvent) -> None:
        self.agent.call_later(0.0, self._post, event)


class SupervisedWorkers:
    """The agent's side of it: what `agent.machine.WorkersPort` asks for."""

    def __init__(self, node: SimulatedNode, agent: SimulatedProcess, post: Callable[[WorkerEvent], None]) -> None:
        self._node, self._agent, self._post = node, agent, post
        self._supervisor: SimulatedSupervisor | None = None
        self._lease_until, self._began_s = 0.0, node.loop.now_s

    def start(self) -> None:
        self._supervisor = self._node.supervisor = SimulatedSupervisor(self._node, self._agent, self._post)

    def never_called(self, *_: object, **__: object) -> None:
        raise NotImplementedError("simulated jobs have no `prewarm`, and no user of theirs runs commands")

    run_command = signal_command = warm = cool = never_called

    def spawn(self, rank: int, argv: object, env: Mapping[str, str], *_: object, **__: object) -> None:
        node, store = self._node, self._node.agent_store
        node.run.promises.worker_wanted(node.name, rank, self._lease_until - node.loop.now_s)
        if store is not None:
            store.check_ranks(env["NVRX_REPLICA"], int(env["NVRX_CYCLE"]))
        self._ask(SimulatedSupervisor.spawn, rank, env)

    def stop(self, grace_s: float, number: int = signal.SIGTERM, checkpoint: tuple[int, float] | None = None) -> None:
        self._ask(SimulatedSupervisor.stop, int(number), grace_s, checkpoint)

    def phase_done(self, phase: Phase) -> None:
        self._ask(SimulatedSupervisor.phase_done, phase)

    def lease(self, seconds: float, grant: int | None = None) -> None:
        now_s = self._node.loop.now_s
        self._node.run.contact.lease_renewed(self._node, seconds, now_s - self._began_s, grant)
        self._lease_until = now_s + seconds * self._node.clock.pace
        self._ask(SimulatedSupervisor.renew_lease, self._lease_until, grant)

    def fence(self, fence_socket: Any) -> None:
        self._pass_on("fence", fence_socket)
        fence_socket.close()

    def hold(self, connection: Any) -> None:
        self._pass_on("hold", connection)

    def close(self) -> None:
        self._ask(SimulatedSupervisor.close)

    def _ask(self, order: Callable[..., None], *args: Any) -> None:
        if self._supervisor is not None:
            self._supervisor.ask(order, *args)

    def _pass_on(self, kind: str, held: Any) -> None:
        """A descriptor in a message is held from the moment it is sent."""
        if self._supervisor is not None and self._supervisor.alive:
            held.held_by(self._supervisor)
            self._ask(SimulatedSupervisor.keep_open, kind, held)
