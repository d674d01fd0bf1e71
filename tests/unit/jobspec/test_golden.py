"""The scripts of four jobs, word by word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.jobspec.golden import JOBS, path_of, script_of


@pytest.mark.parametrize("name", JOBS)
def test_the_script_is_the_golden_one(name: str) -> None:
    """A change of the script is seen, and made on purpose: `python -m tests.unit.jobspec.golden`."""
    assert script_of(name) == path_of(name).read_text()


@pytest.mark.parametrize("name", JOBS)
def test_bash_and_shellcheck_find_nothing(name: str) -> None:
    """Each script parses, and shellcheck has nothing to say (SC1091: it cannot see the user's own `source` files)."""
    shellcheck = Path(sys.executable).with_name("shellcheck")  # this environment's own
    for command in (["bash", "-n"], [shellcheck, "--exclude=SC1091"]):
        done = subprocess.run([*command, path_of(name)], capture_output=True, text=True)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_every_golden_file_has_its_job() -> None:
    """No file outlives the job that it was made of."""
    folder = path_of("plain").parent
    assert {path.stem for path in folder.iterdir()} == set(JOBS)
    assert folder == Path(__file__).parent / "golden"
