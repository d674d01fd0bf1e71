"""The commands of README.md and the tutorial, typed in their order by a user with two terminals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvrx_slurm.jobspec.load import load
from nvrx_slurm.lab.devcluster import names, remove
from tests.waiting import until

pytestmark = [pytest.mark.slurm(nodes=6), pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
ELSEWHERE = ("pip install", "sudo ")
"""Lines that install something, which the tests' environment has already."""

FASTER = {"NVRX_SLURM_COMMAND": "python train.py --step-time 0.05"}
"""Halves the minute of training, and leaves every line of the pages as it is."""

LIVE_S, JOB_S = 60.0, 200.0


class Page:
    """The blocks of a page: its shell lines in order, without their comments, and its other blocks."""

    def __init__(self, name: str) -> None:
        self.text = (ROOT / name).read_text()
        blocks = re.findall(r"^```(\w+)\n(.*?)^```", self.text, re.MULTILINE | re.DOTALL)
        lines = [line.split("  #")[0].strip() for kind, text in blocks if kind == "sh" for line in text.splitlines()]
        self.lines = [line for line in lines if not line.startswith(ELSEWHERE)]
        self.yaml = [text for kind, text in blocks if kind == "yaml"]
        self.python = [text for kind, text in blocks if kind == "python"]

    def says(self, line: str) -> str:
        """Take the next line of the page, and assert that it is this one."""
        assert self.lines.pop(0) == line
        return line


class Terminal:
    """A shell in a folder. Each command in the background prints to a file of its own."""

    def __init__(self, folder: Path, before: str = "") -> None:
        folder.mkdir()
        self.folder, self.before = folder, before
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path}
        self._background: list[subprocess.Popen[bytes]] = []

    def type(self, line: str, *, exit_code: int = 0) -> str:
        """Run the line. Returns its stdout."""
        done = subprocess.run(
            ["bash", "-c", f"{self.before}\n{line}"],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIVE_S,
        )
        assert done.returncode == exit_code, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def begin(self, line: str, output: str) -> Callable[[], str]:
        """Start a line. The function that is returned waits for its exit code 0, and returns its output."""
        file = self.folder / output
        with file.open("wb") as opened:
            process = subprocess.Popen(
                ["bash", "-c", f"{self.before}\nexec {line}"],
                cwd=self.folder,
                env=self.environment | FASTER,
                stdin=subprocess.DEVNULL,
                stdout=opened,
                stderr=opened,
            )
        self._background.append(process)

        def end() -> str:
            assert process.wait(JOB_S) == 0, file.read_text()
            return file.read_text()

        return end

    def close(self) -> None:
        for process in self._background:
            if process.poll() is None:
                process.terminate()
                process.wait()

    def until(self, condition: Callable[[], object], what: str) -> None:
        until(lambda: bool(condition()), what, timeout=LIVE_S)


@pytest.fixture
def terminals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Terminal, Terminal]]:
    """One terminal for the local job and one for the Slurm job, since each job keeps checkpoints in its folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # clusters and a job index of this test alone
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    both = Terminal(tmp_path / "here"), Terminal(tmp_path / "slurm", 'eval "$(nvrx-slurm cluster env)"')
    yield both
    for each in both:
        each.close()
    for name in names():
        remove(name)


def test_the_readme_and_the_tutorial_can_be_typed(terminals: tuple[Terminal, Terminal]) -> None:
    """A local job survives a killed agent, a Slurm job survives a killed node, both end with the same bits, and each
    line does what the page says."""
    here, slurm = terminals
    readme, tutorial = Page("README.md"), Page("docs/tutorial.md")
    readme.says("nvrx-slurm demo")  # typed in test_installed.py, where only the package is installed

    # A job of a minute on this machine: README's second and third line, the tutorial's steps 1 to 3.
    here.type(readme.says(tutorial.says("nvrx-slurm init")))
    exec(tutorial.python[0], {"step": 1})
    job = load(here.folder / "job.yaml").spec
    (here.folder / "shown.yaml").write_text(tutorial.yaml[0])
    assert load(here.folder / "shown.yaml").spec == job
    assert re.search(
        r"^nodes +2 +job\.yaml:\d+$",
        here.type(tutorial.says("nvrx-slurm config show --origin job.yaml")),
        re.MULTILINE,
    )
    end_of_run = here.begin(readme.says(tutorial.says("nvrx-slurm run job.yaml")), "run.log")

    here.until((here.folder / "checkpoints" / "checkpoint.json").exists, "the first checkpoint")
    found = here.type(tutorial.says("nvrx-slurm events --json | grep node_joined"))
    (pid,) = (joined["pid"] for line in found.splitlines() if (joined := json.loads(line))["node"] == "n2")
    here.type(tutorial.says("kill -9 PID").replace("PID", str(pid)))

    # Meanwhile the same job on a Slurm of six nodes: step 4.
    slurm.type("nvrx-slurm init")
    slurm.type(tutorial.says("nvrx-slurm cluster up --nodes 6"))
    tutorial_environment = tutorial.says('eval "$(nvrx-slurm cluster env)"')
    assert slurm.before == tutorial_environment
    end_of_watch = slurm.begin(tutorial.says("nvrx-slurm submit --spares 2 --watch job.yaml"), "watch.log")
    slurm.until((slurm.folder / "checkpoints" / "checkpoint.json").exists, "the first checkpoint")
    slurm.type(tutorial.says("nvrx-slurm cluster kill-node n2"))
    status = tutorial.says("nvrx-slurm status last")
    (journal,) = slurm.folder.glob("nvrx-jobs/1/events.jsonl")
    slurm.until(lambda: b'"event":"node_lost"' in journal.read_bytes(), "the loss of n2 in the journal")
    slurm.until(lambda: re.search(r"^n2 .*lost", slurm.type(status), re.MULTILINE), "the loss of n2 in its status")
    down = tutorial.says("nvrx-slurm cluster down")
    assert slurm.type(readme.says(tutorial.says("nvrx-slurm submit --spares 2 job.yaml"))) == "2\n"
    slurm.type("nvrx-slurm cancel 2")

    (local,) = (path.name for path in (here.folder / "nvrx-jobs").glob("local-*"))
    for end, job_id in ((end_of_run, local), (end_of_watch, "1")):
        assert re.search(r"node_lost +n2 was lost", end())
        assert "resuming after step" in here.type(f"nvrx-slurm logs {job_id}")
    trained = [json.loads((each.folder / "checkpoints" / "trained.json").read_text()) for each in terminals]
    assert trained[0] == trained[1]
    assert trained[0]["error"] < 1e-4
    slurm.type(down)

    # The tutorial's commands for after a failure, on the local job, which has ended.
    answers = {
        command.split()[1]: here.type(command.replace("JOB", local))
        for command in re.findall(r"\| `(nvrx-slurm (?:explain|events|logs|wait) [^`]*)` ", tutorial.text)
    }
    assert (len(answers), answers["wait"]) == (4, "0\n")
    assert "n2" in answers["explain"]
    assert tutorial.lines == []
    (without_a_file,) = readme.lines  # the next test runs it
    assert without_a_file.startswith("nvrx-slurm submit -N 16 ")


def test_the_examples_of_job_yaml_are_jobs(terminals: tuple[Terminal, Terminal]) -> None:
    """README's line without a file gives the same job as the file below it, and the tutorial's roles are valid."""
    here, _ = terminals
    for index, text in enumerate((*Page("README.md").yaml, *Page("docs/tutorial.md").yaml[1:])):
        (here.folder / f"{index}.yaml").write_text(f"name: rl\n{text}" if "name:" not in text else text)
    line = Page("README.md").lines[-1].removeprefix("nvrx-slurm submit ")
    show = "nvrx-slurm config show --json"
    assert here.type(f"{show} {line}") == here.type(f"{show} 0.yaml")
    assert json.loads(here.type(f"{show} 1.yaml"))["roles.rollout.replicas"] == 16
