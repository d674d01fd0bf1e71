"""Jobs for the tests of pages: one with every kind of failure, hostile texts, and one that is large."""

from __future__ import annotations

from pathlib import Path

from nvrx_slurm.journal.folder import JobFolder, Result
from tests.unit.report.recorder import BEGIN, Recorder, to_first_cycle, write

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"
    "&amp;{{7*7}}\x1b[31m\u202e"
)
"""The worst that a job may write."""


def eventful() -> Recorder:
    """A lost node, a worker that raises, a hang, an in-process restart; then the end."""
    recorder = to_first_cycle()
    recorder.lose("n2", after_s=60.0)
    recorder.ready(at=83)
    recorder.start_workers()
    recorder.progress(70, after_s=3.0)
    recorder.restart_in_process("n0", 1, after_s=20.0)
    recorder.fail("n1", 3, after_s=40.0, error=f"ValueError: {HOSTILE}", exit_code=1, step=120)
    recorder.ready(at=121, after_s=0.4)
    recorder.start_workers(took_s=0.1)
    recorder.progress(111, after_s=4.0)
    recorder.hang("n0", 1, after_s=30.0)
    recorder.ready(after_s=1.2, at=140)
    recorder.start_workers()
    recorder.progress(131, after_s=2.5)
    recorder.now += 55.0
    recorder.finish(at=300)
    return recorder


def write_eventful(base: Path) -> JobFolder:
    """The folder of that job, with the stacks of its hang, which are hostile too."""
    folder = write(base, eventful())
    stacks = folder.path / "stacks/main-0"
    stacks.mkdir(parents=True)
    (stacks / "rank-3.txt").write_text(f"Thread 1\n  train.py:41 in step\n{HOSTILE}\n")
    folder.write_result(Result(exit_code=0, reason="done", ended_at=BEGIN + 240.0))
    return folder
