"""What a worker's environment must say for the hook to be there."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

DUMP_SIGNAL: int = signal.SIGRTMAX - 3
"""What asks a worker for its stacks: 61. Real-time, because every lower signal has its users among launchers, Slurm's
`--signal`, profilers and checkpoint requests. Of the real-time ones C libraries take the first few (32 to 34),
systemd, containers and Mono count up from there, valgrind and qemu use the last (64). Nothing known uses this one."""

HOOK_DIR = Path(__file__).resolve().parent / "hook"


def hook_environment(inherited: Mapping[str, str], dump_dir: Path) -> dict[str, str]:
    """The variables to add for one worker, whose environment without them is `inherited`.

    The hook goes first on PYTHONPATH, and what was there follows; `dump_dir` must exist when the worker starts, in
    memory of this node and of the worker's user only. A crash in native code prints its stacks to stderr
    (PYTHONFAULTHANDLER) unless the user has set that variable to something, be it nothing.
    """
    hook = str(HOOK_DIR)
    others = [part for part in inherited.get("PYTHONPATH", "").split(os.pathsep) if part and part != hook]
    return {
        "PYTHONFAULTHANDLER": inherited.get("PYTHONFAULTHANDLER", "1"),
        "PYTHONPATH": os.pathsep.join([hook, *others]),
        "NVRX_DUMP_DIR": str(dump_dir),
        "NVRX_DUMP_SIGNAL": str(DUMP_SIGNAL),
    }
