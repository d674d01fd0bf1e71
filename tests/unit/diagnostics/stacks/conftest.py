"""Real processes to take stacks of."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from nvrx_slurm.diagnostics.stacks.hook_client import hook_environment

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def dump_dir(tmp_path: Path) -> Path:
    """The folder for the answers of the hooks."""
    folder = tmp_path / "answers"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def hooked(dump_dir: Path) -> dict[str, str]:
    """A worker's environment with the hook in it."""
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NVRX_BEAT_SOCKET")}
    # Python 2 would leave the hook's bytecode beside its source, in this tree.
    return {**own, **hook_environment(own, dump_dir), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def start(hooked: dict[str, str]) -> Iterator[Start]:
    """Starts a Python program with the hook, or any `argv`; returns once the program has printed a line, as it
    must."""
    running: list[subprocess.Popen[bytes]] = []

    def start(
        code: str = "", *, argv: Sequence[str] | None = None, env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        command = argv or [sys.executable, "-c", code]
        process = subprocess.Popen(command, env=env or hooked, stdout=subprocess.PIPE, process_group=0)
        running.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        process.said = line.decode().strip()  # type: ignore[attr-defined]
        assert line, f"the program ended with {process.wait()}"
        return process

    yield start
    for process in running:
        with contextlib.suppress(ProcessLookupError):  # SIGKILL ends stopped ones too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
