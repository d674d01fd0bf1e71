"""How the batch host of a Slurm job learns its nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.batch.__main__ import _info
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.journal.folder import JobFolder
from tests.unit.core.fleet import plain

SCONTROL = """\
#!/bin/sh
[ "$2" = hostnames ] || exit 1
[ -e "${0%/*}/asked" ] || { : >"${0%/*}/asked"; echo "scontrol: error: $SAYS" >&2; exit 1; }
echo n2; echo n1
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A scontrol that fails at its first call."""
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_CONF", "")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    return monkeypatch


def test_a_job_that_starts_while_slurm_is_silent_asks_again(site: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If compute nodes have no slurm.conf of their own, scontrol asks slurmctld for it."""
    site.setenv("SAYS", "Unable to contact slurm controller (connect failure)")
    assert _info(plain(), JobFolder(tmp_path / "7"), "slurm", (), None, None).nodes == ("n2", "n1")


def test_what_scontrol_refuses_is_one_clear_error(site: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The job's output shows it, and no traceback."""
    site.setenv("SAYS", "Invalid hostlist: n[")
    with pytest.raises(NvrxError, match=r"Invalid hostlist"):
        _info(plain(), JobFolder(tmp_path / "7"), "slurm", (), None, None)
