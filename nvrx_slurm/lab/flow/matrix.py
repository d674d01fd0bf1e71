"""The fault matrix of one job: which faults its shape and a stage allow, and what must follow from each. Pure.

What must follow is read from the job's own plan: its spares, `min_nodes`, restart budget, roles and bounds.
Nothing is asked of the workload: a fault happens once every replica runs, and the flow is over once the job has
recovered, or has ended as it should.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nvrx_slurm.errors import EXIT_FAILED, EXIT_RETRY, EXIT_TERMINATED, EXIT_TIMEOUT
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.lab.flow.faults import FAULTS
from nvrx_slurm.lab.flow.inferred_faults import HELD_BACK
from nvrx_slurm.lab.flow.model import StageName
from nvrx_slurm.lab.flow.writing import NOTE, Item, in_any_order, nice
from nvrx_slurm.util.durations import words
from nvrx_slurm.util.ids import replica_id

# How long after its workers have started a job without `workload.beat` counts as at work.
AT_WORK_S = 5.0

# How long a busy machine may take to start a replica's workers.
START_S = 20.0

# How long after a part of the control plane was replaced the next fault comes.
SETTLED_S = 3.0

# How many faults a flow waits for at most, each after the recovery from the one before.
MOST_IN_A_ROW = 6


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


Cases = Iterator[MatrixCase | LeftOut]


def matrix(plan: Plan, stage: StageName) -> list[MatrixCase | LeftOut]:
    """Every fault that there is for this job, those of one role after the other, then those of the job."""
    shapes = [RoleShape(plan, role, stage) for role in plan.roles]
    found: list[MatrixCase | LeftOut] = [_starts(shapes[0])]
    for shape in shapes:
        for of_role in (_worker_dies, _node_is_lost, _worker_hangs, _two_nodes_die, _fault_after_fault):
            found += of_role(shape)
    for of_job in (_spare_dies, _control_plane_dies, _job_ends, _next_generation_runs):
        found += of_job(shapes[0])
    for index, case in enumerate(found):
        for action in (action for fault in getattr(case, "faults", ()) for action in fault["do"]):
            if stage not in (stages := FAULTS[action].stages):
                why = f"{action} cannot be done on the stage {stage} (it can on: {', '.join(stages)})"
                found[index] = LeftOut(case.name, why)
                break
    return found


class RoleShape:
    """The first replica of a role, and what follows when something happens to it."""

    def __init__(self, plan: Plan, role: RolePlan, stage: StageName) -> None:
        self.plan, self.role, self.stage = plan, role, stage
        self.bounds = plan.fault_tolerance
        self.replica = replica_id(role.name, 0)
        self.replicas = plan.replica_roles
        self.restarts = role.on_failure in ("restart_replica", "restart_job")
        self.last_rank = role.world_size - 1
        self.whose = self.named(self.replica)

    def named(self, replica: str) -> Item:
        """The field that names a replica, where there are several."""
        return {"replica": replica} if len(self.replicas) > 1 else {}

    def name(self, fault: str) -> str:
        return f"{fault}-{self.role.name}" if len(self.plan.roles) > 1 else fault

    def can_lose(self, count: int) -> bool:
        """Whether so many of its nodes can die and leave the batch host, which Slurm has on the job's first."""
        spared = self.role is self.plan.roles[0] and self.stage != "local"
        return self.role.nodes_per_replica - spared >= count

    # ---- moments and targets

    def at_work(self) -> Item:
        """All nodes have joined, all workers run, and a first step was reported; or else a while has passed."""
        stepped = {"any": [{"event": "progress", **self.whose}, {"state": "running", "after": words(AT_WORK_S)}]}
        joined = {"event": "node_joined", "times": self.plan.total_nodes}
        return {"all": [joined, {"state": "running"}, stepped]}

    def after_recoveries(self, count: int) -> list[Item]:
        """The moments of so many faults, each after the recovery from the one before."""
        recovered = [{"event": "recovered", **self.whose, "cycle": cycle} for cycle in range(1, count)]
        return [self.at_work(), *recovered]

    def node_of(self, rank: int) -> Item:
        return {"of_rank": rank, **self.whose}

    def worker(self, rank: int) -> Any:
        return {"rank": rank, **self.whose} if self.whose else rank

    # ---- what must follow

    def begins(self, **more: Any) -> Iterator[Item]:
        """Every replica's first rendezvous closes in full. `more`: of its fields."""
        yield from in_any_order([[self.closed(replica, 0, **more)] for replica in self.replicas])

    def closed(self, replica: str, cycle: int, nodes: int | None = None, **more: Any) -> Item:
        size = {"nodes": {"length": self.replicas[replica].nodes_per_replica if nodes is None else nodes}}
        return {"rendezvous_closed": {**self.named(replica), "cycle": cycle, **size, **more}}

    def decided(self, cycle: int = 0, action: str | None = None) -> Item:
        return {"restart_decided": {**self.whose, "cycle": cycle, "action": action or self.role.on_failure}}

    def recovers(self, cycle: int = 1, nodes: int | None = None, **more: Any) -> Iterator[Item]:
        """It goes on in this cycle, and with it all that `restart_job` restarts."""
        branches = []
        for replica in self.replicas if self.role.on_failure == "restart_job" else [self.replica]:
            own = replica == self.replica
            closed = self.closed(replica, cycle, nodes if own else None, **(more if own else {}))
            branches.append([closed, {"recovered": {**self.named(replica), "cycle": cycle}}])
        yield from in_any_order(branches)

    def others_unmoved(self) -> Iterator[Item]:
        """No other replica opens a rendezvous, until this one has recovered or the job ends."""
        if self.role.on_failure != "restart_job":
            for other in self.replicas:
                if other != self.replica:
                    moved = {"rendezvous_opened": {"replica": other, "cycle": 1}}
                    yield {"never": moved, "until": {"recovered": self.whose}}

    def after_failure(self, cycle: int = 0) -> Iterator[Item]:
        """A failed worker spends the budget; no node is lost."""
        if self.restarts and cycle >= self.bounds.max_restarts.count:
            yield from (self.decided(cycle, "stop"), ended(EXIT_FAILED))
            return
        yield self.decided(cycle)
        yield from self.recovers(cycle + 1) if self.restarts else self._ends_without_restart(cycle)

    def after_loss(self, capture: str, cycle: int = 0, lost: int = 1) -> Iterator[Item]:
        """A lost node is replaced by a spare; without one the replica goes on smaller, or the job ends.

        `lost`: how many it has lost by then.
        """
        # Workers on the nodes that stay may fail by their broken connections before the loss is noticed.
        yield from in_any_order([[{"node_lost": {"node": capture}}], [self.decided(cycle)]])
        left = self.role.nodes_per_replica - max(0, lost - self.plan.spares)
        if not self.restarts:
            yield from self._ends_without_restart(cycle)
        elif lost <= self.plan.spares:
            yield from self.recovers(cycle + 1, promoted={"length": 1})
        elif self.role.min_nodes is not None and left >= self.role.min_nodes:
            yield from self.recovers(cycle + 1, nodes=left)
        else:
            yield ended(EXIT_RETRY)

    def _ends_without_restart(self, cycle: int) -> Iterator[Item]:
        if self.role.on_failure != "fail_job":
            yield {"replica_ended": {**self.whose, "cycle": cycle, "outcome": "failed"}}
        if self.role.on_failure == "fail_job" or len(self.replicas) == 1:
            yield ended(EXIT_FAILED)

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


def ended(exit_code: int) -> Item:
    return {"job_ended": {"exit_code": exit_code}}


# ------------------------------------------------------------------------------------- faults of any role


def _case(role: RoleShape, fault: str, about: str, faults: list[Item], *expect: Item, takes_s: float) -> MatrixCase:
    followed = (*role.begins(), *role.others_unmoved(), *expect)
    return MatrixCase(role.name(fault), about, tuple(faults), followed, takes_s)


def _worker_dies(role: RoleShape) -> Cases:
    for name, about, rank in (
        ("kill-first-rank", "Rank 0 is killed.", 0),
        ("kill-last-rank", "The last rank is killed.", role.last_rank),
    ):
        if name == "kill-last-rank" and rank == 0:
            yield LeftOut(role.name(name), "its only rank is the first")
        else:
            faults = [{"when": role.at_work(), "do": {"kill_worker": role.worker(rank)}}]
            yield _case(role, name, about, faults, *role.after_failure(), takes_s=role.restart_s)


def _node_is_lost(role: RoleShape) -> Cases:
    for name, about, action, capture in (
        ("kill-agent", "The agent of a node is killed; its workers die with it.", "kill_agent", "$dead"),
        ("kill-node", "A node dies at once.", "kill_node", "$dead"),
        ("freeze-node", "A node freezes.", "stop_node", "$frozen"),
    ):
        if action != "kill_agent" and not role.can_lose(1):
            yield LeftOut(role.name(name), "its only node is the batch host")
        else:
            faults = [{"when": role.at_work(), "do": {action: role.node_of(role.last_rank)}, "as": capture}]
            yield _case(role, name, about, faults, *role.after_loss(capture), takes_s=role.fenced_s)


def _worker_hangs(role: RoleShape) -> Cases:
    hang = role.bounds.hang
    given = [bound for bound in (hang.step_timeout, hang.no_output) if bound is not None]
    if not given:
        why = "no bound says when a worker hangs: set fault_tolerance.hang.step_timeout, or no_output"
        yield LeftOut(role.name("hang"), why)
        return
    # Before its first heartbeat a worker has no step to be late with.
    moment = role.at_work() if hang.no_output is not None else {"event": "progress", **role.whose}
    faults: list[Item] = [{"when": moment, "do": {"stop_worker": role.worker(role.last_rank)}}]
    expect = ({"worker_hung": {**role.whose, "cycle": 0}}, *role.after_failure())
    about = "A worker is stopped: it hangs, and is found out."
    yield _case(role, "hang", about, faults, *expect, takes_s=max(given) + role.restart_s + 30.0)


def _two_nodes_die(role: RoleShape) -> Cases:
    name = role.name("two-at-once")
    if role.plan.spares < 2:
        yield LeftOut(name, f"needs 2 spares, and the job has {role.plan.spares}")
        return
    if not role.can_lose(2) or not role.restarts:
        yield LeftOut(name, "needs two nodes in a replica that restarts, the batch host not among them")
        return
    node_before_last = role.node_of(role.last_rank - role.role.workers_per_node)
    faults: list[Item] = [
        {"when": role.at_work(), "do": {"kill_node": node_before_last}, "as": "$dead1"},
        {"when": {"fault": 1}, "do": {"kill_node": role.node_of(role.last_rank)}, "as": "$dead2"},
    ]
    lost = in_any_order([[{"node_lost": {"node": "$dead1"}}], [{"node_lost": {"node": "$dead2"}}]])
    # Whether the second death falls into the first recovery is a matter of milliseconds: one cycle, or two.
    recovered = {"recovered": {**role.whose, "cycle": ">= 1"}}
    yield _case(role, "two-at-once", "Two nodes die together.", faults, *lost, recovered, takes_s=2 * role.fenced_s)


def _fault_after_fault(role: RoleShape) -> Cases:
    deaths, most = role.plan.spares + 1, role.bounds.max_restarts.count
    no_restart = None if role.restarts else f"its role does not restart: on_failure is {role.role.on_failure}"
    why = no_restart
    if why is None and deaths > MOST_IN_A_ROW:
        why = f"{deaths} nodes would have to die, one after the other; at most {MOST_IN_A_ROW} do"
    elif why is None and not role.can_lose(1):
        why = "its only node is the batch host"
    elif why is None and deaths == 1:
        why = "there are no spares: kill-node is the same"
    if why is not None:
        yield LeftOut(role.name("no-spare-left"), why)
    else:
        faults: list[Item] = [
            {"when": moment, "do": {"kill_node": role.node_of(role.last_rank)}, "as": f"$dead{number}"}
            for number, moment in enumerate(role.after_recoveries(deaths), start=1)
        ]
        expect = [item for n in range(deaths) for item in role.after_loss(f"$dead{n + 1}", n, n + 1)]
        about, followed = "Node after node dies, until no spare is left.", (*role.begins(), *expect)
        yield MatrixCase(role.name("no-spare-left"), about, tuple(faults), followed, deaths * role.fenced_s)

    if no_restart is not None:
        yield LeftOut(role.name("budget"), no_restart)
    elif not 0 < most < MOST_IN_A_ROW:
        why = f"max_restarts is {most}; tried where it is from 1 to {MOST_IN_A_ROW - 1}"
        yield LeftOut(role.name("budget"), why)
    else:
        moments = role.after_recoveries(most + 1)
        faults = [{"when": moment, "do": {"kill_worker": role.worker(0)}} for moment in moments]
        expect = [item for cycle in range(most + 1) for item in role.after_failure(cycle)]
        about, followed = "Workers are killed until the restart budget is spent.", (*role.begins(), *expect)
        yield MatrixCase(role.name("budget"), about, tuple(faults), followed, (most + 1) * role.restart_s)


# ----------------------------------------------------------------------------------- faults of the whole job


def _starts(job: RoleShape) -> MatrixCase:
    """No fault: what all others rely on."""
    starts = [
        [job.closed(replica, 0), {"workers_started": {**job.named(replica), "cycle": 0}}] for replica in job.replicas
    ]
    return MatrixCase("starts", "Every replica comes together and runs.", (), tuple(in_any_order(starts)), 10.0)


def _spare_dies(job: RoleShape) -> Cases:
    if not job.plan.spares:
        yield LeftOut("spare-killed", "the job has no spares")
        return
    faults = (
        {"when": job.at_work(), "do": {"kill_node": {"spare": 1}}, "as": "$dead"},
        # Nothing recovers from that. So the job is cancelled, or the flow would last as long as the job.
        {"when": {"event": "node_lost", "after": words(SETTLED_S)}, "do": {"scancel": {}}},
    )
    unmoved: Item = {"never": {"restart_decided": {}}}
    expect = (*job.begins(), unmoved, {"node_lost": {"node": "$dead"}}, ended(EXIT_TERMINATED))
    yield MatrixCase("spare-killed", "A hot spare dies, and no worker is touched.", faults, expect, job.fenced_s)


def _control_plane_dies(job: RoleShape) -> Cases:
    """The workers go on; that all is well again shows in the recovery from the next fault."""
    again = {"epoch": ">= 2"}
    for name, about, action, when, seen in (
        (
            "kill-controller",
            "The controller is killed: no worker is touched, and the next one goes on.",
            "kill_controller",
            {"event": "controller_started", **again},
            [{"controller_started": again}],
        ),
        ("kill-store", "The store is killed: nothing recorded is lost.", "kill_store", {"fault": 1}, []),
    ):
        if action == "kill_store" and job.plan.store.url is not None:
            yield LeftOut(name, f"the store at {job.plan.store.url} is the site's own")
            continue
        settled: Item = {**when, "after": words(SETTLED_S)}
        faults: tuple[Item, ...] = (
            {"when": job.at_work(), "do": {action: {}}},
            {NOTE: "By then it is up again.", "when": settled, "do": {"kill_worker": job.worker(0)}},
        )
        unmoved: Item = {"never": {"restart_decided": {}}, "until": {"worker_failed": {}}}
        expect = (*job.begins(), unmoved, *seen, *job.after_failure())
        yield MatrixCase(name, about, faults, expect, job.restart_s + 30.0)


def _job_ends(job: RoleShape) -> Cases:
    end_s = job.restart_s
    limit_s = end_s + job.bounds.teardown.checkpoint_timeout + 60.0
    for name, about, do, exit_code, takes_s in (
        ("cancel", "The job is cancelled, and leaves nothing behind.", {"scancel": {}}, EXIT_TERMINATED, end_s),
        ("time-limit", "The job's time is up.", {"shorten_time_limit": "now"}, EXIT_TIMEOUT, limit_s),
    ):
        expect = (*job.begins(), {"shutdown": {"exit_code": exit_code}}, ended(exit_code))
        yield MatrixCase(name, about, ({"when": job.at_work(), "do": do},), expect, takes_s)


def _next_generation_runs(job: RoleShape) -> Cases:
    again = ({"job_started": {"generation": 1}}, *job.begins(generation=1))
    faults: tuple[Item, ...] = (
        {"when": job.at_work(), "do": {"requeue": {}}},
        {NOTE: HELD_BACK, "when": {"event": "job_ended"}, "do": {"release": {}}},
    )
    about = "The job is requeued, and its next generation runs."
    expect = (*job.begins(), ended(EXIT_TERMINATED), *again)
    yield MatrixCase("requeue", about, faults, expect, job.restart_s + 90.0)

    # The surviving agents stop their workers once they have been without controller for this long; then Slurm
    # requeues the job.
    grace_s = job.bounds.fence_timeout
    faults = (
        {"when": job.at_work(), "do": {"kill_node": {"batch_host": True}}, "as": "$dead"},
        {NOTE: HELD_BACK, "when": {"fault": 1, "after": words(grace_s + 10.0)}, "do": {"release": {}}},
    )
    about = "The batch host's node dies: the job's next generation goes on."
    yield MatrixCase(
        "lose-batch-host",
        about,
        faults,
        (*job.begins(), *again),
        grace_s + 120.0,
        overrides={"fault_tolerance.control_plane_grace": words(grace_s)},
        needs={"on": ["dev"], "cluster": {"nodes": job.plan.total_nodes + 1}},
    )
