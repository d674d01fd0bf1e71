"""What a type checker and a reader of an editor's hints see."""

from __future__ import annotations

import subprocess
import sys

from tests.inprocess.harness import ROOT


def test_a_users_script_type_checks() -> None:
    """Under mypy's strict rules: names that are loaded late, a call given as first parameter or by default, a
    composition, a state that an assignment changes."""
    command = [sys.executable, "-m", "mypy", "--strict", "tests/inprocess/typed_user.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
