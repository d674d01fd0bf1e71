"""The stacks of a node's workers: written beside their logs first, and reported to the controller then."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from nvrx_slurm.agent.events import Cycle, Dumped, StacksOnFile
from nvrx_slurm.agent.hangs import Hang
from nvrx_slurm.agent.machine import StacksPort
from nvrx_slurm.agent.reporting import FactPublisher
from nvrx_slurm.agent.supervisor import descendants, living_children
from nvrx_slurm.diagnostics.stacks.dump import dump
from nvrx_slurm.diagnostics.stacks.hook_client import hook_environment
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import StacksDumped, WorkerHung
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.threads import awaitable_thread


class Stacks:
    """Asks workers for their stacks. `folder`: node-local, in memory, where a worker's hook writes them."""

    def __init__(
        self, job: JobFolder, folder: Path, *, generation: int, inherited: Mapping[str, str], clock: Clock
    ) -> None:
        self._job, self._folder, self._generation = job, folder, generation
        self._inherited, self._clock = inherited, clock
        self._one_at_a_time = asyncio.Lock()

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """What a worker's environment needs, so that it can answer; `own` is the role's."""
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
        of_ranks = {label: cycle.pids[rank] for label, rank in labels.items() if rank in cycle.pids}
        children_of, unknown = dict[int, list[int]](), list[str]()
        try:  # one walk for all ranks, and not on the event loop: it takes 40 ms where thousands of processes run
            children_of = await awaitable_thread(living_children, "processes")
        except OSError as error:
            unknown.append(f"what the workers have started is not looked at: {error.strerror}")
        groups = {label: [pid, *descendants(pid, children_of)] for label, pid in of_ranks.items()}
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
        files = {labels[label]: path for label, path in report.files.items() if label in labels}
        return StacksOnFile(
            files={rank: str(path.relative_to(self._job.path)) for rank, path in files.items()},
            where={labels[label]: line for label, line in report.last_lines.items()},
            problems=(
                *(f"rank {rank} has no worker now" for rank in sorted(set(wanted) - cycle.running)),
                *unknown,
                *report.problems,
            ),
        )


# How long stacks may take where they are wanted before anybody is asked to end.
DUMP_FIRST_S = 3.0


class Dumping(msgspec.Struct, eq=False):
    """Writes down beside the agent's loop (`go`), and posts `Dumped` when that is done."""

    stacks: StacksPort
    publisher: FactPublisher
    go: Callable[[Coroutine[Any, Any, None]], object]
    post: Callable[[Dumped], None]

    def begin(
        self,
        cycle: Cycle,
        why: str,
        timeout_s: float,
        *,
        ranks: set[int] | None = None,
        hang: Hang | None = None,
        request: str | None = None,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Have the stacks of this node's running workers written down, and go on with `then`. `hang`: why they are,
        which is reported once they are on file."""

        async def dump() -> None:
            # Workers that are about to be stopped (`then`) may be paused for it.
            dumped = await self.stacks.dump(
                cycle, why=why, timeout_s=timeout_s, ranks=ranks, may_pause=then is not None
            )
            self.post(Dumped(cycle, dumped, why=why, hang=hang, request=request, then=then))

        self.go(dump())

    def publish(self, event: Dumped, *, at_work: bool) -> None:
        """Report what was written down. `at_work`: its hang is still news."""
        cycle, hang = event.cycle, event.hang
        if hang is not None and at_work:
            self.publisher.publish(
                WorkerHung,
                replica=cycle.replica,
                cycle=cycle.number,
                rank=hang.rank,
                why=hang.why,
                step=hang.step,
                where=event.stacks.where.get(hang.rank),
                stacks=event.stacks.files.get(hang.rank),
                silent_s=round(hang.since_s, 6),
                limit_s=hang.limit_s,
            )
        elif event.stacks.files or event.stacks.problems or event.request:
            self.publisher.publish(
                StacksDumped,
                why=event.why,
                files=event.stacks.files,
                where=event.stacks.where,
                problems=event.stacks.problems,
                request=event.request,
            )
