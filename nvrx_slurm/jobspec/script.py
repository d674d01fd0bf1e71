"""Renders the job script, for Slurm or for this machine, from `sbatch/job.sh.template`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Literal

import nvrx_slurm
from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec import budgets
from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.plan import Plan, plan_to_json
from nvrx_slurm.util.durations import slurm_time

TEMPLATE = "job.sh.template"


def template_folder() -> Path:
    """`sbatch/` inside the installed package, or beside it in a source checkout."""
    package = Path(nvrx_slurm.__file__).parent
    installed = package / "sbatch"
    return installed if installed.is_dir() else package.parent / "sbatch"


def render_job(spec: JobSpec, plan: Plan, *, cluster: Literal["slurm", "local"], python: str) -> str:
    """The job script, ready for `sbatch` (or, `local`, for bash). It holds the whole plan and needs no other file.

    `python` is the interpreter that runs the batch host and the agents; it must be the same on all nodes.
    Raises ConfigError for a value that no script can carry.
    """
    on_slurm = cluster == "slurm"
    nodes = f"{plan.active_nodes} node" + ("s" if plan.active_nodes > 1 else "")
    spares = f" and {plan.spares} hot spare" + ("s" if plan.spares > 1 else "") if plan.spares else ""
    template = Template((template_folder() / TEMPLATE).read_text(encoding="utf-8"))
    return template.substitute(
        title=f"{plan.name}: {nodes}{spares}, by nvrx-slurm",
        flags="".join(f"\n#SBATCH {flag}" for flag in sbatch_flags(spec, plan)) if on_slurm else "",
        setup="".join(f"\n{line}" for line in spec.setup),
        python=shlex.quote(python),
        cluster=cluster,
        launcher=f" -- \\\n  {shlex.join(_launcher(spec, plan, python))}" if on_slurm else "",
        plan=plan_to_json(plan).decode(),
    )


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


# --------------------------------------------------------------------------------------------- the `#SBATCH` lines
# Slurm parses them itself, with rules of its own, not a shell's.

_MEMORY = {"mem-per-cpu", "mem-per-gpu"}  # sbatch takes one of the memory flags only
_PLAIN = re.compile(r"[A-Za-z0-9_.,:;=/@%+*&|!~^\[\](){}<>-]+")


def sbatch_quote(value: str) -> str:
    """A value as Slurm's parser of `#SBATCH` lines reads it back: in double quotes, `\\` before `"` and `\\`.

    Raises ConfigError for what no quoting carries: control characters, and bytes that are no text.
    """
    if any(ord(char) < 32 or ord(char) == 127 or 0xD800 <= ord(char) < 0xE000 for char in value):
        raise ConfigError(f"{value!r} holds a control character or is no UTF-8, which no sbatch flag can carry")
    if _PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def notice_s(plan: Plan) -> int:
    """How long before its time limit Slurm signals the job, so that it can save and tear down."""
    teardown = plan.fault_tolerance.teardown
    return budgets.notice_s(teardown.grace, teardown.checkpoint_s, plan.time_limit_s)


def sbatch_flags(spec: JobSpec, plan: Plan) -> list[str]:
    """Every flag of the job, quoted. Raises ConfigError."""
    return [flag if value is None else f"{flag}={sbatch_quote(value)}" for flag, value in _flags(spec, plan)]


def step_flags(spec: JobSpec) -> list[str]:
    """Flags that srun needs again: not every Slurm lets it inherit them."""
    slurm = spec.slurm
    again = {"--cpus-per-task": slurm.cpus_per_task, "--gpus-per-node": slurm.gpus_per_node}
    return [f"{flag}={value}" for flag, value in again.items() if value is not None]


def _flags(spec: JobSpec, plan: Plan) -> Iterator[tuple[str, str | None]]:
    slurm = spec.slurm
    yield "--job-name", plan.name
    yield "--nodes", str(plan.total_nodes)
    yield "--ntasks-per-node", "1"
    yield "--no-kill", None
    if "no-requeue" not in slurm.extra and "requeue" not in slurm.extra:
        yield "--requeue", None
    yield "--open-mode", "append"
    yield "--signal", f"B:USR1@{notice_s(plan)}"
    if "\\" in plan.folder:  # Slurm takes it for "replace nothing from here on", and drops it
        raise ConfigError(
            f"the folder {plan.folder!r} holds a backslash, which no Slurm log path can; choose another"
        )
    yield "--output", f"{plan.folder.replace('%', '%%')}/slurm-%j.out"  # sbatch(1), "filename pattern"
    if slurm.time is not None:
        yield "--time", slurm_time(slurm.time)
    for key in ("partition", "account", "qos", "gpus_per_node", "cpus_per_task", "mem", "constraint", "exclude",
                "reservation", "segment"):  # fmt: skip
        value = getattr(slurm, key)
        if value is not None:
            yield "--" + key.replace("_", "-"), str(value)
    if slurm.extra.get("exclusive", False) is not False and slurm.mem is None and not _MEMORY & set(slurm.extra):
        yield "--mem", "0"  # an exclusive node without it comes with the partition's default share of memory
    # those without a value last: sbatch refuses one that wanted a value, where it would take the next flag for it
    for flag, value in sorted(slurm.extra.items(), key=lambda item: item[1] is True):
        if value is not False:
            yield f"--{flag}", None if value is True else value
