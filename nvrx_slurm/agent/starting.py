"""The start of a cycle's workers on this node: their environment, their output, their slots."""

from __future__ import annotations

from nvrx_slurm.agent.environment import worker_environment
from nvrx_slurm.agent.events import Cycle
from nvrx_slurm.agent.machine import Board, Output, Stacks, Workers
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.folder import JobFolder


class Starting:
    """Starts workers. `Spawned` or `Exited` follows for each."""

    def __init__(
        self,
        plan: Plan,
        folder: JobFolder,
        *,
        node: str,
        generation: int,
        workers: Workers,
        board: Board,
        output: Output,
        stacks: Stacks,
    ) -> None:
        self._plan, self._folder, self._node, self._generation = plan, folder, node, generation
        self._workers, self._board, self._output, self._stacks = workers, board, output, stacks

    def start(self, cycle: Cycle) -> None:
        """All ranks of a cycle that are this node's."""
        role = next(role for role in self._plan.roles if role.name == cycle.assignment.role)
        for local_rank in range(cycle.assignment.workers):
            self._spawn(cycle, role, local_rank)

    def _spawn(self, cycle: Cycle, role: RolePlan, local_rank: int) -> None:
        rank = cycle.assignment.first_rank + local_rank
        env = worker_environment(
            cycle.assignment,
            local_rank=local_rank,
            job_id=self._folder.job_id,
            max_restarts=self._plan.fault_tolerance.max_restarts.count,
            generation=self._generation,
            replica=cycle.replica,
            cycle=cycle.number,
            node=self._node,
            store_file=self._folder.store_path.absolute(),
            own=role.env,
        )
        env |= self._board.prepare(rank, cycle.number) | self._stacks.environment(role.env)
        logs = self._folder.cycle_logs(cycle.replica, self._generation, cycle.number)
        prefix = f"[{cycle.replica} {rank}] "
        out = self._output.capture(logs / f"rank-{rank}.out", prefix, rank)
        err = self._output.capture(logs / f"rank-{rank}.err", prefix, rank)
        cycle.running.add(rank)
        self._workers.spawn(rank, role.command, env, role.workdir or self._plan.workdir, out, err)
