"""What one process of pytest starts for its fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.lab.devcluster import DevCluster
from nvrx_slurm.lab.pytest_fixtures import PytestSession


def test_a_cluster_that_does_not_start_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session of pytest goes on, and holds no list of what there is to clean up."""

    def fail(**_: object) -> DevCluster:
        raise NvrxError("slurmctld ended instead of serving")

    monkeypatch.setattr(DevCluster, "up", fail)
    # A session takes down what earlier ones have left, and this process's own cluster, which other tests use, too.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    session = PytestSession(tmp_path)
    with pytest.raises(NvrxError, match="slurmctld ended"), session.cluster(1):
        pass
    session.close()
    held = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [name for name in held if name.is_relative_to(tmp_path)]
