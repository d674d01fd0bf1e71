"""How the broker uses the findings of its agents: early, late, repeated, hostile, or missing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from nvrx_slurm.attribution.analyze.analyzer import Analyzer
from nvrx_slurm.attribution.analyze.evidence import read_logs
from nvrx_slurm.attribution.analyze.gathering import (
    MOST_CYCLES,
    IncompleteFindings,
    ReceivedFindings,
    analyze_gathered,
)
from nvrx_slurm.attribution.analyze.node_findings import encoded, found_in
from nvrx_slurm.attribution.rules.catalogue import load_catalogue
from nvrx_slurm.attribution.scan import find_logs
from nvrx_slurm.journal.records import Entry, RendezvousClosed, entry_to_json
from nvrx_slurm.journal.verdicts import (
    MOST_FINDINGS_BYTES,
    SHARED_FROM_BYTES,
    AgentFindings,
    Attribution,
    Failed,
    FailureKey,
    Inquiry,
    LogsRead,
    Verdict,
)
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.files import JobFiles
from tests.still_clock import StillClock

CATALOGUE = load_catalogue()
KEY = FailureKey(job="", generation=0, replica="main-0", cycle=1, rank=2)
CAUSE = "KeyError: 'lr'"
NODES = ("n1", "n2", "n3")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The logs of three nodes; only those of n3 show the cause."""
    folder = tmp_path / "cycle-1"
    folder.mkdir()
    for rank in range(3):
        (folder / f"rank-{rank}.err").write_text("step 1\nstep 2\n")
    with (folder / "rank-2.err").open("a") as file:
        file.write(f"{CAUSE}\n")
    return folder


def inquiry(folder: Path, *earlier: Path, lost: str | None = None) -> Inquiry:
    failed = Failed(cause="lost", node=lost) if lost else Failed(cause="x", node="n3", rank=2, exit_code=1)
    return Inquiry(key=KEY, paths=(str(folder),), failed=failed, nodes=NODES, earlier=tuple(map(str, earlier)))


def sent(folder: Path, node: str, *, whole: bool = True) -> AgentFindings:
    """The findings of a node's agent in the files as they are now."""
    logs = [log for log in find_logs([folder], inquiry(folder)) if log.node == node]
    data = encoded(found_in(node, folder, *read_logs(logs, CATALOGUE, threading.Event()), CATALOGUE))
    assert data is not None
    return AgentFindings(folder=str(folder), node=node, whole=whole, data=data)


def forget(folder: Path) -> None:
    """Remove the cause from the files, so that only findings show it."""
    for path in folder.glob("rank-*"):
        path.write_text("step 1\nstep 2\n")


def answer(folder: Path, received: ReceivedFindings, *, whole: bool = True, left_s: float = 60.0) -> Attribution:
    clock, asked = StillClock(), inquiry(folder)
    return analyze_gathered(
        asked,
        CATALOGUE,
        received,
        logs=find_logs([folder], asked),
        whole=whole,
        stop=threading.Event(),
        clock=clock,
        deadline=clock.monotonic() + left_s,
    ).attribution


def read_of(attribution: Attribution) -> LogsRead:
    assert attribution.read is not None
    return attribution.read


def test_findings_are_judged_in_place_of_logs(folder: Path) -> None:
    """The broker reads none of the files that findings cover."""
    received = ReceivedFindings()
    for node in NODES:
        received.put(sent(folder, node))
    forget(folder)
    found = answer(folder, received)
    assert (found.verdict, found.ranks) == (Verdict.STOP, (2,))
    assert (read_of(found).files, read_of(found).agents) == (3, 3)


def test_the_broker_reads_what_no_agent_sends(folder: Path) -> None:
    """If an agent is dead or slow, the broker reads its node's logs in the shared folder."""
    received = ReceivedFindings()
    received.put(sent(folder, "n1"))
    found = answer(folder, received)
    assert (found.verdict, read_of(found).files, read_of(found).agents) == (Verdict.STOP, 3, 1)


def test_files_that_findings_do_not_cover_are_read(folder: Path) -> None:
    """The broker reads a file without findings: one that a worker added, or that the agent looked at too early."""
    received = ReceivedFindings()
    for node in NODES:
        received.put(sent(folder, node))
    (folder / "rank-0.out").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    assert read_of(answer(folder, received)).files == 4


def test_at_the_deadline_it_judges_by_what_has_come(folder: Path) -> None:
    """The answer names the nodes whose findings have not arrived."""
    received = ReceivedFindings()
    received.put(sent(folder, "n3"))
    found = answer(folder, received, left_s=0.0)
    assert found.verdict is Verdict.STOP
    assert read_of(found).agents == 1
    assert {problem.partition(":")[0] for problem in read_of(found).problems} == {"n1", "n2"}


def test_early_findings_that_cannot_be_read_are_none(folder: Path) -> None:
    """At the deadline there is no time to read the logs of such a node either, and the answer says so."""
    received = ReceivedFindings()
    received.put(replace(sent(folder, "n1", whole=False), data=b"{"))
    received.put(sent(folder, "n3"))
    problems = read_of(answer(folder, received, left_s=0.0)).problems
    assert {problem.partition(":")[0] for problem in problems} == {"n1", "n2"}


def test_at_the_deadline_early_findings_are_better_than_none(folder: Path) -> None:
    """With time left the broker reads the logs; at the deadline it uses findings made while the logs were still
    written."""
    received = ReceivedFindings()
    for node in NODES:
        received.put(sent(folder, node, whole=False))
    forget(folder)
    assert answer(folder, received).verdict is not Verdict.STOP
    assert answer(folder, received, left_s=0.0).verdict is Verdict.STOP


def test_a_look_at_unfinished_logs_waits_for_all_agents(folder: Path) -> None:
    """Without all agents its verdict could be wrong, and the broker has no time to read logs that still grow."""
    received = ReceivedFindings()
    for node in NODES[1:]:
        received.put(sent(folder, node, whole=False))
    with pytest.raises(IncompleteFindings):
        answer(folder, received, whole=False)
    received.put(sent(folder, "n1", whole=False))
    assert answer(folder, received, whole=False).verdict is Verdict.STOP


def test_late_and_repeated_findings_change_nothing(folder: Path) -> None:
    """Findings of complete logs are kept, in any order and however often findings arrive."""
    received = ReceivedFindings()
    early, whole = sent(folder, "n1", whole=False), sent(folder, "n1")
    for each in (early, whole, early, whole, early):
        received.put(each)
    assert received.of(str(folder))["n1"] is whole


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91" * 10_000, b"x" * (MOST_FINDINGS_BYTES + 1)])
def test_what_is_no_findings_does_not_matter(folder: Path, data: bytes) -> None:
    """If a node's findings are malformed, its logs are read."""
    received = ReceivedFindings()
    received.put(sent(folder, "n1"))
    for node in NODES[1:]:
        received.put(AgentFindings(folder=str(folder), node=node, whole=True, data=data))
    found = answer(folder, received)
    assert (found.verdict, read_of(found).agents) == (Verdict.STOP, 1)


def test_a_node_cannot_report_for_another(folder: Path) -> None:
    """Findings of n3 that n2 sends as its own are not used."""
    received = ReceivedFindings()
    of_n3 = sent(folder, "n3")
    received.put(AgentFindings(folder=str(folder), node="n2", whole=True, data=of_n3.data))
    assert read_of(answer(folder, received)).agents == 0


def test_of_old_cycles_nothing_is_kept(folder: Path) -> None:
    """Jobs last for weeks, so old findings are dropped. Findings of one cycle never answer for another."""
    received = ReceivedFindings()
    found = sent(folder, "n1")
    for cycle in range(2 * MOST_CYCLES):
        received.put(AgentFindings(folder=f"{folder}-{cycle}", node="n1", whole=True, data=found.data))
    kept = [cycle for cycle in range(2 * MOST_CYCLES) if received.of(f"{folder}-{cycle}")]
    assert kept == list(range(MOST_CYCLES, 2 * MOST_CYCLES))
    assert received.of(str(folder)) == {}


def test_the_cycles_before_are_judged_by_their_findings(tmp_path: Path) -> None:
    """An unknown exception that was on another node in the cycle before is the program's."""
    job = JobFiles(tmp_path / "7")
    job.create()
    closed = RendezvousClosed(
        replica="main-0",
        cycle=0,
        nodes=NODES,
        active=3,
        standby=0,
        world_size=3,
        master_addr="n1",
        master_port=29500,
    )
    job.events_path.write_bytes(entry_to_json(Entry(n=1, t=1.0, record=closed)) + b"\n")
    before, folder = (job.cycle_logs("main-0", 0, cycle) for cycle in (0, 1))
    before.mkdir(parents=True)
    folder.mkdir()
    trace = 'Traceback (most recent call last):\n  File "/w/t.py", line 3, in main\n    go()\nacme.Odd: not even\n'
    for rank in range(3):
        (before / f"rank-{rank}.err").write_text(trace if rank == 0 else "step 1\n")
        (folder / f"rank-{rank}.err").write_text(trace if rank == 2 else "step 1\n")
    received = ReceivedFindings()
    for node in NODES:
        received.put(sent(folder, node))
    key = replace(KEY, job=str(job.path))
    asked = replace(inquiry(folder, before), key=key)
    clock = StillClock()

    def said() -> Verdict:
        return analyze_gathered(
            asked,
            CATALOGUE,
            received,
            logs=find_logs([folder], asked),
            whole=True,
            stop=threading.Event(),
            clock=clock,
            deadline=clock.monotonic() + 60.0,
        ).attribution.verdict

    by_logs = said()
    for rank, node in enumerate(NODES):
        data = sent(before, node).data
        received.put(AgentFindings(folder=str(before), node=node, whole=True, data=data))
        (before / f"rank-{rank}.err").write_text("step 1\n")
    assert said() == by_logs == Verdict.STOP


@pytest.fixture
def large(folder: Path) -> Iterator[Path]:
    """The same folder with so much output that agents are to read it; the large file is sparse."""
    with (folder / "rank-0.out").open("wb") as file:
        file.truncate(SHARED_FROM_BYTES)
    yield folder
    (folder / "rank-0.out").unlink()


@pytest.mark.parametrize("lost", [None, "n2"])
def test_the_analyzer_takes_what_agents_send(large: Path, lost: str | None) -> None:
    """For large logs the analyzer uses findings. It does not wait for a node that is known to be lost, and reads its
    logs."""
    received = ReceivedFindings()
    for node in NODES:
        if node != lost:
            received.put(sent(large, node))

    async def asked() -> Attribution:
        analyzer = Analyzer(received=received, clock=SystemClock())
        try:
            return await analyzer.analyze(inquiry(large, lost=lost))
        finally:
            await analyzer.close()

    found = asyncio.run(asked())
    assert found.primary is not None
    assert (found.primary.text, read_of(found).agents) == (CAUSE, 3 - (lost is not None))


def test_small_logs_are_read_by_the_leader(folder: Path) -> None:
    """The leader reads them sooner than an agent could."""
    received = ReceivedFindings()
    for node in NODES:
        received.put(sent(folder, node))

    async def asked() -> Attribution:
        analyzer = Analyzer(received=received)
        try:
            return await analyzer.analyze(inquiry(folder))
        finally:
            await analyzer.close()

    assert read_of(asyncio.run(asked())).agents == 0
