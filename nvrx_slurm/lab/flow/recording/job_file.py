"""Plan → job.yaml: the way of `jobspec.plan` back, for a job whose own job.yaml is not at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from nvrx_slurm.jobspec.model import FaultToleranceSpec
from nvrx_slurm.jobspec.plan import PLAIN_ROLE, Plan, RolePlan
from nvrx_slurm.jobspec.reading import written
from nvrx_slurm.lab.flow.language.writing import NOTE, to_yaml
from nvrx_slurm.util.durations import words


def job_yaml(plan: Plan, note: str) -> str:
    """A job.yaml that makes this plan, in any folder. `note`: the comment at its head.

    What a plan does not hold is not in it: the keys below `slurm` (the time limit aside) and `setup`.
    """
    return to_yaml({NOTE: note, **job_keys(plan)})


def overrides(plan: Plan, other: Plan) -> dict[str, Any]:
    """The keys that make this plan of a job.yaml whose own plan is the other one; one without `slurm` and `store`."""
    changed = _changed(_work(plan, complete=True), _work(other, complete=True))
    bounds = _bounds(plan.fault_tolerance, other.fault_tolerance)
    return changed | ({"fault_tolerance": bounds} if bounds else {})


def job_keys(plan: Plan) -> dict[str, Any]:
    """The keys of a job.yaml that makes this plan, those at their default left out."""
    document = {"name": plan.name, **_work(plan, complete=False), "workdir": plan.workdir}
    if plan.time_limit_s is not None:
        document["slurm"] = {"time": words(plan.time_limit_s)}
    store = msgspec.to_builtins(plan.store)
    if store:
        document["store"] = store
    if bounds := _bounds(plan.fault_tolerance, FaultToleranceSpec()):
        document["fault_tolerance"] = bounds
    return document


def is_plain(plan: Plan) -> bool:
    """Whether the plan is of a job without `roles`."""
    first = plan.roles[0]
    is_usual = first.name == PLAIN_ROLE and first.replicas == 1 and first.on_failure == "restart_replica"
    return is_usual and len(plan.roles) == 1


def _work(plan: Plan, *, complete: bool) -> dict[str, Any]:
    """What runs on how many nodes; `complete`: those at their default too."""
    roles = {role.name: _role(role, complete=complete) for role in plan.roles}
    if is_plain(plan):
        (role,) = roles.values()
        keys = {"nodes_per_replica": "nodes"}
        work = {keys.get(key, key): value for key, value in role.items() if key not in ("replicas", "on_failure")}
    else:
        work = {"roles": roles}
    return work | ({"spares": plan.spares} if plan.spares or complete else {})


def _role(role: RolePlan, *, complete: bool) -> dict[str, Any]:
    """The role's keys; its command as a list, which no shell would split."""
    fields = msgspec.structs.asdict(role) if complete else msgspec.to_builtins(role)
    return {key: value for key, value in fields.items() if key != "name" and value is not None}


def _bounds(bounds: FaultToleranceSpec, usual: FaultToleranceSpec) -> dict[str, Any]:
    """The keys whose values are not the usual ones. Where nodes are remembered is no part of what the job does."""
    wanted, there = written(bounds), written(usual)
    wanted["attribution"]["ledger"] = there["attribution"]["ledger"] = None
    return _changed(wanted, there)


def _changed(wanted: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in wanted.items():
        known = there.get(key)
        if isinstance(value, dict):
            below = _changed(value, known if isinstance(known, dict) else {})
            found |= {key: below} if below else {}
        elif value != known:
            found[key] = value
    return found
