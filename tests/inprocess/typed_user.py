"""A user's script that uses all public types; `test_typing.py` runs mypy on it."""

from dataclasses import replace
from typing import assert_type

from nvrx_slurm import inprocess
from nvrx_slurm.inprocess import CallWrapper, RankAssignment, RankAssignmentCtx, State, Wrapper
from nvrx_slurm.inprocess.monitor_thread import RankShouldRestart


@Wrapper()
def first(call: CallWrapper, steps: int) -> float:
    call.ping()
    return steps / 2


@Wrapper()
def by_default(steps: int, call: CallWrapper | None = None) -> float:
    return steps / 2


@Wrapper()
def without(steps: int) -> float:
    return steps / 2


class Reversed(RankAssignment):
    """A user's own rank assignment, which changes the state in place."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        assert ctx.state.rank is not None
        ctx.state.rank = ctx.state.world_size - 1 - ctx.state.rank
        return replace(ctx, terminated_ranks=set())


def main() -> None:
    assert_type(first(3), float | None)
    assert_type(by_default(3), float | None)
    assert_type(without(3), float | None)
    State(0, 4).active_rank = 3
    try:
        inprocess.Wrapper(
            initialize=inprocess.RetryController(max_iterations=3),
            health_check=inprocess.Compose(inprocess.CudaHealthCheck(), inprocess.FaultCounter(3)),
            rank_assignment=inprocess.Compose(inprocess.rank_assignment.ActivateAllRanks(), Reversed()),
            store_factory=inprocess.FileStore,
        )
    except (inprocess.exception.RestartError, RankShouldRestart):
        raise
