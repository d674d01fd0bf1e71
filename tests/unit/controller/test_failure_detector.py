"""Silence is judged by what an answer of the store can show."""

from __future__ import annotations

import asyncio
from typing import Any

from nvrx_slurm.journal.records import NodeLost
from nvrx_slurm.store.heartbeat_reader import HeartbeatBatch
from tests.unit.controller.test_controller import Hand, OneRead, reader
from tests.unit.core.fleet import running


class HandedOver:
    """Heartbeats that arrive when the test delivers them."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answers = asyncio.Queue[list[tuple[float, bytes, bytes]]]()

    async def read(self) -> HeartbeatBatch:
        self.asked.set()
        return HeartbeatBatch(0.0, await self.answers.get())

    async def answer(self) -> None:
        """Answer with nothing new. Returns once the next answer is requested."""
        self.asked.clear()
        self.answers.put_nowait([])
        await self.asked.wait()


async def test_an_answer_from_before_a_freeze_proves_no_silence() -> None:
    """The next answer has the heartbeats that all nodes have sent meanwhile; if it has none, the nodes are lost."""
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
