"""What must follow when something happens to a role's first replica, read from the job's plan; and a case. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nvrx_slurm.errors import EXIT_FAILED, EXIT_RETRY
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.lab.flow.language.faults import FAULTS
from nvrx_slurm.lab.flow.language.model import StageName
from nvrx_slurm.lab.flow.language.writing import Item, in_any_order, nice
from nvrx_slurm.util.durations import words
from nvrx_slurm.util.ids import replica_id

AT_WORK_S = 5.0
"""How long after its workers have started a job without `workload.beat` is struck: by then they are at work."""

START_S = 20.0
"""How long a busy machine may take to start a replica's workers."""


class RoleShape:
    """The first replica of a role, and what follows when something happens to it."""

    def __init__(self, plan: Plan, role: RolePlan, stage: StageName) -> None:
        self.plan, self.role, self.stage = plan, role, stage
        self.bounds = plan.fault_tolerance
        self.replica = replica_id(role.name, 0)
        self.restarts = role.on_failure in ("restart_replica", "restart_job")

    # ---- the shape

    @cached_property
    def replicas(self) -> list[str]:
        return [replica_id(role.name, index) for role in self.plan.roles for index in range(role.replicas)]

    @property
    def whose(self) -> Item:
        """The field that names the replica, where there are several."""
        return {"replica": self.replica} if len(self.replicas) > 1 else {}

    @property
    def last_rank(self) -> int:
        return self.role.nodes_per_replica * self.role.workers_per_node - 1

    def name(self, fault: str) -> str:
        return f"{fault}-{self.role.name}" if len(self.plan.roles) > 1 else fault

    @property
    def is_first(self) -> bool:
        return self.role is self.plan.roles[0]

    def can_lose(self, count: int) -> bool:
        """Whether so many of its nodes can die and leave the batch host, which Slurm has on the job's first."""
        spared = self.is_first and self.stage != "local"
        return self.role.nodes_per_replica - spared >= count

    # ---- moments

    def at_work(self) -> Item:
        """All nodes are here, all workers run, and a first step was reported; or else a while has passed."""
        stepped = {"any": [{"event": "progress", **self.whose}, {"state": "running", "after": words(AT_WORK_S)}]}
        joined = {"event": "node_joined", "times": self.plan.total_nodes}
        return {"all": [joined, {"state": "running"}, stepped]}

    def recovered_at(self, cycle: int) -> Item:
        return {"event": "recovered", **self.whose, "cycle": cycle}

    # ---- targets

    @property
    def last_node(self) -> Item:
        return {"of_rank": self.last_rank, **self.whose}

    def node_before_last(self) -> Item:
        return {"of_rank": self.last_rank - self.role.workers_per_node, **self.whose}

    def worker(self, rank: int) -> Any:
        return {"rank": rank, **self.whose} if self.whose else rank

    # ---- what must follow

    def begins(self) -> Iterator[Item]:
        """Every replica's first round closes in full."""
        yield from in_any_order([[self._closed(replica, 0)] for replica in self.replicas])

    def begins_to_work(self) -> Iterator[Item]:
        """The same, and workers start in each."""
        branches = []
        for replica in self.replicas:
            whose = {"replica": replica} if len(self.replicas) > 1 else {}
            branches.append([self._closed(replica, 0), {"workers_started": {**whose, "cycle": 0}}])
        yield from in_any_order(branches)

    def _closed(self, replica: str, cycle: int, nodes: int | None = None, **more: Any) -> Item:
        role = next(role for role in self.plan.roles if replica.rpartition("-")[0] == role.name)
        whose = {"replica": replica} if len(self.replicas) > 1 else {}
        size = {"nodes": {"length": role.nodes_per_replica if nodes is None else nodes}}
        return {"round_closed": {**whose, "cycle": cycle, **size, **more}}

    def decided(self, cycle: int = 0, action: str | None = None) -> Item:
        return {"restart_decided": {**self.whose, "cycle": cycle, "action": action or self.role.on_failure}}

    def recovers(self, cycle: int = 1, nodes: int | None = None, **more: Any) -> Iterator[Item]:
        """It goes on in this cycle, and with it all that `restart_job` restarts."""
        moved = self.replicas if self.role.on_failure == "restart_job" else [self.replica]
        branches = []
        for replica in moved:
            own = replica == self.replica
            closed = self._closed(replica, cycle, nodes if own else None, **(more if own else {}))
            whose = {"replica": replica} if len(self.replicas) > 1 else {}
            branches.append([closed, {"recovered": {**whose, "cycle": cycle}}])
        yield from in_any_order(branches)

    def others_unmoved(self) -> Iterator[Item]:
        """No other replica opens a round, until this one has recovered or the job ends."""
        if self.role.on_failure != "restart_job":
            for other in self.replicas:
                if other != self.replica:
                    moved = {"round_opened": {"replica": other, "cycle": 1}}
                    yield {"never": moved, "until": {"recovered": self.whose}}

    def ends(self, exit_code: int) -> Iterator[Item]:
        yield {"job_ended": {"exit_code": exit_code}}

    def after_failure(self, cycle: int = 0) -> Iterator[Item]:
        """A failed worker spends the budget; no node is lost."""
        if self.restarts and cycle >= self.bounds.max_restarts.count:
            yield from (self.decided(cycle, "stop"), *self.ends(EXIT_FAILED))
        elif self.restarts:
            yield from (self.decided(cycle), *self.recovers(cycle + 1))
        else:
            yield from self._without_restart(cycle)

    def after_loss(self, capture: str, cycle: int = 0, lost: int = 1) -> Iterator[Item]:
        """A lost node is replaced by a spare; without one the replica goes on smaller, or the job ends.

        `lost`: how many it has lost by then. The workers that stay may fail before the loss is noticed, by their
        broken connections: so the order of the two is left open.
        """
        yield from in_any_order([[{"node_lost": {"node": capture}}], [self.decided(cycle)]])
        if not self.restarts:
            yield from self._without_restart(cycle, decided=True)
            return
        left = self.role.nodes_per_replica - max(0, lost - self.plan.spares)
        if lost <= self.plan.spares:
            yield from self.recovers(cycle + 1, promoted={"length": 1})
        elif self.role.min_nodes is not None and left >= self.role.min_nodes:
            yield from self.recovers(cycle + 1, nodes=left)
        else:
            yield from self.ends(EXIT_RETRY)

    def _without_restart(self, cycle: int, *, decided: bool = False) -> Iterator[Item]:
        if not decided:
            yield self.decided(cycle)
        if self.role.on_failure == "fail_job":
            yield from self.ends(EXIT_FAILED)
            return
        yield {"replica_ended": {**self.whose, "cycle": cycle, "outcome": "failed"}}
        if len(self.replicas) == 1:
            yield from self.ends(EXIT_FAILED)

    # ---- how long that may take

    @property
    def restart_s(self) -> float:
        """One recovery: from the fault on, as late as it may be noticed, to the last worker's start."""
        bounds = self.bounds
        return bounds.heartbeat.timeout + bounds.teardown.grace + bounds.rendezvous.last_call + START_S

    @property
    def fenced_s(self) -> float:
        """The same where a death must be waited for, since nothing proves it."""
        return self.restart_s + self.bounds.gives_away_after_s


@dataclass(frozen=True, slots=True)
class MatrixCase:
    """One flow of the matrix. `takes_s`: what it needs beyond the job's start, at most."""

    name: str
    about: str
    faults: tuple[Item, ...]
    expect: tuple[Item, ...]
    takes_s: float
    overrides: Item = field(default_factory=dict)  # of job.yaml, as dotted keys
    needs: Item = field(default_factory=dict)  # of the cluster, and of the stage

    def document(self, job: str, overrides: Item, start_s: float) -> Item:
        """The flow (see `writing.to_yaml`) of a job that takes `start_s` to run, at most."""
        said: Item = {"name": self.name, "about": self.about, "job": job}
        said |= {"overrides": changed} if (changed := {**overrides, **self.overrides}) else {}
        said |= self.needs
        said |= {"faults": list(self.faults)} if self.faults else {}
        return said | {"expect": list(self.expect), "limits": {"wall": words(nice(start_s + self.takes_s))}}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What the job's shape, or the stage, cannot do."""

    name: str
    why: str


def if_possible(case: MatrixCase | LeftOut, stage: StageName) -> MatrixCase | LeftOut:
    """The case, unless one of its faults cannot be done on the stage."""
    if isinstance(case, LeftOut):
        return case
    for action in (action for fault in case.faults for action in fault["do"]):
        if stage not in FAULTS[action].stages:
            able = ", ".join(FAULTS[action].stages)
            return LeftOut(case.name, f"{action} cannot be done on the stage {stage} (it can on: {able})")
    return case
