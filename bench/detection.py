"""From a death, or a freeze, to the moment in which the job has noticed it; and that no other node is reaped."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from bench import processes, tables
from nvrx_slurm.agent.supervisor import descendants, send_all
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import (
    Entry,
    NodeJoined,
    NodeLost,
    Record,
    RendezvousClosed,
    WorkerFailed,
    WorkersStarted,
)
from nvrx_slurm.lab.plans import plain_bounds
from nvrx_slurm.report.source import Journal
from nvrx_slurm.util.clock import SystemClock

WAIT_S = 30.0
POLL_S = 0.1
"""How often torchrun's agent looks at its workers (`--monitor-interval`, its default)."""

SATURATED_S = 60.0
NODES = 4
TIMEOUT_S = 3.0
_R = TypeVar("_R", bound=Record)


def detection(runs: int, peers: Path) -> None:
    """A worker's death, an agent's death, a node's freeze."""
    own, polled = [_floor(_woken) for _ in range(runs)], [_floor(_polled) for _ in range(runs)]
    with _job(spares=2 * runs + 1, silence_s=TIMEOUT_S) as job:
        workers = [job.worker_death() for _ in range(runs)]
        agents = [job.agent_death() for _ in range(runs)]
        frozen = [job.freeze() for _ in range(runs)]
    by = {"nvrx-slurm": workers, "pidfd, the floor": own, f"a look every {POLL_S:g} s (torchrun)": polled}
    tables.print_rows("a worker's SIGKILL → its agent's word is in the store", by, unit="ms", first="nvrx-slurm")
    tables.print_targets(by, [tables.Target("≤ 5 ms, in s", None, ("nvrx-slurm",), at_most=0.005)])
    tables.print_rows("an agent's SIGKILL → the controller knows", {"nvrx-slurm": agents}, unit="ms", first="")
    tables.print_targets({"a": agents}, [tables.Target("≤ 100 ms, in s", None, ("a",), at_most=0.1)])
    tables.print_rows("SIGSTOP of a node, timeout 3 s → reaped", {"nvrx-slurm": frozen}, unit="ms", first="")
    tables.print_targets({"a": frozen}, [tables.Target("≤ 3.5 s", None, ("a",), at_most=TIMEOUT_S + 0.5)])


def saturated(runs: int, peers: Path) -> None:
    """Every core busy for `runs` minutes: how many nodes are taken for dead."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        with _job(spares=1, silence_s=TIMEOUT_S) as job:
            lost = job.losses_within(SATURATED_S * runs)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    print(
        f"\n{len(lost)} false deaths among {NODES + 1} nodes in {SATURATED_S * runs:.0f} s, {len(loops)} busy loops"
    )
    tables.print_target("no false death", len(lost), at_most=0)


# ------------------------------------------------------------------------------------------ a job


class _Watched:
    """A local job whose workers only sleep, and its journal."""

    def __init__(self, folder: JobFolder) -> None:
        self.journal, self.clock = Journal(folder, live=True), SystemClock()
        self.entries: list[Entry] = []
        self.cycle = -1
        self._settle()

    def worker_death(self) -> float:
        """Seconds until the agent's word arrived in the store."""
        victim = next(r for r in self._all(WorkersStarted) if r.cycle == self.cycle)
        before, known = self.clock.wall(), len(self._all(WorkerFailed))
        os.kill(next(iter(victim.pids.values())), signal.SIGKILL)
        entry = self._until(WorkerFailed, known + 1)
        self._settle()
        return entry.t - entry.record.ago_s - before  # type: ignore[union-attr]

    def agent_death(self) -> float:
        """Seconds until the controller held the node for dead."""
        agent = self._agent()
        return self._loss(lambda: os.kill(agent, signal.SIGKILL))

    def freeze(self) -> float:
        """Seconds until the controller gave the frozen node up; it is killed afterwards."""
        agent = self._agent()
        processes_of_node = [agent, *descendants(agent)]
        took = self._loss(lambda: send_all(processes_of_node, signal.SIGSTOP))
        send_all(processes_of_node[::-1], signal.SIGKILL)
        return took

    def losses_within(self, seconds: float) -> list[NodeLost]:
        deadline = self.clock.monotonic() + seconds
        while self.clock.monotonic() < deadline:
            self._poll()
        return self._all(NodeLost)

    def _agent(self) -> int:
        node = next(e.record.nodes[0] for e in reversed(self.entries) if isinstance(e.record, RendezvousClosed))
        return [r.pid for r in self._all(NodeJoined) if r.node == node][-1]

    def _loss(self, inflict: Callable[[], None]) -> float:
        before, known = self.clock.wall(), len(self._all(NodeLost))
        inflict()
        took = self._until(NodeLost, known + 1).t - before
        self._settle()
        return took

    def _settle(self) -> None:
        """Wait until all workers of the next cycle run."""
        self.cycle += 1

        def started() -> bool:
            self._poll()
            return sum(each.cycle == self.cycle for each in self._all(WorkersStarted)) == NODES

        processes.wait_until(started, WAIT_S, f"cycle {self.cycle}")

    def _all(self, kind: type[_R]) -> list[_R]:
        return [e.record for e in self.entries if isinstance(e.record, kind)]

    def _until(self, kind: type[Record], count: int) -> Entry:
        def there() -> bool:
            self._poll()
            return len(self._all(kind)) >= count

        processes.wait_until(there, WAIT_S, f"{count} × {kind.__name__}")
        return [e for e in self.entries if isinstance(e.record, kind)][count - 1]

    def _poll(self) -> None:
        self.entries += [item for item in self.journal.poll(0.1) if isinstance(item, Entry)]


@contextlib.contextmanager
def _job(*, spares: int, silence_s: float) -> Iterator[_Watched]:
    with processes.temporary_folder() as room:
        role = RolePlan(name="main", command=("sleep", "100000"), nodes_per_replica=NODES)
        bounds = plain_bounds(
            max_restarts=1000, quarantine_after=1000, heartbeat__timeout=silence_s, heartbeat__startup_timeout=60.0
        )
        where = str(room)
        plan = Plan(name="b", roles=(role,), spares=spares, workdir=where, folder=where, fault_tolerance=bounds)
        job_id = f"bench-{os.getpid()}"
        host = processes.start_job(plan, job_id, room / "host.log")
        try:
            yield _Watched(JobFolder(room / job_id))
        finally:
            processes.end(host, polite_s=15.0)


# ------------------------------------------------------------------------------------------ floors


def _floor(watch: Callable[[int], None]) -> float:
    """From the SIGKILL of a bare child to the moment in which its parent knows."""
    clock = SystemClock()
    child = os.posix_spawnp("sleep", ["sleep", "100000"], {"PATH": os.defpath})
    # From a process of its own, as the parent is busy watching.
    killer = subprocess.Popen([sys.executable, "-S", "-c", _KILLER, str(child)], stdout=subprocess.PIPE)
    watch(child)
    known = clock.monotonic()
    assert killer.stdout is not None
    killed_at = float(killer.stdout.read())
    killer.stdout.close()
    killer.wait()
    os.waitpid(child, 0)
    return known - killed_at


_KILLER = """
import os, random, sys, time
time.sleep(0.1 + random.random() / 5)
killed_at = time.monotonic()
os.kill(int(sys.argv[1]), 9)
print(killed_at)
"""


def _woken(child: int) -> None:
    handle = os.pidfd_open(child)
    select.select([handle], [], [])
    os.close(handle)


def _polled(child: int) -> None:
    clock = SystemClock()
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        clock.sleep(POLL_S)
