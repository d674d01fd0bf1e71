"""Jobs on the rootless Slurm of the tests, submitted as a user would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.lab.devcluster import DevCluster
from nvrx_slurm.store.keys import Keys
from nvrx_slurm.store.redis_client import client
from nvrx_slurm.util.clock import SystemClock
from tests.forks import run_command
from tests.harness import RunningJob
from tests.waiting import until

TERMINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}
CLI = (sys.executable, "-m", "nvrx_slurm")


class SlurmHandle:
    """A submitted job as Slurm sees it; it has the `wait` and `poll` of a process."""

    def __init__(self, job_id: str, cluster: DevCluster) -> None:
        self.job_id, self.env = job_id, {**os.environ, **cluster.environment()}

    def show(self) -> dict[str, str]:
        done = subprocess.run(
            ["scontrol", "show", "job", self.job_id], env=self.env, capture_output=True, text=True, check=True
        )
        return dict(re.findall(r"(\w+)=(\S+)", done.stdout))

    def wait(self, timeout: float) -> int:
        """The job's exit code, once Slurm reports a terminal state."""
        clock = SystemClock()
        deadline = clock.monotonic() + timeout
        while (shown := self.show())["JobState"] not in TERMINAL:
            if clock.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"job {self.job_id}: {shown}", timeout)
            clock.sleep(0.1)
        return int(shown["ExitCode"].split(":")[0])

    def poll(self) -> int | None:
        shown = self.show()
        return int(shown["ExitCode"].split(":")[0]) if shown["JobState"] in TERMINAL else None

    def cancel(self) -> None:
        subprocess.run(["scancel", self.job_id], env=self.env, check=True)


def nvrx(
    *arguments: str, cwd: Path, env: Mapping[str, str], timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run the command line, as a user would."""
    return run_command(arguments, cwd=cwd, env={**os.environ, **env}, timeout=timeout)


def submit(cluster: DevCluster, job_yaml: Path, *flags: str) -> RunningJob:
    """Submit a job.yaml; the job's folder is beside it."""
    done = nvrx("submit", *flags, job_yaml.name, cwd=job_yaml.parent, env=cluster.environment())
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.strip()
    return RunningJob(JobFolder(job_yaml.parent / "nvrx-jobs" / job_id), SlurmHandle(job_id, cluster))


def settled(job: RunningJob, nodes: int) -> None:
    """Wait for two heartbeats per node: by then the controller knows whether a death can be proven."""
    address = job.folder.read_store()
    assert address is not None
    with client(address, connect_s=5.0, answer_s=5.0) as store:
        beats = Keys(address.job).beats
        until(lambda: int(store.xlen(beats)) >= 2 * nodes, f"two heartbeats of each of {nodes} nodes")
