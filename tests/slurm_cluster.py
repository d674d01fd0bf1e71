"""A real Slurm for the tests: `slurm_cluster` of our own pytest plugin, and `healthy_cluster` for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nvrx_slurm.cluster.dev import DevCluster


@pytest.fixture
def healthy_cluster(slurm_cluster: DevCluster) -> Iterator[DevCluster]:
    """The session's Slurm, with every node idle and no job left, before the test and after it."""
    slurm_cluster.heal()
    yield slurm_cluster
    slurm_cluster.heal()
