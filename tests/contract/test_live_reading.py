"""Reading a running job's store, and asking it for stacks, against a real Valkey; the test is the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from nvrx_slurm.api.stack_request import NodeStacks, StackRequest
from nvrx_slurm.errors import NvrxError, StoreUnreachable, UsageError, WaitTimeout
from nvrx_slurm.journal.folder import JobFolder, StoreAddress
from nvrx_slurm.journal.records import (
    AnyRecord,
    DumpAsked,
    DumpOrdered,
    Entry,
    Heartbeat,
    RendezvousOpened,
    StacksDumped,
    WorkersDone,
)
from nvrx_slurm.report import snapshot
from nvrx_slurm.report.model import ReceivedHeartbeat
from nvrx_slurm.report.source import Journal
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.util.clock import SystemClock
from tests.unit.report.recorder import Recorder, to_first_cycle, write

WAIT_S = 20.0
NODES = 400


class Controller:
    """Writes the journal, and reads the requests in the inbox."""

    def __init__(self, store: StoreClient, recorder: Recorder) -> None:
        self._store, self._recorder = store, recorder
        self._n = len(recorder.entries)

    async def begin(self) -> None:
        self._epoch, *_ = await self._store.acquire("test", 60.0)
        await self._store.commit(self._epoch, self._recorder.entries)

    async def say(self, *said: AnyRecord) -> None:
        entries = [Entry(n=self._n + index, t=self._recorder.now, record=each) for index, each in enumerate(said, 1)]
        self._n += len(entries)
        await self._store.commit(self._epoch, entries)

    async def asked(self) -> DumpAsked:
        """The request, once it is in the inbox."""
        async with asyncio.timeout(WAIT_S):
            while not (facts := await self._store.inbox("0-0")):
                pass  # each read blocks for a while
        asked = facts[0][1]
        assert isinstance(asked, DumpAsked)
        return asked


@pytest.fixture
def recorder() -> Recorder:
    return to_first_cycle()


@pytest.fixture
def job(tmp_path: Path, recorder: Recorder, address: StoreAddress) -> JobFolder:
    """A job that runs: its folder has the store's address, and its journal is only in the store."""
    folder = write(tmp_path / "jobs", recorder)
    folder.events_path.unlink()
    folder.write_store(address)
    return folder


@pytest.fixture
async def controller(store: StoreClient, recorder: Recorder, job: JobFolder) -> Controller:
    controller = Controller(store, recorder)
    await controller.begin()
    return controller


def dumped(recorder: Recorder, job: JobFolder, node: str, request: str, *ranks: int, **more: Any) -> StacksDumped:
    """What a node reports once it has appended the stacks of its ranks to their files."""
    files = {}
    for rank in ranks:
        file = job.path / "stacks" / f"rank-{rank}.txt"
        file.parent.mkdir(exist_ok=True)
        with file.open("a") as out:
            out.write(
                f"=== then hang | rank {rank}, pid 1\nold\n\n=== now asked for ({request}) | rank {rank}, pid 1\n"
            )
            out.write(f"stack of {rank}\n\n=== now asked for ({request}) | rank {rank}, pid 2\nits child\n\n")
        files[rank] = str(file.relative_to(job.path))
    why = f"asked for ({request})"
    return StacksDumped(**recorder.agent(node), why=why, request=request, files=files, **more)


async def gathered(answers: Iterator[NodeStacks]) -> list[NodeStacks]:
    return await asyncio.to_thread(lambda: list(answers))


async def test_a_heartbeats_age_comes_from_the_servers_clock(store, job, recorder, controller) -> None:
    """The stamp and the current time are both the server's: the age is the time that passed by its clock."""
    before = await store.time()
    await store.send_heartbeat(recorder.beat("n0", 7, 6).heartbeat, keep=100)
    taken = await asyncio.to_thread(snapshot.take, job)
    after = await store.time()
    status = snapshot.as_status(taken)
    ages = {node.name: node.beat_age_s for node in status.nodes}
    assert ages["n0"] is not None
    assert 0.0 <= ages["n0"] <= after - before + 0.001  # a stamp has milliseconds
    assert ages["n1"] is None
    assert [(rank.step, rank.lag) for rank in status.ranks[:3]] == [(7, 0), (6, 1), (None, None)]


async def test_the_first_read_has_the_last_two_heartbeats_of_every_node(store, job, controller) -> None:
    """The first read returns the two newest heartbeats of each node and no older ones, however long the stream is."""
    for cycle in (1, 2, 3):
        for n in range(NODES):
            await store.send_heartbeat(Heartbeat(node=f"n{n}", incarnation="i", cycle=cycle), keep=100_000)

    def look() -> list[ReceivedHeartbeat]:
        with closing(Journal(job, beats=True)) as journal:
            return [item for item in journal.catch_up() if isinstance(item, ReceivedHeartbeat)]

    beats = await asyncio.to_thread(look)
    assert sorted(heard.heartbeat.node for heard in beats) == sorted(2 * [f"n{n}" for n in range(NODES)])
    assert [heard.heartbeat.cycle for heard in beats] == [2, 3] * NODES


async def test_a_reader_gets_new_heartbeats_and_entries(store, job, recorder, controller) -> None:
    """After the first read only new entries and new heartbeats are returned; heartbeats with their time."""
    journal = Journal(job, beats=True)
    try:
        await asyncio.to_thread(journal.catch_up)
        begin = await store.time()
        await store.send_heartbeat(recorder.beat("n3", 9).heartbeat, keep=100)
        (heard,) = await asyncio.to_thread(journal.poll, 1.0)
        assert isinstance(heard, ReceivedHeartbeat)
        assert (heard.heartbeat.node, heard.heartbeat.steps) == ("n3", {6: 9})
        assert heard.t >= begin - 0.001
        await controller.say(RendezvousOpened(replica="main-0", cycle=1))
        (entry,) = await asyncio.to_thread(journal.poll, 1.0)
        assert isinstance(entry, Entry)
    finally:
        journal.close()


async def test_every_node_is_asked_and_its_new_text_is_passed_on(job, recorder, controller) -> None:
    """The request names the user who asks. Of each file only the text that this request added is returned, that of
    child processes included."""
    request = StackRequest(job)
    answers = asyncio.create_task(gathered(request.answers(WAIT_S)))
    asked = await controller.asked()
    assert (asked.ranks, asked.replica) == ((), None)
    assert "@" in asked.by
    ordered = DumpOrdered(request=asked.request)
    foreign = dumped(recorder, job, "n1", "another")
    told = [
        dumped(recorder, job, f"n{n}", asked.request, 2 * n, 2 * n + 1, where={2 * n: "a.py:1 in f"})
        for n in range(4)
    ]
    await controller.say(asked, ordered, foreign, told[0], told[0], *told[1:])
    come = await answers
    assert [answer.node for answer in come] == ["n0", "n1", "n2", "n3"]
    third = come[1].stacks[0]
    assert (third.rank, third.replica, third.where) == (2, "main-0", "a.py:1 in f")
    line = f"=== now asked for ({asked.request}) | rank 2, pid"
    assert third.text == f"{line} 1\nstack of 2\n\n{line} 2\nits child\n\n"


async def test_only_nodes_with_the_asked_ranks_are_waited_for(job, recorder, controller) -> None:
    """Rank 3 is on n1: only n1 has to answer, and its problems are passed on."""
    request = StackRequest(job, ranks=[3])
    answers = asyncio.create_task(gathered(request.answers(WAIT_S)))
    asked = await controller.asked()
    assert asked.ranks == (3,)
    problems = ("rank 3: it did not answer",)
    await controller.say(DumpOrdered(request=asked.request, ranks=(3,)))
    await controller.say(dumped(recorder, job, "n1", asked.request, problems=problems))
    (answer,) = await answers
    assert (answer.node, answer.stacks, answer.problems) == ("n1", (), problems)


async def test_a_node_that_lost_its_workers_meanwhile_is_not_waited_for(job, recorder, controller) -> None:
    """A node whose workers are done or torn down will never answer. Answers that arrived before are returned."""
    request = StackRequest(job)
    said: list[str] = []
    answers = asyncio.create_task(gathered(request.answers(WAIT_S, said.append)))
    asked = await controller.asked()
    await controller.say(dumped(recorder, job, "n0", asked.request, 0, 1))
    await controller.say(WorkersDone(**recorder.agent("n1"), replica="main-0", cycle=0))
    await controller.say(RendezvousOpened(replica="main-0", cycle=1))
    assert [answer.node for answer in await answers] == ["n0"]
    assert said == ["the workers on n[1-3] ended before they could answer"]


async def test_when_all_workers_end_before_they_answer_that_is_an_error(job, controller) -> None:
    """No stacks were written, so the request fails instead of returning nothing."""
    answers = asyncio.create_task(gathered(StackRequest(job).answers(WAIT_S)))
    await controller.asked()
    await controller.say(RendezvousOpened(replica="main-0", cycle=1))
    with pytest.raises(NvrxError, match=r"the workers on n\[0-3\] ended before they could answer"):
        await answers


async def test_nodes_that_did_not_answer_are_named(job, recorder, controller) -> None:
    """After the timeout the error names the nodes without an answer. The answers that arrived are returned before."""
    clock = _Impatient()
    request = StackRequest(job, clock=clock)
    said: Queue[str] = Queue()
    come: list[NodeStacks] = []

    def ask() -> None:
        for answer in request.answers(WAIT_S, said.put):
            come.append(answer)
            clock.ahead_s = 3.0 if len(come) == 1 else WAIT_S + 1.0

    asking = asyncio.create_task(asyncio.to_thread(ask))
    asked = await controller.asked()
    await controller.say(DumpOrdered(request=asked.request), dumped(recorder, job, "n0", asked.request, 0, 1))
    waits_for = await asyncio.to_thread(said.get, timeout=WAIT_S)
    assert waits_for.startswith("waiting for n[1-3] to write down stacks, up to ")
    await controller.say(dumped(recorder, job, "n2", asked.request, 4, 5))
    with pytest.raises(WaitTimeout, match=r"n\[1,3\] did not answer within 20.0 s"):
        await asking
    assert [answer.node for answer in come] == ["n0", "n2"]


async def test_a_request_that_no_controller_takes_up_is_another_error(job, controller) -> None:
    """If no order follows within the timeout, the error names the controller, not the nodes."""
    request = StackRequest(job)
    with pytest.raises(WaitTimeout, match="controller did not take up the request"):
        await gathered(request.answers(0.01))


async def test_what_cannot_be_asked_says_what_can(job, controller) -> None:
    """An unknown rank or replica is a usage error that lists the valid ones."""
    with pytest.raises(UsageError, match="no rank 8: main-0 has ranks 0-7"):
        await asyncio.to_thread(StackRequest, job, ranks=[3, 8])
    with pytest.raises(UsageError, match="no replica 'main-1': the job has main-0"):
        await asyncio.to_thread(StackRequest, job, replica="main-1")


async def test_without_workers_there_is_none_to_ask(job, recorder, controller) -> None:
    """While a rendezvous is open the error names the phase of the replica."""
    await controller.say(RendezvousOpened(replica="main-0", cycle=1))
    with pytest.raises(UsageError, match=r"no replica has a worker now \(main-0 is stopping\)"):
        await asyncio.to_thread(StackRequest, job)


async def test_a_store_that_is_away_is_unreachable(job, recorder, controller, address) -> None:
    """If the store does not answer, the error is StoreUnreachable (exit code 69), and not a usage error (2)."""
    job.write_store(StoreAddress(url="redis://127.0.0.1:1", password=None, job=address.job, token="t"))
    with pytest.raises(StoreUnreachable, match="does not answer"):
        await asyncio.to_thread(StackRequest, job)


class _Impatient(SystemClock):
    """A clock that the test sets ahead."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s
