"""How long whole commands take, from before they are started to their exit."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from functools import partial

from bench.errors import PeerFailed
from bench.tables import in_turns
from nvrx_slurm.jobspec import env
from nvrx_slurm.util.clock import SystemClock

COMMAND_S = 30.0


def time_all(commands: Mapping[str, Sequence[str]], runs: int, given: Mapping[str, str]) -> dict[str, list[float]]:
    """Seconds of each run by name, in turns. Raises PeerFailed."""
    for argv in commands.values():
        time_one(argv, given)  # what is read for the first time is read from the disk
    return in_turns(runs, {name: partial(time_one, argv, given) for name, argv in commands.items()})


def time_one(argv: Sequence[str], given: Mapping[str, str]) -> float:
    """Seconds of one run, with `given` added to its environment."""
    clock = SystemClock()
    began = clock.monotonic()
    process = subprocess.run(
        argv, env=env.child_environment(given), capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    took = clock.monotonic() - began
    if process.returncode != 0:
        raise PeerFailed(f"{' '.join(argv)} exited with {process.returncode}: {process.stderr[-2000:]}")
    return took
