"""Child processes that do not outlive the batch host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence

from nvrx_slurm.processes import dies_with_parent


async def start(
    argv: Sequence[str], env: Mapping[str, str], *, on_death: signal.Signals, own_session: bool
) -> Process:
    """Start a child that inherits our output."""
    return await asyncio.create_subprocess_exec(
        *argv, env=dict(env), stdin=DEVNULL, start_new_session=own_session, preexec_fn=dies_with_parent(on_death)
    )


def send_signal(child: Process, number: signal.Signals) -> None:
    """Signal a child that still runs.

    Not by `Process.send_signal`, which polls first and may take the exit status away from who waits for it.
    """
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)


async def end(children: Sequence[Process], *, polite_s: float) -> None:
    """SIGTERM, up to `polite_s` for them to end, then SIGKILL."""
    for number, wait_s in ((signal.SIGTERM, polite_s), (signal.SIGKILL, 5.0)):
        left = [child for child in children if child.returncode is None]
        for child in left:
            send_signal(child, number)
        if left:
            await asyncio.wait([asyncio.ensure_future(child.wait()) for child in left], timeout=wait_s)
