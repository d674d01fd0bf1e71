"""A real Slurm for the tests: `slurm_cluster` of our pytest plugin, and `healthy_cluster` for a single test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.lab.devcluster import DevCluster

LEDGER = "NVRX_SLURM_FAULT_TOLERANCE__ATTRIBUTION__LEDGER"


@pytest.fixture
def healthy_cluster(
    slurm_cluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DevCluster]:
    """The session's Slurm, with every node idle and no job left, before and after the test. Its ledger of suspect
    nodes is empty: faults of earlier tests are not in it."""
    monkeypatch.setenv(LEDGER, str(tmp_path / "suspects.json"))
    slurm_cluster.heal()
    yield slurm_cluster
    slurm_cluster.heal()
