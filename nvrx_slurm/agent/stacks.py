"""What the workers of a node are doing, written down beside their logs."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from nvrx_slurm.agent.events import Cycle, StacksOnFile
from nvrx_slurm.agent.supervisor import descendants
from nvrx_slurm.diagnostics.stacks.dump import dump
from nvrx_slurm.diagnostics.stacks.hook_client import hook_environment
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.util.clock import Clock


class Stacks:
    """Asks workers for their stacks. `folder`: node-local, in memory, where a worker's hook writes them."""

    def __init__(
        self, job: JobFolder, folder: Path, *, generation: int, inherited: Mapping[str, str], clock: Clock
    ) -> None:
        self._job, self._folder, self._generation = job, folder, generation
        self._inherited, self._clock = inherited, clock
        self._one_at_a_time = asyncio.Lock()

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """What a worker's environment must say, so that it can answer; `own` is the role's."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        return hook_environment({**self._inherited, **own}, self._folder)

    def clear(self) -> None:
        """The cycle is over."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def dump(
        self,
        cycle: Cycle,
        *,
        why: str,
        timeout_s: float,
        ranks: Collection[int] | None = None,
        may_pause: bool = False,
    ) -> StacksOnFile:
        """The stacks of the running workers (or of some `ranks`) and of all that they started. Never fails.

        `may_pause`: they are about to be ended, and may be stopped for some milliseconds to see native frames too.
        """
        wanted = cycle.running if ranks is None else ranks
        labels = {f"rank {rank}": rank for rank in sorted(cycle.running.intersection(wanted))}
        groups = {label: self._family(cycle, rank) for label, rank in labels.items() if rank in cycle.pids}
        out = self._job.cycle_stacks(cycle.replica, self._generation, cycle.number)
        async with self._one_at_a_time:
            report = await dump(
                groups,
                dump_dir=self._folder,
                out=out,
                why=why,
                timeout_s=timeout_s,
                may_pause=may_pause,
                gpus=True,
                clock=self._clock,
            )
        of_ranks = {labels[label]: path for label, path in report.files.items() if label in labels}
        return StacksOnFile(
            files={rank: str(path.relative_to(self._job.path)) for rank, path in of_ranks.items()},
            where={labels[label]: line for label, line in report.last_lines.items()},
            problems=(
                *(f"rank {rank} has no worker now" for rank in sorted(set(wanted) - cycle.running)),
                *report.problems,
            ),
        )

    @staticmethod
    def _family(cycle: Cycle, rank: int) -> list[int]:
        return [cycle.pids[rank], *descendants(cycle.pids[rank])]
