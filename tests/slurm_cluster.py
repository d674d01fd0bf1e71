"""A real Slurm for the tests: `dev_cluster`, shared by the whole session, and `healthy_cluster` for one test.

A test run that is killed outright (SIGKILL) cannot clean up; its cluster goes down at the start of the next run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nvrx_slurm.cluster.dev import DevCluster, names, remove

NODES = 6
_PREFIX = "test-"


@pytest.fixture(scope="session")
def dev_cluster() -> Iterator[DevCluster]:
    """A Slurm with six idle nodes of four CPUs each. Use `healthy_cluster` where a test breaks something."""
    _remove_abandoned()
    with DevCluster.up(name=f"{_PREFIX}{os.getpid()}", nodes=NODES) as cluster:
        yield cluster


@pytest.fixture
def healthy_cluster(dev_cluster: DevCluster) -> Iterator[DevCluster]:
    """The session's Slurm, with every node idle and no job left, before the test and after it."""
    dev_cluster.heal()
    yield dev_cluster
    dev_cluster.heal()


def _remove_abandoned() -> None:
    """Take down the clusters of test runs that are over: their pid is in the name."""
    for name in names():
        pid = name.removeprefix(_PREFIX)
        if name.startswith(_PREFIX) and pid.isdigit() and not _runs(int(pid)):
            remove(name)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
