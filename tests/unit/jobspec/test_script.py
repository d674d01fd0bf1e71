"""What bash passes on from a script: every word arrives as it was written."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.plan import Plan, plan, plan_from_json
from nvrx_slurm.jobspec.script import render_job
from tests.unit.jobspec.specs import job_spec

HOSTILE = (
    "two words", "it's", 'a "b"', "$(touch hit)", "`touch hit`", "$HOME", "a;b", "a#b", "# c", "a\nNVRX_PLAN\nb",
    "-n", "--", "%j", "back\\slash", "trailing\\", "é\U0001f600\u2028", "*", "~", "!x", "\t", "", "a&b|c>d",
    "\x1b[0m", "\r",
)  # fmt: skip

RECORDER = """\
#!/bin/bash
printf '%s\\0' "$@" > "${0%/*}/words"
cat > "${0%/*}/plan"
"""


@dataclass(frozen=True)
class Started:
    """How the script started the batch host."""

    words: list[str]
    plan: Plan
    output: str


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Started]:
    """Runs a job's script with a `python` that records its arguments and its standard input."""
    folder = tmp_path / 'it\'s $(a) "folder" \\ # %j é'
    folder.mkdir()
    recorder = folder / "python"
    recorder.write_text(RECORDER)
    recorder.chmod(0o700)

    def start(spec: JobSpec, made: Plan, cluster: str = "local") -> Started:
        script = render_job(spec, made, cluster=cluster, python=str(recorder))  # type: ignore[arg-type]
        done = subprocess.run(["bash"], input=script.encode(), capture_output=True, check=True, cwd=tmp_path)
        assert done.stderr == b""
        assert not (tmp_path / "hit").exists()
        words = (folder / "words").read_bytes().decode().split("\0")[:-1]
        return Started(words, plan_from_json((folder / "plan").read_bytes()), done.stdout.decode())

    return start


def job(**keys: object) -> JobSpec:
    return job_spec({"name": "a", "command": "x", **keys})


def planned(spec: JobSpec) -> Plan:
    return plan(spec, folder=Path("/shared/jobs"), job_file=Path("/home/me/job.yaml"))


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_value_arrives_unchanged(start: Callable[..., Started], text: str) -> None:
    """A command's words and a variable's value reach the batch host unchanged; no shell reads them."""
    spec = job(command=["x", text, text], env={"A": text})
    started = start(spec, planned(spec))
    assert started.plan == planned(spec)
    assert started.plan.roles[0].command == ("x", text, text)
    assert started.plan.roles[0].env == {"A": text}


@settings(settings.get_profile("shared fixtures"), max_examples=40)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1, max_size=4))
def test_any_command_arrives_unchanged(start: Callable[..., Started], words: list[str]) -> None:
    """Words of any text arrive unchanged."""
    spec = job(command=["x", *words])
    assert start(spec, planned(spec)).plan.roles[0].command == ("x", *words)


def test_paths_arrive_unchanged(start: Callable[..., Started], tmp_path: Path) -> None:
    """The job folder, the workers' folder and the password file may have any printable name."""
    hostile = 'it\'s $(touch hit) `a` "b" ; # % é'
    spec = job(workdir=hostile, store={"url": "redis://h", "password_file": hostile})
    made = plan(spec, folder=tmp_path / hostile, job_file=tmp_path / hostile / "job.yaml")
    assert start(spec, made).plan == made
    assert made.workdir == str(tmp_path / hostile / hostile)


def test_the_launchers_words_arrive_unchanged(start: Callable[..., Started]) -> None:
    """On Slurm the batch host gets the command that starts the agents: srun, which survives a lost node, with the
    job's interpreter."""
    spec = job(nodes=2, spares=1, slurm={"cpus_per_task": 8, "gpus_per_node": "h100:4"})
    words = start(spec, planned(spec), "slurm").words
    assert words[:6] == ["-P", "-m", "nvrx_slurm.batch", "--cluster", "slurm", "--"]
    assert words[6] == "srun"
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL", "--nodes=3", "--ntasks=3"} <= set(words)
    assert {"--cpus-per-task=8", "--gpus-per-node=h100:4"} <= set(words)
    assert words[-4].endswith('/it\'s $(a) "folder" \\ # %j é/python')
    assert words[-3:] == ["-P", "-m", "nvrx_slurm.agent"]


def test_the_local_script_starts_the_batch_host_alone(start: Callable[..., Started]) -> None:
    """Without Slurm, the batch host starts the agents by itself."""
    assert start(job(), planned(job())).words == ["-P", "-m", "nvrx_slurm.batch", "--cluster", "local"]


def test_setup_lines_are_shell_as_the_user_wrote_them(start: Callable[..., Started]) -> None:
    """Only the lines of `setup` are read by a shell, before anything starts, and a command may span lines."""
    spec = job(setup=["A='two  words'", 'if true; then\n  echo "$A" # said\nfi', "echo $((1 + 1))"])
    assert start(spec, planned(spec)).output == "two  words\n2\n"


FAILING = {
    "module load nosuch": ["true", "module load nosuch"],  # no such command
    "grep -q x /dev/null": ["false || true", "grep -q x /dev/null"],
    "source fails.sh": ["if false; then false; fi", "source fails.sh"],  # failed by its return value
    "exit 3": ["set +e", "exit 3"],
    "exit 0": ["true", "exit 0"],  # bash would end the job as successful although nothing has run
}


@pytest.mark.parametrize("command", FAILING)
def test_a_line_of_setup_that_fails_fails_the_job(tmp_path: Path, command: str) -> None:
    """Instead of a job to run, the batch host gets the exit status, the number and the text of the failed line."""
    (tmp_path / "python").write_text(RECORDER)
    (tmp_path / "python").chmod(0o700)
    (tmp_path / "fails.sh").write_text("false\ntrue\ngrep -q x /dev/null\n")
    spec = job(setup=[*FAILING[command], "touch hit"])
    script = tmp_path / "job.sh"
    script.write_text(render_job(spec, planned(spec), cluster="local", python=str(tmp_path / "python")))
    subprocess.run(["bash", script], cwd=tmp_path, capture_output=True, check=True)
    words = (tmp_path / "words").read_text().split("\0")[:-1]
    status = {"module load nosuch": "127", "exit 3": "3", "exit 0": "0"}.get(command, "1")
    assert words[5:] == ["--failed-setup", status, "0" if command.startswith("exit") else "2", command]
    assert plan_from_json((tmp_path / "plan").read_bytes()) == planned(spec)
    assert not (tmp_path / "hit").exists()


@pytest.mark.parametrize("number", ["TERM", "USR1"])
def test_a_signal_during_setup_is_recorded_as_such(tmp_path: Path, number: str) -> None:
    """A job that is cancelled, or that reaches its time limit, is recorded with the signal, not with an earlier
    command's status."""
    (tmp_path / "python").write_text(RECORDER)
    (tmp_path / "python").chmod(0o700)
    spec = job(setup=[f"kill -{number} $$"])
    script = tmp_path / "job.sh"
    script.write_text(render_job(spec, planned(spec), cluster="local", python=str(tmp_path / "python")))
    subprocess.run(["bash", script], cwd=tmp_path, capture_output=True, check=False)
    words = (tmp_path / "words").read_text().split("\0")[:-1]
    assert words[5:7] == ["--failed-setup", str(128 + signal.Signals[f"SIG{number}"])]


def test_a_failing_command_in_a_sourced_file_fails_no_job(tmp_path: Path) -> None:
    """Setup files are full of commands that may fail; only the return value of the sourced file counts."""
    (tmp_path / "python").write_text(RECORDER)
    (tmp_path / "python").chmod(0o700)
    (tmp_path / "env.sh").write_text("false\nA=1\n")
    spec = job(setup=["source env.sh"])
    script = tmp_path / "job.sh"
    script.write_text(render_job(spec, planned(spec), cluster="local", python=str(tmp_path / "python")))
    subprocess.run(["bash", script], cwd=tmp_path, capture_output=True, check=True)
    assert (tmp_path / "words").read_text().split("\0")[:-1] == ["-P", "-m", "nvrx_slurm.batch", "--cluster", "local"]


def test_umask_is_the_users_own(start: Callable[..., Started]) -> None:
    """The script leaves the user's umask, so that users can share their checkpoints; the job folder has a mode of its
    own."""
    here = subprocess.run(["bash", "-c", "umask"], capture_output=True, text=True, check=True).stdout
    assert start(job(setup=["umask"]), planned(job())).output == here
