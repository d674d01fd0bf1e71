"""How a controller begins: it listens before it judges what is overdue."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvrx_slurm.controller.controller import INBOX_STALL_S, Controller
from nvrx_slurm.report.failure_replay import NoBroker
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.files import JobFiles
from tests.unit.core.fleet import plain


class OneRead:
    """A store whose inbox is empty, and is read once; after that it does not answer."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()

    async def inbox(self, after: str) -> list[tuple[str, bytes]]:
        self.asked.set()
        await self.answers.wait()
        self.answers.clear()
        return []


async def test_nothing_is_overdue_before_the_inbox_has_been_read() -> None:
    """Deadlines that passed while nobody led wait for what was said meanwhile, until the first read is back."""
    store: Any = OneRead()
    environment: Any = SimpleNamespace(
        host="head",
        pid=1,
        files=JobFiles(Path("/jobs/42")),
        mirror=None,
        liveness_server=lambda *_: None,
        attribution_broker=lambda _: NoBroker(),
    )
    nobody: Any = None
    controller = Controller(
        plan=plain(),
        info=nobody,
        environment=environment,
        store=store,
        heartbeats=nobody,
        token="",
        bind="*",
        clock=SystemClock(),
    )
    reading = asyncio.create_task(controller._read_inbox("0"))
    await store.asked.wait()
    assert not await controller._has_read_all()
    store.asked.clear()
    store.answers.set()
    await store.asked.wait()
    assert await controller._has_read_all()
    controller.inbox_read_at -= INBOX_STALL_S
    assert not await controller._has_read_all()
    reading.cancel()
