"""What the journal still knows of a cycle before."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.attribution.analyze.analysis import analyze_logs, inquiry_about
from nvrx_slurm.attribution.rules.catalogue import load_catalogue
from nvrx_slurm.journal.records import Entry, Record, RendezvousClosed, WorkerFailed, entry_to_json
from nvrx_slurm.journal.verdicts import Attribution, Failed, FailureKey, Inquiry, Scope, Verdict
from nvrx_slurm.util.files import JobFiles


def closed(cycle: int, *nodes: str) -> Record:
    """A round of two nodes with four ranks each."""
    return RendezvousClosed(
        replica="main-0",
        cycle=cycle,
        nodes=nodes,
        active=2,
        standby=0,
        world_size=8,
        master_addr=nodes[0],
        master_port=29500,
    )


def crashed(cycle: int, node: str, rank: int) -> Record:
    """A worker that SIGSEGV ended."""
    return WorkerFailed(
        node=node, incarnation="i", seq=1, replica="main-0", cycle=cycle, rank=rank, signal=11, step=40
    )


@pytest.fixture
def job(tmp_path: Path) -> JobFiles:
    """Cycle 0 ended on n1; then n3 stood in for it."""
    files = JobFiles(tmp_path / "job-7")
    files.create()
    write(files, closed(0, "n1", "n2"), crashed(0, "n1", 3), crashed(0, "n2", 5), closed(1, "n3", "n2"))
    for cycle in (0, 1):
        files.cycle_logs("main-0", 0, cycle).mkdir(parents=True)
    return files


def write(files: JobFiles, *records: Record) -> None:
    """The job's journal; its last line is torn."""
    entries = (Entry(n=n, t=float(n), record=record) for n, record in enumerate(records, start=1))  # type: ignore[arg-type]
    lines = [entry_to_json(entry) for entry in entries]
    files.events_path.write_bytes(b"\n".join([*lines, b'{"n": 9, "event": "rendezvous_closed", "t"']))


def asked(files: JobFiles, node: str, rank: int = 3) -> Inquiry:
    """About cycle 1, in which a rank was ended by SIGSEGV again."""
    return Inquiry(
        key=FailureKey(job=str(files.path), generation=0, replica="main-0", cycle=1, rank=rank),
        paths=(str(files.cycle_logs("main-0", 0, 1)),),
        failed=Failed(cause="signal 11", node=node, rank=rank, signal=11),
        nodes=("n3", "n2"),
        workers_per_node=4,
        earlier=(str(files.cycle_logs("main-0", 0, 0)),),
    )


def test_its_nodes_and_its_first_failure_are_known(job: JobFiles) -> None:
    """A torn line does no harm."""
    before = inquiry_about(job.cycle_logs("main-0", 0, 0), asked(job, "n3"))
    assert before.nodes == ("n1", "n2")
    assert before.failed is not None
    assert (before.failed.node, before.failed.rank, before.failed.signal) == ("n1", 3, 11)


def test_of_a_folder_outside_of_a_job_only_its_files_are_known(job: JobFiles, tmp_path: Path) -> None:
    """And nothing is made up."""
    before = inquiry_about(tmp_path / "old-logs", asked(job, "n3"))
    assert (before.paths, before.nodes, before.failed) == ((str(tmp_path / "old-logs"),), (), None)


def about(inquiry: Inquiry) -> Attribution:
    """By the shipped rules."""
    return analyze_logs(inquiry, load_catalogue()).attribution


def test_the_same_crash_on_another_node_is_the_programs(job: JobFiles) -> None:
    """No line says anything; the signal alone, twice, on two nodes, does."""
    found = about(asked(job, "n3"))
    assert (found.verdict, found.fault, found.scope) == (Verdict.STOP, "segfault", Scope.USER_CODE)


def test_the_same_crash_on_the_same_node_is_the_nodes(job: JobFiles) -> None:
    """It is left out, so that the next cycle shows which of the two it was."""
    write(job, closed(0, "n3", "n2"), crashed(0, "n3", 3))
    found = about(asked(job, "n3"))
    assert (found.verdict, found.scope, found.nodes) == (Verdict.RESTART, Scope.NODE, ("n3",))


def test_one_crash_is_no_reason(job: JobFiles) -> None:
    """It may have been anything."""
    write(job, closed(0, "n1", "n2"))
    assert about(asked(job, "n3")).verdict is Verdict.UNKNOWN
