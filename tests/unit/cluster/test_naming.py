"""What the cluster is called."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest

from nvrx_slurm.attribution.ledger import cluster_of
from nvrx_slurm.cluster.commands import CommandOutput
from nvrx_slurm.cluster.naming import cluster_name_of, named_cluster
from nvrx_slurm.journal.folder import JobInfo

SAID = """\
Configuration data as of 2026-11-21T18:00:00
AccountingStorageBackupHost = (null)
ClusterName             = alpha-2
CompleteWait            = 0 sec
"""


def test_the_name_is_read_from_the_configuration_that_slurm_prints() -> None:
    """Without one there is none."""
    assert cluster_name_of(SAID) == "alpha-2"
    assert cluster_name_of("slurmctld is DOWN") is None


@pytest.mark.parametrize(
    ("output", "name"), [(CommandOutput(0, SAID, ""), "alpha-2"), (CommandOutput(1, SAID, "no"), None)]
)
def test_outside_of_a_job_slurm_is_asked(
    output: CommandOutput, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside of one it has told already."""
    asked: list[Sequence[str]] = []

    def run(command: Sequence[str], *, timeout_s: float) -> CommandOutput:
        asked.append(command)
        return output

    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    assert named_cluster(run) == name
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "beta")
    assert named_cluster(run) == "beta"
    assert asked == [["scontrol", "show", "config"]]


def test_where_there_is_no_slurm_there_is_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """And no error."""
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert named_cluster() is None


def test_a_job_without_slurm_has_no_nodes_worth_remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody gives it a ledger; and then they are this machine's."""
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "alpha")  # `nvrx-slurm run` inside of an allocation
    local = JobInfo(job_id="local-a", name="a", cluster="local", started_at=0.0)
    on_slurm = JobInfo(job_id="7", name="a", cluster="slurm", started_at=0.0)
    assert cluster_of(local, None) is None
    assert cluster_of(local, "/own.json") == f"local@{socket.gethostname()}"
    assert cluster_of(on_slurm, None) == "alpha"
