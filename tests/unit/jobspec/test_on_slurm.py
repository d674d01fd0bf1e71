"""What a real Slurm reads from a script: every flag arrives as it was written."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.plan import plan, plan_from_json
from nvrx_slurm.jobspec.script import render_job
from nvrx_slurm.lab.devcluster import DevCluster
from tests.unit.jobspec.specs import job_spec

pytestmark = pytest.mark.slurm(nodes=6)

HOSTILE = (
    "two words", "it's", 'a "b"', "'", '"', '""', "$(touch hit)", "`touch hit`", "$HOME", "a;b", "a#b", "# c",
    " lead", "trail ", "-n", "--nodes=9", "%j %%", "back\\slash", "trailing\\", "\\\\", "é\U0001f600\u00a0\u2028",
    "*?[a]", "~", "!x", "", "a&b|c>d", ":x", "a=b", "{x}",
)  # fmt: skip

PYTHON = """\
#!/bin/bash
# Stands for the interpreter: as the batch host it starts the launcher, as an agent it says what it sees.
case "$3" in
nvrx_slurm.batch)
    cat > "${0%/*}/plan"
    while [ "$1" != -- ]; do shift; done
    shift
    NVRX_SEEN=yes exec "$@"
    ;;
nvrx_slurm.agent) echo "agent $SLURMD_NODENAME ${NVRX_SEEN:-no}" ;;
esac
"""

Slurm = Callable[..., str]


@pytest.fixture
def slurm(healthy_cluster: DevCluster, tmp_path: Path) -> Slurm:
    """Runs one of Slurm's programs against the cluster; returns what it prints."""
    variables = env.child_environment(healthy_cluster.environment())

    def slurm(*command: str, script: str = "") -> str:
        done = subprocess.run(command, input=script, env=variables, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return slurm


def job(**keys: object) -> JobSpec:
    return job_spec({"name": "a", "command": "x", **keys})


def script_of(spec: JobSpec, folder: Path, python: str = "python") -> str:
    folder.mkdir(exist_ok=True)
    return render_job(spec, plan(spec, folder=folder), cluster="slurm", python=python)


def interpreter(folder: Path) -> str:
    path = folder / "python"
    path.write_text(PYTHON)
    path.chmod(0o700)
    return str(path)


def test_hostile_flags_arrive_unchanged(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm keeps a comment of any characters unchanged, and takes none of it for a flag."""
    for text in HOSTILE:
        spec = job(nodes=2, slurm={"extra": {"comment": text, "hold": True}})
        job_id = slurm("sbatch", "--parsable", script=script_of(spec, tmp_path / "jobs")).strip()
        kept = slurm("squeue", "--noheader", f"--jobs={job_id}", "--format=%D %j %k")
        assert kept == f"2 a {text}\n"
    assert not (tmp_path / "hit").exists()


def test_every_flag_is_the_one_asked_for(slurm: Slurm, tmp_path: Path) -> None:
    """`scontrol show job` shows the values of the keys of `slurm`."""
    keys = {
        "time": "2-00:01:00",
        "cpus_per_task": 2,
        "mem": 0,
        "exclude": "n[5-6]",
        "extra": {"hold": True, "nice": 7},
    }
    script = script_of(job(nodes=2, spares=1, slurm=keys), tmp_path / "jobs")
    job_id = slurm("sbatch", "--parsable", script=script).strip()
    shown = dict(part.partition("=")[::2] for part in slurm("scontrol", "show", "job", job_id).split())
    asked = {"TimeLimit": "2-00:01:00", "CPUs/Task": "2", "ExcNodeList": "n[5-6]", "Nice": "7", "Requeue": "1"}
    assert asked.items() <= shown.items()
    assert shown["NumNodes"].startswith("3")
    assert shown["StdOut"] == f"{tmp_path}/jobs/slurm-{job_id}.out"


def test_setup_lines_are_no_flags(slurm: Slurm, tmp_path: Path) -> None:
    """A `#SBATCH` line among the user's own shell lines changes nothing."""
    spec = job(nodes=2, setup=["#SBATCH --nodes=5"], slurm={"extra": {"hold": True}})
    job_id = slurm("sbatch", "--parsable", script=script_of(spec, tmp_path / "jobs")).strip()
    assert slurm("squeue", "--noheader", f"--jobs={job_id}", "--format=%D") == "2\n"


@pytest.mark.parametrize("name", ["100%j", 'it\'s a "folder" # $(x)', "-é%%"])
def test_the_log_is_in_a_job_folder_of_any_name(slurm: Slurm, tmp_path: Path, name: str) -> None:
    """Slurm writes its log to the plan's path, and one agent starts on each node of the allocation."""
    folder = tmp_path / name
    script = script_of(job(nodes=2), folder, interpreter(tmp_path))
    job_id = slurm("sbatch", "--parsable", "--wait", script=script).strip()
    said = (folder / f"slurm-{job_id}.out").read_text().splitlines()
    assert len(said) == 2
    assert all(line.startswith("agent n") for line in said)
    assert plan_from_json((tmp_path / "plan").read_bytes()).folder == str(folder)


@pytest.mark.parametrize("export", ["ALL", "NONE", "HOME"])
def test_agents_see_the_batch_hosts_environment(slurm: Slurm, tmp_path: Path, export: str) -> None:
    """The variables that the batch host sets for its agents reach them, even if the job was submitted with a bare
    environment."""
    spec = job(slurm={"extra": {"export": export}})
    job_id = slurm("sbatch", "--parsable", "--wait", script=script_of(spec, tmp_path, interpreter(tmp_path))).strip()
    assert (tmp_path / f"slurm-{job_id}.out").read_text().rpartition("agent ")[2].split()[1] == "yes"
