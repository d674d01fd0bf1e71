"""Child processes that do not outlive the batch host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Collection, Mapping, Sequence

from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import dies_with_parent, restore_descriptor_limit

log = get_logger("batch")

SAY_EVERY_S = 1.0
KILL_S = 5.0
"""How long a child may linger after SIGKILL: it is in uninterruptible sleep (D)."""


async def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    on_death: signal.Signals,
    own_session: bool,
    pending: Collection[signal.Signals] = (),
    pass_fds: Collection[int] = (),
) -> Process:
    """Start a child that inherits our output. Signals of `pending` wait until it unblocks them: one that is sent
    before the child can handle it is not lost, and does not kill it."""
    adopt = dies_with_parent(on_death)

    def prepare() -> None:
        adopt()
        restore_descriptor_limit()
        signal.pthread_sigmask(signal.SIG_BLOCK, pending)

    return await asyncio.create_subprocess_exec(
        *argv,
        env=dict(env),
        stdin=DEVNULL,
        pass_fds=tuple(pass_fds),
        start_new_session=own_session,
        preexec_fn=prepare,
    )


def send_signal(child: Process, number: signal.Signals) -> None:
    """Signal a child that still runs.

    Not by `Process.send_signal`, which polls first and may take the exit status away from who waits for it.
    """
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)


async def ended(children: Mapping[str, Process], *, within_s: float) -> bool:
    """Wait until all of these (name → child) have ended, `within_s` at most; say once a second who has not."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while left := [name for name, child in children.items() if child.returncode is None]:
        left_s = deadline - loop.time()
        if left_s <= 0.0:
            return False
        ends = [asyncio.ensure_future(children[name].wait()) for name in left]
        await asyncio.wait(ends, timeout=min(SAY_EVERY_S, left_s))
        if still := [name for name, end in zip(left, ends, strict=True) if not end.done()]:
            log.info("waiting for %s to end, for up to %.0f s", ", ".join(still), max(0.0, deadline - loop.time()))
    return True


async def end(children: Mapping[str, Process], *, polite_s: float) -> None:
    """SIGTERM, up to `polite_s` for them to end, then SIGKILL."""
    for number, wait_s in ((signal.SIGTERM, polite_s), (signal.SIGKILL, KILL_S)):
        for child in children.values():
            send_signal(child, number)
        await ended(children, within_s=wait_s)
