"""What workers that were killed have left in this node's memory."""

from __future__ import annotations

from pathlib import Path

from nvrx_slurm.util.log import get_logger

log = get_logger("agent")

RINGS = "nvrx-ring-*"


def sweep_rings(memory: Path = Path("/dev/shm")) -> None:
    """Remove the payload rings whose creators are dead: a ring's own tracker may have been killed with its worker.

    In a thread, where nobody may wait: it takes a while to give back gigabytes.
    """
    if any(memory.glob(RINGS)):  # most jobs have none, and what knows them takes 2 MB of an agent
        from nvrx_slurm.transport.ring import sweep

        for name in sweep():
            log.info("removed the payload ring %s: its worker is dead", name)
