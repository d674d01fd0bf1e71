"""Plan → job.yaml: the way of `config.plan` back, for a job whose own job.yaml is not at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from nvrx_slurm.jobspec.plan import PLAIN_ROLE
from nvrx_slurm.jobspec.values import allowance_words, size_words
from nvrx_slurm.journal.records import Allowance, BackoffPlan, FaultTolerance, Plan, RolePlan
from nvrx_slurm.journal.verdicts import AttributionPlan
from nvrx_slurm.lab.flow.language.writing import NOTE, to_yaml
from nvrx_slurm.util.durations import words

_KEYS = {
    "heartbeat_interval_s": "heartbeat.interval",
    "heartbeat_timeout_s": "heartbeat.timeout",
    "startup_timeout_s": "heartbeat.startup_timeout",
    "join_timeout_s": "rendezvous.join_timeout",
    "last_call_s": "rendezvous.last_call",
    "teardown_grace_s": "teardown.grace",
    "stop_signal": "teardown.stop_signal",
    "checkpoint_signal": "teardown.checkpoint_signal",
    "checkpoint_timeout_s": "teardown.checkpoint_timeout",
    "gpu_memory_below_bytes": "teardown.gpu_memory_below",
    "gpu_reclaim_timeout_s": "teardown.gpu_reclaim_timeout",
    "startup_s": "startup_timeout",
    "step_s": "step_timeout",
    "no_output_s": "no_output",
    "exit_skew_s": "exit_skew",
    "least_s": "",  # no key of job.yaml
    "max_restarts_per_s": "",  # part of max_restarts
    "ledger": "",  # where nodes are remembered is no part of what the job does
    "max_cycles": "max_no_progress_cycles",
    "min_steps": "min_progress_steps",
}
"""Field of the plan's bounds → key below its block; where nothing is said, the field's name without its unit."""

USUAL = FaultTolerance(attribution=AttributionPlan(enable_lib=True), backoff=BackoffPlan())
"""What a job.yaml makes that says nothing of it."""

_UNITS: dict[str, Callable[[Any], str]] = {"_s": words, "_bytes": size_words}


def job_yaml(plan: Plan, note: str) -> str:
    """A job.yaml that makes this plan, in any folder. `note`: the comment at its head.

    What a plan does not tell is not in it: the keys below `slurm` (the time limit aside) and `setup`.
    """
    return to_yaml({NOTE: note, **job_keys(plan)})


def overrides(plan: Plan, other: Plan) -> dict[str, Any]:
    """The keys that make this plan of a job.yaml whose own plan is the other one; one without `slurm` and `store`."""
    changed = _changed(_work(plan, complete=True), _work(other, complete=True))
    bounds = _bounds(plan.fault_tolerance, other.fault_tolerance)
    return changed | ({"fault_tolerance": bounds} if bounds else {})


def _changed(wanted: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in wanted.items():
        known = there.get(key)
        if isinstance(value, dict) and isinstance(known, dict):
            found |= {key: below} if (below := _changed(value, known)) else {}
        elif value != known:
            found[key] = value
    return found


def job_keys(plan: Plan) -> dict[str, Any]:
    """The keys of a job.yaml that makes this plan, those at their default left out."""
    document = {"name": plan.name, **_work(plan, complete=False), "workdir": plan.workdir}
    if plan.time_limit_s is not None:
        document["slurm"] = {"time": words(plan.time_limit_s)}
    store = {"url": plan.store_url, "password_file": plan.store_password_file, "namespace": plan.store_namespace}
    if plan.store_url is not None:
        document["store"] = {key: value for key, value in store.items() if value is not None}
    elif plan.store_server != "auto":
        document["store"] = {"server": plan.store_server}
    if bounds := _bounds(plan.fault_tolerance, USUAL):
        document["fault_tolerance"] = bounds
    return document


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


def is_plain(plan: Plan) -> bool:
    """Whether the plan is of a job without `roles`."""
    first = plan.roles[0]
    is_usual = first.name == PLAIN_ROLE and first.replicas == 1 and first.on_failure == "restart_replica"
    return is_usual and len(plan.roles) == 1


def _role(role: RolePlan, *, complete: bool) -> dict[str, Any]:
    """The role's keys; its command as a list, which no shell would split."""
    fields = msgspec.structs.asdict(role) if complete else msgspec.to_builtins(role)
    return {key: value for key, value in fields.items() if key != "name" and value is not None}


def _bounds(bounds: msgspec.Struct, usual: msgspec.Struct) -> dict[str, Any]:
    """The keys of a block whose values are not the usual ones; a dotted key goes a level down."""
    found: dict[str, Any] = {}
    for path, value in _unusual(bounds, usual):
        *above, last = path.split(".")
        block = found
        for key in above:
            block = block.setdefault(key, {})
        block[last] = value
    return found


def _unusual(bounds: msgspec.Struct, usual: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    if isinstance(bounds, FaultTolerance) and isinstance(usual, FaultTolerance):
        ours, theirs = _restarts(bounds), _restarts(usual)
        bounds, usual = (msgspec.structs.replace(each, max_restarts=0) for each in (bounds, usual))
        if ours != theirs:
            yield "max_restarts", ours
    for name in bounds.__struct_fields__:
        value, known = getattr(bounds, name), getattr(usual, name)
        unit = next((unit for unit in _UNITS if name.endswith(unit)), "")
        key = _KEYS.get(name, name.removesuffix(unit))
        if value == known or not key:
            continue
        if isinstance(value, Allowance):
            yield key, allowance_words(value)
        elif value is None and isinstance(known, BackoffPlan):
            yield key, "off"
        elif isinstance(value, msgspec.Struct):
            yield key, _bounds(value, known or _empty(value))
        else:
            yield key, _UNITS[unit](value) if unit and value is not None else value


def _restarts(bounds: FaultTolerance) -> int | str:
    return allowance_words(Allowance(count=bounds.max_restarts, per_s=bounds.max_restarts_per_s))


def _empty(block: msgspec.Struct) -> msgspec.Struct:
    """The same kind of block with nothing but its defaults; what it must have is None."""
    return type(block)(**{field.name: None for field in msgspec.structs.fields(block) if field.required})
