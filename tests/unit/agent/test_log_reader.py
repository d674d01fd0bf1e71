"""How the agent reads the logs of its ranks: a real process, real files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from nvrx_slurm.agent.log_reader import LogReader
from nvrx_slurm.attribution.analyze.node_findings import NodeFindings, decoded
from nvrx_slurm.jobspec.model import AttributionSpec
from nvrx_slurm.journal.records import Assignment
from nvrx_slurm.journal.verdicts import SHARED_FROM_BYTES

NODES = 8
WAIT_S = 60.0
RANKS = Assignment(
    role="main",
    group_rank=1,
    group_world_size=NODES,
    first_rank=2,
    workers=2,
    world_size=2 * NODES,
    master_addr="n0",
    master_port=29500,
    restart_count=0,
)
LIB = AttributionSpec(enable_lib=True)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Logs of ranks 2 and 3 of n1, and of a rank of another node; enough output for a large job."""
    (tmp_path / "stacks").mkdir()
    (tmp_path / "health").mkdir()
    with (tmp_path / "rank-2.out").open("wb") as file:
        file.truncate(SHARED_FROM_BYTES // NODES)
    (tmp_path / "rank-2.err").write_text("KeyError: 'lr'\n")
    (tmp_path / "rank-3.err").write_text("step 1\n")
    (tmp_path / "rank-20.err").write_text("KeyError: 'of another node'\n")
    (tmp_path / "rank-3.out").touch()
    (tmp_path / "stacks" / "rank-3.txt").write_text("=== 2026-11-21T18:00:00Z x | rank 3, pid 7\n")
    (tmp_path / "health" / "n1.txt").write_text("2026-11-21T18:00:00.000000Z load: 1\n")
    (tmp_path / "health" / "n2.txt").write_text("2026-11-21T18:00:00.000000Z load: 1\n")
    return tmp_path


@pytest.fixture
async def reader() -> AsyncIterator[LogReader]:
    """The log reader of n1; its workers' output always counts as completely written."""
    reader = LogReader("n1", LIB, lambda _: True)
    yield reader
    await reader.close()


class Heard:
    """What the reader has found, in order."""

    def __init__(self) -> None:
        self.found: asyncio.Queue[tuple[bool, NodeFindings]] = asyncio.Queue()

    def __call__(self, whole: bool, data: bytes) -> None:
        self.found.put_nowait((whole, decoded(data)))

    async def next(self) -> tuple[bool, NodeFindings]:
        async with asyncio.timeout(WAIT_S):
            return await self.found.get()


def lines(found: NodeFindings) -> dict[str, list[str]]:
    """File → the lines that some rule has recognised."""
    return {each.name: list(dict.fromkeys(line.text for line in each.lines)) for each in found.files}


async def test_logs_are_read_at_the_failure_and_when_they_are_whole(logs: Path, reader: LogReader) -> None:
    """The logs of this node's ranks, their stacks and the node's state are read at the failure, and again once they
    are complete, with what was printed meanwhile."""
    heard = Heard()
    reader.begin(logs, RANKS, heard)
    whole, found = await heard.next()
    assert not whole
    assert lines(found) == {
        "rank-2.err": ["KeyError: 'lr'"],
        "rank-2.out": [],
        "rank-3.err": [],
        "health/n1.txt": [],
        "stacks/rank-3.txt": [],
    }
    with (logs / "rank-3.err").open("a") as file:
        file.write("ValueError: of the end\n")
    reader.whole()
    whole, found = await heard.next()
    assert whole
    assert lines(found)["rank-3.err"] == ["ValueError: of the end"]
    assert lines(found)["rank-2.err"] == ["KeyError: 'lr'"]


async def test_whole_logs_are_read_once(logs: Path, reader: LogReader) -> None:
    """If the workers had ended before the first reading began, the logs are read only once."""
    heard = Heard()
    reader.begin(logs, RANKS, heard)
    reader.whole()
    assert (await heard.next())[0]
    assert reader._task is not None
    await reader._task
    assert heard.found.empty()


@pytest.mark.parametrize(
    ("settings", "nodes"), [(LIB, NODES // 2), (LIB, 1), (AttributionSpec(enable_lib=False), NODES)]
)
async def test_nothing_is_read_where_the_broker_reads_all(logs: Path, settings: AttributionSpec, nodes: int) -> None:
    """The agent reads nothing where the broker reads all logs: in a smaller job, on one node, or without the built-in
    rules."""
    reader, heard = LogReader("n1", settings, lambda _: True), Heard()
    reader.begin(logs, replace(RANKS, group_world_size=nodes), heard)
    reader.whole()
    if reader._task is not None:
        await reader._task
    assert heard.found.empty()


async def test_a_reading_is_called_off(logs: Path, reader: LogReader) -> None:
    """The next failure, or the agent's end, cancels a reading: nothing more is sent about the earlier cycle."""
    before, heard = Heard(), Heard()
    reader.begin(logs, RANKS, before)
    reader.begin(logs, RANKS, heard)
    reader.whole()
    assert (await heard.next())[0]
    assert before.found.empty()
    await reader.close()


async def test_a_wrong_rule_file_is_the_brokers_to_report(logs: Path, tmp_path: Path) -> None:
    """With a wrong rule file the agent reads by the built-in rules, as the broker does; the broker reports the
    file."""
    (tmp_path / "own.yaml").write_text("no: [rule")
    settings = AttributionSpec(enable_lib=True, rules=(str(tmp_path / "own.yaml"),))
    reader, heard = LogReader("n1", settings, lambda _: True), Heard()
    reader.begin(logs, RANKS, heard)
    reader.whole()
    whole, found = await heard.next()
    await reader.close()
    assert whole
    assert lines(found)["rank-2.err"] == ["KeyError: 'lr'"]
