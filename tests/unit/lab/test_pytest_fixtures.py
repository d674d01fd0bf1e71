"""The processes and files that the pytest fixtures open in one process."""

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
    """The pytest session goes on, and keeps no cleanup list open."""

    def fail(**_: object) -> DevCluster:
        raise NvrxError("slurmctld ended instead of serving")

    monkeypatch.setattr(DevCluster, "up", fail)
    # A session takes down clusters of earlier sessions and of this process, which other tests use, too.
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
    """pytest ends at a KeyboardInterrupt; after another error it would go on with the next test."""
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
        # The run would end by itself, but later tests must not find it.
        for process in started:
            process.kill()
            with process:
                pass
