"""The floor: a loop that only respawns. What any launcher must pay on this machine."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench import processes
from bench.launchers.base import NODES, WORKERS_PER_NODE, Task

LOOP = Path(__file__).parent.parent / "bare_loop.py"


@dataclass(frozen=True)
class Bare:
    """Starts `bare_loop.py`."""

    name: str = "bare loop"

    def start(self, task: Task) -> BareFleet:
        argv = [sys.executable, "-S", "-E", str(LOOP), str(NODES), str(WORKERS_PER_NODE), str(task.spares)]
        log = task.room / "bare.log"
        return BareFleet(
            processes.start([*argv, *task.command], log=log, extra={"OMP_NUM_THREADS": "1"}), log, NODES + task.spares
        )


class BareFleet:
    """The hub, whose children are the nodes."""

    def __init__(self, hub: subprocess.Popen[bytes], log: Path, nodes: int) -> None:
        self._hub, self._log, self._nodes = hub, log, nodes
        self.parent_of_nodes = hub.pid

    def wait_spares(self, timeout_s: float) -> None:
        """The hub starts no workers before all its nodes have joined."""
        processes.wait_until(
            lambda: "all nodes are here" in self._log.read_text(errors="replace"), timeout_s, f"{self._nodes} nodes"
        )

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def stop(self) -> None:
        processes.end(self._hub)
