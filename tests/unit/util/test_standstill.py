"""How a process itself measures for how long it was stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from nvrx_slurm.lab.simulation.loop import VirtualClock, VirtualLoop
from nvrx_slurm.util.standstill import standstill

PROGRAM = """
import asyncio
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.standstill import standstill

async def main():
    stood_still = asyncio.ensure_future(standstill(SystemClock()))
    await asyncio.sleep(0)  # it has looked at the clock once
    print("announced", flush=True)
    print(await stood_still)

asyncio.run(main())
"""


def test_process_that_is_stopped_after_the_announcement_measures_how_long():
    """SIGSTOP comes two seconds after the announcement, as Slurm sends it."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "announced\n"
        os.kill(process.pid, signal.SIGSTOP)
        try:
            process.wait(timeout=4.0)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGCONT)
        assert 3.0 < float(process.stdout.readline()) < 60.0


def test_announcement_that_nothing_follows_is_over_after_a_while():
    """If no stop follows, the standstill ends with 0 s, and the job goes on."""
    loop = VirtualLoop()
    assert loop.run(standstill(VirtualClock(loop))) == 0.0
    loop.close()
