"""examples/rollouts as jobs: the policy reads all that was played, whichever node dies in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import NodeLost, Progress, WorkersStarted, entry_from_json
from nvrx_slurm.lab.devcluster.processes import read_table
from tests.harness import RunningJob, plan_of
from tests.slurm_harness import CLI
from tests.waiting import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "rollouts"
LONGEST_S = 100.0
RunLocal = Callable[[Plan], RunningJob]


def rollouts_job(base: Path, *options: str, before: tuple[str, ...] = ()) -> Plan:
    """The example's roles, with other options of the policy; it reads over the network, as from other machines."""
    policy = (*before, sys.executable, "policy.py", "--transports", "tcp", *options)
    return plan_of(
        base,
        RolePlan(name="policy", command=policy, workdir=str(EXAMPLE)),
        RolePlan(name="rollout", command=(sys.executable, "rollout.py"), replicas=3, workdir=str(EXAMPLE)),
        spares=1,
    )


def said(folder: JobFolder, replica: str, cycle: int = 0) -> list[str]:
    return (folder.cycle_logs(replica, 0, cycle) / "rank-0.out").read_text().splitlines()


def rings_of(pids: set[int]) -> list[str]:
    """The rings of these processes in the node's memory."""
    return [path.name for path in Path("/dev/shm").glob("nvrx-ring-*") if int(path.name.split("-")[2]) in pids]


def pids_of(job: RunningJob) -> set[int]:
    return {pid for started in job.said(WorkersStarted) for pid in started.pids.values()}


def kill_the_node_of(job: RunningJob, replica: str) -> str:
    """Kill the replica's node, once the replica has made progress and all nodes, the spare included, have joined."""
    for node in range(1, 6):
        job.agent_pid(f"n{node}")
    node = str(job.expect(Progress, replica=replica, timeout=LONGEST_S).node)
    job.kill_node(node)
    job.expect(NodeLost, node=node)
    return node


def test_the_example_reads_all_that_was_played(tmp_path):
    """With job.yaml, except for its length, nothing is skipped, the policy learns, and no ring is left."""
    command = f"{sys.executable} policy.py --payloads 60 --step-time 0.02"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*CLI, "run", EXAMPLE / "job.yaml", "--folder", tmp_path, "--set", f"roles.policy.command={command}"],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.iterdir()
    *lives, summary = said(JobFolder(folder), "policy-0")
    assert [line.partition(":")[0] for line in lives] == [f"rollout-{number} cycle 0" for number in range(3)]
    assert all(line.endswith("skipped 0") for line in lives)
    assert float(summary.rpartition(" ")[2]) > -0.5  # it began with -5.9, and noise alone costs 0.08
    assert said(JobFolder(folder), "rollout-2")[-1].startswith("the policy needs no more")
    journal = [entry_from_json(line).record for line in JobFolder(folder).events_path.read_bytes().splitlines()]
    started = [record for record in journal if isinstance(record, WorkersStarted)]
    assert len(started) == 4
    assert rings_of({pid for record in started for pid in record.pids.values()}) == []


def test_what_died_with_a_rollouts_node_is_skipped_and_all_else_is_read(run_local: RunLocal, tmp_path):
    """The spare replaces the rollout's node and publishes: the policy ends only once it has read those payloads
    too."""
    options = ("--payloads", "40", "--of-replacements", "5", "--skipped", "1")
    stops_itself = ("/bin/sh", "-c", 'kill -STOP $$; exec "$@"', "sh")  # so no payload of the dead rollout is read
    job = run_local(rollouts_job(tmp_path, *options, before=stops_itself))
    kill_the_node_of(job, "rollout-1")
    (policy,) = job.expect(WorkersStarted, replica="policy-0").pids.values()
    until(lambda: read_table()[policy].state == "T", "the policy is stopped")
    os.kill(policy, signal.SIGCONT)
    assert job.finish(LONGEST_S) == 0, job.story()
    lines = said(job.folder, "policy-0")
    skipped = [line for line in lines if line.startswith("skipped")]
    assert skipped
    assert all(line.startswith("skipped one of rollout-1, cycle 0: ") for line in skipped)
    assert "rollout-1 cycle 1: read" in "\n".join(lines)
    assert len(job.said(NodeLost)) == 1
    assert rings_of(pids_of(job)) == []


def test_the_policys_replacement_reads_on(run_local: RunLocal, tmp_path):
    """Payloads that the dead policy has read are stale. Its replacement reads the others, and the rollouts are never
    restarted."""
    job = run_local(rollouts_job(tmp_path, "--payloads", "400"))
    kill_the_node_of(job, "policy-0")
    assert job.finish(LONGEST_S) == 0, job.story()
    assert {started.cycle for started in job.said(WorkersStarted) if started.replica.startswith("rollout")} == {0}
    assert said(job.folder, "policy-0", cycle=1)[-1].startswith("read ")
    assert rings_of(pids_of(job)) == []


@pytest.mark.parametrize("script", ["policy.py", "rollout.py"])
def test_outside_of_a_job_it_says_what_it_lacks(script, tmp_path):
    """Outside of a job each script exits with 1, and prints one clear line at the end of Python's output."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("NVRX_")}
    done = subprocess.run(
        [sys.executable, EXAMPLE / script], env=outside, capture_output=True, text=True, timeout=LONGEST_S
    )
    assert done.returncode == 1
    assert "no worker of an nvrx-slurm job" in done.stderr
