"""The types that a type checker and an editor see."""

from __future__ import annotations

import subprocess
import sys

from tests.inprocess.harness import ROOT


def test_a_users_script_type_checks() -> None:
    """A user's script passes mypy --strict: lazily loaded names, a call as first parameter or with a default, a
    composition, and an assignment that changes the state."""
    command = [sys.executable, "-m", "mypy", "--strict", "tests/inprocess/typed_user.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
