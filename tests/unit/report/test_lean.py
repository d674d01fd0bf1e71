"""The imports for reading a job from its folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.report.recorder import JOB, ended, write

HEAVY = ("redis", "rich", "pydantic", "submitit", "jinja2", "ruamel", "stamina", "asyncio")

PROGRAM = """
import sys
from nvrx_slurm.cli import cli
cli.main(sys.argv[2:], standalone_mode=False)
print([name for name in sys.argv[1].split(",") if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize("args", [("status", "--json"), ("status", JOB, "--json"), ("status", JOB), ("events", JOB)])
def test_an_ended_job_is_read_without_heavy_imports(tmp_path: Path, args: tuple[str, ...]) -> None:
    """If the output is a pipe and the job is only a folder, no store client, terminal library or configuration is
    loaded."""
    write(tmp_path, ended())
    argv = [sys.executable, "-c", PROGRAM, ",".join(HEAVY), *args, "--folder", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert done.stdout
