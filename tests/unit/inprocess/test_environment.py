"""What a process can learn from the variables of its launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from nvrx_slurm.inprocess import environment
from nvrx_slurm.inprocess.environment import RankVariables
from nvrx_slurm.inprocess.exception import OptionError
from nvrx_slurm.inprocess.state import FrozenState

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_CLUSTER_NAME": "alpha",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "4",
    "SLURM_RESTART_COUNT": "1",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-n1-77@1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "n1"}
OURS = TORCHRUN | {
    "TORCHELASTIC_RUN_ID": "77.main-0",
    "NVRX_JOB_ID": "77",
    "NVRX_REPLICA": "main-0",
    "NVRX_GENERATION": "1",
    "NVRX_CYCLE": "5",
}
BY_HAND = {"RANK": "3", "WORLD_SIZE": "8"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch):
    """Sets the environment to exactly these variables."""

    def launch(variables: Mapping[str, str]) -> environment.RankIdentity:
        for name in list(os.environ):
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return environment.launch()

    return launch


@pytest.mark.parametrize(
    ("variables", "group"),
    [
        (TORCHRUN, "torchrun.run.2.n1:29500"),
        (SRUN, "slurm.alpha.77.4.1"),
        (MPIRUN, "mpi.prterun-n1-77@1"),
        (MPICH, "n1:"),
        (OURS, "77.main-0.1.5"),
        (BY_HAND | {"MASTER_ADDR": "n1", "MASTER_PORT": "7"}, "n1:7"),
        (OURS | {"NVRX_INPROCESS_GROUP": "mine"}, "mine"),
    ],
    ids=["torchrun", "srun", "mpirun", "mpich", "nvrx-slurm", "by hand", "named"],
)
def test_every_launcher_identifies_a_process(launched, variables: Mapping[str, str], group: str) -> None:
    """They give its rank, and a group name that no other start of the ranks has."""
    launch = launched(variables)
    assert (launch.rank, launch.world_size, launch.group) == (3, 8, group)
    assert launch.local_rank == (None if variables.get("RANK") and "LOCAL_RANK" not in variables else 1)
    assert launch.host == os.uname().nodename
    assert launch.replaced == ("NVRX_CYCLE" in variables)


@pytest.mark.parametrize("changed", ["NVRX_CYCLE", "NVRX_GENERATION", "NVRX_REPLICA", "NVRX_JOB_ID"])
def test_the_next_start_by_nvrx_slurm_is_another_group(launched, changed: str) -> None:
    """In each cycle, generation and replica a group sees nothing that another left in the store."""
    assert launched(OURS).group != launched(OURS | {changed: "9"}).group


def test_an_outer_launcher_does_not_name_the_group(launched) -> None:
    """For a torchrun in a Slurm step, or in an nvrx-slurm job, the ranks are those of the inner launcher."""
    assert launched(SRUN | TORCHRUN | {"RANK": "0"}).group == "torchrun.run.2.n1:29500"
    assert launched(OURS | TORCHRUN).group == "77.main-0.1.5.torchrun.run.2.n1:29500"
    assert launched(SRUN | BY_HAND | {"RANK": "0", "MASTER_ADDR": "n1"}).group == "n1:"


BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77"}
ALONE = SRUN | BATCH | {"SLURM_STEP_NUM_TASKS": "1"}


@pytest.mark.parametrize("outer", [BATCH, ALONE], ids=["sbatch", "srun"])
@pytest.mark.parametrize(
    ("inner", "group"), [(MPIRUN, "mpi.prterun-n1-77@1"), (MPICH, "n1:")], ids=["openmpi", "mpich"]
)
def test_mpirun_in_a_slurm_job_gives_the_rank(
    launched, outer: Mapping[str, str], inner: Mapping[str, str], group
) -> None:
    """The ranks inherit SLURM_PROCID from the batch script, or from the step in which mpirun runs."""
    launch = launched(outer | inner)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.group) == (3, 8, 1, group)


def test_srun_with_pmi2_gives_the_local_rank(launched) -> None:
    """srun sets PMI_RANK and PMI_SIZE, and only its own variable for the local rank."""
    launch = launched(SRUN | {"PMI_RANK": "3", "PMI_SIZE": "8"})
    assert (launch.rank, launch.local_rank, launch.group) == (3, 1, "slurm.alpha.77.4.1")


PRINT_GROUP = "from nvrx_slurm.inprocess.environment import launch; print(launch().group)"


def test_children_of_one_process_are_a_group(tmp_path: Path) -> None:
    """If no variable names the group, as with multiprocessing, the parent process does."""
    children = [
        subprocess.run(
            [sys.executable, "-c", PRINT_GROUP],
            env={"RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            check=True,
        )
        for rank in range(2)
    ]
    [group] = {child.stdout.decode().strip() for child in children}
    assert group.startswith(f"{os.uname().nodename}.{os.getpid()}.")


@pytest.mark.parametrize(
    ("variables", "named", "words"),
    [
        ({}, ("RANK",), "start the ranks with"),
        ({"RANK": "0"}, ("WORLD_SIZE",), "start the ranks with"),
        ({"RANK": "zero", "WORLD_SIZE": "1"}, ("RANK",), "'zero'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ("RANK", "WORLD_SIZE"), "0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ("RANK", "WORLD_SIZE"), "-1"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "x"}, ("LOCAL_RANK",), "'x'"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, ("SLURM_STEP_NUM_TASKS",), "start the ranks with"),
    ],
)
def test_an_invalid_rank_is_refused(
    launched, variables: Mapping[str, str], named: tuple[str, ...], words: str
) -> None:
    """The error has the variable, its value, and the valid values."""
    with pytest.raises(OptionError, match=words) as caught:
        launched(variables)
    assert caught.value.options == named


@pytest.mark.parametrize(
    ("variables", "is_certain"),
    [
        (TORCHRUN, False),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, True),
        (SRUN, False),
        (SRUN | {"SLURM_STEP_NUM_NODES": "1"}, True),
        (MPIRUN, False),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, True),
        (MPICH | {"MPI_LOCALNRANKS": "8"}, True),
        (SRUN | {"SLURM_STEP_NUM_NODES": "1", "PMI_RANK": "3", "PMI_SIZE": "8"}, True),
        (BY_HAND, True),
        (BY_HAND | {"MASTER_ADDR": "localhost"}, True),
        (BY_HAND | {"MASTER_ADDR": "127.0.0.1"}, True),
        (BY_HAND | {"MASTER_ADDR": "n1"}, False),
        (SRUN | BY_HAND | {"RANK": "0", "MASTER_ADDR": "localhost"}, True),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "n1"}, True),
    ],
)
def test_it_is_known_where_all_ranks_are_on_one_host(
    launched, variables: Mapping[str, str], is_certain: bool
) -> None:
    """Otherwise a rank of another host could not reach a store of this host."""
    assert environment.all_on_this_host(launched(variables)) == is_certain


def test_how_the_watchdog_asks_can_be_chosen(launched) -> None:
    """It is a pending call, unless the variable says signal; any other value is an error that names both."""
    launched(BY_HAND)
    assert environment.watchdog_method() == "pending-call"
    launched(BY_HAND | {"NVRX_INPROCESS_WATCHDOG": "signal"})
    assert environment.watchdog_method() == "signal"
    launched(BY_HAND | {"NVRX_INPROCESS_WATCHDOG": "no"})
    with pytest.raises(OptionError, match="pending-call or signal") as caught:
        environment.watchdog_method()
    assert caught.value.options == ("NVRX_INPROCESS_WATCHDOG",)


def test_torchruns_store_is_known_where_it_offers_one(launched) -> None:
    """torchrun sets a variable for it; an address alone belongs to the ranks' own store."""
    launched(TORCHRUN)
    assert environment.torchrun_store() is None
    launched(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert environment.torchrun_store() == ("n1", 29500)


def test_the_function_sees_its_new_rank_and_afterwards_all_is_as_before(launched, monkeypatch) -> None:
    """Variables that were not set before are removed again; a rank in reserve keeps the variables."""
    launched({"RANK": "3", "WORLD_SIZE": "4"})
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(KeyError), RankVariables() as variables:
        variables.set(FrozenState(rank=1, world_size=3, active_rank=0, active_world_size=2))
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "2")
        variables.set(FrozenState(rank=2, world_size=3, active_rank=None, active_world_size=2))
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "2")
        raise KeyError
    assert os.environ["RANK"] == "3"
    assert "WORLD_SIZE" not in os.environ


def test_the_local_rank_is_the_launchers_while_the_function_has_a_new_rank(launched) -> None:
    """srun's and mpirun's local rank is used while RANK is as they set it: callbacks choose their GPU by it."""
    launched(SRUN)
    with RankVariables() as variables:
        variables.set(FrozenState(rank=2, world_size=7, active_rank=2, active_world_size=7))
        assert environment.local_rank() == 1
    with pytest.raises(OptionError):
        launched({})
    assert environment.local_rank() is None
