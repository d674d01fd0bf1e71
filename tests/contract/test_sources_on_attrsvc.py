"""The source `attrsvc` on the real service: `nvrx-slurm attrsvc`, its own process, over HTTP."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.attribution.sources import Source, sources_of
from nvrx_slurm.jobspec.model import AttributionSpec
from nvrx_slurm.journal.verdicts import Attribution, FailureKey, Inquiry, Verdict
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.files import write_private
from tests.contract.failing_log import RANK, write_failure

WAIT_S = 60.0
TOKEN = "t0k3n-t0k3n-t0k3n"

Serve = Callable[..., Awaitable["Service"]]


class Service:
    """A service that listens, and may read below the job folder."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process, self.url = process, url

    async def kill(self) -> None:
        if self.process.returncode is None:
            os.kill(self.process.pid, signal.SIGKILL)
        await self.process.wait()


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Starts services that keep their results in one state folder, and announces each as the job's own."""
    services: list[Service] = []
    write_private(tmp_path / "token", TOKEN.encode())

    async def serve() -> Service:
        options = {
            "--bind": "127.0.0.1:0",
            "--root": tmp_path,
            "--token-file": tmp_path / "token",
            "--state-dir": tmp_path / "state",
            "--workers": 1,
        }
        arguments = [str(part) for option in options.items() for part in option]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "nvrx_slurm", "attrsvc", *arguments), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        said = await asyncio.wait_for(process.stdout.readline(), WAIT_S)
        listening = re.search(r"http://[\d.]+:\d+", said.decode())
        assert listening is not None, said
        services.append(Service(process, listening[0]))
        place = {"url": services[-1].url, "token": TOKEN}
        write_private(tmp_path / "attrsvc.json", msgspec.json.encode(place))
        return services[-1]

    yield serve
    for service in services:
        await service.kill()


@pytest.fixture
async def source(tmp_path: Path) -> AsyncIterator[Source]:
    """The source that asks the job's own service."""
    plan = AttributionSpec(manage_attrsvc=True, decision_timeout=WAIT_S, enable_lib=False)
    (source,) = sources_of(plan, folder=tmp_path, clock=SystemClock())
    yield source
    await source.close()


def inquiry_of(folder: Path, logs: Path) -> Inquiry:
    key = FailureKey(job=str(folder), generation=0, replica="main-0", cycle=0, rank=RANK)
    return Inquiry(key=key, paths=(str(logs),))


async def ask(source: Source, inquiry: Inquiry, settled: asyncio.Event) -> Attribution:
    return await source.ask(inquiry, settled=settled, timeout_s=WAIT_S)


@pytest.fixture
def settled() -> asyncio.Event:
    """Set: the logs are complete."""
    settled = asyncio.Event()
    settled.set()
    return settled


async def test_the_service_answers(serve: Serve, source: Source, settled: asyncio.Event, tmp_path: Path) -> None:
    """The verdict of the rules, with its evidence, under the source's own name. A second request gets the same
    verdict."""
    await serve()
    write_failure(tmp_path / "logs")
    first = await ask(source, inquiry_of(tmp_path, tmp_path / "logs"), settled)
    assert (first.source, first.verdict, first.ranks) == ("attrsvc", Verdict.STOP, (RANK,)), first.problem
    again = await ask(source, inquiry_of(tmp_path, tmp_path / "logs"), settled)
    assert (again.verdict, again.primary) == (first.verdict, first.primary)


async def test_a_log_that_is_written_during_the_request_counts(serve: Serve, source: Source, tmp_path: Path) -> None:
    """A source that is asked before the failing rank has written its error asks the service again once the logs are
    complete, and gets the verdict."""
    await serve()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.err").write_text("step 1\n")
    settled = asyncio.Event()
    asking = asyncio.create_task(ask(source, inquiry_of(tmp_path, tmp_path / "logs"), settled))
    await asyncio.wait({asking}, timeout=0.5)
    assert not asking.done()
    write_failure(tmp_path / "logs")
    settled.set()
    assert (await asking).verdict is Verdict.STOP


async def test_a_service_that_was_killed_and_moved(
    serve: Serve, source: Source, settled: asyncio.Event, tmp_path: Path
) -> None:
    """A service that is killed after its answer, and started on another port, gives the same answer, though the log
    has changed."""
    first = await serve()
    write_failure(tmp_path / "logs")
    before = await ask(source, inquiry_of(tmp_path, tmp_path / "logs"), settled)
    await first.kill()
    (tmp_path / "logs" / f"rank-{RANK}.err").write_text("all is well\n")
    await serve()
    after = await ask(source, inquiry_of(tmp_path, tmp_path / "logs"), settled)
    assert (after.verdict, after.primary) == (before.verdict, before.primary) == (Verdict.STOP, before.primary)


async def test_logs_that_it_may_not_read(
    serve: Serve, source: Source, settled: asyncio.Event, tmp_path: Path
) -> None:
    """The service refuses paths outside its roots, and its refusal is the source's problem."""
    await serve()
    answer = await ask(source, inquiry_of(tmp_path, Path("/etc")), settled)
    assert answer.verdict is Verdict.UNKNOWN
    assert answer.problem is not None and "403" in answer.problem
