"""Which ranks share a failure: one node's (its installation is at fault), all (the program), or a single one (its
GPU)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.journal.verdicts import Attribution, Scope, Verdict
from tests.unit.attribution.analyze.whole import HEAD, STEPS, answer

NODES: dict[str, Any] = {"nodes": ("n1", "n2", "n3"), "workers_per_node": 2}
WAITED = (
    "joined the store\nloading the model\n"
    f"{HEAD}torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 4/6 clients joined.\n"
)


def job(tmp_path: Path, own: str, ranks: tuple[int, ...], others: str = WAITED, **facts: Any) -> Attribution:
    """A job of six ranks on three nodes; those in `ranks` print `own`."""
    logs = {f"rank-{rank}.err": own if rank in ranks else others for rank in range(6)}
    return answer(tmp_path, logs, **(NODES | facts))


@pytest.mark.parametrize(
    "line",
    [
        "ModuleNotFoundError: No module named 'flash_attn'",
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        "PermissionError: [Errno 13] Permission denied: '/local/cache/index'",
        "RuntimeError: expected 8 GPUs, found 7",
    ],
)
def test_one_node_of_several(tmp_path: Path, line: str) -> None:
    """What a single node lacks is that node's fault, and a restart on another node helps."""
    found = job(tmp_path, f"{HEAD}{line}\n", (2, 3))
    assert (found.verdict, found.scope, found.nodes) == (Verdict.RESTART, Scope.NODE, ("n2",))


def test_all_nodes(tmp_path: Path) -> None:
    """What all nodes lack is the job's fault."""
    found = job(tmp_path, f"{HEAD}ModuleNotFoundError: No module named 'flash_attn'\n", tuple(range(6)))
    assert (found.verdict, found.nodes) == (Verdict.STOP, ())
    assert found.explanation.startswith("All 6 ranks on 3 nodes raise the same: import error.")


@pytest.mark.parametrize(
    ("ranks", "others", "line"),
    [
        ((2, 3), "", "ModuleNotFoundError: No module named 'flash_attn'"),
        ((2,), WAITED, "FileNotFoundError: [Errno 2] No such file or directory: '/data/meta.json'"),
        ((2, 3), WAITED, "KeyError: 'lr'"),
    ],
    ids=["no rank came further", "one rank of a node", "no matter of a node"],
)
def test_not_a_node_s_fault(tmp_path: Path, ranks: tuple[int, ...], others: str, line: str) -> None:
    """No node is at fault if nothing shows that the others have what it lacks, or if the failure is no matter of an
    installation."""
    assert job(tmp_path, f"{HEAD}{line}\n", ranks, others).verdict is Verdict.STOP


UNKNOWN_TO_RULES = f"{HEAD}acme.plans.StageMissing: stage {{rank}} of 3 is not planned\n"


def test_the_same_unknown_exception_on_all(tmp_path: Path) -> None:
    """An unknown exception on every rank of several nodes, before the first step, is the program's."""
    found = job(tmp_path, UNKNOWN_TO_RULES, tuple(range(6)))
    assert (found.verdict, found.scope) == (Verdict.STOP, Scope.USER_CODE)


@pytest.mark.parametrize(
    ("own", "ranks", "facts"),
    [
        (UNKNOWN_TO_RULES, (0, 1, 2, 3), {}),
        (STEPS + UNKNOWN_TO_RULES, tuple(range(6)), {}),
        (f"{HEAD}acme.Denied: licence server unavailable\n", tuple(range(6)), {}),
        (UNKNOWN_TO_RULES, tuple(range(6)), {"nodes": ("n1",), "workers_per_node": 6}),
    ],
    ids=["not on all", "after steps", "a service", "one node"],
)
def test_an_unknown_exception_proves_nothing(
    tmp_path: Path, own: str, ranks: tuple[int, ...], facts: dict[str, Any]
) -> None:
    """Each of these failures may pass."""
    assert job(tmp_path, own, ranks, "loading\n", **facts).verdict is Verdict.UNKNOWN


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    """A NaN loss on one rank of several may come from its GPU; on all ranks it comes from the model."""
    nan = f"{STEPS}{HEAD}ValueError: Loss became NaN at step 200\n"
    assert job(tmp_path / "one", nan, (4,), STEPS).verdict is Verdict.UNKNOWN
    assert job(tmp_path / "all", nan, tuple(range(6))).verdict is Verdict.STOP


def test_slurm_s_own_spool(tmp_path: Path) -> None:
    """Slurm keeps the copy of the batch script: if the copy is missing, the node is at fault."""
    line = "slurmstepd: error: execve(): /var/spool/slurmd/job00042/slurm_script: No such file or directory\n"
    found = answer(tmp_path, {"slurm-42_n2.out": line}, nodes=("n1", "n2"))
    assert (found.verdict, found.scope, found.nodes) == (Verdict.RESTART, Scope.NODE, ("n2",))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("NameError: cannot access free variable 'x' where it is not associated with a value in enclosing scope",
         "name_error"),
        ("RuntimeError: Not compiled with CUDA support", "cuda_not_built"),
        ("RuntimeError: a Tensor with 3 elements cannot be converted to Scalar", "torch_usage"),
        ('sqlite3.OperationalError: near "FORM": syntax error', "database_error"),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.00 GiB.", "cuda_oom"),
        ("RuntimeError: unable to open shared memory object </torch_7_1> in read-only mode: Too many open files (24)",
         "too_many_files"),
        ("subprocess.TimeoutExpired: Command 'ls' timed out after 5 seconds", "subprocess_timeout"),
        ("NVRM: fallen off the bus and is not responding to commands.", "gpu_lost"),
        ("RuntimeError: HIP error: invalid device function", "cuda_kernel_image"),
        ("amdgpu 0000:c1:00.0: amdgpu: 2 uncorrectable hardware errors detected in umc block", "gpu_ecc"),
        ("[n2:71] MPI communication: peer process has unexpectedly disconnected", "peer_lost"),
    ],
)  # fmt: skip
def test_classes(tmp_path: Path, line: str, fault: str) -> None:
    """Each of these lines gets its class."""
    assert answer(tmp_path, f"{STEPS}{HEAD}{line}\n").fault == fault


@pytest.mark.parametrize("log", ["", "loading the model\nstep 91200 loss 2.1\nstep 91260 loss 2.1\n"])
def test_the_kernel_s_own_stamp_is_no_start(tmp_path: Path, log: str) -> None:
    """If the start of a cycle is not known, the stamp of a kernel message does not stand for it."""
    dmesg = "[Fri May  1 12:00:00 2026] Memory cgroup out of memory: Killed process 4711 (python) total-vm:99kB\n"
    found = answer(tmp_path, {"dmesg.log": dmesg, **({"rank-0.out": log} if log else {})})
    assert (found.verdict, found.fault) == (Verdict.UNKNOWN, "host_oom")


@pytest.mark.parametrize(("head", "verdict"), [("loading the model\n", Verdict.STOP), ("", Verdict.UNKNOWN)])
def test_a_log_that_was_cut(tmp_path: Path, head: str, verdict: Verdict) -> None:
    """A log that begins with a step does not show when its job began: memory that ran out may be a leak."""
    log = (
        f"{head}[2026-11-21 18:00:00] step 91200 loss 2.1\n"
        "[2026-11-21 18:03:00] step 91260 loss 2.1\n"
        "slurmstepd: error: Detected 1 oom_kill event in StepId=771.0. Some of the step tasks have been OOM Killed.\n"
    )
    assert answer(tmp_path, log).verdict is verdict


def test_ranks_that_only_their_failures_name(tmp_path: Path) -> None:
    """Ranks known only by their failures are not all ranks: others may print nothing into this log."""
    own = UNKNOWN_TO_RULES.splitlines()
    log = "".join(f"n{node}: {rank}: {line}\n" for line in own for node, rank in ((1, 0), (2, 8)))
    assert answer(tmp_path, log).verdict is Verdict.UNKNOWN


def test_more_ranks_than_there_can_be(tmp_path: Path) -> None:
    """Ranks are not enumerated: the numbers in an inquiry from outside cost no memory."""
    found = answer(tmp_path, {"rank-0.err": f"{HEAD}KeyError: 'lr'\n"}, nodes=("n1", "n2"), workers_per_node=10**15)
    assert (found.verdict, found.ranks) == (Verdict.STOP, (0,))
