"""The scripts of four jobs, character by character."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.jobspec.golden import JOBS, path_of, script_of


@pytest.mark.parametrize("name", JOBS)
def test_the_script_is_the_golden_one(name: str) -> None:
    """A change of a script must be intended: `python -m tests.unit.jobspec.golden` rewrites the golden files."""
    assert script_of(name) == path_of(name).read_text()


@pytest.mark.parametrize("name", JOBS)
def test_bash_and_shellcheck_find_nothing(name: str) -> None:
    """Each script parses, and shellcheck reports nothing (without SC1091: it cannot follow the user's own `source`
    files)."""
    shellcheck = Path(sys.executable).with_name("shellcheck")  # this environment's own
    for command in (["bash", "-n"], [shellcheck, "--exclude=SC1091"]):
        done = subprocess.run([*command, path_of(name)], capture_output=True, text=True)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_every_golden_file_has_its_job() -> None:
    """Each file in `golden/` belongs to a job of this test."""
    folder = path_of("plain").parent
    assert {path.stem for path in folder.iterdir()} == set(JOBS)
    assert folder == Path(__file__).parent / "golden"
