"""Which logs a node's reader reads for its agent."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from nvrx_slurm.attribution.analyze.evidence import read_logs
from nvrx_slurm.attribution.node_reader import NodeLogs, logs_of_node
from nvrx_slurm.attribution.rules.catalogue import Catalogue


def test_log_that_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that is removed after it was looked at is listed, and is a problem of the scan; the others are read."""
    for rank in (0, 1, 2):
        (tmp_path / f"rank-{rank}.out").write_text("last\n")
    stat = Path.stat

    def vanishes(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        status = stat(path, follow_symlinks=follow_symlinks)
        if path.name == "rank-1.out":
            path.unlink()
        return status

    monkeypatch.setattr(Path, "stat", vanishes)
    logs = dict(logs_of_node(NodeLogs(node="n1", folder=str(tmp_path), ranks=(0, 1))))
    assert [(log.path.name, log.node, size) for log, (size, _) in logs.items()] == [
        ("rank-0.out", "n1", 5),
        ("rank-1.out", "n1", 5),
    ]
    read, _ = read_logs(list(logs), Catalogue(()), threading.Event())
    assert len(read.problems) == 1 and "rank-1.out" in read.problems[0]
