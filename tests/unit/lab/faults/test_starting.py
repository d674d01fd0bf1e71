"""The programs that the lab starts and waits for: one that hangs at its start is an error, and is ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.lab.faults import disk, network
from nvrx_slurm.lab.flow.stages import faults

STARTS = [
    pytest.param(disk, "MOUNTED_WITHIN_S", lambda: disk.SmallDisk("size=1m"), id="disk"),
    pytest.param(network, "ANSWERS_WITHIN_S", lambda: network.HostNetwork(["n1"]), id="network"),
    pytest.param(faults, "LISTENS_WITHIN_S", lambda: faults.ScriptedService("stop"), id="service"),
]


@pytest.mark.parametrize(("module", "bound", "start"), STARTS)
def test_a_program_that_hangs_at_its_start_is_ended(
    module: object, bound: str, start: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither reports nor ends: the caller gets an error, and no process is left."""
    program = tmp_path / "unshare"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(module, bound, 1.0)
    with pytest.raises(NvrxError):
        start()
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()
