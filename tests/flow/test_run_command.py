"""`nvrx-slurm run`: the job in the foreground, as a user types it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.agent.supervisor import descendants
from nvrx_slurm.errors import EXIT_RETRY
from tests.forks import run_command
from tests.harness import wait_gone
from tests.slurm_harness import CLI
from tests.slurm_jobs import STUBBORN, gate_command
from tests.waiting import until

IGNORES_SIGCHLD = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def run(gate, tmp_path):
    """Starts `nvrx-slurm run` of a job whose workers wait at the gate."""
    started = []

    def start(*flags, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **keys):
        job = {"name": "r", "command": list(gate.command), "nodes": 1, "workers_per_node": 2, **keys}
        (tmp_path / "job.yaml").write_text(json.dumps(job))
        started.append(
            subprocess.Popen(
                [*CLI, "run", *flags], cwd=tmp_path, stdout=stdout, stderr=stderr, start_new_session=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        everybody = [process.pid, *descendants(process.pid)]
        process.kill()
        process.communicate()
        wait_gone(everybody)


def test_output_to_a_full_disk_does_not_end_the_job(run, gate):
    """A full disk at stdout ends the job neither at the batch host's first line nor at the command's output."""
    with Path("/dev/full").open("w") as full:
        process = run(stdout=full, stderr=subprocess.PIPE)
    gate.wait(2, cycle=0)
    gate.open()
    assert process.wait(30) == 0


def test_run_ends_with_the_jobs_exit_code_and_prints_its_events(run, gate):
    """The exit code of a job that is done is 0. The output, here to a pipe, has the events, what the workers print,
    and the summary."""
    process = run(nodes=2, workers_per_node=1, spares=1)
    gate.wait(2, cycle=0)
    gate.open()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    for word in ("node_joined", "rendezvous_closed", "[main-0 1] rank 1 waits", "exit code 0: done", "logs"):
        assert word in output.decode()
    assert b"explain" not in output


def test_failed_job_gives_its_code(run, gate):
    """With a spent budget `run` exits with 1 too. Standard error says why; with `--quiet` only standard error has the
    workers' lines."""
    process = run("--quiet", stderr=subprocess.PIPE, fault_tolerance={"max_restarts": 0})
    gate.wait(2, cycle=0)[1].go(exit_code=4)
    output, why = process.communicate(timeout=30)
    assert process.returncode == 1
    assert b"rank 1 waits" not in output
    for word in ("rank 1 on n1 exited with code 4", "rank 1 waits", "restart budget spent", "→ nvrx-slurm explain"):
        assert word in why.decode()


def test_failed_job_gives_its_code_to_a_caller_that_ignores_sigchld(tmp_path):
    """Some daemons ignore SIGCHLD, and their children inherit that: `run` still ends with the job's exit code."""
    ignored = [sys.executable, "-c", IGNORES_SIGCHLD, *CLI, "run", "-N", "1", "--", "sh", "-c", "exit 5"]
    done = subprocess.run(ignored, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "exited with code 5" in done.stdout


def test_ctrl_c_ends_the_job_cleanly(run, gate):
    """After SIGINT to the foreground group, as a terminal sends it, no process is left, the exit code is 130, and the
    output says where the logs are."""
    process = run()
    workers = gate.wait(2, cycle=0)
    everybody = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    wait_gone([*everybody, *(w.pid for w in workers.values())])
    assert b"exit code 130: interrupted\n  logs " in output


def test_a_second_ctrl_c_kills(run, gate, tmp_path):
    """A second Ctrl-C kills workers that ignore the stop signal and have an hour of grace. The exit code stays
    130."""
    process = run(command=list(gate_command(gate, STUBBORN)), fault_tolerance={"teardown": {"grace": "1h"}})
    workers = gate.wait(2, cycle=0)
    os.killpg(process.pid, signal.SIGINT)
    log = next((tmp_path / "nvrx-jobs").glob("local-*/nodes/n1.log"))
    until(lambda: "teardown: ask" in log.read_text(), "the teardown to begin")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) == 130
    wait_gone([w.pid for w in workers.values()])


@pytest.mark.parametrize("moment", ["job.sh", "job.json", "plan.json", "store.json"])
def test_ctrl_c_at_any_moment_of_the_start_leaves_a_summary(run, tmp_path, moment):
    """Ctrl-C as soon as a file of the job exists: no traceback, exit code 130, a result, and no process left."""
    process = run(setup=["sleep 0.01"])
    jobs = tmp_path / "nvrx-jobs"
    until(lambda: list(jobs.glob(f"local-*/{moment}")), moment)
    everybody = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in output
    assert b"exit code 130: interrupted\n  logs " in output
    assert next(jobs.glob("local-*/result.json")).is_file()
    if everybody or moment != "job.sh":  # which exists before the first process does
        wait_gone(everybody)


def test_ctrl_c_during_the_first_imports_prints_nothing(tmp_path):
    """The command dies by SIGINT itself, without output, as a program that has not begun to do anything."""
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "nvrx_slurm", "run"]
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, b"", b"")


def test_a_failed_line_of_setup_fails_the_job_and_is_named(run, tmp_path):
    """The failed line is named at the end of the output, in the result, and by `explain`. No worker is started."""
    process = run(setup=["true", "module load nosuch"], stderr=subprocess.PIPE)
    _, why = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "line 2 of setup failed with exit code 127: module load nosuch" in why.decode().splitlines()[-3]
    folder = next((tmp_path / "nvrx-jobs").glob("local-*"))
    assert "module load nosuch" in json.loads((folder / "result.json").read_text())["reason"]
    told = run_command(["explain", folder.name], cwd=tmp_path)
    assert "module load nosuch" in told.stdout
    assert not (folder / "logs").exists()


def test_a_setup_that_exits_with_0_is_no_success(run, tmp_path):
    """No worker has run: the exit code is 1, and the reason names the command that has ended the script."""
    process = run(setup=["exit 0"])
    process.communicate(timeout=30)
    assert process.returncode == 1
    result = json.loads(next((tmp_path / "nvrx-jobs").glob("local-*/result.json")).read_text())
    assert result["exit_code"] == 1
    assert result["reason"].endswith(": exit 0")


def test_a_reader_that_has_gone_does_not_end_the_job(run, gate):
    """`run | head -1`: the job goes on, and standard error says so."""
    process = run(stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    note = process.stderr.readline()
    assert b"goes on" in note
    gate.wait(2, cycle=0)
    gate.open()
    assert process.wait(30) == 0


def test_a_closed_terminal_is_reported_as_the_reason(run, gate, tmp_path):
    """SIGHUP ends the job cleanly; `explain` and `wait` report that the terminal was closed."""
    process = run()
    gate.wait(2, cycle=0)
    process.send_signal(signal.SIGHUP)
    assert process.wait(30) == 143
    job_id = next((tmp_path / "nvrx-jobs").glob("local-*")).name
    told = run_command(["explain", job_id], cwd=tmp_path)
    assert "terminal was closed" in told.stdout
    waited = run_command(["wait", job_id], cwd=tmp_path)
    assert waited.returncode == 143
    assert "terminal was closed" in waited.stderr


@pytest.mark.parametrize("removed", ["the job folder", "all job folders"])
def test_a_job_whose_folder_is_removed_runs_on_and_ends(run, gate, tmp_path, removed):
    """A folder that a user removed costs the job its records, not its work: the command ends with the job's code."""
    process = run("--quiet")
    gate.wait(2, cycle=0)
    jobs = tmp_path / "nvrx-jobs"
    [job] = jobs.glob("local-*")
    shutil.rmtree(job if removed == "the job folder" else jobs)
    gate.open()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output.decode()
    assert b"Traceback" not in output


def test_a_killed_batch_host_ends_a_job_whose_folder_is_removed(run, gate, tmp_path):
    """With the folder gone, no file names the batch host's process. The command has read its pid before, and ends."""
    process = run("--quiet")
    gate.wait(2, cycle=0)
    [job] = (tmp_path / "nvrx-jobs").glob("local-*")
    host = json.loads((job / "job.json").read_text())["host_pid"]
    shutil.rmtree(job)
    os.kill(host, signal.SIGKILL)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == EXIT_RETRY, output.decode()


def test_nothing_outlives_a_killed_run(run, gate):
    """SIGKILL of the command itself ends the job too."""
    process = run(nodes=2, workers_per_node=1, spares=1)
    gate.wait(2, cycle=0)
    everybody = descendants(process.pid)
    process.kill()
    wait_gone(everybody)
