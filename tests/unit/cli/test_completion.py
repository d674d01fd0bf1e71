"""What the shell completes, asked as bash asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.journal.job_index import record_job
from tests.unit.cli.conftest import Nvrx
from tests.unit.report.recorder import BEGIN, ended, plain_plan, write


@pytest.fixture
def completed(nvrx: Nvrx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns the answers to a line whose last word is being typed. There is a job 4711 of 4 nodes, in another
    folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = write(tmp_path / "elsewhere", ended(), job="4711", cluster="slurm")
    assert folder.read_plan() == plain_plan()
    info = folder.read_info()
    assert info is not None
    folder.write_info(type(info)(job_id="4711", name="", cluster="slurm", started_at=BEGIN, nodes=("n1", "n2")))
    record_job(folder.path)

    def completed(line: str) -> list[str]:
        done = nvrx(_NVRX_SLURM_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(line.split(" ")) - 1))
        assert done.stderr == ""
        return [answer.partition(",")[2] for answer in done.stdout.split()]

    return completed


@pytest.mark.parametrize(
    ("line", "answers"),
    [
        ("nvrx-slurm events 4", ["4711"]),
        ("nvrx-slurm rm x", []),
        ("nvrx-slurm report 4", ["4711"]),
        ("nvrx-slurm top 4711 4", ["4711"]),
        ("nvrx-slurm metrics --show r", ["rules"]),
        ("nvrx-slurm events 4711 --folder=nowhere 4", []),
        ("nvrx-slurm logs --rank ", [str(rank) for rank in range(8)]),
        ("nvrx-slurm dump 4711 --replica ", ["main-0"]),
        ("nvrx-slurm logs 0815 --rank ", []),
        ("nvrx-slurm drain ", ["n1", "n2", "4711"]),
        ("nvrx-slurm drain 4711 n", ["n1", "n2"]),
        ("nvrx-slurm events --type node_l", ["node_left", "node_lost"]),
        ("nvrx-slurm submit --set fault_tolerance.heartbeat.t", ["fault_tolerance.heartbeat.timeout="]),
        ("nvrx-slurm submit --set spar", ["spares="]),
    ],
)
def test_the_shell_completes(completed, line: str, answers: list[str]) -> None:
    """Ids are completed from the index; ranks, replicas and nodes from the job on the line, or the newest one; and
    keys and events."""
    assert completed(line) == answers


def test_the_shell_completes_flows(completed, tmp_path: Path) -> None:
    """Flows are completed from the files and folders on the line."""
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "a.yaml").write_text("# a comment\nname: kill-node\njob: x\n")
    (tmp_path / "flows" / "b.job.yaml").write_text("name: no-flow\n")
    assert completed("nvrx-slurm ci run flows --flow k") == ["kill-node"]
    assert completed("nvrx-slurm ci run nowhere --flow k") == []
