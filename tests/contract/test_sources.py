"""Every source of attribution, on a real server of its kind: the source answers within its bound, and names the
server's problem."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nvrx_slurm.agent.supervisor import descendants
from nvrx_slurm.attribution.sources import Source, sources_of
from nvrx_slurm.attribution.sources.builtin_rules import DIED
from nvrx_slurm.jobspec.model import AttributionSpec
from nvrx_slurm.journal.verdicts import Attribution, FailureKey, Inquiry, Verdict
from nvrx_slurm.lab.faults.attribution_server import AttributionServer, behaviour
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.files import write_private
from nvrx_slurm.util.processes import is_alive
from tests.contract.failing_log import write_failure
from tests.fault_harness import until
from tests.harness import wait_gone

STOP, UNKNOWN, TIMEOUT = Verdict.STOP, Verdict.UNKNOWN, Verdict.TIMEOUT
MCP_SCRIPT = Path(__file__).parents[1] / "mcp_script.py"
ENOUGH_S, SHORT_S = 60.0, 1.5
MARGIN_S = 40.0
"""How much later than its bound an answer may arrive here, on a busy machine."""

TOKEN = "t0k3n-t0k3n"

ENDLESS_RULE = """
trap.set:
  fault: trap
  pattern: 'aaaa(a+)+$'
  verdict: STOP
  scope: user_code
  severity: 74
  hint: None.
  reference: https://example.org/
  sample: ['aaaaaa']
  not_sample: ['b']
"""


@dataclass(frozen=True)
class Case:
    """The behaviour of a server, by kind, and the attribution that its source returns; `problem`: a part of its
    problem."""

    attrsvc: str
    mcp: str
    verdict: Verdict
    problem: str | None = None
    timeout_s: float = ENOUGH_S


CASES = {
    "answers": Case("stop", "stop", STOP),
    "answers in another form": Case("forgets", "text", STOP),
    "is slow": Case("slow:700ms", "slow", STOP),
    "hangs": Case("hang", "hang", TIMEOUT, "no answer within", SHORT_S),
    "is late": Case("late", "silent", TIMEOUT, "no answer within", SHORT_S),
    "talks garbage": Case("garbage", "garbage", UNKNOWN, "the answer is not what"),
    "talks without end": Case("huge", "endless", UNKNOWN, ""),
    "answers about another failure": Case("wrong-key", "wrong-key", UNKNOWN, "another failure"),
    # The job's own service may be restarted, so it is asked until the timeout.
    "dies in the middle of its answer": Case("dies", "dies", UNKNOWN, "closed", timeout_s=10.0),
    "refuses": Case("401", "refuses", UNKNOWN, ""),
    "has no such thing": Case("404", "no-tool", UNKNOWN, ""),
    "fails": Case("failed", "tool-error", UNKNOWN, "no logs there"),
    "changes its mind": Case("changes", "changes", STOP),
    "answers twice": Case("twice", "twice", STOP),
    "is noisy": Case("flap", "noise", STOP),
}


def inquiry_of(folder: Path, cycle: int = 0) -> Inquiry:
    key = FailureKey(job=str(folder), generation=0, replica="main-0", cycle=cycle, rank=1)
    return Inquiry(key=key, paths=(str(folder),))


async def ask(source: Source, inquiry: Inquiry, *, settled: bool = True, timeout_s: float = ENOUGH_S) -> Attribution:
    event = asyncio.Event()
    if settled:
        event.set()
    return await source.ask(inquiry, settled=event, timeout_s=timeout_s)


def only(plan: AttributionSpec, folder: Path) -> Source:
    (source,) = sources_of(plan, folder=folder, clock=SystemClock())
    return source


class Servers:
    """Starts servers of one kind with a given behaviour, and a source for each; ends them all."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self._open: list[Source | AttributionServer] = []

    def source(self, case: Case) -> Source:
        made = getattr(self, self.kind)(case)
        self._open.append(made)
        return made

    def mcp(self, case: Case) -> Source:
        command = (sys.executable, "-S", "-P", str(MCP_SCRIPT), case.mcp, str(self.folder / "died"))
        plan = AttributionSpec(enable_mcp=True, mcp_command=command, decision_timeout=1.0, enable_lib=False)
        return only(plan, self.folder)

    def attrsvc(self, case: Case) -> Source:
        write_private(self.folder / "token", TOKEN.encode())
        plan = AttributionSpec(
            attrsvc_url=self.listening(case).url, token_file=str(self.folder / "token"), enable_lib=False
        )
        return only(plan, self.folder)

    def managed(self, case: Case) -> Source:
        self.announce(self.listening(case))
        return only(AttributionSpec(manage_attrsvc=True, enable_lib=False), self.folder)

    def http(self, case: Case) -> Source:
        write_private(self.folder / "token", TOKEN.encode())
        plan = AttributionSpec(
            http_urls=(self.listening(case).url,), token_file=str(self.folder / "token"), enable_lib=False
        )
        return only(plan, self.folder)

    def listening(self, case: Case) -> AttributionServer:
        server = AttributionServer(behaviour(case.attrsvc), token=TOKEN)
        self._open.append(server)
        return server

    def announce(self, server: AttributionServer) -> None:
        place = f'{{"url": "{server.url}", "token": "{TOKEN}"}}'
        write_private(self.folder / "attrsvc.json", place.encode())

    @property
    def server(self) -> AttributionServer:
        return next(one for one in reversed(self._open) if isinstance(one, AttributionServer))

    async def close(self) -> None:
        for one in reversed(self._open):
            closing = one.close()
            if closing is not None:
                await closing


@pytest.fixture
async def servers(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Servers]:
    """Servers of the kind that the parameter names."""
    servers = Servers(request.param, tmp_path)
    yield servers
    await servers.close()


every_kind = pytest.mark.parametrize("servers", ["attrsvc", "managed", "http", "mcp"], indirect=True)
over_http = pytest.mark.parametrize("servers", ["attrsvc", "managed", "http"], indirect=True)
over_mcp = pytest.mark.parametrize("servers", ["mcp"], indirect=True)


@every_kind
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_every_source_bounds_what_its_server_does(servers: Servers, case: Case) -> None:
    """An attribution arrives in time, under the source's name. Without a verdict it names the problem, and never the
    token."""
    source = servers.source(case)
    began = time.monotonic()
    answer = await ask(source, inquiry_of(servers.folder), timeout_s=case.timeout_s)
    assert time.monotonic() - began < case.timeout_s + MARGIN_S
    assert (answer.source, answer.verdict) == (source.name, case.verdict), answer.problem
    assert (answer.problem is None) is (case.problem is None)
    assert (case.problem or "") in (answer.problem or "")
    assert TOKEN not in (answer.problem or "")


@every_kind
async def test_a_connection_is_kept_for_the_next_failure(servers: Servers) -> None:
    """Two failures in a row are asked about over one connection."""
    source = servers.source(CASES["answers"])
    for cycle in (0, 1):
        assert (await ask(source, inquiry_of(servers.folder, cycle))).verdict is STOP
    if servers.kind != "mcp":
        assert servers.server.connections == 1


@every_kind
async def test_failures_at_the_same_time(servers: Servers) -> None:
    """Ten concurrent requests get ten answers."""
    source = servers.source(CASES["answers"])
    found = await asyncio.gather(*(ask(source, inquiry_of(servers.folder, cycle)) for cycle in range(10)))
    assert {answer.verdict for answer in found} == {STOP}


@every_kind
async def test_an_open_circuit_is_not_asked(servers: Servers) -> None:
    """After three failures in a row the source does not ask its server for a while, and says so."""
    source = servers.source(CASES["fails"])
    for cycle in range(3):
        await ask(source, inquiry_of(servers.folder, cycle))
    if servers.kind == "mcp":  # asked again, the source would start another server
        pids = _servers_running(servers.folder)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(wait_gone, pids)
    else:
        asked = len(servers.server.asked)
    answer = await ask(source, inquiry_of(servers.folder, 3))
    assert answer.problem is not None and "circuit open for another" in answer.problem
    if servers.kind == "mcp":
        assert not _servers_running(servers.folder)
    else:
        assert len(servers.server.asked) == asked > 0


@over_http
async def test_a_verdict_may_change_until_the_logs_are_complete(servers: Servers) -> None:
    """A progressive answer, given while the logs are incomplete, is not used. The terminal answer is."""
    source, settled = servers.source(CASES["changes its mind"]), asyncio.Event()
    asking = asyncio.create_task(source.ask(inquiry_of(servers.folder), settled=settled, timeout_s=ENOUGH_S))
    await _until(lambda: any(one.method == "GET" for one in servers.server.asked), asking)
    assert {one.intent for one in servers.server.asked} == {"progressive"}
    settled.set()
    assert (await asking).verdict is STOP
    assert [(one.intent, one.settled) for one in servers.server.asked if one.method == "POST"][-1] == (
        "terminal",
        True,
    )


@over_http
async def test_a_service_is_asked_again_after_its_retry_after(servers: Servers) -> None:
    """A service that answers 429 is asked again after the pause that it names."""
    source = servers.source(Case("429:1", "", STOP))
    assert (await ask(source, inquiry_of(servers.folder))).verdict is STOP
    assert len(servers.server.asked) == 2


@over_http
async def test_a_service_that_asks_for_too_long_is_not_waited_for(servers: Servers) -> None:
    """A Retry-After beyond the remaining time ends the request at once."""
    answer = await ask(servers.source(Case("429:1000", "", UNKNOWN)), inquiry_of(servers.folder))
    assert answer.problem is not None and "1000.0 s from now, would be too late" in answer.problem
    assert answer.latency_s < MARGIN_S


@over_http
async def test_no_redirect_is_followed(servers: Servers) -> None:
    """The token is for one service only: the problem names the redirect's target, and nothing is sent there."""
    other = servers.listening(CASES["answers"])
    answer = await ask(servers.source(Case(f"redirect:{other.url}/", "", UNKNOWN)), inquiry_of(servers.folder))
    assert answer.problem is not None and other.url in answer.problem
    assert other.connections == 0


@over_http
async def test_an_earlier_problem_is_reported_at_the_timeout(servers: Servers) -> None:
    """The service closes the first connection and does not answer the second request: the problem is that of the
    first."""
    source = servers.source(Case("dies-then-hangs", "", UNKNOWN))
    answer = await ask(source, inquiry_of(servers.folder), timeout_s=10.0)
    assert answer.verdict is UNKNOWN
    assert answer.problem is not None and "closed" in answer.problem


@over_http
async def test_a_service_that_is_down(servers: Servers) -> None:
    """The problem of a service that is down names its URL. The job's own service is waited for until the timeout."""
    source = servers.source(CASES["answers"])
    servers.server.close()
    answer = await ask(source, inquiry_of(servers.folder), timeout_s=10.0)
    assert answer.verdict is UNKNOWN
    assert answer.problem is not None and servers.server.url in answer.problem


async def test_the_jobs_own_service_is_waited_for(tmp_path: Path) -> None:
    """A source that is asked before the service has started finds the service once it has."""
    servers = Servers("managed", tmp_path)
    source = only(AttributionSpec(manage_attrsvc=True, enable_lib=False), tmp_path)
    asking = asyncio.create_task(ask(source, inquiry_of(tmp_path)))
    await asyncio.wait({asking}, timeout=0.3)
    assert not asking.done()
    servers.announce(servers.listening(CASES["answers"]))
    assert (await asking).verdict is STOP
    await source.close()
    await servers.close()


async def test_a_wrong_token_is_reported_without_showing_it(tmp_path: Path) -> None:
    """The problem has the service's 401 and the key that names the token, not the token."""
    server = AttributionServer(behaviour("stop"), token="another")
    write_private(tmp_path / "token", TOKEN.encode())
    source = only(
        AttributionSpec(attrsvc_url=server.url, token_file=str(tmp_path / "token"), enable_lib=False), tmp_path
    )
    answer = await ask(source, inquiry_of(tmp_path))
    assert answer.problem is not None and "401" in answer.problem and "token_file" in answer.problem
    assert TOKEN not in answer.problem
    await source.close()
    server.close()


@pytest.mark.parametrize("servers", ["managed"], indirect=True)
async def test_the_jobs_own_service_may_be_started_again_elsewhere(servers: Servers) -> None:
    """The service dies during a request and is started on another port: the same request finds it there."""
    source = servers.source(CASES["hangs"])
    asking = asyncio.create_task(ask(source, inquiry_of(servers.folder)))
    first = servers.server
    await _until(lambda: bool(first.asked), asking)
    servers.announce(servers.listening(CASES["answers"]))
    first.close()
    assert (await asking).verdict is STOP


@over_mcp
async def test_a_server_that_failed_half_way_is_replaced(servers: Servers) -> None:
    """The next failure is answered by a new process; the broken one is not used again."""
    source = servers.source(CASES["dies in the middle of its answer"])
    assert (await ask(source, inquiry_of(servers.folder, 0))).verdict is UNKNOWN
    assert (await ask(source, inquiry_of(servers.folder, 1))).verdict is STOP


@over_mcp
async def test_a_server_that_hangs_is_replaced_and_ended(servers: Servers) -> None:
    """A stopped process is not asked a second time, and no process is left once the source is closed."""
    source = servers.source(CASES["hangs"])
    for cycle in (0, 1):
        answer = await ask(source, inquiry_of(servers.folder, cycle), timeout_s=SHORT_S)
        assert answer.verdict is TIMEOUT
    pids = _servers_running(servers.folder)
    await source.close()
    wait_gone(pids)


@over_mcp
@pytest.mark.parametrize("mode", ["deaf", "chatty", "refuses", "stop"])
async def test_no_server_is_left_behind(servers: Servers, mode: str) -> None:
    """The server's process is gone once the source is closed, however the server behaved."""
    source = servers.source(Case("", mode, UNKNOWN))
    await ask(source, inquiry_of(servers.folder), timeout_s=SHORT_S)
    # The other two are gone before the source answers: it kills a chatty one, and one that refuses has ended.
    assert _servers_running(servers.folder) or mode in ("chatty", "refuses")
    await source.close()
    await asyncio.to_thread(until, lambda: not _servers_running(servers.folder), "the server is gone")


async def test_a_server_is_killed_if_the_wait_for_its_end_is_cancelled(tmp_path: Path) -> None:
    """The server does not end by itself; cancelling the wait for its end kills it at once."""
    started = asyncio.Event()

    async def hold() -> None:
        # At the top of the module this import would cost pytest's collection a second.
        from nvrx_slurm.attribution.sources.mcp_session import child_streams

        async with child_streams((sys.executable, "-S", "-P", str(MCP_SCRIPT), "deaf", str(tmp_path / "died"))):
            started.set()
            await asyncio.Event().wait()

    holder = asyncio.create_task(hold())
    await started.wait()
    pids = _servers_running(tmp_path)
    assert pids
    holder.cancel()
    await asyncio.wait({holder}, timeout=0.1)
    assert not holder.done()
    holder.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holder
    wait_gone(pids)


async def test_what_a_server_that_has_ended_left_is_gone(tmp_path: Path) -> None:
    """The command ends by itself; a process that it has started is killed."""
    from nvrx_slurm.attribution.sources.mcp_session import child_streams

    left = tmp_path / "pid"
    async with child_streams(("sh", "-c", f"sleep 600 & echo $! > {left}.new && mv {left}.new {left}")):
        await asyncio.to_thread(until, left.exists, "it has started a process")
    wait_gone([int(left.read_text())])


async def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    """The problem names the command and the key that sets it."""
    answer = await ask(
        only(AttributionSpec(enable_mcp=True, mcp_command=("/no/such",), enable_lib=False), tmp_path),
        inquiry_of(tmp_path),
    )
    assert answer.problem is not None and "mcp_command '/no/such'" in answer.problem


async def test_our_own_server_answers_our_own_source(tmp_path: Path) -> None:
    """`mcp` without a command starts `nvrx-slurm mcp`, which gives the same verdict as the built-in rules."""
    write_failure(tmp_path / "logs")
    plan = AttributionSpec(enable_mcp=True, enable_lib=True)
    sources = sources_of(plan, folder=tmp_path, clock=SystemClock())
    lib, mcp = await asyncio.gather(*(ask(one, inquiry_of(tmp_path / "logs"), timeout_s=60.0) for one in sources))
    for source in sources:
        await source.close()
    assert (lib.source, mcp.source) == ("lib", "mcp")
    assert (lib.verdict, lib.fault, lib.primary) == (mcp.verdict, mcp.fault, mcp.primary), mcp.problem
    assert lib.verdict is STOP


async def test_the_built_in_rules_wait_for_the_failing_ranks_log(tmp_path: Path) -> None:
    """Asked before the log is written, the source waits until the workers are gone, and then finds the failure."""
    source, settled = only(AttributionSpec(enable_lib=True, decision_timeout=ENOUGH_S), tmp_path), asyncio.Event()
    asking = asyncio.create_task(source.ask(inquiry_of(tmp_path / "logs"), settled=settled, timeout_s=ENOUGH_S))
    await asyncio.wait({asking}, timeout=0.2)
    assert not asking.done()
    write_failure(tmp_path / "logs")
    settled.set()
    answer = await asking
    assert (answer.verdict, answer.ranks) == (STOP, (1,))
    await source.close()


async def test_the_built_in_rules_report_what_they_cannot_read(tmp_path: Path) -> None:
    """Logs that do not exist are a problem, not a verdict."""
    source = only(AttributionSpec(enable_lib=True), tmp_path)
    answer = await ask(source, inquiry_of(tmp_path / "nowhere"))
    await source.close()
    assert answer.verdict is UNKNOWN
    assert answer.problem is not None and "nowhere" in answer.problem


async def test_a_rule_that_never_ends(tmp_path: Path) -> None:
    """A user's pattern that backtracks for years is a timeout, and the next failure is analysed."""
    (tmp_path / "mine.yaml").write_text(ENDLESS_RULE)
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / "rank-1.err").write_text("a" * 80 + "!\n")
    write_failure(tmp_path / "logs")
    source = only(AttributionSpec(enable_lib=True, rules=(str(tmp_path / "mine.yaml"),)), tmp_path)
    await source.open()
    trapped = await ask(source, inquiry_of(tmp_path / "trap"), timeout_s=SHORT_S)
    assert trapped.verdict is TIMEOUT
    assert (await ask(source, inquiry_of(tmp_path / "logs"))).verdict is STOP
    await source.close()


async def test_the_analysis_is_killed(tmp_path: Path) -> None:
    """The analysis process dies while it works, as it would without memory: the problem says so, and another process
    analyses the next failure."""
    write_failure(tmp_path / "logs")
    source = only(AttributionSpec(enable_lib=True), tmp_path)
    before = set(descendants(os.getpid()))
    await source.open()
    (process,) = set(descendants(os.getpid())) - before
    os.kill(process, signal.SIGSTOP)
    asking = asyncio.create_task(ask(source, inquiry_of(tmp_path / "logs")))
    await asyncio.wait({asking}, timeout=0.1)
    os.kill(process, signal.SIGKILL)
    died = await asking
    assert (died.verdict, died.problem) == (UNKNOWN, f"{DIED} (-9)")
    assert (await ask(source, inquiry_of(tmp_path / "logs"))).verdict is STOP
    await source.close()


async def test_a_rule_file_that_is_wrong_is_a_problem(tmp_path: Path) -> None:
    """The answer names the broken file, and has the verdict of the other rules."""
    (tmp_path / "mine.yaml").write_text("rules: [\n")
    write_failure(tmp_path / "logs")
    plan = AttributionSpec(enable_lib=True, rules=(str(tmp_path / "mine.yaml"),))
    source = only(plan, tmp_path)
    answer = await ask(source, inquiry_of(tmp_path / "logs"))
    await source.close()
    assert (answer.verdict, answer.ranks) == (STOP, (1,))
    assert answer.problem is not None and "mine.yaml" in answer.problem


def _servers_running(folder: Path) -> list[int]:
    """The scripted servers that were started for this test."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            mine = entry.name.isdigit() and str(folder / "died").encode() in (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if mine and is_alive(int(entry.name)):
            found.append(int(entry.name))
    return found


async def _until(happened, asking: asyncio.Task[Attribution]) -> None:  # type: ignore[no-untyped-def]
    """Wait until something has happened at the server, which runs in another thread."""
    async with asyncio.timeout(ENOUGH_S):
        while not happened():
            assert not asking.done(), asking
            await asyncio.wait({asking}, timeout=0.02)
