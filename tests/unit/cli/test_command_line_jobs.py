"""Jobs of the command line: `-- COMMAND`, sbatch's flags, `--save`, and the messages for mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from nvrx_slurm.cli import cli
from nvrx_slurm.cli.options import name_of
from nvrx_slurm.errors import ConfigError, StoreUnreachable, UsageError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, without this machine's site files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "xdg"))
    return tmp_path


def typed(*arguments: str) -> str:
    """The output of `nvrx-slurm`; raises the exception with which it ends."""
    done = CliRunner().invoke(cli, arguments, standalone_mode=False, prog_name="nvrx-slurm")
    if done.exception:
        raise done.exception
    return done.output


def keys(*arguments: str) -> dict[str, Any]:
    """The job's keys, each with its value."""
    shown: dict[str, Any] = json.loads(typed("config", "show", "--json", *arguments))
    return shown


def test_a_line_of_torchrun_is_a_job() -> None:
    """torchrun's counts become keys, and its script is the command; this tool's own flags take precedence."""
    line = "torchrun --nnodes 2:4 --nproc-per-node=8 --max-restarts 5 train.py --lr 1"
    found = keys("-N", "3", "--nproc_per_node", "2", "--", *line.split())
    assert (found["nodes"], found["min_nodes"], found["workers_per_node"]) == (3, 2, 2)
    assert found["command"] == ["python", "-u", "train.py", "--lr", "1"]
    assert found["fault_tolerance.max_restarts"] == 5


@pytest.mark.parametrize("flag", [("--gpus-per-node", "8"), ("--gpus-per-node=h100:8",)])
def test_a_worker_for_each_gpu_that_the_line_asks_for(flag: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's `gpu` is that number, not the number of GPUs on the node where the line is typed."""
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    assert keys(*flag, "--", "torchrun", "--nproc-per-node=gpu", "train.py")["workers_per_node"] == 8


def test_modules_to_prewarm_are_a_flag() -> None:
    """`--prewarm` takes names with commas, `auto` or `off`, and replaces the value of the file."""
    Path("job.yaml").write_text("name: a\ncommand: x\nprewarm: {imports: [numpy], memory: 1GiB}\n")
    assert keys("job.yaml", "--prewarm", "torch, mymodel")["prewarm.imports"] == ["torch", "mymodel"]
    assert keys("job.yaml", "--prewarm", "auto")["prewarm.imports"] == "auto"
    assert keys("job.yaml", "--prewarm", "off")["prewarm.imports"] == []
    assert keys("job.yaml", "--set", "prewarm.memory=2GiB")["prewarm.imports"] == ["numpy"]
    with pytest.raises(ConfigError) as refused:
        typed("render", "job.yaml", "--prewarm", "my-model")
    assert (refused.value.file, refused.value.key) == ("--prewarm", "prewarm")


SBATCH = {
    "-N": ("4", "nodes", 4),
    "-t": ("90", "slurm.time", "1h30m"),
    "-p": ("gpu", "slurm.partition", "gpu"),
    "-A": ("us", "slurm.account", "us"),
    "-q": ("high", "slurm.qos", "high"),
    "-w": ("n[1-4]", "slurm.extra.nodelist", "n[1-4]"),
    "-x": ("n9", "slurm.exclude", "n9"),
    "-C": ("h100", "slurm.constraint", "h100"),
    "-J": ("mine", "name", "mine"),
    "-o": ("/logs/%x-%j.out", "output", "/logs/%x-%j.out"),
    "-c": ("64", "slurm.cpus_per_task", 64),
    "--gpus-per-node": ("h100:8", "slurm.gpus_per_node", "h100:8"),
    "--mem": ("0", "slurm.mem", "0"),
}
"""sbatch's flag → what it is given here, and the key with the value that it then has."""


def test_a_command_alone_is_a_job(here: Path) -> None:
    """The job needs no file, is named after its script, and takes the words after -- unchanged."""
    (here / "job.yaml").write_text("not: [read\n")
    job = keys("--spares", "1", "--workers-per-node=8", "--", "python", "src/train.py", "--spares", "-h", "a b")
    assert job["command"] == ["python", "src/train.py", "--spares", "-h", "a b"]
    assert (job["name"], job["nodes"], job["spares"], job["workers_per_node"]) == ("train", 1, 1, 8)


def test_sbatchs_short_flags_mean_what_they_mean_to_sbatch() -> None:
    """Each sets its key, in every command that takes a job, and is passed to sbatch under its long name."""
    flags = [word for flag, (given, _, _) in SBATCH.items() for word in (flag, given)]
    job = keys(*flags, "--", "x")
    assert {key: job[key] for _, key, _ in SBATCH.values()} == {key: value for _, key, value in SBATCH.values()}
    script = typed("render", *flags, "--", "x")
    assert {"#SBATCH --nodelist=n[1-4]", "#SBATCH --time=0-01:30:00", "#SBATCH --job-name=mine"} <= set(
        script.splitlines()
    )


def test_a_percent_sign_in_the_current_folder_is_no_pattern(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a percent sign that the user wrote after -o begins a pattern."""
    (here / "100%j").mkdir()
    monkeypatch.chdir(here / "100%j")
    assert keys("-o", "logs/%j.out", "--", "x")["output"] == f"{here}/100%%j/logs/%j.out"


def test_flags_and_command_win_over_the_file(here: Path) -> None:
    """Other keys of the file stay; a flag wins over --set of the same key."""
    (here / "a.yaml").write_text("name: a\ncommand: x\nnodes: 2\nspares: 1\n")
    job = keys("a.yaml", "-N", "3", "--set", "nodes=5", "--", "python", "other.py")
    assert (job["name"], job["command"], job["nodes"], job["spares"]) == ("a", ["python", "other.py"], 3, 1)


def test_a_file_after_two_dashes_is_a_file(here: Path) -> None:
    """This was so before commands could follow the dashes."""
    (here / "a.yaml").write_text("name: a\ncommand: x\n")
    assert keys("--", "a.yaml")["name"] == "a"


def test_what_is_saved_is_the_same_job(here: Path) -> None:
    """The file contains what was typed and no more; other layers still count."""
    flags = ("-N", "2", "-t", "2:00:00", "--set", "env.A=1.10", "--set", "fault_tolerance.backoff=off")
    before = keys(*flags, "--save", "saved.yaml", "--", "python", "t.py", "a b", "$X")
    assert keys("saved.yaml") == before
    assert (here / "saved.yaml").read_text().splitlines()[:3] == [
        "name: t", "command: python t.py 'a b' '$X'", "nodes: 2",
    ]  # fmt: skip
    again = keys("saved.yaml", "--spares", "1", "--save", "more.yaml")
    assert (again["nodes"], again["spares"], keys("more.yaml")) == (2, 1, again)


def test_a_range_of_spares_is_saved(here: Path) -> None:
    """A range is saved from a flag and from a file; a flag with one number replaces the file's range."""
    (here / "a.yaml").write_text("name: a\ncommand: x\nspares: 0..2\n")
    keys("--spares", "0..2", "--save", "flag.yaml", "--", "x")
    keys("a.yaml", "--save", "file.yaml")
    keys("a.yaml", "--spares", "1", "--save", "one.yaml")
    saved = [keys(f"{name}.yaml") for name in ("flag", "file", "one")]
    assert [(job["spares"], job["min_spares"]) for job in saved] == [(2, 0), (2, 0), (1, None)]


@pytest.mark.parametrize("place", ["there.yaml", "below/job.yaml", "no/job.yaml"])
def test_a_save_overwrites_nothing_and_changes_no_path(here: Path, place: str) -> None:
    """An existing file, a folder in which paths would mean other files, and a missing folder are errors."""
    (here / "there.yaml").write_text("mine\n")
    (here / "below").mkdir()
    with pytest.raises(UsageError, match=f"^--save {place}: "):
        typed("config", "show", "--set", "workdir=.", "--save", place, "--", "x")
    assert (here / "there.yaml").read_text() == "mine\n"
    assert not [*(here / "below").iterdir()]


MISTAKES: dict[tuple[str, ...], str] = {
    ("sumbit", "job.yaml"): "Did you mean 'submit'?",
    ("run", "python", "train.py", "--epochs", "4"): "nvrx-slurm run -- python train.py --epochs 4",
    ("run", "-N", "2", "./train.sh", "a b"): "nvrx-slurm run -N 2 -- bash ./train.sh 'a b'",
    ("run", "--nnodes=1", "train.py", "--steps", "3"): "nvrx-slurm run --nodes 1 -- python train.py --steps 3",
    ("submit", "-n", "16", "--", "x"): "--workers-per-node",
    ("submit", "-N", "2-4", "--", "x"): "--nodes 2 --spares 0..2",
    ("submit", "--ntasks-per-node=8", "--", "x"): "--workers-per-node",
    ("submit", "--exclusive", "--", "x"): "--set slurm.extra.exclusive=VALUE",
    ("run", "--dry-run", "job.yaml"): "--dry-run is a flag of nvrx-slurm submit",
    ("submit", "--here", "--", "x"): "--here is a flag of nvrx-slurm run",
    ("run", "--ft-rank-heartbeat-timeout=450", "--", "x"): "behind -- ft_launcher",
    ("run", "--"): "no command after --",
    ("run", "--sparse", "1"): "Did you mean --spares?",
    ("submit", "--gpus", "8", "--", "x"): "Did you mean --gpus-per-node?",
    ("job.yaml",): "nvrx-slurm run job.yaml",
    ("train.py", "--epochs", "4"): "nvrx-slurm run -- python train.py",
}
"""What a new user types, and what the message must hold."""


@pytest.mark.parametrize(("arguments", "says"), MISTAKES.items())
def test_a_mistake_is_answered_with_what_was_meant(arguments: tuple[str, ...], says: str) -> None:
    """The message contains the line to type instead."""
    with pytest.raises(click.UsageError) as caught:
        typed(*arguments)
    assert says in caught.value.format_message()


@pytest.mark.parametrize(
    ("arguments", "key", "says"),
    [
        (("run",), None, "nvrx-slurm init"),
        (("submit", "-N", "two", "--", "x"), "nodes", "must be a whole number"),
        (("submit", "-t", "soon", "--", "x"), "slurm.time", "no duration"),
        (("submit", "-J", "a b", "--", "x"), "name", "letters"),
        (("submit", "--", ""), "command", "must name a program"),
        (("run", "--", "python train.py"), "command", "without quotes"),
        (("run", "--", "python train.py " + "x" * 256), "command", "without quotes"),  # no file has such a name
        (("run", "train.py"), None, "nvrx-slurm run -- python train.py"),
        (("submit", "job.sh"), None, "where it has `srun COMMAND`"),
    ],
)
def test_a_wrong_value_or_file_is_named(here: Path, arguments: tuple[str, ...], key: str | None, says: str) -> None:
    """The error is the same as for a file, and comes before anything is submitted; for another kind of file it has
    the line to type instead."""
    (here / "train.py").write_text("print('hello')\n")
    (here / "job.sh").write_text("#!/bin/bash\n#SBATCH -N 2\nsrun python train.py\n")
    with pytest.raises(ConfigError) as caught:
        typed(*arguments)
    assert (caught.value.key, says in str(caught.value)) == (key, True)


def test_run_starts_nothing_where_the_store_does_not_answer(here: Path) -> None:
    """As with `submit` the error comes at once, and no job has a folder."""
    with pytest.raises(StoreUnreachable):
        typed("run", "--here", "--set", "store.url=redis://127.0.0.1:1/0", "--", "true")
    assert not [*(here / "nvrx-jobs").iterdir()]


@pytest.mark.parametrize("command", [("run", "--here"), ("submit", "--local"), ("submit", "--dry-run")])
def test_files_of_attribution_are_read_before_a_job_starts(here: Path, command: tuple[str, ...]) -> None:
    """One error names each file that cannot be used, and no job has a folder."""
    (here / "open").write_text("secret")
    (here / "open").chmod(0o644)
    (here / "bad.yaml").write_text("mine: {pattern: (}\n")
    keys = {
        "slack.channel": "c",
        "slack.token_file": "gone",
        "attrsvc_url": "http://localhost:1",
        "token_file": "open",
    }
    keys["rules"] = "[bad.yaml, none.yaml]"
    flags = [word for key, value in keys.items() for word in ("--set", f"fault_tolerance.attribution.{key}={value}")]
    with pytest.raises(ConfigError) as caught:
        typed(*command, *flags, "--", "true")
    for file in ("gone", "open", "bad.yaml", "none.yaml"):
        assert str(here / file) in str(caught.value)
    assert not [*here.glob("nvrx-jobs/*")]


def test_a_package_that_attribution_lacks_is_said_before_the_first_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the extra is not installed, a warning names the packages of the sources that are asked."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    asked = ("submit", "--dry-run", "--set", "fault_tolerance.attribution.enable_mcp=true")
    assert typed(*asked, "--ft-attribution-http-url", "http://localhost:1", "--", "true")
    (record,) = caplog.records
    assert record.args == ("mcp, httpx2",)
    assert typed("submit", "--dry-run", "--", "true")
    assert len(caplog.records) == 1


def test_a_token_that_no_source_needs_is_not_read(here: Path) -> None:
    """A site file may name a token although the job asks no service."""
    assert typed("submit", "--dry-run", "--set", "fault_tolerance.attribution.token_file=gone", "--", "true")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("python", "-u", "a/b/train.py", "--data", "x.py"), "train"),
        (("bash", "run all.sh"), "run-all"),
        (("python", "-m", "package.module"), "package.module"),
        (("/usr/bin/sleep", "5"), "sleep"),
        (("./.",), "job"),
    ],
)
def test_a_job_is_named_after_its_command(command: tuple[str, ...], name: str) -> None:
    """The name is one that job.yaml accepts."""
    assert name_of(command) == name
