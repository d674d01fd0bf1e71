"""A service in this process, with real workers whose answers the test writes, and a client for it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from nvrx_slurm.attribution.service import app
from nvrx_slurm.attribution.service.confinement import Roots
from nvrx_slurm.attribution.service.metrics import Metrics
from nvrx_slurm.attribution.service.service import AttributionService
from nvrx_slurm.attribution.service.storage import RetentionLimits, StateFolder
from nvrx_slurm.attribution.service.workers import AnalysisWorker, WorkerSetup
from nvrx_slurm.journal.verdicts import FailureKey, Inquiry
from nvrx_slurm.util.clock import SystemClock

SCRIPTED = (sys.executable, str(Path(__file__).with_name("scripted_worker.py")))
SETUP = WorkerSetup(roots=(), rules=(), memory_bytes=1 << 30)


@dataclass
class Fleet:
    """A folder of logs with a service beside it, and what a test asks of it."""

    room: Path
    clock: SystemClock = field(default_factory=SystemClock)
    services: list[AttributionService] = field(default_factory=list)
    clients: list[httpx2.AsyncClient] = field(default_factory=list)

    @property
    def logs(self) -> Path:
        return self.room / "logs"

    def worker(self, *, timeout_s: float = 30.0, margin_s: float = 5.0) -> AnalysisWorker:
        return AnalysisWorker(SETUP, timeout_s=timeout_s, clock=self.clock, program=SCRIPTED, margin_s=margin_s)

    def start(
        self,
        *,
        workers: int = 1,
        timeout_s: float = 30.0,
        state: bool = False,
        bounds: RetentionLimits | None = None,
        **rest: Any,
    ) -> httpx2.AsyncClient:
        """Start a service; returns a client for it."""
        metrics, results = Metrics(), None
        if state:
            (self.room / "state").mkdir(exist_ok=True)
            results = StateFolder(self.room / "state")
        pool = [self.worker(timeout_s=timeout_s, margin_s=0.0 if timeout_s < 5 else 5.0) for _ in range(workers)]
        service = AttributionService(
            Roots([self.logs]),
            pool,
            clock=self.clock,
            metrics=metrics,
            results=results,
            bounds=bounds or RetentionLimits(),
        )
        self.services.append(service)
        service.start()
        built = app.build(service, metrics, clock=self.clock, **rest)
        client = httpx2.AsyncClient(transport=httpx2.ASGITransport(built), base_url="http://service")
        self.clients.append(client)
        return client

    def inquiry(self, says: str | None, cycle: int = 0) -> Inquiry:
        """An inquiry about a log with this content; None: the log is a FIFO into which the test writes later."""
        log = self.logs / f"cycle-{cycle}.log"
        if says is None:
            os.mkfifo(log)
        else:
            log.write_text(says)
        key = FailureKey(job="/jobs/1", generation=0, replica="main-0", cycle=cycle, rank=3)
        return Inquiry(key=key, paths=(str(log),))

    async def write(self, inquiry: Inquiry, says: str) -> None:
        """Write the log; a worker that reads a FIFO then goes on."""
        await asyncio.to_thread(Path(inquiry.paths[0]).write_text, says)

    async def close(self) -> None:
        for client in self.clients:
            await client.aclose()
        for service in self.services:
            await service.close()


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    # On a busy machine this process may not run for seconds.
    monkeypatch.setattr("nvrx_slurm.attribution.service.service.FILE_SYSTEM_S", 60.0)
    (tmp_path / "logs").mkdir()
    fleet = Fleet(tmp_path)
    yield fleet
    await fleet.close()


async def ask(
    client: httpx2.AsyncClient, inquiry: Inquiry, intent: str = "terminal", *, wait_s: int = 20, **rest: Any
) -> httpx2.Response:
    """Submit an inquiry and wait for the reply."""
    body = msgspec.json.encode({"inquiry": inquiry, "intent": intent, **rest})
    headers = {"Content-Type": "application/json", "Prefer": f"wait={wait_s}"}
    return await client.post("/v1/inquiries", content=body, headers=headers)


async def until(client: httpx2.AsyncClient, holds: Callable[[dict[str, Any]], bool], within_s: float = 20.0) -> None:
    """Wait until the service's stats satisfy this condition."""
    async with asyncio.timeout(within_s):
        while not holds((await client.get("/v1/stats")).json()):  # noqa: ASYNC110 -- the service is asked over HTTP
            await asyncio.sleep(0.01)
