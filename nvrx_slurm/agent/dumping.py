"""Hangs and stacks: what the workers are doing is written down first, and told to the controller then."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from nvrx_slurm.agent.events import Cycle, Dumped, Hung
from nvrx_slurm.agent.machine import Stacks
from nvrx_slurm.agent.publisher import FactPublisher
from nvrx_slurm.journal.records import StacksDumped, WorkerHung

DUMP_FIRST_S = 3.0
"""How long stacks may take where they are wanted before anybody is asked to end."""


class Dumping:
    """Writes down beside the agent's loop (`go`), and posts `Dumped` when that is done."""

    def __init__(
        self,
        stacks: Stacks,
        *,
        publisher: FactPublisher,
        go: Callable[[Coroutine[Any, Any, None]], object],
        post: Callable[[Dumped], None],
    ) -> None:
        self._stacks, self._publisher, self._go, self._post = stacks, publisher, go, post

    def begin(
        self,
        cycle: Cycle,
        why: str,
        timeout_s: float,
        *,
        ranks: set[int] | None = None,
        request: str | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Have the stacks of this node's running workers written down, and go on with `then`."""
        self._go(self._dump(cycle, why, timeout_s, ranks, request, then))

    def report(self, cycle: Cycle, hang: Hung) -> None:
        """Write down what all of this node's workers are doing, and only then say that one hangs."""
        self._go(self._look_into(cycle, hang))

    def tell(self, event: Dumped, *, at_work: bool) -> None:
        """Say what was written down. `at_work`: the hang is news still."""
        cycle, hang = event.cycle, event.hang
        if hang is not None and at_work:
            self._publisher.publish(
                WorkerHung,
                replica=cycle.replica,
                cycle=cycle.number,
                rank=hang.rank,
                why=hang.why,
                step=hang.step,
                where=event.stacks.where.get(hang.rank),
                stacks=event.stacks.files.get(hang.rank),
            )
        elif event.stacks.files or event.stacks.problems or event.request:
            self._publisher.publish(
                StacksDumped,
                why=event.why,
                files=event.stacks.files,
                where=event.stacks.where,
                problems=event.stacks.problems,
                request=event.request,
            )

    async def _look_into(self, cycle: Cycle, hang: Hung) -> None:
        dumped = await self._stacks.dump(cycle, why=f"rank {hang.rank}: {hang.why}", timeout_s=DUMP_FIRST_S)
        self._post(Dumped(cycle, dumped, hang=hang))

    async def _dump(
        self,
        cycle: Cycle,
        why: str,
        timeout_s: float,
        ranks: set[int] | None,
        request: str | None,
        then: Callable[[], None] | None,
    ) -> None:
        may_pause = then is not None
        dumped = await self._stacks.dump(cycle, why=why, timeout_s=timeout_s, ranks=ranks, may_pause=may_pause)
        self._post(Dumped(cycle, dumped, why=why, request=request, then=then))
