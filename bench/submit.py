"""The whole command `nvrx-slurm submit` against a process that submits through bare submitit, on a real Slurm."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench.commands import time_all
from bench.processes import temporary_folder
from bench.tables import Target, print_rows, print_targets
from nvrx_slurm.lab.devcluster import DevCluster

OURS, BARE = "nvrx-slurm submit", "bare submitit"
LATER = "now+1hour"  # no job starts: what runs would disturb what is measured

JOB_YAML = f"""\
name: bench
command: ["true"]
nodes: 2
slurm:
  time: 10m
  extra: {{begin: {LATER}}}
"""

BARE_SUBMITIT = f"""\
import os, sys
import submitit
executor = submitit.SlurmExecutor(folder=sys.argv[1])
executor.update_parameters(job_name="bench", nodes=2, time=10, additional_parameters={{"begin": "{LATER}"}})
print(executor.submit(os.getpid).job_id)
"""


def submit(runs: int, peers: Path) -> None:
    """Submit in turns; nothing of the cluster or its jobs is left."""
    with temporary_folder() as room, DevCluster.up(name=f"bench-{os.getpid()}", nodes=2) as cluster:
        (room / "job.yaml").write_text(JOB_YAML)
        (room / "bare.py").write_text(BARE_SUBMITIT)
        program = Path(sys.executable).with_name("nvrx-slurm")
        ours = (str(program), "submit", "--folder", str(room / "jobs"), str(room / "job.yaml"))
        commands = {
            OURS: ours,
            BARE: (sys.executable, str(room / "bare.py"), str(room / "bare-jobs")),
        }
        # Both as an installed package runs: with compiled modules.
        settled = {"PYTHONDONTWRITEBYTECODE": ""}
        samples = time_all(commands, runs, {**cluster.environment(), **settled})
    print_rows("submit", samples, unit="ms", first=OURS)
    print_targets(samples, [Target("≤ 1.2 × bare submitit", BARE, (OURS,), at_most=1.2)])
