"""Flows as the pytest plugin runs them: by `nvrx-slurm ci run`, in a process that cleans up by itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from nvrx_slurm.errors import EXIT_INTERRUPTED, EXIT_USAGE, UsageError
from nvrx_slurm.lab.flow import report_text
from nvrx_slurm.lab.flow.model import StageName
from nvrx_slurm.lab.flow.outcome import FlowAttempt, suite_from_json
from nvrx_slurm.lab.flow.writing import to_yaml
from nvrx_slurm.util.processes import dies_with_parent

ENDED_S = 10.0
"""How long a run may take to undo what it did, once interrupted."""


class Flows:
    """The flows of one test. `folder`: for their files; `here`: from where relative paths count."""

    def __init__(self, folder: Path, *, here: Path, stage: StageName) -> None:
        self._folder, self._here, self._stage = folder, here, stage
        self._count = 0

    def run(self, flow: str | Path | Mapping[str, Any], *, on: StageName | None = None) -> FlowAttempt:
        """Run a flow once, and return how it went. Fails the test where it did not pass.

        Raises UsageError where the flow file is wrong, or its stage cannot be had.
        """
        self._count += 1
        path = self._write(flow) if isinstance(flow, Mapping) else self._here / flow
        results = self._folder / f"flow-{self._count}.json"
        artifacts = self._folder / f"flow-{self._count}-artifacts"
        flags = ("--on", on or self._stage, "--json", str(results), "--artifacts", str(artifacts), "--no-github")
        # The run ends with the test, for any reason that ends first.
        command = [sys.executable, "-P", "-m", "nvrx_slurm", "ci", "run", str(path), *flags]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=dies_with_parent(signal.SIGTERM),
        )
        try:
            out, err = process.communicate()
        except BaseException:
            process.terminate()
            process.communicate(timeout=ENDED_S)
            raise
        done = subprocess.CompletedProcess(command, process.returncode, out, err)
        if done.returncode == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        if not results.exists():
            message = done.stderr.strip().removeprefix("nvrx-slurm: error: ")
            raise UsageError(message) if done.returncode == EXIT_USAGE else RuntimeError(message)
        (outcome,) = suite_from_json(results.read_bytes()).flows
        if outcome.left_out is not None:
            raise UsageError(f"{path}: {outcome.left_out}")
        if outcome.status != "passed":
            pytest.fail("\n".join(map(click.unstyle, report_text.findings(outcome, Path.cwd()))), pytrace=False)
        return outcome.attempts[-1]

    def _write(self, keys: Mapping[str, Any]) -> Path:
        path = self._folder / f"flow-{self._count}.yaml"
        path.write_text(to_yaml({**keys, "job": str(self._here / str(keys["job"]))}))
        return path
