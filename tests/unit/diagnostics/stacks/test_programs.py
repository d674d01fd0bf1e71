"""Other programs are run within a time limit."""

from __future__ import annotations

import asyncio

from nvrx_slurm.diagnostics.stacks import programs
from nvrx_slurm.util import tasks
from nvrx_slurm.util.processes import is_alive


def test_program_that_hangs_is_killed(tmp_path, monkeypatch):
    """A program that exceeds its time limit is killed, and its output says so."""
    monkeypatch.setattr(tasks, "REAPED_S", 60.0)  # an overloaded machine takes long over a SIGKILL
    pid = tmp_path / "pid"
    said = asyncio.run(programs.run("sh", "-c", f"echo $$ > {pid}; exec sleep 1000", timeout_s=0.5))
    assert said == programs.ProgramOutput("no answer within 0.5 s", ok=False)
    assert not is_alive(int(pid.read_text()))


def test_program_without_time_is_not_started():
    """If no time is left, no program is started."""
    assert asyncio.run(programs.run("/nonexistent", timeout_s=0.0)).text == "no time was left for it"


def test_program_that_is_not_there_is_none(tmp_path):
    """A program that is not installed is not found, and one that cannot be run gives the reason."""
    assert asyncio.run(programs.find("no-such-program", 10.0)) is None
    missing = str(tmp_path / "none")
    said = asyncio.run(programs.run(missing, timeout_s=10.0))
    assert said == programs.ProgramOutput(f"{missing}: No such file or directory", ok=False)
