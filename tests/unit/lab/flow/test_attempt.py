"""The checks that are made after every attempt."""

from __future__ import annotations

import msgspec
import pytest

from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.journal.folder import JobFolder, Result
from nvrx_slurm.journal.records import JobEnded, JobStarted, NodeLost, RendezvousClosed, Signalled
from nvrx_slurm.lab.flow import attempt
from nvrx_slurm.lab.flow.load import load_flow
from nvrx_slurm.lab.flow.matching import FlowMatcher
from nvrx_slurm.lab.flow.outcome import InjectedFault
from nvrx_slurm.lab.flow.triggers import FaultScheduler
from tests.unit.report.recorder import ended, plain_plan

FLOW = """\
job: job.yaml
faults:
  - {when: {event: worker_hung}, do: {kill_worker: {rank: 0}}}
  - {when: {fault: 1}, do: kill_controller}
expect:
  - node_lost: {node: n9}
  - job_ended: {exit_code: 0}
"""


@pytest.fixture
def flow(write):
    """A flow whose first expectation is not met, and whose first fault never happens."""
    return load_flow(write(FLOW))


@pytest.fixture
def entries():
    """A job that lost n2, recovered, and ended well."""
    return ended().entries


def test_a_miss_is_reported_with_its_line_and_the_nearest_entry(flow, entries):
    """The finding has the expectation's own line and the nearest entry, with the difference."""
    matcher = FlowMatcher(flow)
    for entry in entries:
        matcher.feed(entry)
    matcher.job_over()
    found = attempt.of_miss(flow, matcher.miss, entries)
    assert (found.kind, found.file, found.line) == ("expectation", "flow.yaml", 6)
    assert found.message.startswith("expected node_lost {node: n9}")
    text = "\n".join(found.detail)
    lost = next(entry for entry in entries if isinstance(entry.record, NodeLost))
    assert f"node: {lost.record.node}, not n9" in text


def test_every_fault_that_never_happened_is_a_finding_at_its_line(flow, entries):
    """A fault that waits for it is a finding too."""
    scheduler = FaultScheduler(flow.faults)
    for entry in entries:
        scheduler.feed(entry)
    found = list(attempt.of_faults(flow, scheduler))
    assert [finding.line for finding in found] == [3, 4]
    assert "fault 1 (kill_worker of rank 0) did not happen" in found[0].message


def test_a_journal_that_the_core_wrote_replays(flow, entries):
    """There are no findings."""
    assert list(attempt.of_replay(flow, plain_plan(), entries)) == []


def test_a_journal_that_the_core_would_not_write_is_a_finding(flow, entries):
    """The rendezvous has one node more than the core decided."""
    index = next(i for i, entry in enumerate(entries) if isinstance(entry.record, RendezvousClosed))
    closed = msgspec.structs.replace(entries[index].record, nodes=(*entries[index].record.nodes, "n5"))
    entries[index] = msgspec.structs.replace(entries[index], record=closed)
    (found,) = attempt.of_replay(flow, plain_plan(), entries)
    assert f"entry {entries[index].n} is not what the core decides" in found.message
    assert any("nodes:" in line for line in found.detail)


def result(code: int) -> Result:
    return Result(exit_code=code, reason="why", ended_at=0.0)


@pytest.mark.parametrize(
    ("told", "state", "said"),
    [
        (result(0), JobState.COMPLETED, []),
        (None, None, []),
        (result(0), JobState.RUNNING, []),
        (result(75), JobState.COMPLETED, ["result.json with 75"]),
        (result(0), JobState.FAILED, ["Slurm says FAILED"]),
        (result(1), JobState.FAILED, ["result.json with 1", "Slurm says FAILED"]),
    ],
)
def test_journal_result_and_slurm_must_have_the_same_end(flow, entries, told, state, said):
    """Two different ends are a finding; a missing one is not."""
    found = [finding.message for finding in attempt.of_exit_code(flow, entries, told, state)]
    assert len(found) == len(said)
    assert all(words in message for words, message in zip(said, found, strict=True))


def test_a_job_that_ended_before_its_journal_began_is_a_finding(flow, tmp_path):
    """Otherwise a flow with only `never` would pass. The end of the script's output shows the cause."""
    folder = JobFolder(tmp_path / "7")
    (tmp_path / "slurm-7.out").write_text("no module named cuda\n")
    (found,) = attempt.of_unexplained_end(flow, [], [], folder, JobState.FAILED)
    assert (found.kind, found.line) == ("exit_code", 1)
    assert "FAILED" in found.message
    assert any("no module named cuda" in line for line in found.detail)


def test_an_end_that_the_journal_does_not_have_is_a_finding_unless_a_fault_happened(flow, entries, tmp_path):
    """A batch host that was killed cannot write the end of its journal."""
    folder, injected = (
        JobFolder(tmp_path / "7"),
        [InjectedFault(number=1, what="kill_batch_host", t=0.0, proof="gone")],
    )
    assert list(attempt.of_unexplained_end(flow, entries, [], folder, JobState.COMPLETED)) == []
    assert len(list(attempt.of_unexplained_end(flow, entries[:-1], [], folder, JobState.FAILED))) == 1
    assert list(attempt.of_unexplained_end(flow, entries[:-1], injected, folder, JobState.FAILED)) == []


def test_the_end_of_an_older_generation_is_not_the_jobs(entries):
    """A requeued job that has started again has not ended."""
    last = entries[-1]
    assert isinstance(last.record, JobEnded)
    assert attempt.exit_code_of(entries) == 0
    again = JobStarted(job="1", name="digits", expected=("n0",), generation=1)
    entries.append(msgspec.structs.replace(last, n=last.n + 1, record=again))
    assert attempt.exit_code_of(entries) is None


def test_excerpt_shows_each_fault_in_its_place(entries):
    """There is one line for each entry, as in `nvrx-slurm events`, and one for each fault at its time, even before
    the first entry."""
    lost = next(index for index, entry in enumerate(entries) if isinstance(entry.record, NodeLost))
    injected = [
        InjectedFault(number=1, what="kill_node n2", t=entries[lost].t - 0.001, proof="gone"),
        InjectedFault(number=2, what="kill_controller", t=entries[0].t - 0.5, proof="gone"),
    ]
    lines = attempt.excerpt(entries, injected)
    assert len(lines) == len(entries) + 2
    assert lines[0].split(None, 2) == ["-0.500s", "fault", "2: kill_controller"]
    assert lines[lost + 1].endswith("1: kill_node n2")


def test_a_preemption_that_was_left_in_time_may_be_all_that_slurm_remembers(flow, entries):
    """Slurm 24.11 reports PREEMPTED at the end of a job that left within its GraceTime in an earlier generation."""
    signalled = Signalled(reason="preempted")
    entries.insert(1, msgspec.structs.replace(entries[0], record=signalled))
    assert list(attempt.of_exit_code(flow, entries, result(0), JobState.PREEMPTED)) == []
