"""From a SIGKILL to all workers running again: 2 nodes × 2 workers that leave when a peer vanishes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from bench import processes
from bench.errors import BenchTimeout, PeerFailed, PeerMissing
from bench.launchers.bare import Bare
from bench.launchers.base import WORLD_SIZE, Fleet, Launcher, Task
from bench.launchers.local_job import LocalJob, NvrxSlurm
from bench.launchers.torchelastic import ft_launcher, torchrun, torchrun_tuned
from bench.tables import Target, print_rows, print_targets
from bench.worker_registry import RunningWorker, WorkerRegistry
from nvrx_slurm.journal.records import Recovered
from nvrx_slurm.lab.faults.node import kill_local_node
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.threads import in_thread

START_S = 120.0
RECOVER_S = 180.0
VICTIM = WORLD_SIZE - 1  # on the second node: torchelastic's first node holds the rendezvous, and must not die

Kill = Callable[[RunningWorker, Fleet], None]
Command = Callable[[WorkerRegistry, Path], tuple[str, ...]]
"""The workers' command, from where they report and the folder of the measurement."""

Samples = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Recovery:
    """When the kill was sent, and the workers of the next world, by rank. `phases`: of nvrx-slurm, by the journal."""

    killed: float
    world: dict[int, RunningWorker]
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def took_s(self) -> float:
        return max(worker.started for worker in self.world.values()) - self.killed


def worker_recovery(runs: int, peers: Path) -> None:
    """A worker is killed."""
    launchers: list[Launcher] = [NvrxSlurm(), torchrun(peers), ft_launcher(peers), Bare()]
    samples = measure_all(launchers, runs, spares=0, kill=kill_worker)
    print_rows("from a worker's SIGKILL to all workers running", samples, unit="ms", first=NvrxSlurm.name)
    print_targets(
        samples,
        [
            Target("≥ 8 × faster than the best peer", NvrxSlurm.name, ("torchrun", "ft_launcher"), at_least=8.0),
            Target("≤ 3 × the bare loop", Bare.name, (NvrxSlurm.name,), at_most=3.0),
        ],
    )


def node_recovery(runs: int, peers: Path) -> None:
    """A node is killed, with all that runs on it; each run has a hot spare."""
    samples = measure_all([NvrxSlurm(), Bare()], runs, spares=runs, kill=kill_node)
    # Their time is timeouts that they sleep through, a minute each: side by side they do not disturb each other.
    elastic: list[Launcher] = [torchrun(peers), torchrun_tuned(peers), ft_launcher(peers)]
    samples |= measure_together(elastic, runs, spares=runs, kill=kill_node)
    print_rows("from a node's SIGKILL to its ranks on a spare", samples, unit="ms", first=NvrxSlurm.name)
    print_targets(
        samples,
        [
            Target("≥ 10 × faster than torchrun", NvrxSlurm.name, ("torchrun",), at_least=10.0),
            Target("≥ 3 × faster than ft_launcher", NvrxSlurm.name, ("ft_launcher",), at_least=3.0),
            Target("≤ 1 s", None, (NvrxSlurm.name,), at_most=1.0),
        ],
    )


def kill_worker(victim: RunningWorker, fleet: Fleet) -> None:
    os.kill(victim.pid, signal.SIGKILL)


def kill_node(victim: RunningWorker, fleet: Fleet) -> None:
    kill_local_node(processes.ancestor_below(victim.pid, fleet.parent_of_nodes))


def measure_all(launchers: Sequence[Launcher], runs: int, *, spares: int, kill: Kill) -> Samples:
    """Seconds of each run by launcher, one launcher after the other; see `measured` for one that fails."""
    found = {launcher.name: measured(launcher, runs, spares=spares, kill=kill) for launcher in launchers}
    return {name: [each.took_s for each in recoveries] for name, recoveries in found.items() if recoveries}


def measure_together(launchers: Sequence[Launcher], runs: int, *, spares: int, kill: Kill) -> Samples:
    """The same, all launchers at the same time."""
    # In daemon threads: Ctrl-C does not wait for them.
    each_alone = [partial(measure_all, [launcher], runs, spares=spares, kill=kill) for launcher in launchers]
    samples: Samples = {}
    for future in [in_thread(work, "measure") for work in each_alone]:
        samples |= future.result()
    return samples


def measured(
    launcher: Launcher,
    runs: int,
    *,
    spares: int,
    kill: Kill,
    command: Command = lambda registry, room: registry.command,
) -> list[Recovery]:
    """A peer that is missing or fails is reported, and gives an empty list. A failure of nvrx-slurm is an error."""
    try:
        return measure(launcher, runs, spares=spares, kill=kill, command=command)
    except (PeerMissing, PeerFailed) as error:
        if isinstance(launcher, NvrxSlurm):
            raise
        print(f"{launcher.name}: left out: {error}", flush=True)
        return []


def measure(launcher: Launcher, runs: int, *, spares: int, kill: Kill, command: Command) -> list[Recovery]:
    """One fleet, killed `runs` times."""
    with (
        processes.temporary_folder() as room,
        closing(WorkerRegistry()) as registry,
        contextlib.ExitStack() as stack,
    ):
        fleet = launcher.start(Task(command(registry, room), spares, room))
        stack.callback(fleet.stop)
        try:
            taken = list(_recoveries(fleet, registry, runs, kill))
        except BenchTimeout as error:
            raise PeerFailed(f"{error}\n{fleet.log()}") from None
        if isinstance(fleet, LocalJob):
            journal = fleet.recoveries()[-runs:]
            _print_phases(journal)
            if len(journal) == len(taken):
                taken = [replace(each, phases=own.phases) for each, own in zip(taken, journal, strict=True)]
        return taken


def _recoveries(fleet: Fleet, registry: WorkerRegistry, runs: int, kill: Kill) -> Iterator[Recovery]:
    clock = SystemClock()
    world = registry.wait_world(WORLD_SIZE, timeout_s=START_S)
    for _ in range(runs):
        fleet.wait_spares(START_S)
        killed = clock.monotonic()
        kill(world[VICTIM], fleet)
        world = registry.wait_world(WORLD_SIZE, timeout_s=RECOVER_S, after=killed)
        yield Recovery(killed, world)


def _print_phases(timed: Sequence[Recovered]) -> None:
    """Where our time goes, by the journal (from the moment that the death was noticed)."""
    if timed:
        parts = [f"{name} {median(r.phases[name] for r in timed) * 1000:.1f}" for name in timed[0].phases]
        total = median(r.total_s for r in timed) * 1000
        print(f"nvrx-slurm, by its journal (medians, ms): {', '.join(parts)}; total {total:.1f}", flush=True)
