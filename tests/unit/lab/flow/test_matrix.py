"""The fault matrix: the cases that a job's shape and a stage allow, and that the core does what each flow expects."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.jobspec.model import HangSpec, StoreSpec
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.lab.flow.load import load_flow
from nvrx_slurm.lab.flow.matching import FlowMatcher
from nvrx_slurm.lab.flow.matrix import LeftOut, MatrixCase, matrix
from nvrx_slurm.lab.flow.writing import job_yaml, to_yaml
from nvrx_slurm.lab.plans import plain_bounds
from tests.unit.core.fleet import Fleet, plain, plan_of
from tests.unit.lab.flow.test_recording import at_work, begin, worker

POLICY = RolePlan(name="policy", command=("x",), nodes_per_replica=2)
ROLLOUT = RolePlan(name="rollout", command=("x",), replicas=2, on_failure="ignore")
SHAPES: dict[str, Plan] = {
    "one node": plain(nodes=1, spares=0),
    "spares": plain(nodes=4, spares=2),
    "shrinks": plain(nodes=3, spares=0, min_nodes=2),
    "no budget": plain(max_restarts=0),
    "roles": plan_of(POLICY, ROLLOUT, spares=1),
    "restarts all": plan_of(msgspec.structs.replace(POLICY, on_failure="restart_job"), ROLLOUT, spares=2),
    "fails": plan_of(msgspec.structs.replace(POLICY, on_failure="fail_job")),
    "own store": msgspec.structs.replace(plain(), store=StoreSpec(url="redis://host:1/0")),
}


def of(plan: Plan, stage: str = "local") -> dict[str, MatrixCase | LeftOut]:
    return {each.name: each for each in matrix(plan, stage)}  # type: ignore[arg-type]


def matcher_of(case: MatrixCase | LeftOut, plan: Plan, folder: Path, dead: str | None) -> FlowMatcher:
    """The case's expectations; all its faults happened before the journal begins."""
    assert isinstance(case, MatrixCase)
    (folder / "job.yaml").write_text(job_yaml(msgspec.structs.replace(plan, workdir="/"), "A job."))
    (folder / "flow.yaml").write_text(to_yaml(case.document("job.yaml", {}, 60.0)))
    flow = load_flow(folder / "flow.yaml")
    matcher = FlowMatcher(flow)
    for fault in flow.faults:
        matcher.fault_happened(0.0, {fault.binds: dead} if fault.binds else {})
    return matcher


def judge(matcher: FlowMatcher, fleet: Fleet) -> None:
    for entry in fleet.journal:
        matcher.feed(entry)
    matcher.job_over()
    assert matcher.miss is None, matcher.miss


@pytest.mark.parametrize("stage", ["local", "dev", "slurm"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_case_is_a_flow(shape, stage, tmp_path):
    """Each case can be loaded; its faults, targets and expectations are those of the job."""
    for case in matrix(SHAPES[shape], stage):
        if isinstance(case, MatrixCase):
            matcher_of(case, SHAPES[shape], tmp_path, "n1")


def test_names_are_unique():
    """Each case has its own name, which includes the role if there are several."""
    names = [each.name for each in matrix(SHAPES["roles"], "dev")]
    assert len(set(names)) == len(names)
    assert {"kill-node-policy", "kill-node-rollout", "kill-store"} <= set(names)


@pytest.mark.parametrize(
    ("shape", "stage", "name", "why"),
    [
        ("one node", "dev", "kill-node", "its only node is the batch host"),
        ("one node", "local", "two-at-once", "needs 2 spares, and the job has 0"),
        ("one node", "local", "spare-killed", "the job has no spares"),
        ("spares", "local", "hang", "no bound says when a worker hangs: set fault_tolerance.hang.step_timeout"),
        ("spares", "local", "time-limit", "shorten_time_limit cannot be done on the stage local"),
        ("own store", "local", "kill-store", "the store at redis://host:1/0 is the site's own"),
        ("no budget", "local", "budget", "max_restarts is 0"),
        ("fails", "local", "budget", "its role does not restart: on_failure is fail_job"),
    ],
)
def test_left_out(shape, stage, name, why):
    """A case that cannot be run is left out, with the reason."""
    left_out = of(SHAPES[shape], stage)[name]
    assert isinstance(left_out, LeftOut)
    assert left_out.why.startswith(why)


def test_hang_is_tried_where_there_is_a_bound():
    """With a bound for steps the worker is stopped after its first step: before that the bound does not apply."""
    bounds = plain_bounds(hang=HangSpec(step_timeout=30.0))
    case = of(msgspec.structs.replace(plain(), fault_tolerance=bounds))["hang"]
    assert isinstance(case, MatrixCase)
    assert case.faults[0]["when"] == {"event": "progress"}
    assert case.takes_s > 30.0


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "one node"])
def test_lost_node(shape, tmp_path):
    """After a lost node the core does what kill-node expects of this job: spare, smaller world, failure or end."""
    plan = SHAPES[shape]
    role = plan.roles[0]
    fleet, replica = at_work(plan), f"{role.name}-0"
    node = fleet.job.replicas[replica].order[-1]
    fleet.lose(node)
    recover(fleet)
    name = f"kill-node-{role.name}" if len(plan.roles) > 1 else "kill-node"
    judge(matcher_of(of(plan)[name], plan, tmp_path, node), fleet)


@pytest.mark.parametrize("shape", [name for name, plan in SHAPES.items() if len(plan.roles) == 1 and name != "fails"])
def test_killed_worker(shape, tmp_path):
    """After a killed worker the core does what kill-first-rank expects of this job, by its restart budget."""
    plan = SHAPES[shape]
    fleet = at_work(plan)
    worker(fleet, "n1", 0, signal=9)
    recover(fleet)
    judge(matcher_of(of(plan)["kill-first-rank"], plan, tmp_path, None), fleet)


def test_spent_budget(tmp_path):
    """Workers are killed until the restart budget is spent and the job ends, as the case `budget` expects."""
    plan = SHAPES["spares"]
    fleet = at_work(plan)
    for _ in range(plan.fault_tolerance.max_restarts.count + 1):
        worker(fleet, "n1", 0, signal=9)
        recover(fleet)
    assert fleet.job.shutdown is not None
    judge(matcher_of(of(plan)["budget"], plan, tmp_path, None), fleet)


def recover(fleet: Fleet) -> None:
    """The remaining nodes get ready and start workers; if the job ends, all leave."""
    for replica in fleet.job.replicas.values():
        fleet.ready(*[name for name in replica.order if fleet.job.nodes[name].alive], replica=replica.id)
    for replica in fleet.job.replicas.values():
        if replica.cycle > 0 and not replica.ended and fleet.job.shutdown is None:
            begin(fleet, replica.id)
    if fleet.job.shutdown is not None:
        fleet.leave(*[name for name in fleet.names if fleet.job.nodes[name].alive])
