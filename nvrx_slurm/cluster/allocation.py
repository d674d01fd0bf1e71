"""An allocation that the user has already: inside `salloc`, or inside an sbatch script of their own.

A job that runs there is no job of Slurm's: its agents are a step of the user's job, its batch host is a child of the
command that started it. So it has an id of its own, `123-run1` for the first one in Slurm's job 123, and ending it
leaves the allocation to the user.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from nvrx_slurm.cluster.base import prepare_folder
from nvrx_slurm.cluster.commands import PATIENCE_S, Runner, SlurmPrograms, SystemRunner
from nvrx_slurm.cluster.local import LocalCluster
from nvrx_slurm.cluster.slurm_nodes import IN_UTC, JobNodes, said, slurm_settings
from nvrx_slurm.cluster.slurm_text import UNKNOWN_JOB, fields_of, number_of
from nvrx_slurm.errors import UsageError
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.plan import Plan, plan
from nvrx_slurm.jobspec.script import render_job
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.locks import locked

if TYPE_CHECKING:
    from nvrx_slurm.jobspec.model import JobSpec

RUN = "-run"
LOCK_S = 30.0
# Held in the base folder while a run chooses its nodes, so that two that start at one moment never share any.
LOCK_NAME = ".allocation.lock"

# What an sbatch script's flags leave in the environment, from where srun takes them as its own (srun(1), "input
# environment variables"). They lay out the user's tasks; a step of agents has one task on each node, with all of it.
LAYOUT = re.compile(
    r"S(LURM|RUN)_(NTASKS\w*|NPROCS|TASKS_PER_NODE|NNODES|CPUS_PER_\w+|CPU_BIND\w*|GPUS|GPUS_PER_TASK|GPUS_PER_SOCKET"
    r"|GPU_BIND|TRES_PER_TASK|TRES_BIND|MEM_PER_\w+|MEM_BIND\w*|DISTRIBUTION|HINT|EXACT|EXCLUSIVE|HOSTFILE|RELATIVE"
    r"|THREADS_PER_CORE|SPREAD_JOB|USE_MIN_NODES|LABELIO|STD\w+MODE|OPEN_MODE|KILL_BAD_EXIT|WAIT|TIMELIMIT"
    r"|REMOTE_CWD|WORKING_DIR|MULTI_PROG|PROLOG|EPILOG)"
)


class Allocation(msgspec.Struct, frozen=True):
    """A running job of Slurm's. `nodes`: those that it holds now, in Slurm's order."""

    job_id: str
    nodes: tuple[str, ...]


def refuse_het_job() -> None:
    """Raises UsageError in a heterogeneous job."""
    if env.get("SLURM_HET_SIZE"):
        raise UsageError(
            "this is a heterogeneous job: its components are jobs of their own, and the loss of a node in one of them"
            " ends all; ask for one component, whose nodes are alike, or submit one job for each"
        )


def current_allocation(runner: Runner | None = None) -> Allocation | None:
    """The allocation that this process runs in; None where it runs in none, or in a worker of nvrx-slurm.

    Raises UsageError where it cannot be used, MissingProgramError, SlurmUnreachable.
    """
    job_id = env.own_job_id()
    if job_id is None or env.job_folder() is not None:
        return None
    refuse_het_job()
    if (tasks := int(env.get("SLURM_STEP_NUM_TASKS") or 1)) > 1:
        raise UsageError(
            f"srun has started this command {tasks} times, and each would start a job: call `nvrx-slurm run` once,"
            " without srun; it starts an agent on each node by itself"
        )
    programs = SlurmPrograms(runner or SystemRunner(IN_UTC), PATIENCE_S)
    shown = programs.ask("scontrol", "--oneliner", "show", "job", job_id)
    job = fields_of(shown.stdout)
    if not shown.ok or job.get("JobState") != "RUNNING":
        stands = "Slurm knows no such job" if UNKNOWN_JOB in shown.stderr else job.get("JobState", shown.reason)
        raise UsageError(
            f"SLURM_JOB_ID names job {job_id}, and that allocation cannot be used ({stands}): leave its shell, or"
            " unset SLURM_JOB_ID; `--here` runs the job on this machine alone"
        )
    # From Slurm's NodeList: SLURM_JOB_NODELIST still names nodes that were lost since.
    nodes = programs.ask("scontrol", "show", "hostnames", job.get("NodeList", "")).stdout.split()
    return Allocation(job_id, tuple(nodes))


def end_time(job: Mapping[str, str]) -> float | None:
    """The EndTime of `scontrol show job`, printed with `TZ=UTC0`; None for a job without a time limit."""
    try:
        return datetime.fromisoformat(job["EndTime"]).replace(tzinfo=UTC).timestamp()
    except (KeyError, ValueError):
        return None


class HeldAllocation(JobNodes):
    """What Slurm says of a job while it runs, and what its owner may change of it."""

    async def time_left_s(self) -> float | None:
        """How long it is until the time limit; inf: there is none; None: Slurm does not answer."""
        job = fields_of(await said("scontrol", "--oneliner", "show", "job", self.job_id, extra=IN_UTC))
        if "JobState" not in job:
            return None
        ends_at = end_time(job)
        return math.inf if ends_at is None else ends_at - SystemClock().wall()

    async def slurmd_timeout_s(self) -> float | None:
        """How long a node may be silent until Slurm declares it down; None: it never does, or does not say."""
        return number_of(await slurm_settings(), "SlurmdTimeout") or None

    async def shrink_to(self, nodes: Sequence[str]) -> None:
        """Give up all other nodes of the job, for good."""
        # scontrol leaves two scripts (slurm_job_<id>_resize.sh and .csh) in the folder where it runs.
        with tempfile.TemporaryDirectory(prefix="nvrx-slurm-") as folder:
            await said("scontrol", "update", f"JobId={self.job_id}", f"NodeList={','.join(nodes)}", folder=folder)


def step_environment(environment: Mapping[str, str], *, own_job: bool) -> dict[str, str]:
    """The environment for the srun that starts agents, without the layout of the user's own tasks. `own_job`: what
    Slurm has set is that of the agents, since the job was made for them; SRUN_ variables are always the user's."""
    theirs = ("SRUN_",) if own_job else ("SRUN_", "SLURM_")
    return {
        name: value for name, value in environment.items() if not (name.startswith(theirs) and LAYOUT.fullmatch(name))
    }


def fitted(spec: JobSpec, free: int, *, all_nodes: bool, where: str) -> JobSpec:
    """The job on `free` nodes, with as many spares of `min_spares` to `spares` as there is room for. `all_nodes`: all
    others work. Raises UsageError where they are too few; `where` says it of the allocation."""
    least = spec.spares if spec.min_spares is None else spec.min_spares
    working = sum(role.replicas * role.nodes_per_replica for role in (spec.roles or {}).values()) or spec.nodes
    if all_nodes:
        working = max(1, free - spec.spares)
        spec = replace(spec, nodes=working)
    if working + least > free:
        spares = "no hot spare" if least == 0 else f"{least} hot spare" + ("s" if least > 1 else "")
        raise UsageError(
            f"the job needs {working} node{'s' if working > 1 else ''} and {spares}, {working + least} in all;"
            f" {where}: ask for more with salloc or sbatch, set `nodes` or `spares` lower, or use `--here` for this"
            " machine alone"
        )
    return replace(spec, spares=min(spec.spares, free - working), min_spares=None)


class StartedRun(NamedTuple):
    """A job that has been started in an allocation. `process`: its batch host."""

    job_id: str
    process: subprocess.Popen[bytes]
    plan: Plan
    nodes: tuple[str, ...]

    def placement(self) -> str:
        """On how many nodes it runs, for people."""
        working, spares = self.plan.active_nodes, self.plan.spares
        counts = (
            f"{working} node{'s' if working > 1 else ''} and {spares or 'no'} hot spare{'s' if spares > 1 else ''}"
        )
        return f"{counts} of the allocation {self.job_id.rpartition(RUN)[0]} ({','.join(self.nodes)})"


def start_run(
    allocation: Allocation,
    spec: JobSpec,
    *,
    folder: Path,
    job_file: Path | None,
    all_nodes: bool,
    clock: Clock | None = None,
) -> StartedRun:
    """Start a job on those of the allocation's nodes that no other run of this base folder uses. It shares this
    process's terminal, and ends when this process does. `all_nodes`: the user has not said how many nodes work.

    Raises UsageError.
    """
    clock = clock or SystemClock()
    prepare_folder(folder)
    # The lock is held until `job.json` is written: there the next run sees that these nodes are taken.
    with locked(folder / LOCK_NAME, timeout_s=LOCK_S, clock=clock):
        runs = _runs(allocation, folder)
        # A run that has ended holds its nodes until its batch host, who waits for the agents, has gone.
        used = {
            node: run.job_id
            for run in runs
            if (info := run.read_info()) is not None
            # The process of a run on another machine cannot be looked at: such a run is over once it has a result.
            and (info.host_lives() if info.is_here else run.read_result() is None)
            for node in info.nodes
        }
        free = [node for node in allocation.nodes if node not in used]
        where = f"the allocation {allocation.job_id} has {len(allocation.nodes)}"
        if used:
            busy = ", ".join(sorted({run for node, run in used.items() if node in allocation.nodes}))
            where += f", and {len(allocation.nodes) - len(free)} of them run {busy}"
        spec = fitted(spec, len(free), all_nodes=all_nodes, where=where)
        its_plan = plan(spec, folder=folder, job_file=job_file)
        nodes = tuple(free[: its_plan.total_nodes])
        # Not from their count: the user may have removed the folder of an earlier run.
        number = 1 + max((int(run.job_id.rpartition(RUN)[2]) for run in runs), default=0)
        job_id, process = LocalCluster(folder, clock=clock).start(
            render_job(spec, its_plan, cluster="slurm", python=sys.executable, allocation=(allocation.job_id, nodes)),
            folder=folder,
            name=its_plan.name,
            job_id=f"{allocation.job_id}{RUN}{number}",
            detach=False,
            allocation=(allocation.job_id, nodes),
        )
    return StartedRun(job_id, process, its_plan, nodes)


def _runs(allocation: Allocation, base: Path) -> list[JobFolder]:
    """All runs of the allocation so far, ended ones too."""
    prefix = f"{allocation.job_id}{RUN}"
    return [JobFolder(path) for path in base.glob(f"{prefix}*") if path.name.removeprefix(prefix).isdecimal()]
