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
"""For tests whose examples share the fixtures: each example leaves them as they were, or does not depend on that."""

pytest_plugins = ["tests.slurm_cluster"]


signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""Under nohup SIGHUP is ignored, and the processes that the tests start would inherit that."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # likewise behind `&` in a script
    signal.signal(signal.SIGINT, signal.default_int_handler)

asyncio.set_event_loop(None)
"""Without this, pytest-asyncio asks Python 3.11 for the current loop, which creates one that is never closed."""


def pytest_collection_finish() -> None:
    """Exempt the collected tests, about eleven thousand, from garbage collection. Otherwise each collection walks
    them, and a test that computes much takes a quarter longer."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Jobs that tests submit use neither the user's own cache nor the user's own ledger of suspect nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def gate() -> Iterator[Gate]:
    """The gate at which workers wait until the test releases them."""
    gate = Gate()
    yield gate
    gate.close()


@pytest.fixture
def run_local() -> Iterator[Callable[..., RunningJob]]:
    """Starts local jobs. After the test it ends them, and removes what they left in /dev/shm."""
    jobs: list[RunningJob] = []

    def start(plan: Plan, **options: object) -> RunningJob:
        jobs.append(start_local(plan, **options))  # type: ignore[arg-type]
        return jobs[-1]

    yield start
    for job in jobs:
        end_with_all(job)
        for left in Path("/dev/shm").glob(f"{job.folder.runtime_name}-*"):  # left by a test that killed every process
            shutil.rmtree(left)
