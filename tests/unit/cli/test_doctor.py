"""`nvrx-slurm doctor` in surroundings that lack something."""

from __future__ import annotations

import json
import pwd
from pathlib import Path

import pytest

from nvrx_slurm.cli.doctor import doctor

SCONTROL = """\
#!/bin/sh
case "$*" in
    *config) echo "ClusterName = alpha"; echo "AccountingStorageEnforce = limits" ;;
    *) echo "PartitionName=main Default=YES MaxTime=UNLIMITED State=UP TotalNodes=8" ;;
esac
"""


# Slurm refuses each job, and keeps its script.
SBATCH = "#!/bin/sh\nfor script; do :; done\ncp $script submitted.sh\necho 'no such partition' >&2\nexit 1\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, empty but for scripts in place of Slurm's programs."""
    programs = {"scontrol": SCONTROL, "sacctmgr": "#!/bin/sh\necho 'Name|MaxWall'\n", "sbatch": SBATCH}
    for name, script in programs.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    for variable in ("XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("job", "nodes"), [("", 2), ("nodes: 1", 1), ("nodes: 1\nspares: 1", 2), ("nodes: 4", 2)])
def test_a_probe_takes_two_nodes_unless_the_job_has_one(site: Path, job: str, nodes: int) -> None:
    """This is so without a job.yaml too: with one node the probe would test no network."""
    if job:
        (site / "job.yaml").write_text(f"name: a\ncommand: x\n{job}\n")
    doctor.main(["--probe"], standalone_mode=False)
    assert f"#SBATCH --nodes={nodes}" in (site / "submitted.sh").read_text().splitlines()


@pytest.mark.parametrize("limits", ["TotalNodes=1", "MaxNodes=1 TotalNodes=8"])
def test_a_probe_takes_one_node_of_a_partition_that_allows_no_more(site: Path, limits: str) -> None:
    """A probe of two nodes would stay pending until it is given up."""
    (site / "scontrol").write_text(SCONTROL.replace("TotalNodes=8", limits))
    doctor.main(["--probe"], standalone_mode=False)
    assert "#SBATCH --nodes=1" in (site / "submitted.sh").read_text().splitlines()


def test_user_without_a_name(site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a container the user may have no name: the limits of its account are not known, and the other checks are
    made."""

    def nameless(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", nameless)
    doctor.main(["--json"], standalone_mode=False)
    checks = {each["part"]: each for each in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["QOS"]["level"] == "warn"
    assert len(checks) > 3
