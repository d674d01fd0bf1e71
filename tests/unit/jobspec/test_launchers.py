"""The command lines of torchrun and ft_launcher, translated to flags of this tool."""

from __future__ import annotations

import shlex

import pytest

from nvrx_slurm.errors import UsageError
from nvrx_slurm.jobspec.launchers import Translation, own_flags, unwrapped


def of(line: str, *, allocated: int | None = None, gpus: str | None = None) -> Translation:
    found = unwrapped(shlex.split(line), allocated=allocated, gpus=gpus)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("line", "flags", "command"),
    [
        (
            "torchrun --nnodes=4 --nproc-per-node=8 --max-restarts=2 train.py --lr 0.1",
            "--nodes 4 --workers-per-node 8 --set fault_tolerance.max_restarts=2",
            "python -u train.py --lr 0.1",
        ),
        (
            "torchrun --nnodes 2:4 --nproc_per_node 2 a.py",
            "--nodes 4 --set min_nodes=2 --workers-per-node 2",
            "python -u a.py",
        ),
        ("/env/bin/torchrun -m my.train x", "", "/env/bin/python -u -m my.train x"),
        ("python3 -m torch.distributed.run --nproc-per-node 2 a.py", "--workers-per-node 2", "python3 -u a.py"),
        ("torchrun --no-python ./a.out -r 3", "", "./a.out -r 3"),
        ("ft_launcher --ft-cfg-path f.yaml --nproc-per-node=8 t.py", "--workers-per-node 8", "python -u t.py"),
        ("torchrun -r3 -t 3 -- a.py", "", "python -u a.py"),
    ],
)  # fmt: skip
def test_launchers_command_line_is_translated(line: str, flags: str, command: str) -> None:
    """Counts of nodes, workers and restarts become flags of this tool; the rest is the command of one worker."""
    found = of(line)
    assert (found.flags, found.rest) == (tuple(shlex.split(flags)), tuple(shlex.split(command)))


def test_rendezvous_options_are_reported_as_ignored() -> None:
    """Rendezvous options are reported as ignored: the nodes find each other without them."""
    found = of("torchrun --rdzv_backend=c10d --rdzv-endpoint $HOST:29500 --rdzv-id 1 --node-rank 0 --standalone a.py")
    assert found.ignored == ("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--node-rank", "--standalone")
    assert not found.flags


def test_all_nodes_of_an_allocation_are_not_all_that_work() -> None:
    """A node count equal to the allocation sets no `--nodes`: it would count the spares as working nodes."""
    assert of("torchrun --nnodes 4 a.py", allocated=4).flags == ()
    assert of("torchrun --nnodes 3 a.py", allocated=4).flags == ("--nodes", "3")


def test_number_of_gpus_is_slurms() -> None:
    assert of("torchrun --nproc-per-node gpu a.py", gpus="8").flags == ("--workers-per-node", "8")


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nproc-per-node gpu a.py",
        "torchrun --nnodes two a.py",
        "torchrun --nproc-per-node 8",
        "torchrun --nnodes",
        "torchrun --from-the-future 1 a.py",
        "srun -N 4 torchrun a.py",
    ],
)
def test_what_cannot_be_translated_is_an_error(line: str) -> None:
    with pytest.raises(UsageError):
        unwrapped(shlex.split(line), allocated=None, gpus=None)


@pytest.mark.parametrize(
    "line", ["python train.py --nnodes 2", "python -m my.train", "srun hostname", "./torchrun.sh"]
)
def test_other_commands_stay_as_they_are(line: str) -> None:
    assert unwrapped(shlex.split(line), allocated=None, gpus=None) is None


def test_torchruns_flags_are_understood_among_our_own() -> None:
    """Torchrun's counts become flags of `run`, its other flags are named as ignored, and all else is left."""
    found = own_flags(
        ["--spares", "1", "--nproc_per_node=8", "--rdzv-backend", "c10d", "--nnodes", "2:4", "-t", "2h"],
        allocated=None,
        gpus=None,
    )
    assert found.flags == ("--workers-per-node", "8", "--nodes", "4", "--set", "min_nodes=2")
    assert found.rest == ("--spares", "1", "-t", "2h")
    assert found.ignored == ("--rdzv-backend",)
