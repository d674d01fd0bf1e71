"""Fixtures for the tests of the command line."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_slurm.jobspec import env
from tests.forks import run_command

Nvrx = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def nvrx(tmp_path: Path) -> Nvrx:
    """Runs `nvrx-slurm` as a user would, in an empty folder, without this machine's site files."""
    clean = {"XDG_CONFIG_HOME": str(tmp_path / "xdg"), "XDG_CONFIG_DIRS": str(tmp_path / "xdg")}

    def nvrx(*arguments: str, stdin: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = env.child_environment({**clean, **variables})
        with tempfile.TemporaryFile("w+") as file:
            file.write(stdin or "")
            file.seek(0)
            number = 0 if stdin is None else file.fileno()
            return run_command(arguments, cwd=tmp_path, env=environment, stdin=number)

    return nvrx
