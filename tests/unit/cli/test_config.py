"""`nvrx-slurm init`, `config`, `render` and `completion`."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from nvrx_slurm.cli.config import init
from nvrx_slurm.errors import EXIT_USAGE, UsageError
from nvrx_slurm.jobspec.load import load
from tests.unit.cli.conftest import Nvrx


def write_job(*arguments: str) -> str:
    result = CliRunner().invoke(init, arguments, standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.output


def test_it_writes_a_job_that_loads(tmp_path: Path) -> None:
    """The job is valid, plain or with roles, and the command says what to do with it."""
    for flags, has_roles in (((), False), (("--roles",), True)):
        path = tmp_path / f"{has_roles}.yaml"
        said = write_job(str(path), *flags)
        assert f"`nvrx-slurm run {path}`" in said
        assert bool(load(path).spec.roles) is has_roles


def test_it_overwrites_only_with_force(tmp_path: Path) -> None:
    """A file that exists stays as it is, unless --force is given."""
    path = tmp_path / "job.yaml"
    path.write_text("mine\n")
    with pytest.raises(UsageError, match=r"job.yaml exists; .* overwrite it with --force"):
        write_job(str(path))
    assert path.read_text() == "mine\n"
    write_job(str(path), "--force")
    assert load(path).spec.name == "train"


def test_a_script_that_exists_is_never_overwritten(tmp_path: Path) -> None:
    """`train.py` is a name that many users have; --force is for job.yaml only."""
    (tmp_path / "train.py").write_text("mine\n")
    assert "stays as it is" in write_job(str(tmp_path / "job.yaml"))
    write_job(str(tmp_path / "job.yaml"), "--force")
    assert (tmp_path / "train.py").read_text() == "mine\n"


def test_the_job_runs_the_python_that_has_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is `python` if that is this environment's, else its path, so that the first run does not fail."""
    here = str(Path(sys.executable).parent)
    for path, program in ((here, "python"), ("/nonexistent", sys.executable)):
        monkeypatch.setenv("PATH", path)
        write_job(str(tmp_path / "job.yaml"), "--force")
        assert load(tmp_path / "job.yaml").spec.command == (program, "train.py")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A missing folder, or a folder in the file's place, is one error."""
    for path in (tmp_path / "no" / "job.yaml", tmp_path):
        with pytest.raises(UsageError, match=f"^{path} ") as caught:
            write_job(str(path), "--force")
        assert caught.value.exit_code == EXIT_USAGE


JOB = "name: a\ncommand: [x, 'a b']\nslurm:\n  time: 90m\nfault_tolerance: {teardown: {grace: 0.25}}\n"


def test_show_prints_every_key_with_its_origin(nvrx: Nvrx, tmp_path: Path) -> None:
    """There is one key a line, with its value as in job.yaml and its origin."""
    (tmp_path / "job.yaml").write_text(JOB)
    done = nvrx("config", "show", "--origin", "--spares=2", NVRX_SLURM_NODES="3")
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines()}
    assert lines["slurm.time"].split() == ['"1h30m"', "job.yaml:4"]
    assert lines["fault_tolerance.teardown.grace"].split() == ['"250ms"', "job.yaml:5"]
    assert lines["spares"].split() == ["2", "--spares"]
    assert lines["nodes"].split() == ["3", "$NVRX_SLURM_NODES"]
    assert lines["fault_tolerance.max_restarts"].split() == ["3", "default"]


def test_what_show_prints_as_json_loads_again(nvrx: Nvrx, tmp_path: Path) -> None:
    """Every value is one that job.yaml accepts, and the job is the same."""
    (tmp_path / "job.yaml").write_text(JOB)
    flat = json.loads(nvrx("config", "show", "--json").stdout)
    (tmp_path / "name.yaml").write_text("")
    again = load(tmp_path / "name.yaml", {key: value for key, value in flat.items() if value is not None}).spec
    assert again == load(tmp_path / "job.yaml").spec


def test_the_schema_is_json(nvrx: Nvrx) -> None:
    """`config schema` prints one JSON document that allows no unknown key in any block."""
    schema = json.loads(nvrx("config", "schema").stdout)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["name"]["description"]


def test_a_mistake_shows_no_configuration(nvrx: Nvrx, tmp_path: Path) -> None:
    """`config show` of a bad file says what is wrong, and prints nothing else."""
    (tmp_path / "job.yaml").write_text("name: a\nnodes: x\n")
    done = nvrx("config", "show")
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert done.stderr == "nvrx-slurm: error: job.yaml:2: nodes: must be a whole number, not 'x'\n"


PLAIN_JOB = "name: a\ncommand: x\n"

# arguments → what stderr says, for a valid job.yaml
MISTAKES = {
    ("--set", "nodez=3"): "--set nodez: nodez: is not known; did you mean `nodes`?",
    ("--set", "nodez"): "--set nodez: write it as key=value",
    ("--spares=-1",): "--spares: spares: must be at least 0, not '-1'",
    ("nope.yaml",): "nope.yaml: cannot be read: No such file or directory",
    (".",): ".: cannot be read: Is a directory",
    ("--folder", "a\nb"): "the job folder is ",
    ("--folder", "a\\b"): "holds a backslash",
    ("--folder", "job.yaml/jobs"): "job.yaml/jobs: cannot be written (Not a directory); --folder names ",
}


def job(folder: Path, text: str = PLAIN_JOB) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def test_the_script_is_all_there_is_on_stdout(nvrx: Nvrx, tmp_path: Path) -> None:
    """stdout has the script and nothing else; the folder for its log exists, for its user alone."""
    job(tmp_path)
    done = nvrx("render", "--spares", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("#!/bin/bash\n# a: 1 node and 2 hot spares, by nvrx-slurm\n#SBATCH --job-name=a\n")
    assert f"#SBATCH --output={tmp_path}/nvrx-jobs/slurm-%j.out\n" in done.stdout
    assert stat.S_IMODE((tmp_path / "nvrx-jobs").stat().st_mode) == 0o700
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0


def test_the_local_script_asks_nothing_of_slurm(nvrx: Nvrx, tmp_path: Path) -> None:
    """With --local it is the script for this machine."""
    job(tmp_path)
    done = nvrx("render", "--local")
    assert done.returncode == 0
    assert "SBATCH" not in done.stdout
    assert "srun" not in done.stdout


@pytest.mark.parametrize(("arguments", "says"), MISTAKES.items())
def test_a_mistake_is_one_message_and_exit_code_2(
    nvrx: Nvrx, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    """stderr has one line without a traceback, stdout nothing, and the exit code is that of a usage error."""
    job(tmp_path)
    done = nvrx("render", *arguments)
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert done.stderr.startswith("nvrx-slurm: error: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "nvrx-jobs").exists()


def test_several_mistakes_are_reported_together(nvrx: Nvrx, tmp_path: Path) -> None:
    """All that is wrong with a file is reported in one run."""
    job(tmp_path, "name: a b\nnodez: 1\n")
    done = nvrx("render")
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert done.stderr.splitlines()[0] == "nvrx-slurm: error: 2 problems:"
    assert "job.yaml:1: name: " in done.stderr
    assert "job.yaml:2: nodez: " in done.stderr


def test_a_mistake_in_the_environment_names_the_variable(nvrx: Nvrx, tmp_path: Path) -> None:
    """A variable that sets no known key is reported by its own name."""
    job(tmp_path)
    done = nvrx("render", NVRX_SLURM_NODEZ="3")
    assert done.returncode == EXIT_USAGE
    assert done.stderr.startswith("nvrx-slurm: error: $NVRX_SLURM_NODEZ: nodez: is not known")


def test_the_password_of_the_store_is_in_no_script(nvrx: Nvrx, tmp_path: Path) -> None:
    """The variable with the password is no configuration key, and does not reach the script."""
    job(tmp_path, PLAIN_JOB + "store: {url: 'redis://h'}\n")
    done = nvrx("render", NVRX_SLURM_STORE_PASSWORD="hunter2")
    assert done.returncode == 0
    assert "hunter2" not in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_completes_this_command(nvrx: Nvrx, shell: str) -> None:
    """Each shell's script calls `nvrx-slurm` with the variable that click reads."""
    done = nvrx("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"_NVRX_SLURM_COMPLETE={shell}_complete" in done.stdout
    assert "nvrx-slurm" in done.stdout


def test_the_bash_script_parses(nvrx: Nvrx) -> None:
    """bash accepts it."""
    script = nvrx("completion", "bash").stdout
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""


def test_the_callback_completes_commands_and_flags(nvrx: Nvrx) -> None:
    """The callback answers for commands, and for the flags of one."""
    asked = {"_NVRX_SLURM_COMPLETE": "bash_complete"}
    assert nvrx(COMP_WORDS="nvrx-slurm ren", COMP_CWORD="1", **asked).stdout == "plain,render\n"
    flags = nvrx(COMP_WORDS="nvrx-slurm render --sp", COMP_CWORD="2", **asked).stdout
    assert flags == "plain,--spares\n"


def test_another_shell_is_refused(nvrx: Nvrx) -> None:
    """The error names the shells that are supported."""
    done = nvrx("completion", "tcsh")
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert "'bash', 'zsh', 'fish'" in done.stderr
