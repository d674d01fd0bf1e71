"""How a controller begins: it reads its inbox before it judges what is overdue."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nvrx_slurm.controller.controller import INBOX_STALL_S, Controller, InboundFact
from nvrx_slurm.journal.records import NodeFenced, Tick
from nvrx_slurm.report.failure_replay import NoBroker
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.files import JobFiles
from tests.unit.core.fleet import plain


class OneRead:
    """A store whose inbox is empty; a read is answered once `answers` is set."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()

    async def inbox(self, after: str) -> list[tuple[str, bytes]]:
        self.asked.set()
        await self.answers.wait()
        self.answers.clear()
        return []


class Hand:
    """A monotonic clock that the test moves."""

    at = 0.0

    def monotonic(self) -> float:
        return self.at


def reader(store: Any, clock: Any) -> Controller:
    """A controller that only reads its inbox."""
    environment: Any = SimpleNamespace(
        host="head",
        pid=1,
        files=JobFiles(Path("/jobs/42")),
        mirror=None,
        liveness_server=lambda *_: None,
        attribution_broker=lambda _: NoBroker(),
    )
    nobody: Any = None
    return Controller(
        plan=plain(),
        info=nobody,
        environment=environment,
        store=store,
        heartbeats=nobody,
        token="",
        bind="*",
        clock=clock,
    )


async def test_nothing_is_overdue_before_the_inbox_has_been_read() -> None:
    """Deadlines that passed without a controller wait for the facts that arrived meanwhile, until the first read is
    back."""
    store = OneRead()
    controller = reader(store, SystemClock())
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


@pytest.mark.parametrize(("took_s", "is_read"), [(2.0, True), (INBOX_STALL_S, False)])
async def test_answer_from_before_a_freeze_is_not_taken_for_a_read(took_s: float, is_read: bool) -> None:
    """Facts may have arrived after the store sent the answer. The next read has them."""
    store, clock = OneRead(), Hand()
    controller = reader(store, clock)
    reading = asyncio.create_task(controller._read_inbox("0"))
    for takes_s, then in ((took_s, is_read), (2.0, True)):
        await store.asked.wait()
        store.asked.clear()
        clock.at += takes_s
        store.answers.set()
        await store.asked.wait()
        assert await controller._has_read_all() is then
    reading.cancel()


@pytest.mark.parametrize("fact", [NodeFenced(node="unknown", incarnation="a", proof="its kernel says so"), Tick()])
def test_fact_that_changes_nothing_dates_no_other(fact: NodeFenced | Tick) -> None:
    """After a freeze the controller may decide about such a fact before it reads what has arrived in the store
    meanwhile."""
    clock = Hand()
    controller = reader(OneRead(), clock)
    controller.server_clock.set(100.0)
    clock.at += 10.0
    assert controller._decide([InboundFact(fact)])[0].entries == []
    assert controller.server_clock.stamp(103.0) == 103.0
