"""The real worker: what it reads, what memory it takes, what it answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.attribution.service.workers import AnalysisWorker, WorkerSetup
from nvrx_slurm.errors import SourceError
from nvrx_slurm.journal.verdicts import FailureKey, Inquiry, Verdict
from nvrx_slurm.util.clock import SystemClock

CRASH = """\
Traceback (most recent call last):
  File "/home/u/train.py", line 4, in <module>
    import flash_attn_3
ModuleNotFoundError: No module named 'flash_attn_3'
"""


def _inquiry(*paths: Path) -> Inquiry:
    key = FailureKey(job="/jobs/1", generation=0, replica="main-0", cycle=0, rank=0)
    return Inquiry(key=key, paths=tuple(map(str, paths)))


def _worker(root: Path, memory_bytes: int = 1 << 30) -> AnalysisWorker:
    setup = WorkerSetup(roots=(str(root),), rules=(), memory_bytes=memory_bytes)
    return AnalysisWorker(setup, timeout_s=60.0, clock=SystemClock())


async def test_reads_below_its_root_alone(tmp_path: Path) -> None:
    """A log below the root is read; one outside is not, even if the service asks for it."""
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.err").write_text(CRASH)
    worker = _worker(tmp_path / "in")
    try:
        assert (await worker.analyze(_inquiry(tmp_path / "in"))).verdict is Verdict.STOP
        try:
            outside = await worker.analyze(_inquiry(tmp_path / "out"))
        except SourceError:
            return
        assert outside.verdict is not Verdict.STOP and outside.primary is None
    finally:
        await worker.end()


async def test_nothing_there(tmp_path: Path) -> None:
    """An inquiry without any log is a problem, and the worker stays."""
    worker = _worker(tmp_path)
    try:
        with pytest.raises(SourceError, match=r"no such|No such|no log"):
            await worker.analyze(_inquiry(tmp_path / "none"))
        assert worker.stats().pid is not None
    finally:
        await worker.end()


async def test_out_of_memory(tmp_path: Path) -> None:
    """A worker that runs out of memory reports that or is lost, and is not used again."""
    (tmp_path / "rank-0.err").write_text(CRASH)
    worker = _worker(tmp_path, memory_bytes=1)
    with pytest.raises(SourceError, match=r"memory|thread|the worker was lost"):
        await worker.analyze(_inquiry(tmp_path))
    assert worker.stats().pid is None
