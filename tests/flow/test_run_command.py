"""`nvrx-slurm run`: the job in the foreground, as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from nvrx_slurm.agent.supervisor import descendants
from tests.harness import wait_gone
from tests.slurm_harness import CLI


@pytest.fixture
def run(gate, tmp_path):
    """Starts `nvrx-slurm run` of a job whose workers wait at the gate."""
    started = []

    def start(**keys):
        job = {"name": "r", "command": list(gate.command), "nodes": 2, "spares": 1, **keys}
        (tmp_path / "job.yaml").write_text(json.dumps(job))
        started.append(
            subprocess.Popen(
                [*CLI, "run"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        everybody = [process.pid, *descendants(process.pid)]
        process.kill()
        process.communicate()
        wait_gone(everybody)


def test_run_ends_with_the_jobs_exit_code_and_tells_its_story(run, gate):
    """Done is 0; the screen, here a pipe, has the events and the summary."""
    process = run()
    gate.wait(2, cycle=0)
    gate.open()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    for word in ("node_joined", "rendezvous_closed", "exit code 0: done", "logs"):
        assert word in output.decode()


def test_failed_job_gives_its_code(run, gate):
    """A spent budget is exit code 1 here too."""
    process = run(fault_tolerance={"max_restarts": 0})
    gate.wait(2, cycle=0)[1].go(exit_code=4)
    assert process.wait(30) == 1


def test_ctrl_c_ends_the_job_cleanly(run, gate):
    """SIGINT to the foreground group, as a terminal sends it: workers gone, 130."""
    process = run()
    workers = gate.wait(2, cycle=0)
    everybody = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) == 130
    wait_gone([*everybody, *(w.pid for w in workers.values())])


def test_nothing_outlives_a_killed_run(run, gate):
    """SIGKILL of the command itself ends the job too."""
    process = run()
    gate.wait(2, cycle=0)
    everybody = descendants(process.pid)
    process.kill()
    wait_gone(everybody)
