"""`nvrx-slurm render`"""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from nvrx_slurm.errors import EXIT_USAGE
from tests.unit.cli.conftest import Nvrx

JOB = "name: a\ncommand: x\n"

# arguments → what stderr says, for a job.yaml that is fine
MISTAKES = {
    ("--set", "nodez=3"): "--set nodez: nodez: is not known; did you mean `nodes`?",
    ("--set", "nodez"): "--set nodez: write it as key=value",
    ("--spares=-1",): "--spares: spares: must be at least 0, not -1",
    ("nope.yaml",): "nope.yaml: cannot be read: No such file or directory",
    (".",): ".: cannot be read: Is a directory",
    ("--folder", "a\nb"): "the job folder is ",
    ("--folder", "a\\b"): "holds a backslash",
    ("--folder", "job.yaml/jobs"): "job.yaml/jobs: cannot be written (Not a directory); --folder names ",
}


def job(folder: Path, text: str = JOB) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def test_the_script_is_all_there_is_on_stdout(nvrx: Nvrx, tmp_path: Path) -> None:
    """stdout is the script and nothing else; the folder it logs into exists, for its user alone."""
    job(tmp_path)
    done = nvrx("render", "--spares", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("#!/bin/bash\n# a: 1 node and 2 hot spares, by nvrx-slurm\n#SBATCH --job-name=a\n")
    assert f"#SBATCH --output={tmp_path}/nvrx-jobs/slurm-%j.out\n" in done.stdout
    assert stat.S_IMODE((tmp_path / "nvrx-jobs").stat().st_mode) == 0o700
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0


def test_the_local_script_asks_nothing_of_slurm(nvrx: Nvrx, tmp_path: Path) -> None:
    """--local is the script for this machine."""
    job(tmp_path)
    done = nvrx("render", "--local")
    assert done.returncode == 0
    assert "SBATCH" not in done.stdout
    assert "srun" not in done.stdout


@pytest.mark.parametrize(("arguments", "says"), MISTAKES.items())
def test_a_mistake_is_one_message_and_exit_code_2(
    nvrx: Nvrx, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    """stderr has one line without a traceback, stdout nothing, and the exit code says usage."""
    job(tmp_path)
    done = nvrx("render", *arguments)
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert done.stderr.startswith("nvrx-slurm: error: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "nvrx-jobs").exists()


def test_several_mistakes_are_told_together(nvrx: Nvrx, tmp_path: Path) -> None:
    """All that is wrong with a file is told in one run."""
    job(tmp_path, "name: a b\nnodez: 1\n")
    done = nvrx("render")
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert done.stderr.splitlines()[0] == "nvrx-slurm: error: 2 problems:"
    assert "job.yaml:1: name: " in done.stderr
    assert "job.yaml:2: nodez: " in done.stderr


def test_a_mistake_in_the_environment_names_the_variable(nvrx: Nvrx, tmp_path: Path) -> None:
    """A variable that names no key is told by its own name."""
    job(tmp_path)
    done = nvrx("render", NVRX_SLURM_NODEZ="3")
    assert done.returncode == EXIT_USAGE
    assert done.stderr.startswith("nvrx-slurm: error: $NVRX_SLURM_NODEZ: nodez: is not known")


def test_the_password_of_the_store_is_in_no_script(nvrx: Nvrx, tmp_path: Path) -> None:
    """The variable that holds it is no configuration key, and does not reach the script."""
    job(tmp_path, JOB + "store: {url: 'redis://h'}\n")
    done = nvrx("render", NVRX_SLURM_STORE_PASSWORD="hunter2")
    assert done.returncode == 0
    assert "hunter2" not in done.stdout
