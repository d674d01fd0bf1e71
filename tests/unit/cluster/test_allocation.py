"""An allocation that the user already has: which one it is, and how a job is fitted into it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nvrx_slurm.cluster.allocation import Allocation, current_allocation, fitted, step_environment
from nvrx_slurm.cluster.commands import CommandOutput
from nvrx_slurm.errors import UsageError
from nvrx_slurm.jobspec.model import JobSpec, RoleSpec


class Scontrol:
    """A scontrol that knows only the job 7, in this state."""

    def __init__(self, state: str = "RUNNING") -> None:
        self.state = state

    def __call__(self, command: Sequence[str], *, timeout_s: float) -> CommandOutput:
        if "hostnames" in command:
            return CommandOutput(0, "n1\nn2\nn3\n", "")
        if command[-1] != "7":
            return CommandOutput(1, "", "slurm_load_jobs error: Invalid job id specified")
        return CommandOutput(0, f"JobId=7 JobState={self.state} Reason=None NodeList=n[1-3] EndTime=Unknown", "")


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("NVRX_JOB_FOLDER", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return monkeypatch


def test_allocation_is_what_slurm_says_of_it_now(inside: pytest.MonkeyPatch) -> None:
    """SLURM_JOB_NODELIST still names nodes that were lost."""
    inside.setenv("SLURM_JOB_NODELIST", "n[1-9]")
    assert current_allocation(Scontrol()) == Allocation("7", ("n1", "n2", "n3"))


def test_allocation_of_an_arrays_task_has_the_nodes_of_that_task(inside: pytest.MonkeyPatch) -> None:
    """The last task of an array has the array's own job id, for which scontrol shows all tasks: seen on 22.05.8."""
    last = "JobId=7 ArrayJobId=7 ArrayTaskId=3 JobState=RUNNING NodeList=n1"
    other = "JobId=4 ArrayJobId=7 ArrayTaskId=2 JobState=CANCELLED NodeList=n9"

    def scontrol(command: Sequence[str], *, timeout_s: float) -> CommandOutput:
        if "hostnames" in command:
            return CommandOutput(0, f"{command[-1]}\n", "")
        return CommandOutput(0, f"{last}\n" if command[-1] == "7_3" else f"{last}\n{other}\n", "")

    inside.setenv("SLURM_ARRAY_JOB_ID", "7")
    inside.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert current_allocation(scontrol) == Allocation("7_3", ("n1",))


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "NVRX_JOB_FOLDER"])
def test_outside_and_in_a_worker_there_is_none(inside: pytest.MonkeyPatch, name: str) -> None:
    """A worker that starts a job of its own must not use its peers' nodes for it."""
    if name == "SLURM_JOB_ID":
        inside.delenv(name)
    else:
        inside.setenv(name, "/jobs/7")
    assert current_allocation(Scontrol()) is None


@pytest.mark.parametrize(
    ("variables", "state"),
    [
        ({"SLURM_HET_SIZE": "2"}, "RUNNING"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "RUNNING"),  # `srun nvrx-slurm run`
        ({}, "COMPLETED"),  # the shell that salloc has left behind
        ({"SLURM_JOB_ID": "8"}, "RUNNING"),  # of another cluster
    ],
)
def test_allocation_that_cannot_be_used_is_an_error(
    inside: pytest.MonkeyPatch, variables: dict[str, str], state: str
) -> None:
    """The job must not silently run on this one machine instead."""
    for name, value in variables.items():
        inside.setenv(name, value)
    with pytest.raises(UsageError):
        current_allocation(Scontrol(state))


def spec(**keys: object) -> JobSpec:
    return JobSpec(**{"name": "a", "command": ("true",), **keys})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "free", "all_nodes", "nodes", "spares"),
    [
        ({"spares": 1}, 3, True, 2, 1),
        ({}, 3, True, 3, 0),
        ({"nodes": 2}, 3, False, 2, 0),
        ({"nodes": 2, "spares": 2, "min_spares": 0}, 3, False, 2, 1),
        ({"spares": 2, "min_spares": 0}, 1, True, 1, 0),
    ],
)
def test_job_is_fitted_into_the_free_nodes(
    keys: dict[str, int], free: int, all_nodes: bool, nodes: int, spares: int
) -> None:
    """If the user gives no number of nodes, all but the spares work; of a range of spares as many are taken as there
    is room for."""
    found = fitted(spec(**keys), free, all_nodes=all_nodes, where="")
    assert (found.nodes, found.spares, found.min_spares) == (nodes, spares, None)


@pytest.mark.parametrize(
    ("keys", "free", "all_nodes"),
    [({"nodes": 2, "spares": 2}, 3, False), ({"spares": 3}, 3, True), ({}, 0, True)],
)
def test_too_few_nodes_are_an_error(keys: dict[str, int], free: int, all_nodes: bool) -> None:
    with pytest.raises(UsageError):
        fitted(spec(**keys), free, all_nodes=all_nodes, where="")


def test_roles_count_all_of_their_replicas() -> None:
    roles = {"a": RoleSpec(command=("true",), replicas=2, nodes_per_replica=2)}
    job = JobSpec(name="r", roles=roles)
    assert fitted(job, 4, all_nodes=False, where="").spares == 0
    with pytest.raises(UsageError):
        fitted(job, 3, all_nodes=False, where="")


def test_layout_of_the_users_tasks_is_not_the_agents() -> None:
    """srun reads `#SBATCH --gpus-per-task=1` as its own flag: the one agent of a node would get one GPU."""
    theirs = {
        "SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8", "SLURM_GPUS_PER_TASK": "1", "SRUN_CPUS_PER_TASK": "4",
        "SLURM_MEM_PER_CPU": "1024", "SLURM_CPU_BIND": "cores", "SLURM_DISTRIBUTION": "cyclic", "SLURM_GPUS": "16",
    }  # fmt: skip
    kept = {
        "SLURM_JOB_ID": "7",
        "SLURM_CONF": "/c",
        "SLURM_GPUS_PER_NODE": "8",
        "PATH": "/bin",
        "OMP_NUM_THREADS": "4",
    }
    assert step_environment({**theirs, **kept}, own_job=False) == kept
    set_by_slurm = {name: value for name, value in theirs.items() if name.startswith("SLURM_")}
    assert step_environment({**theirs, **kept}, own_job=True) == {**set_by_slurm, **kept}
