"""Failure → restart decided: attribution and rendezvous together against each alone; and what the path costs where
no source is asked."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from bench.processes import temporary_folder
from bench.tables import Target, in_turns, print_rows, print_targets
from nvrx_slurm.api.submission import submit
from nvrx_slurm.core.job import step
from nvrx_slurm.core.state import new_job
from nvrx_slurm.jobspec.load import load_job
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import JobStarted, NodeJoined, Recovered, WorkerFailed
from nvrx_slurm.journal.verdicts import Verdict
from nvrx_slurm.lab.faults.attribution_server import AttributionServer, slow
from nvrx_slurm.lab.plans import plain_bounds
from nvrx_slurm.report.source import so_far

CI = Path(__file__).parent.parent / "ci"
LONG_S = 8.0
TOGETHER, ATTRIBUTION, RENDEZVOUS = "both at once", f"attribution of {LONG_S:g} s", f"rendezvous of {LONG_S:g} s"
MOST = 9.0 / 8.0
NODES, FAILURES = 64, 200


def decision(runs: int, peers: Path) -> None:
    """A worker fails; its peer ignores SIGTERM, so that the teardown takes its whole grace; the service takes its
    time. From the failure until all workers run again."""
    ways = {
        TOGETHER: partial(_recovery_s, asks=True, deaf=True),
        ATTRIBUTION: partial(_recovery_s, asks=True, deaf=False),
        RENDEZVOUS: partial(_recovery_s, asks=False, deaf=True),
    }
    samples = in_turns(runs, ways)
    print_rows("a failure, until all run again", samples, unit="s", first=RENDEZVOUS)
    print_targets(samples, [Target("≤ 9 s, of 8 s each", RENDEZVOUS, (TOGETHER,), at_most=MOST)])
    unasked_ms = [_core_ms() for _ in range(runs)]
    print(f"the core, {NODES} nodes, no source asked: {min(unasked_ms):.3f} ms a failure (target: ≤ 1 ms)")


def _recovery_s(*, asks: bool, deaf: bool) -> float:
    """How long the recovery took, by the job's own journal."""
    server = AttributionServer(slow(LONG_S, Verdict.RESTART))
    try:
        with temporary_folder() as room:
            spec = load_job(
                CI / "jobs" / "attributed.yaml",
                workdir=str(CI / "workloads"),
                command=f"python3 steps.py {'--deaf ' if deaf else ''}--until recovered --fault fail@20 --ranks 1",
                fault_tolerance__teardown__grace=f"{LONG_S:g}s",
                fault_tolerance__attribution__enable_lib=False,
                fault_tolerance__attribution__decision_timeout="20s",
                fault_tolerance__attribution__http_urls=[server.url] if asks else [],
            )
            job = submit(spec, folder=room, cluster="local")
            job.wait(timeout=120)
            recovered = [
                entry.record for entry in so_far(JobFolder(job.folder)) if isinstance(entry.record, Recovered)
            ]
            return recovered[0].total_s
    finally:
        server.close()


def _core_ms() -> float:
    """A failure of one of many nodes, decided where no source is set up."""
    role = RolePlan(name="main", command=("x",), nodes_per_replica=NODES, workers_per_node=8)
    plan = Plan(name="t", roles=(role,), workdir="/", folder="/", fault_tolerance=plain_bounds(max_restarts=FAILURES))
    names = tuple(f"n{index}" for index in range(NODES))
    took_s = 0.0
    for _ in range(FAILURES):
        job = new_job(plan)
        step(job, JobStarted(job="1", name="t", expected=names), 0.0)
        for name in names:
            step(job, NodeJoined(node=name, incarnation="a", seq=1, addr=name, port=1), 1.0)
        failed = WorkerFailed(node="n1", incarnation="a", seq=2, replica="main-0", cycle=0, rank=8, exit_code=1)
        began = time.perf_counter()
        step(job, failed, 2.0)
        took_s += time.perf_counter() - began
    return took_s / FAILURES * 1000
