from __future__ import annotations

import datetime
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from nvrx_slurm.inprocess import callback_support
from nvrx_slurm.inprocess.completion import Completion
from nvrx_slurm.inprocess.compose import Compose
from nvrx_slurm.inprocess.exception import (
    FaultCounterExceeded,
    HealthCheckError,
    OptionError,
    RestartAbort,
    TimeoutError,
)
from nvrx_slurm.inprocess.finalize import ThreadedFinalize
from nvrx_slurm.inprocess.health_check import ChainedHealthCheck, CudaHealthCheck, FaultCounter, HealthCheck
from nvrx_slurm.inprocess.initialize import RetryController
from nvrx_slurm.inprocess.rank_filter import ActiveWorldSizeDivisibleBy, MaxActiveWorldSize, WorldSizeDivisibleBy
from nvrx_slurm.inprocess.state import FrozenState, Mode, State
from nvrx_slurm.inprocess.terminate import Terminate

STATE = FrozenState(rank=1, world_size=8, active_rank=1, active_world_size=6, iteration=3)
FAILED = FrozenState(rank=1, world_size=8, fn_exception=ValueError("loss is NaN"))
LONG = datetime.timedelta(seconds=30)


# ---- Initialize


@pytest.mark.parametrize(
    "controller",
    [RetryController(), RetryController(4, 8, 6), RetryController(max_iterations=None, min_world_size=8)],
)
def test_retries_go_on_within_the_limits(controller: RetryController):
    """The third restart, of 8 ranks with 6 active, is within limits that name just these numbers."""
    assert controller(STATE) is STATE


@pytest.mark.parametrize(
    ("controller", "message"),
    [
        (RetryController(max_iterations=3), "3 iterations have failed: max_iterations=3"),
        (RetryController(min_world_size=9), "8 ranks are left, fewer than min_world_size=9"),
        (RetryController(min_active_world_size=7), "6 ranks are active, fewer than min_active_world_size=7"),
    ],
)
def test_retries_end_at_the_limits(controller: RetryController, message: str):
    """RestartAbort has the limit that was reached, with both numbers."""
    with pytest.raises(RestartAbort, match=message):
        controller(STATE)


def test_limits_that_nothing_meets_are_refused():
    """A controller that would never let the function run is an OptionError."""
    with pytest.raises(OptionError, match="1 or more") as caught:
        RetryController(max_iterations=0)
    assert caught.value.options == ("max_iterations",)


# ---- Finalize


def test_finalize_calls_with_its_arguments_in_another_thread():
    """The function gets the given arguments in another thread, and the state is returned."""
    seen: list[object] = []

    def note(*args: object, **kwargs: object) -> None:
        seen.append((args, kwargs, threading.current_thread() is threading.main_thread()))

    assert ThreadedFinalize(LONG, note, (1, 2), {"key": 3})(STATE) is STATE
    assert ThreadedFinalize(timeout=LONG, fn=note, args=None)(STATE) is STATE
    assert seen == [((1, 2), {"key": 3}, False), ((), {}, False)]


def test_finalize_raises_what_its_function_raises():
    """An error of the function in its thread is raised in the main thread."""

    def fail() -> None:
        raise OSError("the loader's process is stuck")

    with pytest.raises(OSError, match="the loader's process is stuck"):
        ThreadedFinalize(LONG, fail)(STATE)


def test_finalize_waits_no_longer_than_its_bound():
    """A function that hangs is abandoned: TimeoutError has its name and the rank."""
    free = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=r"ThreadedFinalize: .*wait of rank 1 has not ended within 0.01 s"):
            ThreadedFinalize(datetime.timedelta(seconds=0.01), free.wait)(STATE)
    finally:
        free.set()


# ---- HealthCheck


@dataclass
class Sick(HealthCheck):
    """A check that fails with `error`, if it has one."""

    error: Exception | None = None
    calls: int = 0

    def __call__(self, state: FrozenState) -> FrozenState:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return state


def test_the_first_check_that_fails_wins():
    """Checks run in the order given; the error has the check that failed, and later checks are not called."""
    first, second, third = Sick(), Sick(OSError("no link on eth2")), Sick(OSError("not reached"))
    with pytest.raises(HealthCheckError, match="check 2 of 3, Sick, failed: OSError: no link on eth2") as raised:
        ChainedHealthCheck(first, second, third)(STATE)
    assert raised.value.__cause__ is second.error
    assert (first.calls, second.calls, third.calls) == (1, 1, 0)


def test_a_chain_of_healthy_checks_is_healthy():
    """All checks are called, and the state is returned; a chain can be part of a chain."""
    checks = [Sick(), Sick()]
    assert ChainedHealthCheck(checks[0], ChainedHealthCheck(checks[1]))(STATE) is STATE
    assert [check.calls for check in checks] == [1, 1]


def test_a_chain_takes_health_checks_only():
    """Anything else is an OptionError when the chain is made, not at the first fault."""
    with pytest.raises(OptionError, match="ChainedHealthCheck takes health checks, not 3"):
        ChainedHealthCheck(3)  # type: ignore[arg-type]


def test_faults_of_this_rank_are_counted():
    """The rank's own faults count, up to the number allowed; an iteration that another rank interrupted does not
    count."""
    counter = FaultCounter(max_rank_faults=2)
    for state in (STATE, FAILED, STATE, FAILED, STATE):
        assert counter(state) is state
    with pytest.raises(
        FaultCounterExceeded, match="rank 1 has failed 3 times, more than max_rank_faults=2"
    ) as raised:
        counter(FAILED)
    assert raised.value.__cause__ is FAILED.fn_exception
    assert counter.faults_count == 3


def test_a_counter_without_a_limit_only_counts():
    """None allows any number of faults; a negative limit is an OptionError."""
    counter = FaultCounter()
    for _ in range(50):
        counter(FAILED)
    assert counter.faults_count == 50
    with pytest.raises(OptionError, match="-1") as caught:
        FaultCounter(-1)
    assert caught.value.options == ("max_rank_faults",)


def test_without_cuda_there_is_nothing_to_check():
    """A process without torch, or without a CUDA context, passes, and the check loads no torch."""
    before = "torch" in sys.modules
    assert CudaHealthCheck()(STATE) is STATE
    assert ("torch" in sys.modules) is before


@pytest.mark.parametrize(("local_rank", "seen", "own"), [("3", 8, 3), ("3", 1, 0), (None, 8, 0)])
def test_the_device_is_the_local_ranks(monkeypatch: pytest.MonkeyPatch, local_rank: str | None, seen: int, own: int):
    """If the launcher shows fewer devices, or sets no local rank, it is the thread's current device."""
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": local_rank}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert callback_support.own_device(SimpleNamespace(device_count=lambda: seen, current_device=lambda: 0)) == own


# ---- other components


@pytest.mark.parametrize(("size", "active"), [(8, True), (2, True), (1, False)])
def test_the_older_filters_give_the_same(size: int, active: bool):
    """A filter of rank_filter takes a state and returns it with its active rank and size."""
    state = Compose(WorldSizeDivisibleBy(1), MaxActiveWorldSize(size))(State(rank=1, world_size=8))
    assert (state.mode is Mode.ACTIVE, state.active_world_size) == (active, size)
    assert ActiveWorldSizeDivisibleBy(5)(State(rank=4, world_size=8)).active_rank == 4


@pytest.mark.parametrize("kind", [Completion, Terminate])
def test_completion_and_terminate_are_callbacks(kind: type):
    """A subclass defines the call, and several can be composed into one."""
    seen: list[str] = []

    def made(name: str) -> Callable[[FrozenState], FrozenState]:
        def call(self: object, state: FrozenState) -> FrozenState:
            seen.append(name)
            return state

        return type(name, (kind,), {"__call__": call})()  # type: ignore[no-any-return]

    assert isinstance(Compose(made("b"), made("a")), kind)
    assert Compose(made("b"), made("a"))(STATE) is STATE
    assert seen == ["a", "b"]
    with pytest.raises(TypeError, match="abstract"):
        kind()
