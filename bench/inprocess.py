"""A fault in a wrapped function → the last rank is in it again, in the same processes; beside NVRx's wrapper."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

from bench.inprocess_group import NEEDS, NVRX, OURS, SIDES, Group, Options, group, valkey
from bench.processes import interpreter, temporary_folder
from bench.tables import Target, print_rows, print_targets
from nvrx_slurm.util.clock import SystemClock

SIZE = 8
VICTIM = SIZE - 1  # NVRx's rank 0 holds its store, and must not die
DEFAULTS: Options = {}
TIGHT: Options = {"interval_s": 0.01, "last_call_s": 0.0}
RAISED, RAISED_TIGHT, KILLED_TIGHT = (
    "from a raised exception to the last rank's return, default options",
    "the same, intervals of 10 ms and no last call",
    "from a rank's SIGKILL to the last one's return, intervals of 10 ms and no last call",
)
TARGETS = {RAISED: 20.0, RAISED_TIGHT: 5.0, KILLED_TIGHT: 5.0}

Samples = dict[str, dict[str, list[float]]]  # what → who → seconds


def inprocess(runs: int, peers: Path) -> None:
    """Both sides in turn; with each group as many exceptions as runs, and with tight options a SIGKILL at its end."""
    samples: Samples = defaultdict(lambda: defaultdict(list))
    asyncio.run(_measure(samples, runs, interpreter(NEEDS, peers)))
    for what, rows in samples.items():
        print_rows(f"{what}, {SIZE} ranks", rows, unit="ms", first=OURS)
        faster = f"≥ {TARGETS[what]:.0f} × faster than {NVRX}"
        print_targets(rows, [Target(faster, OURS, (NVRX,), at_least=TARGETS[what])])


async def _measure(samples: Samples, runs: int, python: Path) -> None:
    with temporary_folder() as room:
        async with valkey(room) as store:
            for side in SIDES:
                async with group(python, side, SIZE, DEFAULTS, store, room) as ranks:
                    for iteration in range(1, runs + 1):
                        samples[RAISED][side].append(await _raise(ranks, iteration))
                    await ranks.finish()
            for _ in range(runs):  # a rank that was killed is gone: the next SIGKILL needs another group
                for side in SIDES:
                    async with group(python, side, SIZE, TIGHT, store, room) as ranks:
                        samples[RAISED_TIGHT][side].append(await _raise(ranks, 1))
                        killed = SystemClock().monotonic()
                        ranks.kill(VICTIM)
                        samples[KILLED_TIGHT][side].append(await ranks.until_entered(2, SIZE - 1) - killed)
                        await ranks.finish()


async def _raise(ranks: Group, iteration: int) -> float:
    """One rank raises; seconds until all are in the function again."""
    ranks.send_line(VICTIM, "raise")
    raised = await ranks.until_printed("raised")
    return await ranks.until_entered(iteration, SIZE) - raised
