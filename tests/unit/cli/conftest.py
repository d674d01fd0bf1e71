"""Fixtures for the tests of the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_slurm.jobspec import env

Nvrx = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def nvrx(tmp_path: Path) -> Nvrx:
    """Runs `nvrx-slurm` as a user would, in an empty folder, without this machine's site files."""
    clean = {"XDG_CONFIG_HOME": str(tmp_path / "xdg"), "XDG_CONFIG_DIRS": str(tmp_path / "xdg")}

    def nvrx(*arguments: str, stdin: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "nvrx_slurm", *arguments],
            cwd=tmp_path,
            env=env.child_environment({**clean, **variables}),
            capture_output=True,
            text=True,
            input=stdin,
        )

    return nvrx
