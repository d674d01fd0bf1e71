"""Silence is judged by what the answer of the store can know."""

from __future__ import annotations

import asyncio
from typing import Any

from nvrx_slurm.journal.records import NodeLost
from nvrx_slurm.store.heartbeat_reader import HeartbeatBatch
from tests.unit.controller.test_controller import Hand, OneRead, reader
from tests.unit.core.fleet import running


class HandedOver:
    """Heartbeats that come when the test hands them over."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answers = asyncio.Queue[list[tuple[float, bytes, bytes]]]()

    async def read(self) -> HeartbeatBatch:
        self.asked.set()
        return HeartbeatBatch(0.0, await self.answers.get())

    async def answer(self) -> None:
        """With nothing new. Returns once the next answer is asked for."""
        self.asked.clear()
        self.answers.put_nowait([])
        await self.asked.wait()


async def test_an_answer_from_before_a_freeze_proves_no_silence() -> None:
    """All nodes have sent heartbeats meanwhile, which the next answer has; where it has none, they are lost."""
    job, clock, heartbeats, posted = running().job, Hand(), HandedOver(), list[Any]()
    detector = reader(OneRead(), clock).detector
    detector.nodes, detector.post, detector.pace_s = lambda: job.nodes, posted.append, 0.0
    detector.heartbeats = heartbeats  # type: ignore[assignment]
    for node in job.nodes:
        detector.liveness.watch(node, clock.at)
        detector.liveness.heard(node, clock.at)
    detecting = asyncio.create_task(detector.run())
    await heartbeats.asked.wait()
    clock.at += 10_000.0
    await heartbeats.answer()
    assert posted == []
    await heartbeats.answer()
    assert [(type(fact), fact.node) for fact in posted] == [(NodeLost, node) for node in job.nodes]
    detecting.cancel()
