"""Commands whose caller has closed a standard stream, as `>&-` in a shell and some daemons do."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

CLOSED = [descriptors for count in (1, 2, 3) for descriptors in itertools.combinations(range(3), count)]
# A child writes to standard output after the command has opened a file: it must not write into that file.
CHILD_WRITES = """
import subprocess, sys
import click
from nvrx_slurm import cli

@click.command()
def status():
    with open("file", "w") as file:
        subprocess.run(["echo", "child"], check=True)
        file.write("ours\\n")
    click.echo("out")
    click.echo("err", err=True)

cli.cli.get_command = lambda ctx, name: status
sys.argv = ["nvrx-slurm", "status"]
cli.main()
"""


@pytest.mark.parametrize("closed", CLOSED, ids=str)
def test_a_closed_stream_leads_nowhere(tmp_path: Path, closed: tuple[int, ...]) -> None:
    """The output is lost, the command does its work, and a child's output goes into no file."""
    (tmp_path / "command.py").write_text(CHILD_WRITES)
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m command {" ".join(f"{each}>&-" for each in closed)}', sys.executable],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if 1 in closed else "child\nout\n")
    assert done.stderr == ("" if 2 in closed else "err\n")
    assert (tmp_path / "file").read_text() == "ours\n"
