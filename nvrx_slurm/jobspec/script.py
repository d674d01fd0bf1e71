"""Renders the job script, for Slurm or for this machine, from `sbatch/job.sh.template`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from string import Template
from typing import Literal

import nvrx_slurm
from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.container import ContainerSpec, parts_of_mount
from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.plan import Plan, plan_to_json
from nvrx_slurm.util.durations import slurm_time

TEMPLATE = "job.sh.template"

BEFORE_SETUP = "\nstart_batch_host() {\n"
AFTER_PLAN = """}

# A line of `setup` that fails fails the job: by its own status, not by those of commands in files that it sources.
# So does `exit`, with 0 too: the job has not run.
trap 'start_batch_host --failed-setup $? 0 "$BASH_COMMAND"' EXIT
setup_failed() { [ "$1" = 0 ] || start_batch_host --failed-setup "$1" $(($2 - before_setup)) "$3"; }
trap 'setup_failed $(($? * (${#BASH_SOURCE[@]} == 1))) "$LINENO" "$BASH_COMMAND"' ERR
# Without these the EXIT trap would get the status of an earlier command: USR1 announces the time limit.
trap 'exit 138' USR1
trap 'exit 143' TERM
before_setup=$LINENO
"""
# Around the lines of `setup`; a job without them needs none of it.
AFTER_SETUP = "trap - ERR EXIT TERM USR1\nstart_batch_host\n"


def template_folder() -> Path:
    """`sbatch/` inside the installed package, or beside it in a source checkout."""
    package = Path(nvrx_slurm.__file__).parent
    installed = package / "sbatch"
    return installed if installed.is_dir() else package.parent / "sbatch"


def render_job(
    spec: JobSpec,
    plan: Plan,
    *,
    cluster: Literal["slurm", "local"],
    python: str,
    allocation: tuple[str, tuple[str, ...]] | None = None,
) -> str:
    """The job script, ready for `sbatch` (or, `local`, for bash). It holds the whole plan and needs no other file.

    `allocation`: the job of Slurm's that holds the nodes already, and which of its nodes the job gets; for bash too.

    `python` is the interpreter that runs the batch host and the agents; it must be the same on all nodes.
    Raises ConfigError for a value that no script can carry.
    """
    on_slurm = cluster == "slurm"
    if not on_slurm and any(role.container and role.container.runtime == "pyxis" for role in plan.roles):
        raise ConfigError(
            "pyxis is a plugin of Slurm; on this machine use apptainer, charliecloud or podman",
            key="container.runtime",
        )
    nodes = f"{plan.active_nodes} node" + ("s" if plan.active_nodes > 1 else "")
    spares = f" and {plan.spares} hot spare" + ("s" if plan.spares > 1 else "") if plan.spares else ""
    template = Template((template_folder() / TEMPLATE).read_text(encoding="utf-8"))
    return template.substitute(
        title=f"{plan.name}: {nodes}{spares}, by nvrx-slurm",
        flags="".join(f"\n#SBATCH {flag}" for flag in sbatch_flags(spec, plan))
        if on_slurm and not allocation
        else "",
        before=BEFORE_SETUP if spec.setup else "",
        after=AFTER_PLAN + "".join(f"{line}\n" for line in spec.setup) + AFTER_SETUP if spec.setup else "",
        python=shlex.quote(python),
        cluster=(
            cluster
            if allocation is None
            else f"{cluster} --allocation {allocation[0]} --nodes {','.join(allocation[1])}"
        )
        + (' "$@"' if spec.setup else ""),
        launcher=f" -- \\\n  {shlex.join(_launcher(spec, plan, python, in_allocation=bool(allocation)))}"
        if on_slurm
        else "",
        plan=plan_to_json(plan).decode(),
    )


def _launcher(spec: JobSpec, plan: Plan, python: str, *, in_allocation: bool) -> list[str]:
    """One agent a node. A node that dies, or a task that fails, must not take the others along."""
    nodes = plan.total_nodes
    inside = plan.roles[0].container
    agent = "nvrx_slurm.agent"
    if inside is not None and inside.runtime == "pyxis":
        python, container_flags = "python3", pyxis_flags(inside, plan)  # the image's own, with this package
    else:
        agent, container_flags = plan.agent_module, []
    return [
        "srun",
        "--no-kill",
        "--kill-on-bad-exit=0",
        # A site's WaitTime would end all agents so long after the first one has ended.
        "--wait=0",
        "--mpi=none",  # an agent is no MPI rank, even where the site's default is MPI
        "--export=ALL",  # the batch host's environment, also after `sbatch --export=NONE`
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        # The user's own tasks may be bound to a few CPUs each. The agent's workers share all that the job has there.
        *(["--cpu-bind=none", "--job-name=nvrx-slurm"] if in_allocation else []),
        *step_flags(spec),
        *container_flags,
        python,
        "-P",  # keeps the current folder off sys.path: it may hold a redis.py
        "-m",
        agent,
    ]


def pyxis_flags(inside: ContainerSpec, plan: Plan) -> list[str]:
    """What pyxis adds to srun: agents and workers run in the container. enroot mounts /dev, /dev/shm and /tmp itself.

    Raises ConfigError for a path that its lists cannot hold."""
    targets = {parts_of_mount(mount)[1] for mount in inside.mounts}
    mounts = [*inside.mounts, *(f"{path}:{path}" for path in (plan.folder, plan.workdir) if path not in targets)]
    for mount in mounts:
        if "," in mount:
            raise ConfigError(f"{mount!r} holds a comma, which separates the mounts of pyxis; choose another path")
    return [
        f"--container-image={inside.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={inside.workdir or plan.workdir}",
        "--no-container-remap-root",
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


def step_flags(spec: JobSpec) -> list[str]:
    """Flags that srun needs again: not every Slurm lets it inherit them."""
    slurm = spec.slurm
    again = {"--cpus-per-task": slurm.cpus_per_task, "--gpus-per-node": slurm.gpus_per_node}
    return [f"{flag}={value}" for flag, value in again.items() if value is not None]


def sbatch_flags(spec: JobSpec, plan: Plan) -> list[str]:
    """Every flag of the job, quoted. Raises ConfigError."""
    slurm, least, most = spec.slurm, plan.least_nodes, plan.total_nodes
    flags: list[tuple[str, str | None]] = [
        ("--job-name", plan.name),
        ("--nodes", str(most) if least == most else f"{least}-{most}"),
    ]
    if least == most:  # of a range of nodes Slurm would take the least, one task on each (seen on 22.05)
        flags.append(("--ntasks-per-node", "1"))
    flags.append(("--no-kill", None))
    if "no-requeue" not in slurm.extra and "requeue" not in slurm.extra:
        flags.append(("--requeue", None))
    notice_s = plan.fault_tolerance.teardown.notice_s(plan.time_limit_s)
    # B: to the batch host alone, which Slurm leaves out otherwise; it knows what workers and agents must do first.
    flags += [("--open-mode", "append"), ("--signal", f"B:USR1@{notice_s}")]
    if "\\" in plan.folder:  # Slurm takes it for "replace nothing from here on", and drops it
        raise ConfigError(
            f"the folder {plan.folder!r} holds a backslash, which no Slurm log path can; choose another"
        )
    own = "%A_%a" if slurm.array else "%j"  # sbatch(1), "filename pattern"
    flags.append(("--output", f"{plan.folder.replace('%', '%%')}/slurm-{own}.out"))
    if slurm.time is not None:
        flags.append(("--time", slurm_time(slurm.time)))
    for key in ("partition", "account", "qos", "gpus_per_node", "cpus_per_task", "mem", "constraint", "exclude",
                "reservation", "segment", "dependency", "array"):  # fmt: skip
        value = getattr(slurm, key)
        if value is not None:
            flags.append(("--" + key.replace("_", "-"), str(value)))
    if slurm.extra.get("exclusive", False) is not False and slurm.mem is None and not _MEMORY & set(slurm.extra):
        flags.append(("--mem", "0"))  # an exclusive node without it comes with the partition's default share
    # those without a value last: sbatch refuses one that wanted a value, where it would take the next flag for it
    for flag, value in sorted(slurm.extra.items(), key=lambda item: item[1] is True):
        if value is not False:
            flags.append((f"--{flag}", None if value is True else value))
    return [flag if value is None else f"{flag}={sbatch_quote(value)}" for flag, value in flags]
