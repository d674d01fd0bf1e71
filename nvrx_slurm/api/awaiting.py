"""Waiting for a job, or for what it answers, in an asyncio program."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvrx_slurm.api.handle import Job


class AwaitableJob:
    """A job whose end and whose answers can be awaited; the event loop is never blocked."""

    def __init__(self, job: Job) -> None:
        self.job = job

    async def wait(self, timeout: float | None = None) -> int:
        """As `Job.wait`."""
        watch = self.job.end_watch(timeout, None)
        while (code := await asyncio.to_thread(watch.look)) is None:  # noqa: ASYNC110 - a shared folder sends no event
            await asyncio.sleep(watch.pause_s())
        return code

    async def dump(
        self, ranks: Collection[int] | None = None, *, replica: str | None = None, timeout: float = 30.0
    ) -> dict[int, str]:
        """As `Job.dump`."""
        return await asyncio.to_thread(self.job.dump, ranks, replica=replica, timeout=timeout)
