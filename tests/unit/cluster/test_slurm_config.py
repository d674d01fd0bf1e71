"""What `scontrol show config` says: the cluster's name, and KillWait."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from nvrx_slurm.attribution.ledger import cluster_of
from nvrx_slurm.cluster.commands import CommandOutput
from nvrx_slurm.cluster.slurm_config import KillWaitQuestion, named_cluster
from nvrx_slurm.cluster.slurm_text import number_of, settings_of
from nvrx_slurm.journal.folder import JobInfo

SAID = """\
Configuration data as of 2026-11-21T18:00:00
AccountingStorageBackupHost = (null)
ClusterName             = alpha-2
CompleteWait            = 0 sec
"""


def test_the_name_is_read_from_the_configuration_that_slurm_prints() -> None:
    """If the output has no name, there is none."""
    assert settings_of(SAID)["ClusterName"] == "alpha-2"
    assert "ClusterName" not in settings_of("slurmctld is DOWN")


@pytest.mark.parametrize(
    ("output", "name"), [(CommandOutput(0, SAID, ""), "alpha-2"), (CommandOutput(1, SAID, "no"), None)]
)
def test_outside_of_a_job_slurm_is_asked(
    output: CommandOutput, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside of a job a variable of Slurm's has the name."""
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
    """That is no error."""
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert named_cluster() is None


def test_a_job_without_slurm_has_no_nodes_worth_remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a ledger of its own it has, and then they are nodes of this machine."""
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "alpha")  # `nvrx-slurm run` inside of an allocation
    local = JobInfo(job_id="local-a", name="a", cluster="local", started_at=0.0)
    on_slurm = JobInfo(job_id="7", name="a", cluster="slurm", started_at=0.0)
    assert cluster_of(local, None) is None
    assert cluster_of(local, "/own.json") == f"local@{socket.gethostname()}"
    assert cluster_of(on_slurm, None) == "alpha"


KILL_WAIT_SAID = """\
Configuration data as of 2026-11-21T12:26:48
KeepAliveTime           = SYSTEM_DEFAULT
KillOnBadExit           = 0
KillWait                = 30 sec
LaunchParameters        = (null)
"""


def program(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a scontrol with this body on PATH."""
    path = folder / "scontrol"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_CONF", raising=False)


def test_kill_wait_is_read_from_what_scontrol_prints() -> None:
    """KillOnBadExit is another key; without the line of KillWait there is no value."""
    assert number_of(settings_of(KILL_WAIT_SAID), "KillWait") == 30.0
    assert number_of(settings_of("KillOnBadExit = 0\n"), "KillWait") is None


@pytest.mark.parametrize("body", ["exit 1", "echo Unable to contact slurm controller >&2; exit 1", "exec sleep 1000"])
def test_a_scontrol_that_does_not_answer_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    """If scontrol fails or hangs, the answer is None; a scontrol that hangs is dead afterwards."""
    program(tmp_path, body, monkeypatch)
    with KillWaitQuestion() as question:
        assert question.answer(timeout_s=0.05 if "sleep" in body else 10.0) is None
        process = question._process
    assert process is not None
    assert process.returncode is not None


def test_no_slurm_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scontrol, or with a SLURM_CONF that names no file, the answer is None."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with KillWaitQuestion() as question:
        assert question.answer(timeout_s=10.0) is None
    program(tmp_path, "echo 'KillWait = 30 sec'", monkeypatch)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "nowhere"))
    with KillWaitQuestion() as question:
        assert question.answer(timeout_s=10.0) is None


def test_a_question_that_is_not_waited_for_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When sbatch refuses the job, the query is dropped, and its process is killed."""
    program(tmp_path, "exec sleep 1000", monkeypatch)
    question = KillWaitQuestion()
    with pytest.raises(ValueError, match="refused"), question:
        raise ValueError("refused")
    assert question._process is not None
    assert question._process.returncode == -9


def test_the_question_costs_no_import() -> None:
    """`submit` asks the question, and must not load asyncio and msgspec for it."""
    code = "import sys, nvrx_slurm.cluster.slurm_config; print({'asyncio', 'msgspec'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
