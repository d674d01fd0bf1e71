"""The metrics of a job. `tests/flow/test_metrics.py` reads them with Prometheus."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.journal.records import ControllerStarted, Fact, JobStarted
from nvrx_slurm.report import snapshot
from nvrx_slurm.report.history import JobTimeline
from nvrx_slurm.report.metrics import JobCollector
from nvrx_slurm.report.presence import OutsideState
from nvrx_slurm.report.view import JobFold
from tests.jobs import eventful
from tests.unit.report.recorder import JOB, Recorder, to_first_cycle, write


def with_consequences() -> Recorder:
    """A worker loses its peer, and only then that peer's node is known to be lost; this happens again, and the job is
    requeued before the controller decides."""
    recorder = to_first_cycle()
    for lost in ("n2", "n3"):
        recorder.fail("n0", 0, exit_code=1, error="ConnectionResetError", peer_lost=True, step=80)
        if lost == "n3":
            break
        recorder.lose(lost, after_s=0.2)
        recorder.ready(at=80)
        recorder.start_workers()
        recorder.progress(76, after_s=5.0)
    recorder.tell(ControllerStarted(epoch=2, host="h", pid=1))
    recorder.tell(JobStarted(job=JOB, name="digits", expected=recorder.nodes, generation=1))
    return recorder


@pytest.mark.parametrize("record", [eventful, with_consequences])
def test_no_counter_and_no_bucket_goes_down(record, tmp_path: Path) -> None:
    """This holds at every scrape: Prometheus would take a decrease for a restart of the server, and add the rest
    again."""
    recorder = record()
    folder, history = write(tmp_path, recorder), JobTimeline(keeps_spans=False)
    fold, known = JobFold(recorder.plan, [history]), dict[tuple[str, str], float]()
    for entry, behind in zip(recorder.entries, [*recorder.entries[1:], None], strict=True):
        fold.take(entry)
        if behind is not None and not isinstance(behind.record, Fact):
            continue  # one commit writes a fact and the decisions about it
        shot = snapshot.snap(fold.view, folder, outside=OutsideState())
        for family in JobCollector(lambda shot=shot: [(shot, history)]).collect():
            if family.type in ("counter", "histogram"):
                for sample in family.samples:
                    key = (sample.name, str(sample.labels))
                    assert sample.value >= known.get(key, 0.0), (entry, key)
                    known[key] = sample.value
    failures = {labels: value for (name, labels), value in known.items() if name == "nvrx_failures_total"}
    assert sum(failures.values()) == len(history.failures)
