"""Fixtures for all tests."""

from __future__ import annotations

import asyncio
import gc
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from nvrx_slurm.jobspec.plan import Plan
from tests.harness import Gate, RunningJob, end_with_all, start_local

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
"""No test asserts how long an example takes, or to draw one: that depends on what else the machine does."""
settings.register_profile(
    "shared fixtures", suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
"""Of tests whose examples share the fixtures: each example leaves them as it found them, or does not care."""

pytest_plugins = ["tests.slurm_cluster"]


signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""Under nohup it is ignored, and what the tests start would ignore it, too."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # likewise behind `&` in a script
    signal.signal(signal.SIGINT, signal.default_int_handler)

asyncio.set_event_loop(None)
"""Or Python 3.11 makes a loop when pytest-asyncio asks which one there was, and nobody ever closes that one."""


def pytest_collection_finish() -> None:
    """Keep the collector of garbage away from the eleven thousand tests that have been collected: each collection
    walks them, and a test that computes much takes a quarter longer so."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests submit is not kept in the user's own cache, nor their nodes in the user's own ledger."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Where workers wait until the test lets them go."""
    gate = Gate()
    yield gate
    gate.close()


@pytest.fixture
def run_local() -> Iterator[Callable[..., RunningJob]]:
    """Starts local jobs, and after the test sees to it that nothing of them is left."""
    jobs: list[RunningJob] = []

    def start(plan: Plan, **options: object) -> RunningJob:
        jobs.append(start_local(plan, **options))  # type: ignore[arg-type]
        return jobs[-1]

    yield start
    for job in jobs:
        end_with_all(job)
        for left in Path("/dev/shm").glob(f"{job.folder.runtime_name}-*"):  # of a test that killed all at once
            shutil.rmtree(left)
