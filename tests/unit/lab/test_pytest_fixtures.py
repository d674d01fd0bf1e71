"""What one process of pytest starts for its fixtures."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.lab import pytest_fixtures
from nvrx_slurm.lab.devcluster import DevCluster
from nvrx_slurm.lab.pytest_fixtures import Flows, PytestSession


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


def test_an_interrupt_stays_one_where_the_run_of_a_flow_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pytest ends at it; at an error of another kind it would go on with the next test."""
    run = tmp_path / "python"
    run.write_text("#!/bin/sh\ntrap '' TERM\nsleep 0.3\nkill -ALRM $PPID\nexec sleep 5\n")
    run.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(run))
    monkeypatch.setattr(pytest_fixtures, "ENDED_S", 0.2)
    started: list[subprocess.Popen[str]] = []
    start = subprocess.Popen

    def note(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", note)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Flows(tmp_path, here=tmp_path, stage="local").run("flow.yaml")
    finally:
        signal.signal(signal.SIGALRM, before)
        # The run is left to end by itself; the next tests are not to find it.
        for process in started:
            process.kill()
            with process:
                pass
