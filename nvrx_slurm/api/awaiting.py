"""Waiting for a job in an asyncio program."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvrx_slurm.api.handle import Job


class AwaitableJob:
    """A job whose end can be awaited; the event loop is never blocked."""

    def __init__(self, job: Job) -> None:
        self.job = job

    async def wait(self, timeout: float | None = None) -> int:
        """As `Job.wait`."""
        watch = self.job.end_watch(timeout, None)
        while (code := await asyncio.to_thread(watch.look)) is None:  # noqa: ASYNC110 - a shared folder wakes nobody
            await asyncio.sleep(watch.pause_s())
        return code
