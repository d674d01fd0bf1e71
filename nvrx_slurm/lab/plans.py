"""Plans to test with."""

from __future__ import annotations

from typing import Any

import msgspec

from nvrx_slurm.jobspec.model import FaultToleranceSpec
from nvrx_slurm.jobspec.plan import Plan, plan_to_json
from nvrx_slurm.jobspec.reading import keys_of


def plain_bounds(**keys: Any) -> FaultToleranceSpec:
    """The bounds of a job that asks no source of attribution and starts again without a pause, with these on top.

    `keys` are those below `fault_tolerance` of job.yaml, `__` between levels (`heartbeat__timeout=3.0`), durations in
    seconds.
    """
    nested: dict[str, Any] = {"attribution": {"enable_lib": False}, "backoff": {"max": 0.0}}
    for path, value in keys.items():
        *above, key = path.split("__")
        block = nested.setdefault(above[0], {}) if above else nested
        owner = FaultToleranceSpec if not above else type(keys_of(FaultToleranceSpec)[above[0]].default)
        assert key in owner.__struct_fields__, path
        is_budget = path.startswith("max_") and isinstance(value, int)
        block[key] = {"count": value} if is_budget else value
    return msgspec.convert(nested, FaultToleranceSpec)


def plan_json(**keys: Any) -> bytes:
    """The plan.json of a job that runs nothing, with `plain_bounds` of these keys."""
    return plan_to_json(Plan(name="j", roles=(), workdir="/", folder="/", fault_tolerance=plain_bounds(**keys)))
