"""`nvrx-slurm nodes`, and its effect on `submit --exclude-suspects`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Nvrx

JOB = "name: a\ncommand: x\nnodes: 2\n"


@pytest.fixture
def alpha(nvrx: Nvrx, tmp_path: Path) -> Nvrx:
    """Runs the command on cluster alpha, in the folder of a job.yaml and with its own ledger."""
    (tmp_path / "job.yaml").write_text(JOB)
    state = {"XDG_STATE_HOME": str(tmp_path / "state"), "SLURM_CLUSTER_NAME": "alpha"}
    return lambda *arguments, **variables: nvrx(*arguments, **(state | variables))


def suspects(nvrx: Nvrx, *arguments: str, **variables: str) -> list[str]:
    done = nvrx("nodes", *arguments, "--json", **variables)
    assert done.returncode == 0, done.stderr
    return [each["node"] for each in json.loads(done.stdout)["suspects"]]


def excluded(nvrx: Nvrx, *arguments: str, **variables: str) -> tuple[str | None, str]:
    """The value of `--exclude`, and the text on stderr."""
    done = nvrx("submit", "--exclude-suspects", "--dry-run", *arguments, **variables)
    assert done.returncode == 0, done.stderr
    flags = [line for line in done.stdout.splitlines() if line.startswith("#SBATCH --exclude=")]
    return (flags[0].partition("=")[2] if flags else None), done.stderr


def test_a_node_is_suspect_from_a_report_until_it_is_cleared(alpha: Nvrx) -> None:
    """The list has the reason; a user can clear a node before its suspicion ends."""
    assert alpha("nodes").stderr.startswith("no node of cluster alpha is suspect (")
    assert (
        alpha("nodes", "suspect", "n3", "n1", "--why", "fan\nbroken").stdout == "n3, n1: suspect in cluster alpha\n"
    )
    head, first, second = alpha("nodes").stdout.splitlines()
    assert head.split() == ["NODE", "SCORE", "CLEAR", "IN", "LAST", "JOBS", "WHY"]
    assert (first.split()[0], second.split()[0]) == ("n1", "n3")
    assert first.endswith("said: fan broken")
    assert alpha("nodes", "clear", "n1").stdout == "n1: cleared\n"
    assert suspects(alpha) == ["n3"]
    assert alpha("nodes", "clear", "--all").stdout == "n3: cleared\n"
    assert suspects(alpha) == []


def test_a_reason_in_another_encoding_is_kept(alpha: Nvrx) -> None:
    """A terminal that is set to Latin-1 sends bytes that are not UTF-8: they are shown as escapes."""
    done = alpha("nodes", "suspect", "n1", "--why", os.fsdecode("Lüfter".encode("latin-1")))
    assert (done.returncode, done.stderr) == (0, "")
    assert alpha("nodes").stdout.endswith("said: L\\xfcfter\n")


def test_another_cluster_and_another_ledger_are_named(alpha: Nvrx, tmp_path: Path) -> None:
    """They are named by a flag, by the environment, or in the site file; the flag takes precedence."""
    elsewhere = str(tmp_path / "elsewhere.json")
    alpha("nodes", "--cluster", "beta", "suspect", "n1", "--why", "x")
    alpha("nodes", "--ledger", elsewhere, "suspect", "n2", "--why", "x")
    assert suspects(alpha) == []
    assert suspects(alpha, "--cluster", "beta") == ["n1"]
    assert suspects(alpha, NVRX_SLURM_FAULT_TOLERANCE__ATTRIBUTION__LEDGER=elsewhere) == ["n2"]
    site = tmp_path / "xdg" / "nvrx-slurm" / "config.yaml"
    site.parent.mkdir(parents=True)
    site.write_text(f"fault_tolerance: {{attribution: {{ledger: {elsewhere}}}}}\n")
    assert suspects(alpha) == ["n2"]
    assert suspects(alpha, "--ledger", str(tmp_path / "none.json")) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("suspect", "n[1-3]", "--why", "x"), "name them one by one"),
        (("suspect", "--", "--why"), "--why"),
        (("clear",), "name one node, or say --all"),
        (("clear", "n1", "--all"), "name one node, or say --all"),
    ],
)
def test_what_makes_no_sense_is_an_error(alpha: Nvrx, arguments: tuple[str, ...], words: str) -> None:
    """It is an error, and changes nothing."""
    alpha("nodes", "suspect", "n1", "--why", "fan")
    done = alpha("nodes", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert suspects(alpha) == ["n1"]


def test_a_cluster_that_is_not_known_has_to_be_named(nvrx: Nvrx, tmp_path: Path) -> None:
    """There is no Slurm on PATH that could name it."""
    done = nvrx("nodes", PATH=str(tmp_path))
    assert done.returncode == 69
    assert "name it with --cluster" in done.stderr


def test_a_job_is_submitted_without_the_suspects_of_its_cluster(alpha: Nvrx) -> None:
    """Neighbours become one range; stderr says which nodes are excluded, and why."""
    assert excluded(alpha) == (None, "no node is suspect: none is excluded\n")
    alpha("nodes", "suspect", "n9", "n10", "n11", "--why", "fan broken")
    flag, said = excluded(alpha)
    assert flag == "n[9-11]"
    assert said.splitlines() == [f"excluding suspect node {node} (said: fan broken)" for node in ("n10", "n11", "n9")]
    assert excluded(alpha, SLURM_CLUSTER_NAME="beta")[0] is None
    assert excluded(alpha, "--set", "slurm.extra.clusters=beta")[0] is None


def test_the_same_job_with_other_suspects_is_another_script(alpha: Nvrx, tmp_path: Path) -> None:
    """A script with suspects neither comes from the cache nor goes into it."""
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    plain = alpha("submit", "--dry-run", **cache).stdout
    alpha("nodes", "suspect", "n1", "--why", "x")
    assert excluded(alpha, **cache)[0] == "n1"
    alpha("nodes", "suspect", "n2", "--why", "x")
    assert excluded(alpha, **cache)[0] == "n[1-2]"
    alpha("nodes", "clear", "--all")
    assert excluded(alpha, **cache)[0] is None
    assert alpha("submit", "--dry-run", **cache).stdout == plain


def test_suspects_are_added_to_what_the_job_leaves_out_itself(alpha: Nvrx, tmp_path: Path) -> None:
    """The job itself may exclude a list or a file of names, as sbatch accepts either."""
    alpha("nodes", "suspect", "n1", "--why", "x")
    assert excluded(alpha, "--set", "slurm.exclude=bad[1-2]")[0] == "bad[1-2],n1"
    (tmp_path / "bad.txt").write_text("bad1,bad2\nbad3\n")
    assert excluded(alpha, "--set", "slurm.exclude=./bad.txt")[0] == "bad1,bad2,bad3,n1"
    done = alpha("submit", "--exclude-suspects", "--dry-run", "--set", "slurm.exclude=./none.txt")
    assert done.returncode == 2
    assert "slurm.exclude: the file ./none.txt cannot be read" in done.stderr


def test_the_jobs_own_ledger_is_the_one_that_counts(alpha: Nvrx, tmp_path: Path) -> None:
    """Its path is relative to the folder of job.yaml."""
    alpha("nodes", "--ledger", str(tmp_path / "own.json"), "suspect", "n7", "--why", "x")
    (tmp_path / "job.yaml").write_text(JOB + "fault_tolerance: {attribution: {ledger: own.json}}\n")
    assert excluded(alpha)[0] == "n7"


def test_a_job_on_this_machine_has_no_nodes_to_choose_from(alpha: Nvrx) -> None:
    """The two flags contradict each other, which is an error."""
    done = alpha("submit", "--exclude-suspects", "--local", "--dry-run")
    assert done.returncode == 2
    assert "--exclude-suspects" in done.stderr


def test_an_unreachable_ledger_is_an_error_where_suspects_are_excluded(alpha: Nvrx, tmp_path: Path) -> None:
    """A user who excludes suspects must not find out afterwards that they were not excluded."""
    (tmp_path / "job.yaml").write_text(JOB + "fault_tolerance: {attribution: {ledger: 'redis://127.0.0.1:1/0'}}\n")
    done = alpha("submit", "--exclude-suspects", "--dry-run")
    assert done.returncode == 69
    assert "redis://127.0.0.1:1/0" in done.stderr
