"""Jobs of the fault flows on a real Slurm: their job.yaml, their workers, and what is left of them afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nvrx_slurm.agent.supervisor import send_all
from nvrx_slurm.journal.records import RendezvousClosed
from nvrx_slurm.lab.devcluster import DevCluster
from nvrx_slurm.lab.devcluster.processes import environment_of, read_table, working_folder_of
from nvrx_slurm.util.processes import is_alive
from tests.harness import GATE_WORKER, Gate, RunningJob, Waiting
from tests.slurm_harness import nvrx, submit
from tests.waiting import until

GONE_S = 60.0
CALM = "teardown: {grace: 5s}"

# A worker that runs some lines of its own before it connects to the gate.
PRELUDE = "import runpy, sys\n{lines}\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"

STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)"

POLITE = "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(0))"

# On the checkpoint signal a worker writes a file in its working folder and ends; the rank `endless` saves forever.
SAVING = """
import os, pathlib, signal, sys
def save(*_):
    pathlib.Path("saved-" + os.environ["RANK"]).write_text(os.environ["NVRX_NODE"])
    if os.environ["RANK"] != {endless!r}:
        os._exit(0)
    while True:
        signal.pause()
signal.signal(signal.SIGUSR1, save)
"""


def gate_command(gate: Gate, lines: str) -> tuple[str, ...]:
    """A gate worker that first runs `lines` of Python."""
    return (sys.executable, "-c", PRELUDE.format(lines=lines), str(GATE_WORKER), str(gate.port))


class SlurmJobs:
    """Submits jobs to one cluster, from one folder."""

    def __init__(self, cluster: DevCluster, gate: Gate, folder: Path) -> None:
        self.cluster, self.gate, self.folder = cluster, gate, folder
        self.env = {**os.environ, **cluster.environment()}
        self.jobs: list[RunningJob] = []

    def start(
        self, bounds: str, *, nodes: int = 2, spares: int = 0, command: Sequence[str] = (), slurm: str = "{}"
    ) -> RunningJob:
        """Submit a job of gate workers, one per node. `bounds`: what the job.yaml has below `fault_tolerance`."""
        path = self.folder / "job.yaml"
        path.write_text(
            f"name: fault\ncommand: {json.dumps(list(command or self.gate.command))}\n"
            f"nodes: {nodes}\nspares: {spares}\nworkers_per_node: 1\nslurm: {slurm}\nfault_tolerance: {{{bounds}}}\n"
            "store: {server: bundled}\n"  # regardless of the servers on this machine's PATH
        )
        self.jobs.append(submit(self.cluster, path))
        return self.jobs[-1]

    def running(self, job: RunningJob, count: int, *, cycle: int = 0, generation: int = 0) -> dict[int, Waiting]:
        """The workers of a cycle, by rank, once all of them run. Asserts that no rank has a live worker of an earlier
        cycle."""
        there = self.gate.wait(count, cycle=cycle, generation=generation, timeout=GONE_S)
        job.expect(RendezvousClosed, cycle=cycle, generation=generation)
        for older in range(cycle):
            for rank, worker in self.gate.wait(0, cycle=older, generation=generation).items():
                assert not (rank in there and is_alive(worker.pid)), f"rank {rank} runs twice\n{job.story()}"
        return there

    def command(self, *words: str) -> str:
        """Run one of Slurm's programs; returns its output."""
        return subprocess.run(words, env=self.env, check=True, capture_output=True, text=True).stdout

    def nvrx(self, *words: str) -> str:
        """Run our command line; returns its output."""
        done = nvrx(*words, cwd=self.folder, env=self.cluster.environment())
        assert done.returncode == 0, done.stderr
        return done.stdout

    def processes_of(self, job: RunningJob) -> list[int]:
        """Every process of the job: batch host, store, controller, agents, workers."""
        wanted = {"SLURM_JOB_ID": job.folder.job_id, **self.cluster.environment()}
        folder = str(job.folder.store_dir)  # the store overwrites its environment with its title
        return [
            pid
            for pid in read_table()
            if wanted.items() <= environment_of(pid).items() or working_folder_of(pid).startswith(folder)
        ]

    def process_of(self, job: RunningJob, words: str) -> int:
        """The process of the job whose command line contains `words`."""
        for pid in self.processes_of(job):
            if words in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                return pid
        raise AssertionError(f"job {job.folder.job_id} runs no {words!r}")

    def all_gone(self, job: RunningJob) -> None:
        """Wait until no process of the job is left."""
        until(lambda: not self.processes_of(job), f"every process of job {job.folder.job_id} to be gone")

    def close(self) -> None:
        """Cancel the jobs that a failed test has left."""
        for job in self.jobs:
            job.close()
            if job.process.poll() is None:
                job.process.cancel()
                send_all(self.processes_of(job), 9)
