"""Asking for KillWait, and getting no answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.cluster.kill_wait import KillWaitQuestion
from nvrx_slurm.cluster.slurm_text import kill_wait_of

SAID = """\
Configuration data as of 2026-11-21T12:26:48
KeepAliveTime           = SYSTEM_DEFAULT
KillOnBadExit           = 0
KillWait                = 30 sec
LaunchParameters        = (null)
"""


def program(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this the scontrol that is found."""
    path = folder / "scontrol"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_CONF", raising=False)


def test_kill_wait_is_read_from_what_scontrol_prints() -> None:
    """KillOnBadExit is another key; without the line there is no answer."""
    assert kill_wait_of(SAID) == 30.0
    assert kill_wait_of("KillOnBadExit = 0\n") is None


@pytest.mark.parametrize("body", ["exit 1", "echo Unable to contact slurm controller >&2; exit 1", "exec sleep 1000"])
def test_a_scontrol_that_does_not_tell_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    """One that fails, and one that hangs, are None; the one that hangs is dead afterwards."""
    program(tmp_path, body, monkeypatch)
    with KillWaitQuestion() as question:
        assert question.answer(timeout_s=0.05 if "sleep" in body else 10.0) is None
        process = question._process
    assert process is not None
    assert process.returncode is not None


def test_no_slurm_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scontrol, or with a SLURM_CONF that names no file, there is nobody to ask."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with KillWaitQuestion() as question:
        assert question.answer(timeout_s=10.0) is None
    program(tmp_path, "echo 'KillWait = 30 sec'", monkeypatch)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "nowhere"))
    with KillWaitQuestion() as question:
        assert question.answer(timeout_s=10.0) is None


def test_a_question_that_nobody_waits_for_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When sbatch refuses the job, the question is dropped, and its process with it."""
    program(tmp_path, "exec sleep 1000", monkeypatch)
    question = KillWaitQuestion()
    with pytest.raises(ValueError, match="refused"), question:
        raise ValueError("refused")
    assert question._process is not None
    assert question._process.returncode == -9


def test_the_question_costs_no_import() -> None:
    """`submit` asks it: asyncio and msgspec are not loaded for it."""
    code = "import sys, nvrx_slurm.cluster.kill_wait; print({'asyncio', 'msgspec'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
