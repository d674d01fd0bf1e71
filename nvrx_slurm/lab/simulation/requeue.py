"""Slurm requeues the job: its processes end, it waits in the queue, and its batch script runs again, in the same job
folder, as the next generation.

- `scontrol requeue` signals every process; a batch host that ends by itself removes its store and `store.json`. Where
  it was killed the next generation finds both, as after the loss of its node.
- Slurm starts a job again when each of its nodes has confirmed that no process of it is left. A node that cannot be
  reached is down after a while, and gets replaced. Its agent may still live, and be back before slurmd has killed it.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from nvrx_slurm.journal.records import NodeJoined, Record, Signalled
from nvrx_slurm.lab.simulation.intruder import post_outside
from nvrx_slurm.lab.simulation.node import SimulatedNode

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.run import SimulationRun

LOOK_S = 0.5
SHORTEST_QUEUE_S, LONGEST_QUEUE_S = 0.2, 5.0
# A node that is back registers, learns which jobs run there, and kills the others within this time.
SLURMD_KILLS_S = 10.0

# SlurmdTimeout (300 s by default) is so much longer than the lease of a node's workers, at least.
LEASE_LAPSES_S = 2.0

# How far into the next generation a node of the one before is cut off, at most.
LONGEST_CUT_S = 5.0


class RequeuedJob:
    """What Slurm does to the job of one run. `is_asked`: its generation ends; `waits`: it is in the queue."""

    def __init__(self, run: SimulationRun) -> None:
        self._run, self._chance = run, run.chance("queue")
        self.is_asked = self.waits = False
        self._cut_off: SimulatedNode | None = None
        self._heal: Callable[[], None] = lambda: None
        self.down_after_s = run.plan.fault_tolerance.gives_away_after_s + LEASE_LAPSES_S

    @property
    def longest_s(self) -> float:
        """From the request to the start of the next generation."""
        return 2 * (self._run.shape.kill_wait_s or 0.0) + self.down_after_s + LONGEST_QUEUE_S

    def ask(self, number: int, *, loses_host: bool) -> None:
        """Requeue the job, unless it is in the queue or has been suspended: `scontrol requeue`, or because the batch
        host's node is lost. With an odd `number` one of its nodes cannot be reached any more."""
        run = self._run
        if self.is_asked or self.waits or run.was_suspended or not run.batch.process.alive:
            return
        self.is_asked = True
        if number % 2:
            node = run.nodes[run.info.nodes[number // 2 % len(run.info.nodes)]]
            node.weak_until_s = math.inf
            self._heal = run.cut([node.name], None)
            self._cut_off = node
        if loses_host:
            run.loop.call_outside(0.0, run.batch.process.kill)
        else:
            run.scancel(signal.SIGTERM)

    def leave(self) -> None:
        """The batch host has ended, and with it the control plane. Slurm ends what is left of the generation."""
        run, self.is_asked, self.waits = self._run, False, True
        code = run.batch.process.exit_code
        ended_by_itself = code is not None and code >= 0
        run.store.go_down(keeps_data=not ended_by_itself)
        run.signal_agents(signal.SIGTERM)
        # A batch host that has ended by itself has waited for the agents; else Slurm may give them KillWait.
        kill_s = 0.0 if ended_by_itself else self._chance.choice((0.0, run.shape.kill_wait_s or 0.0))
        run.loop.call_outside(
            kill_s, self._end_processes, run.loop.now_s + kill_s + self.down_after_s, ended_by_itself
        )

    def _end_processes(self, down_at: float, is_fresh: bool) -> None:
        """Kill what is left wherever Slurm can, and wait for the other nodes, which are down at last."""
        run, lost = self._run, list[str]()
        for node in run.allocated:
            if node.is_reachable:
                node.kill()
            else:
                lost.append(node.name)
        if lost and run.loop.now_s < down_at:
            run.loop.call_outside(LOOK_S, self._end_processes, down_at, is_fresh)
        else:
            queue_s = self._chance.uniform(SHORTEST_QUEUE_S, LONGEST_QUEUE_S)
            run.loop.call_outside(queue_s, self._begin, lost, is_fresh)

    def _begin(self, lost: list[str], is_fresh: bool) -> None:
        run, self.waits = self._run, False
        if self._cut_off is not None:
            heal_s = self._chance.uniform(0.0, LONGEST_CUT_S)
            self._cut_off.weak_until_s = run.loop.now_s + heal_s
            run.loop.call_outside(heal_s, self._heal)
            self._cut_off = None
        names = []
        for name in run.info.nodes:
            if name in lost:
                self._kill_when_back(run.nodes[name])
                name = f"x{len(run.nodes) + 1:02d}"
                run.nodes[name] = SimulatedNode(run, name)
            names.append(name)
        run.begin_generation(
            replace(
                run.info,
                generation=run.info.generation + 1,
                nodes=tuple(names),
                started_at=run.host_clock.wall(),
            ),
            is_fresh=is_fresh,
        )
        # A fresh store has another address and another key: what was on its way to the old one never gets there.
        if not is_fresh:
            self._deliver_late()

    def _deliver_late(self) -> None:
        """What was on its way when the generation before ended arrives now: the join of an agent of it, which had
        joined again, and the signal that ended it."""
        run, chance = self._run, self._chance
        joins = [entry.record for entry in run.promises.journal if isinstance(entry.record, NodeJoined)]
        late: list[Record] = [Signalled(reason="cancel", generation=run.info.generation - 1)]
        if joins:
            late.append(replace(chance.choice(joins), incarnation=f"{chance.getrandbits(48):012x}"))
        for fact in late:
            at_s = chance.uniform(0.0, run.shape.work_s)
            run.loop.call_outside(at_s, post_outside, run, fact)

    def _kill_when_back(self, node: SimulatedNode) -> None:
        """slurmd can be reached again, and kills what runs there of the generation before."""
        if node.is_reachable:
            self._run.loop.call_outside(self._chance.uniform(0.0, SLURMD_KILLS_S), node.kill)
        elif node.has_power:
            self._run.loop.call_outside(LOOK_S, self._kill_when_back, node)
