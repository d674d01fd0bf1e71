"""A job that is ready to be handed to a cluster: all that is left to do needs no configuration."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from nvrx_slurm.jobspec.model import JobSpec
    from nvrx_slurm.jobspec.plan import Plan


class PreparedJob(NamedTuple):
    """The script, and what is kept beside it. `folder`: the base folder, absolute. `plan_json`: as `plan.json`."""

    name: str
    folder: str
    script: str
    plan_json: str
    uses_site_store: bool = False
    """The site's own store is knocked at before anything is submitted."""
    teardown_grace_s: float = 0.0
    """What Slurm's KillWait is compared with when the job is submitted."""


def prepare(spec: JobSpec, plan: Plan, *, cluster: Literal["slurm", "local"]) -> PreparedJob:
    """Render the job's script, which runs under this interpreter. Raises ConfigError."""
    from nvrx_slurm.jobspec.plan import plan_to_json
    from nvrx_slurm.jobspec.script import render_job

    return PreparedJob(
        name=plan.name,
        folder=plan.folder,
        script=render_job(spec, plan, cluster=cluster, python=sys.executable),
        plan_json=plan_to_json(plan).decode(),
        teardown_grace_s=plan.fault_tolerance.teardown.grace,
        uses_site_store=plan.store.url is not None,
    )
