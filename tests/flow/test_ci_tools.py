"""`ci record`, `replay` and `matrix` on real jobs: what one job did is expected of the next."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.agent.supervisor import send_all
from nvrx_slurm.api.handle import Job
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import NodeJoined, Progress, WorkersStarted
from tests.harness import RunningJob
from tests.unit.report import recorder

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "ci" / "jobs"


def nvrx(*words: str, cwd: Path, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
    """The command line, as a user has it."""
    command = [sys.executable, "-m", "nvrx_slurm", "ci", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def hurt_job(job) -> Iterator[Job]:
    """A job of three nodes that lost a worker by SIGKILL, then a node, and went on to its end."""
    hurt = job(JOBS / "plain.yaml", command="python3 steps.py --until 'recovered cycle=2'", nodes=3, spares=1)
    watched = RunningJob(JobFolder(hurt.folder), None)
    watched.expect(Progress, rank=1, cycle=0)
    for node in hurt.nodes():
        watched.expect(NodeJoined, node=node)
    send_all([pid_of(watched, rank=1, cycle=0)], signal.SIGKILL)
    watched.expect(Progress, rank=2, cycle=1)
    watched.kill_node(next(each.node for each in watched.said(WorkersStarted) if each.cycle == 1 and 2 in each.pids))
    assert hurt.wait(60) == 0, watched.story()
    yield hurt
    watched.close()


def pid_of(job: RunningJob, *, rank: int, cycle: int) -> int:
    """The process of a rank that runs."""
    (pid,) = [each.pids[rank] for each in job.said(WorkersStarted) if each.cycle == cycle and rank in each.pids]
    return pid


@pytest.mark.timeout(240)
def test_recorded_flow_passes_again(hurt_job, tmp_path):
    """`record` turns a job with faults by hand into a flow with the same faults, and that flow passes."""
    done = nvrx("record", str(hurt_job.folder), "-o", "flow.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    flow = (tmp_path / "flow.yaml").read_text()
    assert "do: {kill_worker: 1}" in flow
    assert "do: {kill_node: {of_rank: 2}}" in flow
    done = nvrx("run", "flow.yaml", "--on", "local", cwd=tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{flow}"


@pytest.fixture
def finished(tmp_path) -> JobFolder:
    """The folder of a job that has run."""
    (tmp_path / "nvrx-jobs").mkdir()
    return recorder.write(tmp_path / "nvrx-jobs", recorder.ended(), job="7")


def test_recorded_to_stdout(finished, tmp_path):
    """With stdout redirected to a file, the flow names a job file beside that file. With `--job` it names an existing
    job.yaml, and the settings in which the job differed become overrides."""
    with (tmp_path / "flow.yaml").open("w") as out:
        command = [sys.executable, "-m", "nvrx_slurm", "ci", "record", "7"]
        subprocess.run(command, cwd=tmp_path, stdout=out, check=True, timeout=60)
    assert "job: flow.job.yaml" in (tmp_path / "flow.yaml").read_text()
    assert nvrx("check", ".", cwd=tmp_path).returncode == 0
    (tmp_path / "own.yaml").write_text(
        "name: mine\ncommand: python train.py\nnodes: 4\nworkers_per_node: 2\n"
        "fault_tolerance: {attribution: {enable_lib: false}, backoff: off}\n"
    )
    said = nvrx("record", "7", "--job", "own.yaml", cwd=tmp_path).stdout
    assert "job: own.yaml\noverrides: {spares: 2}\n" in said


def test_what_is_written_replaces_no_other_file(finished, tmp_path):
    """`record` chooses the name of the job file, and `matrix` the names of all flows. Where the user has a file of
    that name, the command exits with 2 and leaves the file as it is."""
    mine = tmp_path / "train.job.yaml"
    mine.write_text("precious: my own job\n")
    refused = nvrx("record", "7", "-o", "train.yaml", cwd=tmp_path)
    assert (refused.returncode, mine.read_text()) == (2, "precious: my own job\n")
    assert "train.job.yaml is there already" in refused.stderr
    assert nvrx("record", "7", "-o", ".", cwd=tmp_path).returncode == 2
    assert not (tmp_path / "train.yaml").exists()
    matrix = ("matrix", str(JOBS / "plain.yaml"), "--on", "local", "--flow", "kill-*", "--write", "flows")
    for _ in range(2):
        assert nvrx(*matrix, cwd=tmp_path).returncode == 0
    edited = tmp_path / "flows" / "kill-node.yaml"
    edited.write_text(edited.read_text() + "# my edit\n")
    assert nvrx(*matrix, cwd=tmp_path).returncode == 2
    assert edited.read_text().endswith("# my edit\n")


def test_replay(finished, tmp_path):
    """`replay` exits with 0 for the same decisions, with 1 for another one, which it prints, with 2 without a
    journal."""
    same = nvrx("replay", "7", cwd=tmp_path)
    assert (same.returncode, same.stderr) == (0, "")
    assert same.stdout.endswith("decisions among them: the core decides the same today\n")
    text = finished.events_path.read_text()
    finished.events_path.write_text(text.replace('"action":"restart_replica"', '"action":"stop"'))
    other = nvrx("replay", str(finished.events_path), cwd=tmp_path)
    assert other.returncode == 1
    assert "action: 'stop' in the journal, 'restart_replica' now" in other.stdout
    missing = nvrx("replay", "no-such-folder/events.jsonl", cwd=tmp_path)
    assert (missing.returncode, "no-such-folder/events.jsonl: there is no such file" in missing.stderr) == (2, True)
    assert nvrx("replay", "no-such-job", cwd=tmp_path).returncode == 2  # a number may be another test's job


def test_matrix_is_listed_and_written(tmp_path):
    """`--list` shows what would run, and why the rest does not. `--write` writes flows that `ci run` accepts."""
    listed = nvrx("matrix", str(JOBS / "plain.yaml"), "--on", "local", "--list", cwd=tmp_path).stdout
    assert "kill-node        A node dies at once.\n" in listed
    assert "hang             left out: no bound says when a worker hangs" in listed
    plain = (str(JOBS / "plain.yaml"), "--on", "local", "--set", "spares=1", "--flow", "kill-*", "--flow", "two-*")
    assert nvrx("matrix", *plain, "--write", "flows", cwd=tmp_path).returncode == 0
    checked = nvrx("check", "flows", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "kill-node" in checked.stdout
    assert "two-at-once" not in checked.stdout
    assert "overrides: {spares: 1}" in (tmp_path / "flows" / "kill-node.yaml").read_text()
    none = nvrx("matrix", *plain[:3], "--flow", "nothing", cwd=tmp_path)
    assert none.returncode == 2
    assert "--flow nothing: nothing to run on the stage local" in none.stderr


def test_matrix_runs(tmp_path):
    """For a job that would run for ever, each fault is injected while the job works, and the flow ends once the job
    has recovered."""
    (tmp_path / "job.yaml").write_text(
        "name: theirs\ncommand: [tail, -f, /dev/null]\nnodes: 2\nspares: 1\n"
        "fault_tolerance: {teardown: {grace: 1s}, heartbeat: {timeout: 3s}}\n"
    )
    wanted = ("--flow", "kill-node", "--flow", "cancel")
    done = nvrx("matrix", "job.yaml", "--on", "local", "--jobs", "2", *wanted, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed on local" in done.stdout
