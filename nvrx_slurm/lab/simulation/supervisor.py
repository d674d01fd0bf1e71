"""The simulated supervisor, by the real one's rules (`agent/supervisor.py`), on what its kernel guarantees.

- It serves the agent's messages in their order, and looks at the lease before each: after a freeze as well.
- The lease's self-fence timer is the kernel's: it kills a supervisor that is frozen, too.
- When it dies, the kernel closes its fence socket and its end of the liveness connection, and kills its workers a
  moment later.
- When the agent dies, it kills the workers, and ends.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nvrx_slurm.agent.supervisor import SAY_EVERY_S, SELF_FENCE_S
from nvrx_slurm.agent.teardown import Phase, Teardown
from nvrx_slurm.agent.workers import Exited, Spawned, Stopped, SupervisorDied, Tearing, WorkerEvent
from nvrx_slurm.lab.simulation.process import Held, SimulatedFenceSocket, SimulatedProcess
from nvrx_slurm.lab.simulation.workers import SimulatedWorker

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.node import SimulatedNode

DEATH_S = 0.002
"""A dying process closes its sockets up to so long before the kernel kills its children."""

EXEC_S = 0.01


class SimulatedSupervisor:
    """One supervisor process of a node, started by the agent process `agent`."""

    def __init__(self, node: SimulatedNode, agent: SimulatedProcess, post: Callable[[WorkerEvent], None]) -> None:
        self.node, self.agent, self._post = node, agent, post
        self.loop = node.loop
        self.process = SimulatedProcess(node.loop, f"supervisor of {node.name}")
        self.workers: dict[int, SimulatedWorker] = {}
        self.held: dict[str, Held] = {}
        self.teardown: Teardown | None = None
        self.signals: dict[Phase, int] = {}
        self.lapsed = self._closed = False
        self._may_spawn = True
        self._lease_until: float | None = None
        self._self_fence_at: float | None = None
        self._lease_timer_on = self._self_fence_on = False
        self._say_at = 0.0
        self._due_at: float | None = None
        self.process.on_death(self._died)
        agent.on_death(self._agent_died)

    # ---- what the agent asks for

    def ask(self, order: str, *args: Any) -> None:
        """A message of the agent's: served when this process gets to it, in order."""
        if self.process.alive:
            self.process.call_later(0.0, self._serve, order, args)

    def _serve(self, order: str, args: tuple[Any, ...]) -> None:
        self._check_lease()
        _SERVE[order](self, *args)
        self._advance()

    def _spawn(self, rank: int, env: Mapping[str, str]) -> None:
        if not self._may_spawn:
            self._say(Stopped(survivors=(), lapsed=True))
            return
        worker = self.node.fork(self, rank, env)
        self.workers[worker.pid] = worker
        self.process.call_later(self.node.chance.uniform(0.0, EXEC_S), self._has_started, worker)

    def _has_started(self, worker: SimulatedWorker) -> None:
        if worker.pid in self.workers:
            self._say(Spawned(rank=worker.rank, pid=worker.pid))

    def _renew(self, until_s: float) -> None:
        self._may_spawn = until_s > self.loop.now_s
        self._lease_until = until_s
        self._self_fence_at = self._lease_until + SELF_FENCE_S * self.node.clock.pace
        if not self._lease_timer_on:
            self._lease_timer_on = True
            self.process.call_later(max(0.0, self._lease_until - self.loop.now_s), self._look_at_lease)
        if not self._self_fence_on:
            self._self_fence_on = True
            self.loop.call_outside(max(0.0, self._self_fence_at - self.loop.now_s), self._look_at_self_fence)

    def _stop(self, number: int, grace_s: float, checkpoint: tuple[int, float] | None) -> None:
        now = self.loop.now_s
        if self.teardown is not None:
            if grace_s == 0.0:
                self.teardown.hurry(now)
            return
        saving, checkpoint_s = checkpoint or (0, 0.0)
        self.signals = {"checkpoint": saving, "ask": number, "terminate": signal.SIGTERM}
        self.teardown = Teardown.plan(now, grace_s, checkpoint_s)

    def _work_done(self, phase: Phase) -> None:
        if self.teardown is not None:
            self._enter(self.teardown.advance(self.loop.now_s, workers_left=bool(self.workers), work_done=phase))

    def _hold(self, kind: str, held: Held) -> None:
        """Keep the liveness connection or the fence socket open; one of each."""
        if isinstance(held, SimulatedFenceSocket):
            held.armed_by = self.process
        if (older := self.held.pop(kind, None)) is not None:
            older.release(self.process)
        self.held[kind] = held

    # ---- ends

    def _look_at_lease(self) -> None:
        self._lease_timer_on = False
        if self._lease_until is None:
            return
        self._check_lease()
        if self._lease_until is not None:
            self._lease_timer_on = True
            self.process.call_later(self._lease_until - self.loop.now_s, self._look_at_lease)
        self._advance()

    def _check_lease(self) -> None:
        now = self.loop.now_s
        if self._lease_until is None or now < self._lease_until:
            return
        self._lease_until = self._self_fence_at = None
        self._may_spawn = False
        if self.workers or self.teardown is not None:
            self.lapsed = True
            self.teardown = self.teardown or Teardown.plan(now, 0.0)
            self.teardown.hurry(now)
            self._kill_all()

    def _look_at_self_fence(self) -> None:
        """The kernel's timer."""
        self._self_fence_on = False
        if self._self_fence_at is None or not self.process.alive:
            return
        if self.loop.now_s >= self._self_fence_at:
            self.process.kill()
        else:
            self._self_fence_on = True
            self.loop.call_outside(max(0.0, self._self_fence_at - self.loop.now_s), self._look_at_self_fence)

    def child_ended(self, worker: SimulatedWorker, code: int | None, number: int | None) -> None:
        """SIGCHLD."""
        if self.process.alive:
            self.process.call_later(0.0, self._reap, worker, code, number)

    def _reap(self, worker: SimulatedWorker, code: int | None, number: int | None) -> None:
        if self.workers.pop(worker.pid, None) is not None and not self.lapsed:
            self._say(Exited(rank=worker.rank, code=code, signal=number))
        self._check_lease()
        self._advance()

    def _advance(self) -> None:
        """Go on with a teardown, if there is one, and come back when its phase must give way."""
        if self.teardown is None:
            return
        if not self.workers:
            self._stopped()
            return
        now = self.loop.now_s
        self._enter(self.teardown.advance(now, workers_left=True))
        if now >= self._say_at:
            self._say_phase(now)
        at = min(self.teardown.deadline(), self._say_at)  # one timer stands for both; a later one is not set
        if self._due_at is None or at < self._due_at:
            self._due_at = at
            self.process.call_later(max(0.0, at - self.loop.now_s), self._is_due, at)

    def _is_due(self, at: float) -> None:
        if self._due_at == at:
            self._due_at = None
        self._check_lease()
        self._advance()

    def _enter(self, phase: Phase | None) -> None:
        if phase is None:
            return
        self._say_at = 0.0
        if phase == "kill":
            self._kill_all()
        elif phase != "dump":
            for worker in list(self.workers.values()):
                worker.signal(self.signals[phase])
                worker.thaw()  # a stopped one cannot obey

    def _kill_all(self) -> None:
        for worker in list(self.workers.values()):
            worker.kill()

    def _say_phase(self, now: float) -> None:
        assert self.teardown is not None and self.teardown.phase is not None
        self._say_at = now + SAY_EVERY_S
        ends_in_s = max(0.0, self.teardown.deadline() - now)
        self._say(Tearing(phase=self.teardown.phase, left=tuple(self.workers), ends_in_s=ends_in_s))

    def _stopped(self) -> None:
        self.teardown = None
        self._say(Stopped(survivors=(), lapsed=self.lapsed))
        self.lapsed = False

    def _say(self, event: WorkerEvent) -> None:
        self.agent.call_later(0.0, self._post, event)

    # ---- deaths

    def _agent_died(self) -> None:
        """Its end of the socket closes."""
        if self.process.alive:
            self.process.call_later(0.0, self._end_everything)

    def _end_everything(self) -> None:
        self._closed = True  # so no SupervisorDied is sent: the agent has closed its end, or is dead
        self._kill_all()
        self.loop.call_outside(0.0, self.process.kill)

    def _died(self) -> None:
        """The kernel's work: what it held is closed by now; its children are killed (PR_SET_PDEATHSIG)."""
        self.loop.call_outside(self.node.chance.uniform(0.0, DEATH_S), self._orphans_die)

    def _orphans_die(self) -> None:
        self._kill_all()
        if not self._closed:
            self._say(SupervisorDied())


_SERVE: dict[str, Any] = {
    "spawn": SimulatedSupervisor._spawn,
    "lease": SimulatedSupervisor._renew,
    "stop": SimulatedSupervisor._stop,
    "done": SimulatedSupervisor._work_done,
    "hold": SimulatedSupervisor._hold,
    "close": SimulatedSupervisor._end_everything,
}


class SupervisedWorkers:
    """The agent's side of it: what `agent.machine.Workers` asks for."""

    def __init__(self, node: SimulatedNode, agent: SimulatedProcess, post: Callable[[WorkerEvent], None]) -> None:
        self._node, self._agent, self._post = node, agent, post
        self._supervisor: SimulatedSupervisor | None = None
        self._lease_until = 0.0

    def start(self) -> None:
        self._supervisor = self._node.start_supervisor(self._agent, self._post)

    def spawn(self, rank: int, argv: Sequence[str], env: Mapping[str, str], cwd: str, out: int, err: int) -> None:
        self._node.run.promises.worker_wanted(self._node.name, rank, self._lease_until - self._node.loop.now_s)
        self._ask("spawn", rank, env)

    def stop(self, grace_s: float, number: int = signal.SIGTERM, checkpoint: tuple[int, float] | None = None) -> None:
        self._ask("stop", int(number), grace_s, checkpoint)

    def phase_done(self, phase: Phase) -> None:
        self._ask("done", phase)

    def lease(self, seconds: float) -> None:
        self._lease_until = self._node.loop.now_s + seconds * self._node.clock.pace
        self._ask("lease", self._lease_until)

    def fence(self, fence_socket: Any) -> None:
        self._pass_on("fence", fence_socket)
        fence_socket.close()

    def hold(self, connection: Any) -> None:
        self._pass_on("hold", connection)

    def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.ask("close")

    def _ask(self, order: str, *args: Any) -> None:
        if self._supervisor is not None:
            self._supervisor.ask(order, *args)

    def _pass_on(self, kind: str, held: Any) -> None:
        """A descriptor in a message is held from the moment it is sent."""
        if self._supervisor is not None and self._supervisor.process.alive:
            held.held_by(self._supervisor.process)
            self._ask("hold", kind, held)
