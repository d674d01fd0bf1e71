"""`nvrx-slurm doctor` where its surroundings lack something."""

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


def test_user_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container: the limits of its account are not known, and the other checks are made."""
    for name, script in (("scontrol", SCONTROL), ("sacctmgr", "#!/bin/sh\necho 'Name|MaxWall'\n")):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)

    def nameless(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", nameless)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    for variable in ("XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    doctor.main(["--json"], standalone_mode=False)
    checks = {each["part"]: each for each in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["QOS"]["level"] == "warn"
    assert len(checks) > 3
