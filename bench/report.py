"""The page of a large job, its trace, its metrics, and a fleet's page: processor time, memory and size, beside a bare
reading of the same journal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.errors import PeerFailed
from bench.processes import temporary_folder
from bench.tables import print_rows, print_target
from nvrx_slurm.core.job import step
from nvrx_slurm.core.state import new_job
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.folder import JobFolder, JobInfo, Result
from nvrx_slurm.journal.records import (
    AnyFact,
    Entry,
    JobStarted,
    NodeJoined,
    NodeLost,
    NodeReady,
    Progress,
    WorkersDone,
    WorkersStarted,
    entry_to_json,
)
from nvrx_slurm.lab.plans import plain_bounds

BEGIN = 1_790_000_000.0
RANKS = 8
NODES, EVENTS = 1000, 100_000
JOBS, EVENTS_OF_ONE = 1000, 200
MOST_S, MOST_MIB, MOST_PAGE_MB, MOST_FLEET_S = 3.0, 300.0, 5.0, 10.0

RUN = """
import json, resource, sys, time
from nvrx_slurm.cli import cli
began = time.process_time()
cli.main(sys.argv[1:], standalone_mode=False)
took = time.process_time() - began
print(json.dumps([took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]), file=sys.stderr)
"""
READ = """
import sys, time
from pathlib import Path
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.report.journal_file import JournalFile
began = time.process_time()
JournalFile(JobFolder(Path(sys.argv[1]))).read()
print(time.process_time() - began)
"""


def report(runs: int, peers: Path) -> None:
    """Print what each costs, and the targets."""
    with temporary_folder() as room:
        large, fleet = room / "large", room / "fleet"
        job = write_job(large, "1", nodes=NODES, spares=8, events=EVENTS)
        page = room / "page.html"
        commands = {
            "report": ["report", "1", "-o", str(page)],
            "trace": ["trace", "1", "-o", str(room / "trace.json")],
            "metrics": ["metrics", "1"],
        }
        taken: dict[str, list[float]] = {"journal read alone": []}
        memory: dict[str, float] = {}
        for _ in range(runs):
            taken["journal read alone"].append(float(_python(READ, str(job.path)).stdout))
            for name, words in commands.items():
                _note(name, _python(RUN, *words, "--folder", str(large)), taken, memory)
        print_rows(f"{NODES} nodes, {EVENTS} events, processor time", taken, unit="s", first="journal read alone")
        for name, mib in memory.items():
            print(f"  {name}: {mib:.0f} MiB at most")
        print_target(f"report in {MOST_S} s at most", min(taken["report"]), at_most=MOST_S)
        print_target(f"report in {MOST_MIB:.0f} MiB at most", memory["report"], at_most=MOST_MIB)
        print_target(f"page of {MOST_PAGE_MB} MB at most", page.stat().st_size / 1e6, at_most=MOST_PAGE_MB)

        for number in range(JOBS):
            write_job(fleet, str(number + 1), nodes=8, spares=1, events=EVENTS_OF_ONE)
        all_jobs: dict[str, list[float]] = {}
        words = ["report", "--since", "100000d", "-o", str(page), "--folder", str(fleet)]
        for name in ("first time", "again"):
            given = _python(RUN, *words, cache=room / "cache")
            _note(name, given, all_jobs, memory)
        print_rows(f"{JOBS} jobs of {EVENTS_OF_ONE} events, processor time", all_jobs, unit="s", first="first time")
        slowest_s = max(all_jobs["first time"])
        print_target(f"all jobs in {MOST_FLEET_S} s at most", slowest_s, at_most=MOST_FLEET_S)


def _python(program: str, *arguments: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **({"XDG_CACHE_HOME": str(cache)} if cache else {})}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, env=env
    )
    if done.returncode:
        raise PeerFailed(f"{' '.join(arguments)} exited with {done.returncode}: {done.stderr[-2000:]}")
    return done


def _note(
    name: str, done: subprocess.CompletedProcess[str], taken: dict[str, list[float]], memory: dict[str, float]
) -> None:
    took, mib = json.loads(done.stderr.splitlines()[-1])
    taken.setdefault(name, []).append(took)
    memory[name] = max(mib, memory.get(name, 0.0))


# ------------------------------------------------------------------------------------------- journals


def write_job(base: Path, job_id: str, *, nodes: int, spares: int, events: int) -> JobFolder:
    """A folder of a job that has ended, whose journal is what the core would have journaled: a node is lost in each
    cycle, and another agent takes its place a moment later."""
    role = RolePlan(name="main", command=("x",), nodes_per_replica=nodes - spares, workers_per_node=RANKS)
    bounds = plain_bounds(max_restarts=10**6, quarantine_after=10**6)
    plan = Plan(name="big", roles=(role,), spares=spares, workdir="/", folder=str(base), fault_tolerance=bounds)
    folder = JobFolder(base / job_id)
    folder.create()
    folder.write_plan(plan)
    folder.write_info(JobInfo(job_id=job_id, name="big", cluster="local", started_at=BEGIN, host="elsewhere"))
    last = BEGIN
    with folder.events_path.open("wb") as file:
        for entry in journal(plan, job_id, events):
            file.write(entry_to_json(entry) + b"\n")
            last = entry.t
    folder.write_result(Result(exit_code=0, reason="done", ended_at=last))
    return folder


def journal(plan: Plan, job_id: str, events: int) -> Iterator[Entry]:
    """So many entries, and those of the end."""
    job, n, now = new_job(plan), 0, BEGIN
    names = tuple(f"node{index:04}" for index in range(plan.total_nodes))
    born = dict.fromkeys(names, 0)
    seq = iter(range(1, 1 << 60))

    def told(fact: AnyFact, after_s: float) -> Iterator[Entry]:
        nonlocal n, now
        now = round(now + after_s, 6)
        decisions = step(job, fact, now)
        records: list[Any] = [] if decisions is None else [fact, *decisions]
        for record in records:
            n += 1
            yield Entry(n=n, t=now, record=record)

    def agent(node: str) -> dict[str, Any]:
        return {"node": node, "incarnation": f"a{born[node]}-{node}", "seq": next(seq)}

    yield from told(JobStarted(job=job_id, name=plan.name, expected=names), 0.0)
    for node in names:
        yield from told(NodeJoined(**agent(node), addr="10.0.0.1", port=5000), 0.001)
    replica = job.replicas["main-0"]
    reached = 0
    while True:
        place: dict[str, Any] = {"replica": "main-0", "cycle": replica.cycle}
        for index, node in enumerate(replica.order):
            pids = {index * RANKS + local: 40_000 + local for local in range(RANKS)}
            yield from told(WorkersStarted(**agent(node), **place, pids=pids, spawn_s=0.2), 0.001)
        for index, node in enumerate(replica.order):
            yield from told(Progress(**agent(node), **place, rank=index * RANKS, step=reached + 1), 0.001)
        reached += 900
        now += 3000.0
        if n >= events:
            break
        lost = replica.order[replica.cycle * 7 % len(replica.order)]
        yield from told(NodeLost(node=lost, incarnation=f"a{born[lost]}-{lost}", cause="connection_closed"), 0.0)
        for node in [each for each in replica.order if each != lost]:
            place = {"replica": "main-0", "cycle": replica.cycle}
            yield from told(NodeReady(**agent(node), **place, port=5001, teardown_s=0.4, step=reached), 0.001)
        born[lost] += 1
        yield from told(NodeJoined(**agent(lost), addr="10.0.0.1", port=5000), 30.0)
        reached -= 100
    for node in replica.order:
        place = {"replica": "main-0", "cycle": replica.cycle}
        yield from told(WorkersDone(**agent(node), **place, step=reached), 0.001)
