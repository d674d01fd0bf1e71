"""Renders the job script, for Slurm or for this machine, from `sbatch/job.sh.template`."""

from __future__ import annotations

import shlex
from string import Template
from typing import Literal

from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.plan import Plan, plan_to_json
from nvrx_slurm.jobspec.sbatch_flags import sbatch_flags, step_flags
from nvrx_slurm.jobspec.template import TEMPLATE, template_folder


def render_job(spec: JobSpec, plan: Plan, *, cluster: Literal["slurm", "local"], python: str) -> str:
    """The job script, ready for `sbatch` (or, `local`, for bash). It holds the whole plan and needs no other file.

    `python` is the interpreter that runs the batch host and the agents; it must be the same on all nodes.
    Raises ConfigError for a value that no script can carry.
    """
    on_slurm = cluster == "slurm"
    template = Template((template_folder() / TEMPLATE).read_text(encoding="utf-8"))
    return template.substitute(
        title=_title(plan),
        flags="".join(f"\n#SBATCH {flag}" for flag in sbatch_flags(spec, plan)) if on_slurm else "",
        setup="".join(f"\n{line}" for line in spec.setup),
        python=shlex.quote(python),
        cluster=cluster,
        launcher=f" -- \\\n  {shlex.join(_launcher(spec, plan, python))}" if on_slurm else "",
        plan=plan_to_json(plan).decode(),
    )


def _title(plan: Plan) -> str:
    nodes = f"{plan.active_nodes} node" + ("s" if plan.active_nodes > 1 else "")
    spares = f" and {plan.spares} hot spare" + ("s" if plan.spares > 1 else "") if plan.spares else ""
    return f"{plan.name}: {nodes}{spares}, by nvrx-slurm"


def _launcher(spec: JobSpec, plan: Plan, python: str) -> list[str]:
    """One agent a node. A node that dies, or a task that fails, must not take the others along."""
    nodes = plan.total_nodes
    return [
        "srun",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--mpi=none",  # an agent is no MPI rank, even where the site's default is MPI
        "--export=ALL",  # the batch host's environment, also after `sbatch --export=NONE`
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        *step_flags(spec),
        python,
        "-P",  # keeps the current folder off sys.path: it may hold a redis.py
        "-m",
        "nvrx_slurm.agent",
    ]
