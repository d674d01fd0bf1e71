"""Ctrl-C in a command: exit code 130, wherever it arrives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# What a dataclass does when its module is imported: the interrupt leaves an exec() of a string.
INTERRUPTED = """
import sys
import click
from nvrx_slurm import cli
cli.cli.get_command = lambda ctx, name: click.Command(name, callback=lambda: exec("raise KeyboardInterrupt"))
sys.argv = ["nvrx-slurm", "wait"]
cli.main()
"""


def test_an_interrupt_during_an_import_exits_with_130(tmp_path: Path) -> None:
    """Not by SIGINT, as CPython ends a module that `python -m` has started."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    done = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (130, "")
