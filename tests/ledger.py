"""The ledger that ledger workers write, and the check that no rank ever had two workers."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.jobspec.plan import Plan, RolePlan
from tests.harness import Gate, plan_of

LEDGER_WORKER = Path(__file__).parent / "ledger_worker.py"


@dataclass(frozen=True, slots=True)
class Line:
    """One step of one worker; `step` is None if the worker began while another one held the lock of its rank."""

    cycle: int
    rank: int
    node: str
    pid: int
    started_ns: int
    step: int | None


class Ledger:
    """The file that all workers of a job append to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: list[Line] = []
        self._read_bytes = 0
        self._steps: Counter[tuple[str, int]] = Counter()

    def plan(self, gate: Gate, *, nodes: int = 2, spares: int = 2, workers: int = 2, **bounds: object) -> Plan:
        """A plain job of ledger workers, which end when the gate releases them."""
        command = (sys.executable, "-S", str(LEDGER_WORKER), str(gate.port), str(self.path))
        role = RolePlan(name="main", command=command, nodes_per_replica=nodes, workers_per_node=workers)
        return plan_of(self.path.parent, role, spares=spares, quarantine_after=99, **bounds)

    def lines(self) -> list[Line]:
        """All lines in the order of the steps, without a last one that is still being written."""
        # Lines that were read before are kept: a test that waits for steps reads a hundred times a second.
        with self.path.open("rb") as file:
            file.seek(self._read_bytes)
            whole, _, _ = file.read().rpartition(b"\n")
        if whole:
            self._read_bytes += len(whole) + 1
            new = [_line(text) for text in whole.decode().splitlines()]
            self._read += new
            self._steps.update((line.node, line.cycle) for line in new)
        return self._read

    def check(self) -> None:
        """Assert that each rank had one worker at a time, and one process per cycle."""
        newest: dict[int, Line] = {}
        for line in self.lines():
            assert line.step is not None, f"{line} began while another process held rank {line.rank}"
            last = newest.setdefault(line.rank, line)
            if (line.cycle, line.pid) != (last.cycle, last.pid):
                assert line.cycle > last.cycle, f"{line} came after the first line of {last}"
                newest[line.rank] = line

    def steps(self, *, node: str, cycle: int) -> int:
        """How many steps the node's workers took in the cycle."""
        self.lines()
        return self._steps[node, cycle]


def _line(text: str) -> Line:
    cycle, rank, node, pid, started_ns, step = text.split()
    return Line(int(cycle), int(rank), node, int(pid), int(started_ns), None if step == "held" else int(step))
