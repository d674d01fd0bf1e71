"""Journals as a controller writes them: facts are given to the real core, and its decisions follow them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvrx_slurm.core.job import step
from nvrx_slurm.core.state import ControlState, new_job
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.folder import JobFolder, JobInfo
from nvrx_slurm.journal.records import (
    AnyFact,
    Entry,
    Heartbeat,
    JobStarted,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeReady,
    Progress,
    RestartedInProcess,
    Signalled,
    WorkerFailed,
    WorkerHung,
    WorkersDone,
    WorkersStarted,
    entry_to_json,
)
from nvrx_slurm.journal.restarts import InProcessRestart, RankFault
from nvrx_slurm.lab.plans import plain_bounds
from nvrx_slurm.report.model import JobView, ReceivedHeartbeat
from nvrx_slurm.report.view import fold, new_view

BEGIN = 1_790_000_000.0
JOB = "local-20261121-093012-4f2a"


def plain_plan(folder: str = "/jobs", spares: int = 2) -> Plan:
    """One replica of 4 nodes × 2 workers, with hot spares."""
    role = RolePlan(name="main", command=("python", "train.py"), nodes_per_replica=4, workers_per_node=2)
    bounds = plain_bounds(max_restarts=3)
    return Plan(name="digits", roles=(role,), spares=spares, workdir="/w", folder=folder, fault_tolerance=bounds)


def roles_plan(folder: str = "/jobs") -> Plan:
    """policy × 1 of 2 nodes, rollout × 3 of 1 node, one spare."""
    policy = RolePlan(name="policy", command=("policy",), nodes_per_replica=2)
    rollout = RolePlan(name="rollout", command=("rollout",), replicas=3, workers_per_node=2)
    return Plan(
        name="rl", roles=(policy, rollout), spares=1, workdir="/w", folder=folder, fault_tolerance=plain_bounds()
    )


class Recorder:
    """A job's journal so far. Facts that the core takes for stale are not journaled, as in a controller."""

    def __init__(self, plan: Plan, *, start: bool = True) -> None:
        self.plan = plan
        self.entries: list[Entry] = []
        self.now = BEGIN
        self.job: ControlState = new_job(plan)
        self.nodes = tuple(f"n{index}" for index in range(plan.total_nodes))
        self._seq = 0
        if start:
            self.tell(JobStarted(job=JOB, name=plan.name, expected=self.nodes))

    def tell(self, fact: AnyFact, after_s: float = 0.01) -> None:
        self.now = round(self.now + after_s, 6)  # the precision of the file
        decisions = step(self.job, fact, self.now)
        for record in [] if decisions is None else [fact, *decisions]:
            self.entries.append(Entry(n=len(self.entries) + 1, t=self.now, record=record))

    def join(self, *nodes: str) -> None:
        for node in nodes or self.nodes:
            self.tell(NodeJoined(**self.agent(node), addr="127.0.0.1", port=5000, pid=1))

    def start_workers(self, replica: str = "main-0", took_s: float = 0.02, **how: Any) -> None:
        current = self.job.replicas[replica]
        workers = current.role.workers_per_node
        for index, node in enumerate(current.order):
            pids = {index * workers + local: 4000 + index * workers + local for local in range(workers)}
            told = {"replica": replica, "cycle": current.cycle, "pids": pids, "spawn_s": took_s, **how}
            self.tell(WorkersStarted(**self.agent(node), **told), took_s)

    def progress(self, at: int, replica: str = "main-0", after_s: float = 0.8) -> None:
        current = self.job.replicas[replica]
        for node in current.order:
            told = {"replica": replica, "cycle": current.cycle, "rank": 0, "step": at}
            self.tell(Progress(**self.agent(node), **told), after_s)
            after_s = 0.001

    def ready(
        self,
        replica: str = "main-0",
        after_s: float = 0.03,
        but: tuple[str, ...] = (),
        peers_lost: dict[str, tuple[int, ...]] | None = None,
        at: int | None = None,
    ) -> None:
        current = self.job.replicas[replica]
        for node in [node for node in current.order if self.job.nodes[node].alive and node not in but]:
            told: dict[str, Any] = {"replica": replica, "cycle": current.cycle, "port": 5001, "teardown_s": after_s}
            told["step"] = at
            told["peers_lost"] = (peers_lost or {}).get(node, ())
            self.tell(NodeReady(**self.agent(node), **told), after_s)

    def lose(
        self, node: str, *, ago_s: float = 0.002, at: int | None = 80, after_s: float = 4.0, safe_after_s: float = 0.0
    ) -> None:
        """The node is proven dead, or, with `safe_after_s`, has only been silent."""
        incarnation = self.job.nodes[node].incarnation
        cause = "heartbeat_timeout" if safe_after_s else "connection_closed"
        told = {"cause": cause, "step": at, "ago_s": ago_s, "safe_after_s": safe_after_s}
        self.tell(NodeLost(node=node, incarnation=incarnation, **told), after_s)

    def fail(
        self,
        node: str,
        rank: int,
        *,
        replica: str = "main-0",
        after_s: float = 2.0,
        cycle: int | None = None,
        **how: Any,
    ) -> None:
        cycle = self.job.replicas[replica].cycle if cycle is None else cycle
        self.tell(WorkerFailed(**self.agent(node), replica=replica, cycle=cycle, rank=rank, **how), after_s)

    def restart_in_process(self, node: str, iteration: int, *, times: int = 1, after_s: float = 1.0) -> None:
        place = {"replica": "main-0", "cycle": self.job.replicas["main-0"].cycle}
        restart = InProcessRestart(
            cause="exception on rank 1 (KeyError: 3)",
            iteration=iteration,
            world_size=8,
            active_world_size=8,
            total_s=0.042,
            phases={"detected": 0.001, "aborted": 0.03, "left": 0.002, "synchronised": 0.009},
            slowest={"detected": 0, "aborted": 5, "left": 5, "synchronised": 1},
            faults=(RankFault(kind="exception", rank=1, host="n0", text="KeyError: 3"),),
        )
        self.tell(RestartedInProcess(**self.agent(node), **place, restart=restart, times=times), after_s)

    def hang(self, node: str, rank: int, *, replica: str = "main-0", after_s: float = 600.0) -> None:
        place = {"replica": replica, "cycle": self.job.replicas[replica].cycle, "rank": rank}
        why = "no step for 612 s (limit 600 s) after step 41"
        found = {"step": 41, "where": "train.py:41 in step", "stacks": "stacks/main-0/rank-3.txt"}
        self.tell(WorkerHung(**self.agent(node), **place, why=why, **found), after_s)

    def finish(self, at: int = 200) -> None:
        for replica in list(self.job.replicas.values()):
            for node in replica.order:
                told = {"replica": replica.id, "cycle": replica.cycle, "step": at}
                self.tell(WorkersDone(**self.agent(node), **told))
        self.leave()

    def cancel(self) -> None:
        self.tell(Signalled(reason="cancel"))

    def leave(self, reason: str = "done", at: int | None = None) -> None:
        for node in [node for node in self.nodes if self.job.nodes[node].alive]:
            self.tell(NodeLeft(**self.agent(node), reason=reason, step=at))

    def beat(self, node: str, *at: int, **more: object) -> ReceivedHeartbeat:
        """A heartbeat of the node that reaches the store now; `at`: the step of each of its ranks, in order."""
        state = self.job.nodes[node]
        replica = self.job.replicas[state.replica or "main-0"]
        first = replica.order.index(node) * replica.role.workers_per_node if node in replica.order else 0
        kind = {"state": str(state.state), "replica": state.replica, "cycle": replica.cycle}
        steps = dict(enumerate(at, first))
        return ReceivedHeartbeat(
            self.now, Heartbeat(node=node, incarnation=state.incarnation, **kind, steps=steps, **more)
        )

    def agent(self, node: str) -> dict[str, object]:
        """The fields of the node's next fact that name its agent."""
        self._seq += 1
        who = {"node": node, "incarnation": f"agent-of-{node}", "seq": self._seq}
        return {**who, "generation": self.job.generation}


def to_first_cycle() -> Recorder:
    """Six nodes join; 4 run cycle 0, 2 are spares; the first steps are reported."""
    recorder = Recorder(plain_plan())
    recorder.join()
    recorder.start_workers()
    recorder.progress(1)
    return recorder


def with_one_recovery() -> Recorder:
    """n2 dies in cycle 0 at step 80; n4 takes its ranks; cycle 1 runs and has reported its first step, 76."""
    recorder = to_first_cycle()
    recorder.lose("n2")
    recorder.ready()
    recorder.start_workers()
    recorder.progress(76)
    return recorder


def ended() -> Recorder:
    """The same, up to the job's successful end."""
    recorder = with_one_recovery()
    recorder.finish()
    return recorder


def write(base: Path, recorder: Recorder, *, job: str = JOB, cluster: str = "local") -> JobFolder:
    """A job folder with this journal, of a host other than this machine."""
    folder = JobFolder(base / job)
    folder.create()
    folder.write_plan(recorder.plan)
    folder.write_info(
        JobInfo(job_id=job, name=recorder.plan.name, cluster=cluster, started_at=BEGIN, host="elsewhere")
    )
    folder.events_path.write_bytes(lines(recorder.entries))
    return folder


def say(
    folder: JobFolder, text: str, *, replica: str = "main-0", cycle: int = 0, rank: int = 0, stream: str = "out"
) -> None:
    """Appends a rank's output to its log."""
    logs = folder.cycle_logs(replica, 0, cycle)
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"rank-{rank}.{stream}").open("a") as file:
        file.write(text)


def view_of(recorder: Recorder) -> JobView:
    """The view that a reader has after this journal."""
    view = new_view(recorder.plan)
    for entry in recorder.entries:
        fold(view, entry)
    return view


def lines(entries: list[Entry]) -> bytes:
    return b"".join(entry_to_json(entry) + b"\n" for entry in entries)
