"""What the journal still says about an earlier cycle."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.attribution.analyze.analysis import analyze_logs, inquiry_about
from nvrx_slurm.attribution.rules.catalogue import load_catalogue
from nvrx_slurm.journal.records import Entry, Record, RendezvousClosed, WorkerFailed, entry_to_json
from nvrx_slurm.journal.verdicts import Attribution, Failed, FailureKey, Inquiry, Scope, Verdict
from nvrx_slurm.util.files import JobFiles


def closed(cycle: int, *nodes: str) -> Record:
    """A rendezvous of two nodes with four ranks each."""
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
    """A worker that ended by SIGSEGV."""
    return WorkerFailed(
        node=node, incarnation="i", seq=1, replica="main-0", cycle=cycle, rank=rank, signal=11, step=40
    )


@pytest.fixture
def job(tmp_path: Path) -> JobFiles:
    """A job whose cycle 0 ended on n1; n3 replaced that node."""
    files = JobFiles(tmp_path / "job-7")
    files.create()
    write(files, closed(0, "n1", "n2"), crashed(0, "n1", 3), crashed(0, "n2", 5), closed(1, "n3", "n2"))
    for cycle in (0, 1):
        files.cycle_logs("main-0", 0, cycle).mkdir(parents=True)
    return files


def write(files: JobFiles, *records: Record) -> None:
    """Write the job's journal, whose last line is torn."""
    entries = (Entry(n=n, t=float(n), record=record) for n, record in enumerate(records, start=1))  # type: ignore[arg-type]
    lines = [entry_to_json(entry) for entry in entries]
    files.events_path.write_bytes(b"\n".join([*lines, b'{"n": 9, "event": "rendezvous_closed", "t"']))


def asked(files: JobFiles, node: str, rank: int = 3) -> Inquiry:
    """An inquiry about cycle 1, in which a rank ended by SIGSEGV again."""
    return Inquiry(
        key=FailureKey(job=str(files.path), generation=0, replica="main-0", cycle=1, rank=rank),
        paths=(str(files.cycle_logs("main-0", 0, 1)),),
        failed=Failed(cause="signal 11", node=node, rank=rank, signal=11),
        nodes=("n3", "n2"),
        workers_per_node=4,
        earlier=(str(files.cycle_logs("main-0", 0, 0)),),
    )


def test_its_nodes_and_its_first_failure_are_known(job: JobFiles) -> None:
    """The journal has the earlier cycle's nodes and first failure; its torn line does no harm."""
    before = inquiry_about(job.cycle_logs("main-0", 0, 0), asked(job, "n3"))
    assert before.nodes == ("n1", "n2")
    assert before.failed is not None
    assert (before.failed.node, before.failed.rank, before.failed.signal) == ("n1", 3, 11)


def test_of_a_folder_outside_of_a_job_only_its_files_are_known(job: JobFiles, tmp_path: Path) -> None:
    """Outside of a job only the files are known, and no other facts are invented."""
    before = inquiry_about(tmp_path / "old-logs", asked(job, "n3"))
    assert (before.paths, before.nodes, before.failed) == ((str(tmp_path / "old-logs"),), (), None)


def about(inquiry: Inquiry) -> Attribution:
    """The attribution by the shipped rules."""
    return analyze_logs(inquiry, load_catalogue()).attribution


def test_the_same_crash_on_another_node_is_the_programs(job: JobFiles) -> None:
    """The same signal on two nodes, without any log line, is the program's fault."""
    found = about(asked(job, "n3"))
    assert (found.verdict, found.fault, found.scope) == (Verdict.STOP, "segfault", Scope.USER_CODE)


def test_the_same_crash_on_the_same_node_is_the_nodes(job: JobFiles) -> None:
    """That node is left out, so that the next cycle shows whether the node or the program was at fault."""
    write(job, closed(0, "n3", "n2"), crashed(0, "n3", 3))
    found = about(asked(job, "n3"))
    assert (found.verdict, found.scope, found.nodes) == (Verdict.RESTART, Scope.NODE, ("n3",))


def test_one_crash_is_no_reason(job: JobFiles) -> None:
    """A single crash without a reason may have had any cause."""
    write(job, closed(0, "n1", "n2"))
    assert about(asked(job, "n3")).verdict is Verdict.UNKNOWN
