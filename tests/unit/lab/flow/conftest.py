"""Fixtures for the tests of flows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

JOB = """\
name: digits
command: python3 train.py
nodes: 4
spares: 2
workers_per_node: 2
"""
ROLES = """\
name: rl
spares: 1
roles:
  policy: {command: policy, nodes_per_replica: 2}
  rollout: {command: rollout, replicas: 3, workers_per_node: 2}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes flow.yaml beside job.yaml (4 nodes, 2 spares) and roles.yaml, into the current folder, so that messages
    name it by `flow.yaml` alone. This machine's own site files are not read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path))
    Path("job.yaml").write_text(JOB)
    Path("roles.yaml").write_text(ROLES)

    def write(text: str) -> Path:
        path = Path("flow.yaml")
        path.write_text(text, encoding="utf-8")
        return path

    return write
