"""A fault that did not happen fails its flow: on a local stage, with the folder of a job that has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvrx_slurm.api.handle import Job
from nvrx_slurm.journal.folder import Result
from nvrx_slurm.lab.flow.artifacts import AttemptFolder
from nvrx_slurm.lab.flow.attempt import close
from nvrx_slurm.lab.flow.cleanup import CleanupList
from nvrx_slurm.lab.flow.flow_run import FlowRun, StatePoller
from nvrx_slurm.lab.flow.load import load_flow
from nvrx_slurm.lab.flow.outcome import FlowFinding
from nvrx_slurm.lab.flow.stages.local import LocalStage
from nvrx_slurm.util.clock import SystemClock
from tests.unit.report.recorder import JOB, ended, write

WAIT_S = 60.0
Play = Callable[[str], tuple[FlowRun, list[FlowFinding]]]


@pytest.fixture
def play(write_flow: Callable[[str], Path], tmp_path: Path) -> Iterator[Play]:
    """Plays a flow with one fault against a job that recovered once and ended well; returns the run and all
    findings."""
    clock, folder = SystemClock(), AttemptFolder(tmp_path / "attempt")
    folder.path.mkdir()
    recorder = ended()
    job_folder = write(tmp_path / "jobs", recorder)
    job_folder.write_result(Result(exit_code=0, reason="done", ended_at=recorder.now))
    stages: list[LocalStage] = []

    def play(fault: str) -> tuple[FlowRun, list[FlowFinding]]:
        flow = load_flow(write_flow(f"job: job.yaml\nfaults:\n  - {fault}\nexpect:\n  - recovered: {{cycle: 1}}\n"))
        stages.append(LocalStage(flow, tmp_path, CleanupList(folder.path), clock))
        job = Job(JOB, folder=tmp_path / "jobs", cluster="local", clock=clock)
        run = FlowRun(flow, stages[0], StatePoller(job, clock), clock)
        return run, close(run, stages[0], folder, run.run(clock.monotonic() + WAIT_S))

    yield play
    for stage in stages:
        stage.close()


@pytest.fixture
def write_flow(write: Callable[[str], Path]) -> Callable[[str], Path]:
    """The fixture `write`, under a name that the recorder's function `write` does not hide."""
    return write


def test_a_fault_whose_trigger_was_never_met_is_a_finding(play: Play) -> None:
    """The job ends and all expectations are met, but the fault was never tested."""
    run, findings = play("{when: {event: worker_hung}, do: {kill_worker: {rank: 0}}}")
    assert run.matcher.miss is None
    assert [(finding.kind, finding.line) for finding in findings] == [("fault", 3)]


def test_a_fault_that_cannot_be_proven_is_a_finding(play: Play) -> None:
    """The worker to be killed has ended already, so the stage cannot prove the fault: it did not happen."""
    run, findings = play("{when: {event: recovered}, do: {kill_worker: {rank: 0}}}")
    assert run.injected == []
    assert [(finding.kind, finding.line) for finding in findings] == [("fault", 3)]
