"""A simulated fleet that feeds facts to the core, and keeps the journal as a controller would."""

from __future__ import annotations

from typing import Any

from nvrx_slurm.core.job import step
from nvrx_slurm.core.state import NodeState, new_job
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.records import (
    Decision,
    Entry,
    Fact,
    JobStarted,
    Learned,
    NodeFenced,
    NodeIsolated,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeReady,
    Progress,
    Signalled,
    Tick,
    WorkerFailed,
    WorkerHung,
    WorkersDone,
    WorkersStarted,
)
from nvrx_slurm.lab.plans import plain_bounds


def plain(nodes: int = 2, spares: int = 1, *, min_nodes: int | None = None, **bounds: Any) -> Plan:
    """The plan of a job with one role and one replica, `main-0`."""
    role = RolePlan(name="main", command=("x",), nodes_per_replica=nodes, workers_per_node=2, min_nodes=min_nodes)
    return plan_of(role, spares=spares, **bounds)


def plan_of(*roles: RolePlan, spares: int = 0, **bounds: Any) -> Plan:
    return Plan(name="t", roles=roles, spares=spares, workdir="/", folder="/", fault_tolerance=plain_bounds(**bounds))


class Fleet:
    """Nodes n1 … nN of a plan. Each method feeds one fact to the core and returns the decisions (None: it was
    refused)."""

    def __init__(self, plan: Plan, *, suspects: tuple[str, ...] = ()) -> None:
        self.plan, self.job, self.now = plan, new_job(plan), 1000.0
        self.journal: list[Entry] = []
        self.names = tuple(f"n{i}" for i in range(1, plan.total_nodes + 1))
        self.incarnations = dict.fromkeys(self.names, 0)
        self.seqs = dict.fromkeys(self.names, 0)
        self.generation = 0
        self.tell(JobStarted(job="1", name="t", expected=self.names, suspects=suspects))

    def tell(self, fact: Fact) -> list[Decision] | None:
        decisions = step(self.job, fact, self.now)
        if decisions is not None:
            for record in (fact, *decisions):
                self.journal.append(Entry(n=len(self.journal) + 1, t=self.now, record=record))  # type: ignore[arg-type]
        return decisions

    def said(self, kind: type[Any]) -> list[Any]:
        """Every journaled record of a kind."""
        return [entry.record for entry in self.journal if isinstance(entry.record, kind)]

    def state(self, node: str) -> NodeState:
        return self.job.nodes[node].state

    # ---- facts of agents

    def by(self, node: str) -> dict[str, Any]:
        """The fields of the next fact of a node's agent that identify it: node, incarnation, sequence number,
        generation."""
        self.seqs[node] += 1
        incarnation = f"{node}.{self.incarnations[node]}"
        return {"node": node, "incarnation": incarnation, "seq": self.seqs[node], "generation": self.generation}

    def join(self, *nodes: str) -> list[Decision]:
        decisions: list[Decision] = []
        for node in nodes:
            decisions += self.tell(NodeJoined(**self.by(node), addr=f"addr-{node}", port=29500)) or []
        return decisions

    def rejoin(self, node: str) -> list[Decision]:
        """A new agent joins on the node."""
        self.incarnations[node] += 1
        self.seqs[node] = 0
        return self.join(node)

    def ready(self, *nodes: str, replica: str = "main-0", cycle: int | None = None) -> list[Decision]:
        decisions: list[Decision] = []
        at = self.job.replicas[replica].cycle if cycle is None else cycle
        for node in nodes:
            decisions += self.tell(NodeReady(**self.by(node), replica=replica, cycle=at, port=29600)) or []
        return decisions

    def started(self, *nodes: str, replica: str = "main-0") -> list[Decision]:
        decisions: list[Decision] = []
        cycle = self.job.replicas[replica].cycle
        for node in nodes:
            fact = WorkersStarted(**self.by(node), replica=replica, cycle=cycle, pids={0: 1})
            decisions += self.tell(fact) or []
        return decisions

    def step(self, *nodes: str, step: int = 1, replica: str = "main-0") -> list[Decision]:
        """Each node reports its first step of the cycle."""
        decisions: list[Decision] = []
        cycle = self.job.replicas[replica].cycle
        for node in nodes:
            decisions += self.tell(Progress(**self.by(node), replica=replica, cycle=cycle, rank=0, step=step)) or []
        return decisions

    def fail(self, node: str, *, replica: str = "main-0", cycle: int | None = None) -> list[Decision] | None:
        at = self.job.replicas[replica].cycle if cycle is None else cycle
        return self.tell(WorkerFailed(**self.by(node), replica=replica, cycle=at, rank=0, exit_code=1))

    def hang(
        self, node: str, *, replica: str = "main-0", cycle: int | None = None, limit_s: float | None = None
    ) -> list[Decision] | None:
        of_cycle = {"replica": replica, "cycle": self.job.replicas[replica].cycle if cycle is None else cycle}
        hung = WorkerHung(**self.by(node), **of_cycle, rank=0, why="no step for 9 s", limit_s=limit_s)
        return self.tell(hung)

    def isolate(self, node: str, *, replica: str = "main-0", cycle: int | None = None) -> list[Decision] | None:
        """The node was partitioned for long, its workers are dead, and it is in touch again."""
        at = self.job.replicas[replica].cycle if cycle is None else cycle
        return self.tell(NodeIsolated(**self.by(node), replica=replica, cycle=at, for_s=30.0))

    def learn(self, node: str, **seen: tuple[int, float]) -> list[Decision] | None:
        return self.tell(Learned(**self.by(node), role=self.plan.roles[0].name, seen=seen))

    def done(self, *nodes: str, replica: str = "main-0") -> list[Decision]:
        decisions: list[Decision] = []
        cycle = self.job.replicas[replica].cycle
        for node in nodes:
            decisions += self.tell(WorkersDone(**self.by(node), replica=replica, cycle=cycle)) or []
        return decisions

    def leave(self, *nodes: str) -> list[Decision]:
        decisions: list[Decision] = []
        for node in nodes:
            decisions += self.tell(NodeLeft(**self.by(node), reason="told to")) or []
        return decisions

    # ---- facts of the controller

    def requeue(self) -> list[Decision] | None:
        """Slurm starts the job again, on the same nodes."""
        self.generation += 1
        self.incarnations = {node: count + 1 for node, count in self.incarnations.items()}
        self.seqs = dict.fromkeys(self.names, 0)
        return self.tell(JobStarted(job="1", name="t", expected=self.names, generation=self.generation))

    def lose(self, node: str, *, safe_after_s: float = 0.0) -> list[Decision] | None:
        """The node is given up; its workers may still run for `safe_after_s`."""
        incarnation = f"{node}.{self.incarnations[node]}"
        cause = "heartbeat_timeout" if safe_after_s else "connection_closed"
        return self.tell(NodeLost(node=node, incarnation=incarnation, cause=cause, safe_after_s=safe_after_s))

    def prove_dead(self, node: str) -> list[Decision] | None:
        incarnation = f"{node}.{self.incarnations[node]}"
        return self.tell(NodeFenced(node=node, incarnation=incarnation, proof="seen"))

    def signal(self, reason: Any) -> list[Decision] | None:
        return self.tell(Signalled(reason=reason))

    def later(self, seconds: float) -> list[Decision]:
        self.now += seconds
        return self.tell(Tick()) or []


def running(plan: Plan | None = None) -> Fleet:
    """A fleet whose nodes have all joined and whose first cycle runs."""
    fleet = Fleet(plan or plain())
    fleet.join(*fleet.names)
    return fleet
