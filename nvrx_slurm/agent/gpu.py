"""Wait until the GPUs' memory is free again: the driver gives a killed worker's back some time after its death."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from asyncio.subprocess import DEVNULL, PIPE

from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger

log = get_logger("agent")

ASK_EVERY_S = 0.5
ANSWER_S = 10.0
MIB = 1 << 20


async def used_bytes() -> list[int] | None:
    """Memory in use on each GPU of this node, by nvidia-smi; None: there is none, or it does not say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    asked = await asyncio.create_subprocess_exec(
        program,
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=DEVNULL,
    )
    try:
        said, _ = await asyncio.wait_for(asked.communicate(), ANSWER_S)
        return [int(line) * MIB for line in said.decode().split()] if asked.returncode == 0 else None
    except (TimeoutError, ValueError):
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            if asked.returncode is None:
                asked.kill()


async def reclaim(below_bytes: int, budget_s: float, clock: Clock) -> float:
    """Wait until every GPU uses less than `below_bytes`, up to `budget_s`. Returns how long that took, in seconds.

    Without nvidia-smi there is nothing to wait for.
    """
    began = clock.monotonic()
    while (used := await used_bytes()) is not None and max(used, default=0) >= below_bytes:
        took_s = clock.monotonic() - began
        if took_s >= budget_s:
            log.warning("GPU memory is still in use after %.0f s: %s MiB; going on", took_s, [b // MIB for b in used])
            break
        log.info("waiting for GPU memory: %s MiB used, %.0f s left", [b // MIB for b in used], budget_s - took_s)
        await asyncio.sleep(ASK_EVERY_S)
    return clock.monotonic() - began
