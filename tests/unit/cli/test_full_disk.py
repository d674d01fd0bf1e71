"""Commands whose output goes to a disk that is full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.api.handle import Job
from nvrx_slurm.errors import EXIT_USAGE
from tests.unit.report.recorder import JOB, ended, write

COMMANDS = [
    ("status",),
    ("status", JOB),
    ("status", JOB, "--json"),
    ("events", JOB),
    ("report", JOB, "-o", "-"),
    ("metrics", JOB),
    ("init", "--help"),
]


def on_a_full_disk(cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose output cannot be written."""
    with Path("/dev/full").open("wb") as full:
        return subprocess.run(
            [sys.executable, "-m", "nvrx_slurm", *command],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )


def test_a_job_whose_id_cannot_be_printed_is_named(tmp_path: Path) -> None:
    """The job is submitted: a user who took it for refused would submit it twice."""
    (tmp_path / "job.yaml").write_text("{name: one, command: ['true']}")
    done = on_a_full_disk(tmp_path, "submit", "--local", "--folder", str(tmp_path / "jobs"))
    (folder,) = (tmp_path / "jobs").glob("local-*")
    assert folder.name in done.stderr
    assert Job(folder.name, folder=folder.parent, cluster="local").wait(60.0) == 0


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_disk_is_one_line(tmp_path: Path, command: tuple[str, ...]) -> None:
    """The exit code is that of a file that cannot be written, not that of a failed job."""
    write(tmp_path, ended())
    folder = () if "--help" in command else ("--folder", str(tmp_path))
    done = on_a_full_disk(tmp_path, *command, *folder)
    assert (done.returncode, len(done.stderr.splitlines())) == (EXIT_USAGE, 1), done.stderr
    assert os.strerror(28) in done.stderr
