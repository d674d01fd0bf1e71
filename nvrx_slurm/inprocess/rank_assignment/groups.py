"""Whole groups of ranks stay or go."""

from __future__ import annotations

import dataclasses
import datetime
from collections import Counter
from collections.abc import Callable

from nvrx_slurm.inprocess.rank_assignment.base import Key, RankAssignment, RankAssignmentCtx, key_of
from nvrx_slurm.inprocess.state import FrozenState


class FilterCountGroupedByKey(RankAssignment):
    """Counts the healthy ranks of each group, and puts out those of a group for whose count `condition` is false.

    A group is those ranks with the same key; its ranks are added to the terminated ones, which an assignment further
    left in the composition must take from there:

    ```python
    # a host goes on with all of its 8 ranks, or not at all
    Compose(ShiftRanks(), FilterCountGroupedByKey(lambda _: socket.gethostname(), lambda count: count == 8))
    ```

    `key_or_fn` is evaluated on its own rank, with the state of the iteration before, and published; `condition` on
    all ranks, and must come to the same there. `timeout` is there for older code: nobody waits here for anybody,
    since the keys have arrived when the assignment is made.
    """

    def __init__(
        self,
        key_or_fn: Key,
        condition: Callable[[int], bool],
        timeout: datetime.timedelta = datetime.timedelta(seconds=60),
    ) -> None:
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = timeout

    def publish(self, state: FrozenState) -> tuple[str, ...]:
        return (key_of(self.key_or_fn, state),)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        keys = ctx.told()
        unfit = {key for key, count in Counter(keys.values()).items() if not self.condition(count)}
        out = {rank for rank, key in keys.items() if key in unfit}
        return dataclasses.replace(ctx, terminated_ranks=ctx.terminated_ranks | out)
