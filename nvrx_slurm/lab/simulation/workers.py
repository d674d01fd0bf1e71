"""Simulated workers: one process of the user's command each, and the worlds in which they step together.

A world takes its steps while all of its ranks run: one that dies, is frozen, hangs or is cut off stops them all. What
it has done by then is saved, so the next cycle of its replica goes on from there.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from nvrx_slurm.lab.simulation.loop import Handle

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.node import SimulatedNode
    from nvrx_slurm.lab.simulation.run import SimulationRun
    from nvrx_slurm.lab.simulation.supervisor import SimulatedSupervisor

AT_ONCE = 0.75
# Within so long ranks end that have finished together.
LAST_STEP_S = 0.05

SAVING_S = 0.3

# A process that was forked executes its program within so long.
EXEC_S = 0.01

# With which a worker ends when a peer of it is gone.
PEER_LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:589] Read error [n]: Connection reset by peer"


class SimulatedWorker:
    """One rank of one cycle, on one node. A zombie counts as dead."""

    def __init__(
        self, kernel: SimulatedNode, parent: SimulatedSupervisor, pid: int, world: SimulatedWorld, rank: int
    ) -> None:
        self.node, self._kernel, self.parent = kernel.name, kernel, parent
        self.pid, self.world, self.rank = pid, world, rank
        self.alive, self.frozen, self.hangs = True, False, False
        self.saved = 0
        self.lingers_s = 0.0
        """How long after its world has finished it ends."""
        self.executes_at_s = world.loop.now_s + EXEC_S
        self._pending: list[int] = []

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world} on {self.node}"

    @property
    def can_step(self) -> bool:
        return self.alive and not self.frozen and not self.hangs

    def kill(self, number: int = signal.SIGKILL) -> None:
        """It ends at once, also inside a step."""
        self._end(None, int(number))

    def exit(self, code: int) -> None:
        """It ends by itself, unless it is frozen: then after the thaw, if it still lives."""
        if self.frozen:
            self._pending.append(-code)
        else:
            self._end(code, None)

    def signal(self, number: int) -> None:
        """What it does about it is its own affair, but for SIGKILL, SIGSTOP and SIGCONT. It leaves SIGTSTP out."""
        if number == signal.SIGKILL:
            self.kill()
        elif number == signal.SIGSTOP:
            self.freeze()
        elif number == signal.SIGCONT:
            self.thaw()
        elif self.frozen:
            self._pending.append(number)
        elif self.alive and number != signal.SIGTSTP:
            self.world.asks(self, number)

    def freeze(self) -> None:
        if self.alive and not self.frozen:
            self.frozen = True
            self.world.look()

    def thaw(self) -> None:
        if not (self.alive and self.frozen):
            return
        self.frozen = False
        pending, self._pending = self._pending, []
        for number in pending:
            # A signal that was held back is positive, and the code of an exit is kept as its negative, or 0.
            if number <= 0:
                self.exit(-number)
            else:
                self.signal(number)
        self.world.look()

    def hang(self) -> None:
        """It makes no step any more, and handles no signal. SIGKILL still ends it."""
        self.hangs = True
        self.world.look()

    def save(self) -> None:
        """A checkpoint is complete."""
        if self.alive and not self.frozen:
            self.saved += 1

    def obey(self, number: int) -> None:
        """It ends by the signal that it was sent a while ago."""
        if self.alive and not self.frozen:
            self.kill(number)

    def leave(self) -> None:
        """It has noticed that a peer is gone."""
        if self.alive and not self.hangs:
            if not self.frozen:
                self._kernel.worker_raised(self, PEER_LOST)
            self.exit(1)

    def _end(self, code: int | None, number: int | None) -> None:
        if self.alive:
            self.alive = False
            self._kernel.worker_ended(self, code, number)
            self.world.left_by(self, well=code == 0)


class SimulatedWorld:
    """The ranks of one replica in one cycle."""

    def __init__(self, run: SimulationRun, replica: str, cycle: int, size: int) -> None:
        self._run, self.loop, self.behaviour = run, run.loop, run.shape.behaviour
        self.replica, self.cycle, self.size = replica, cycle, size
        self.members: dict[int, SimulatedWorker] = {}
        self.ran_s = 0.0
        self.broken = False
        self._since: float | None = None
        self._end: Handle | None = None
        self._rested_at = run.loop.now_s
        self._first_steps: list[Callable[[], None]] = []

    def __str__(self) -> str:
        return f"{self.replica} cycle {self.cycle}"

    def enter(self, worker: SimulatedWorker, first_step: Callable[[], None]) -> None:
        self.members[worker.rank] = worker
        self._first_steps.append(first_step)
        self.look()

    def look(self) -> None:
        """Step on if all can, else rest."""
        if self._can_step() and self._since is None:
            self._since, left_s = self.loop.now_s, self._run.work_left_s[self.replica]
            self._end = self.loop.call_outside(left_s, self._finish)
            self._run.aims.work_until(self.loop.now_s + left_s)
            for first_step in self._first_steps:
                self.loop.call_outside(self.behaviour.step_s, first_step)
            self._first_steps.clear()
        elif self._since is not None and not self._can_step():
            self._rest()

    def steps(self) -> tuple[int, float]:
        """How many steps this world has taken, and when it took the last."""
        now, step_s = self.loop.now_s, self.behaviour.step_s
        running = self._since is not None
        ran_s = self.ran_s + (now - self._since if self._since is not None else 0.0)
        return int(ran_s / step_s), (now if running else self._rested_at) - ran_s % step_s

    def asks(self, worker: SimulatedWorker, number: int) -> None:
        """A signal for one of its ranks. SIGUSR1 asks for a checkpoint, all others to end."""
        if worker.hangs:
            return
        if number == signal.SIGUSR1:
            self.loop.call_outside(SAVING_S, worker.save)
        elif self.behaviour.obeys_s is not None:
            self.loop.call_outside(self.behaviour.obeys_s, worker.obey, number)

    def left_by(self, worker: SimulatedWorker, *, well: bool) -> None:
        """One of its ranks is gone. The others notice, sooner or later, unless they have finished as well."""
        if well:
            return
        first, self.broken = not self.broken, True
        self._rest()
        if first and self.behaviour.leaves_s is not None:
            for peer in self.members.values():
                if peer.alive:
                    # Some before the death itself is reported: the kernel closes its connections first.
                    after = self._run.work_chance.uniform(0.5, 1.5)
                    notices_s = 0.0 if after < AT_ONCE else self.behaviour.leaves_s * after
                    # Before it executes its program it has no connection that it could lose.
                    self.loop.call_outside(max(notices_s, peer.executes_at_s - self.loop.now_s), peer.leave)

    def _can_step(self) -> bool:
        if self.broken or len(self.members) < self.size:
            return False
        return all(worker.can_step and not self._run.is_cut(worker.node) for worker in self.members.values())

    def _rest(self) -> None:
        if self._since is None:
            return
        ran_s = self.loop.now_s - self._since
        self.ran_s += ran_s
        left_s = self._run.work_left_s[self.replica] = max(0.0, self._run.work_left_s[self.replica] - ran_s)
        self._since, self._rested_at = None, self.loop.now_s
        if left_s:
            self._run.aims.work_until(None)
        if self._end is not None:
            self._end.cancel()

    def _finish(self) -> None:
        self._rest()
        self._run.work_left_s[self.replica] = 0.0
        for worker in self.members.values():
            self.loop.call_outside(worker.lingers_s + self._run.work_chance.uniform(0.0, LAST_STEP_S), worker.exit, 0)
