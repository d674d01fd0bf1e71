"""The attribution broker as the controller runs it: a real process, asked about real logs."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.attribution.analyze.evidence import read_logs
from nvrx_slurm.attribution.analyze.node_findings import encoded, found_in
from nvrx_slurm.attribution.rules.catalogue import load_catalogue
from nvrx_slurm.attribution.scan import find_logs
from nvrx_slurm.controller.attribution_broker import MOST_STARTS, AttributionBrokerProcess
from nvrx_slurm.jobspec.model import AttributionSpec
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.verdicts import (
    SHARED_FROM_BYTES,
    AgentFindings,
    Attribution,
    Failed,
    FailureKey,
    Inquiry,
    Verdict,
    VerdictRecord,
)
from nvrx_slurm.lab.plans import plain_bounds
from nvrx_slurm.util.processes import is_alive

ANSWER_S = 60.0
TRACEBACK = """step 1 loss 2.25
Traceback (most recent call last):
  File "/work/train.py", line 7, in <module>
    import flash_attention_9
ModuleNotFoundError: No module named 'flash_attention_9'
"""


class Answers:
    """The answers that the controller receives, in order."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[tuple[FailureKey, Attribution]] = asyncio.Queue()

    def __call__(self, key: FailureKey, attribution: Attribution) -> None:
        self.answers.put_nowait((key, attribution))

    async def next(self) -> tuple[FailureKey, Attribution]:
        async with asyncio.timeout(ANSWER_S):
            return await self.answers.get()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFolder:
    """A job whose rank 0 has failed in cycle 0."""
    folder = JobFolder(tmp_path / "42")
    folder.create()
    bounds = plain_bounds(attribution=AttributionSpec(enable_lib=True, dry_run=False))
    role = RolePlan(name="main", command=("x",))
    folder.write_plan(Plan(name="t", roles=(role,), workdir="/", folder=str(tmp_path), fault_tolerance=bounds))
    logs = folder.cycle_logs("main-0", 0, 0)
    logs.mkdir(parents=True)
    (logs / "rank-0.err").write_text(TRACEBACK)
    monkeypatch.setenv("NVRX_JOB_FOLDER", str(folder.path))
    return folder


def inquiry_of(folder: JobFolder, cycle: int = 0) -> Inquiry:
    return Inquiry(
        key=FailureKey(job=str(folder.path), generation=0, replica="main-0", cycle=cycle, rank=0),
        paths=(str(folder.cycle_logs("main-0", 0, 0)),),
        failed=Failed(cause="rank 0 on n1 exited with code 1", node="n1", rank=0, exit_code=1),
        nodes=("n1",),
    )


def judged(folder: JobFolder) -> VerdictRecord:
    return VerdictRecord(key=inquiry_of(folder).key, verdict="STOP", acted=True, why="lib: STOP", action="stop")


def pid_of(broker: AttributionBrokerProcess) -> int:
    assert broker._process is not None
    return broker._process.pid


async def test_broker_answers_and_ends(folder: JobFolder) -> None:
    """The broker starts at the first request, answers it once, and has ended once it is closed."""
    heard = Answers()
    broker = AttributionBrokerProcess(folder.node_log("attribution"), heard)
    assert broker._process is None
    broker.ask(inquiry_of(folder), settled=True)
    key, attribution = await heard.next()
    assert key == inquiry_of(folder).key
    assert (attribution.source, attribution.verdict, attribution.fault) == ("lib", Verdict.STOP, "import_error")
    pid = pid_of(broker)
    await broker.close(ANSWER_S)
    assert not is_alive(pid)
    assert heard.answers.empty()


async def test_findings_of_agents_reach_the_rules(folder: JobFolder) -> None:
    """For large logs on two nodes, the rules judge what n2's agent has found, and do not read n2's log again: the
    traceback is no longer in it."""
    logs = folder.cycle_logs("main-0", 0, 0)
    with (logs / "rank-0.out").open("wb") as file:
        file.truncate(SHARED_FROM_BYTES)
    (logs / "rank-1.err").write_text(TRACEBACK)
    (logs / "rank-0.err").write_text("step 1\n")
    asked = msgspec.structs.replace(inquiry_of(folder), nodes=("n1", "n2"))
    catalogue = load_catalogue()
    heard = Answers()
    broker = AttributionBrokerProcess(folder.node_log("attribution"), heard)
    found = []
    for node in asked.nodes:
        own = [log for log in find_logs([logs], asked) if log.node == node and log.kind == "err"]
        data = encoded(found_in(node, logs, *read_logs(own, catalogue, threading.Event()), catalogue))
        assert data is not None
        found.append(AgentFindings(folder=str(logs), node=node, whole=True, data=data))
    (logs / "rank-1.err").write_text("step 1\n")
    broker.ask(asked, settled=False)
    for each in found:
        broker.found(each)
    broker.settled(asked.key)
    _, attribution = await heard.next()
    assert (attribution.verdict, attribution.fault, attribution.ranks) == (Verdict.STOP, "import_error", (1,))
    assert attribution.read is not None
    assert attribution.read.agents == 2
    await broker.close(ANSWER_S)


async def test_broker_that_dies_is_asked_again(folder: JobFolder) -> None:
    """A request without a decision is sent again to the next broker; a request with a decision is not."""
    heard = Answers()
    broker = AttributionBrokerProcess(folder.node_log("attribution"), heard)
    broker.ask(inquiry_of(folder), settled=True)
    await heard.next()
    os.kill(pid_of(broker), signal.SIGKILL)
    key, attribution = await heard.next()
    assert (key.cycle, attribution.verdict) == (0, Verdict.STOP)
    broker.judged(judged(folder))
    os.kill(pid_of(broker), signal.SIGKILL)
    broker.ask(inquiry_of(folder, cycle=1), settled=True)
    assert (await heard.next())[0].cycle == 1
    await broker.close(ANSWER_S)


async def test_broker_that_always_dies_is_not_started_again(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After MOST_STARTS failed starts the controller goes on without the broker and does not start it again."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    broker = AttributionBrokerProcess(folder.node_log("attribution"), Answers())
    broker.ask(inquiry_of(folder), settled=True)
    assert broker._task is not None
    async with asyncio.timeout(ANSWER_S):
        await broker._task
    assert broker._starts == MOST_STARTS
    broker.ask(inquiry_of(folder, cycle=1), settled=True)
    broker.judged(judged(folder))
    assert broker._unsent == []
    await broker.close(ANSWER_S)


async def test_broker_that_dies_now_and_then_is_started_each_time(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only deaths in a row count towards the limit, since jobs last for weeks."""
    monkeypatch.setattr("nvrx_slurm.controller.attribution_broker.STABLE_S", 0.0)
    monkeypatch.setattr("nvrx_slurm.controller.attribution_broker.MOST_STARTS", 2)
    heard = Answers()
    broker = AttributionBrokerProcess(folder.node_log("attribution"), heard)
    broker.ask(inquiry_of(folder), settled=True)
    for _ in range(3):
        await heard.next()
        os.kill(pid_of(broker), signal.SIGKILL)
    await heard.next()
    await broker.close(ANSWER_S)


async def test_broker_that_closes_its_output_is_killed(folder: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that closes its output and does not exit is killed, and the next broker is started."""
    script = folder.path / "mute"
    script.write_text("#!/bin/sh\nexec sleep 1000 >/dev/null\n")
    script.chmod(0o700)
    heard, executable = Answers(), sys.executable
    broker = AttributionBrokerProcess(folder.node_log("attribution"), heard)
    monkeypatch.setattr(sys, "executable", str(script))
    broker.ask(inquiry_of(folder), settled=True)
    await asyncio.sleep(0)
    monkeypatch.setattr(sys, "executable", executable)
    assert (await heard.next())[1].verdict is Verdict.STOP
    assert broker._starts == 2
    await broker.close(ANSWER_S)


async def test_broker_that_hangs_is_killed(folder: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that hangs is killed at the next request, and another broker answers both requests."""
    heard = Answers()
    broker = AttributionBrokerProcess(folder.node_log("attribution"), heard)
    broker.ask(inquiry_of(folder), settled=True)
    await heard.next()
    broker.judged(judged(folder))
    os.kill(pid_of(broker), signal.SIGSTOP)
    broker.ask(inquiry_of(folder, cycle=1), settled=True)
    monkeypatch.setattr("nvrx_slurm.controller.attribution_broker.SILENT_S", 0.0)
    broker.ask(inquiry_of(folder, cycle=2), settled=True)
    assert {(await heard.next())[0].cycle, (await heard.next())[0].cycle} == {1, 2}
    await broker.close(ANSWER_S)


async def test_a_moment_without_processes_is_survived(folder: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker whose process cannot be started is started again after a pause: the host may be able to fork by
    then."""
    heard, executable = Answers(), sys.executable
    broker = AttributionBrokerProcess(folder.node_log("attribution"), heard)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    broker.ask(inquiry_of(folder), settled=True)
    await asyncio.sleep(0)
    assert broker._starts == 1
    monkeypatch.setattr(sys, "executable", executable)
    assert (await heard.next())[1].verdict is Verdict.STOP
    await broker.close(ANSWER_S)


def own_bytes() -> int:
    """The size of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


async def test_a_moment_without_threads_is_survived(folder: JobFolder) -> None:
    """A broker is started again where no thread can be started. Up to Python 3.11, asyncio waits for a process in a
    thread."""
    heard, limits = Answers(), resource.getrlimit(resource.RLIMIT_AS)
    size = threading.stack_size(1 << 28)  # larger than the stacks of ended threads, which would be used again
    broker = AttributionBrokerProcess(folder.node_log("attribution"), heard)
    resource.setrlimit(resource.RLIMIT_AS, (own_bytes() + (1 << 26), limits[1]))
    try:
        broker.ask(inquiry_of(folder), settled=True)
        await asyncio.sleep(0)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        threading.stack_size(size)
    assert broker._starts == 1
    assert (await heard.next())[1].verdict is Verdict.STOP
    assert broker._starts == (1 if sys.version_info >= (3, 12) else 2)
    await broker.close(ANSWER_S)


async def test_decision_while_no_broker_runs_is_queued_for_the_next(folder: JobFolder) -> None:
    """The decision is queued with the request that it is about. An open request is not queued: every new broker is
    sent all open requests."""
    broker = AttributionBrokerProcess(folder.node_log("attribution"), Answers())
    broker.ask(inquiry_of(folder), settled=True)
    broker.ask(inquiry_of(folder, cycle=1), settled=False)
    broker.judged(judged(folder))
    assert [sorted(msgspec.json.decode(line)) for line in broker._unsent] == [["ask", "settled"], ["judged"]]
    assert [key.cycle for key in broker._open] == [1]
    await broker.close(ANSWER_S)


async def test_lines_that_are_no_answers_are_passed_over(folder: JobFolder) -> None:
    """Lines that are no valid answers are skipped, and the next answer is delivered."""
    heard = Answers()
    broker = AttributionBrokerProcess(folder.node_log("attribution"), heard)
    reader = asyncio.StreamReader()
    answer = {"key": inquiry_of(folder).key, "attribution": Attribution(source="lib", verdict=Verdict.RESTART)}
    for wrong in (b'"ranks":[99999999999999999999]', b'"hint":"\xff"', b'"x":' + b"[" * 9999 + b"]" * 9999):
        said = b'{"source":"lib","verdict":"STOP",' + wrong + b"}"
        key = msgspec.json.encode(inquiry_of(folder).key)
        reader.feed_data(b'{"answer":{"key":' + key + b',"attribution":' + said + b"}}\n")
    reader.feed_data(b"hello\n{}\n" + msgspec.json.encode({"answer": answer}) + b"\n")
    reader.feed_eof()

    class Spoken:
        stdout = reader

    await broker._read_answers(Spoken())  # type: ignore[arg-type]
    assert (await heard.next())[1].verdict is Verdict.RESTART
