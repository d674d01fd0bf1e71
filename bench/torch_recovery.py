"""From a SIGKILL to the first step after it on all ranks: 2 nodes × 2 workers with torch, gloo and a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench import recovery
from bench.launchers.bare import Bare
from bench.launchers.base import Launcher
from bench.launchers.local_job import NvrxSlurm
from bench.launchers.torchelastic import ft_launcher, torchrun, torchrun_tuned
from bench.processes import interpreter
from bench.recovery import Kill, Recovery, Samples
from bench.tables import Target, print_rows, print_targets
from bench.warm import COLD, MODULES, WARM
from bench.worker_registry import WorkerRegistry
from nvrx_slurm.jobspec.prewarm import PrewarmSpec

WORKER = Path(__file__).parent / "torch_worker.py"
AUTO = "nvrx-slurm, imports: auto"
TURN = 2
"""Kills of one launcher before it is the next one's turn: other load on the machine affects all alike."""


def torch_recovery(runs: int, peers: Path) -> None:
    """A worker is killed."""
    launchers: list[Launcher] = [*_local_jobs(), torchrun(peers), ft_launcher(peers), Bare()]
    found = _measure_in_turns(launchers, runs, peers, recovery.kill_worker, spares=False)
    _print_all("a worker's SIGKILL → the first step after it on all 4 ranks", found)


def torch_node_recovery(runs: int, peers: Path) -> None:
    """A node is killed, with all that runs on it; each run has a hot spare."""
    # `auto` finds out what to import on the nodes with ranks only.
    local_jobs = [each for each in _local_jobs() if each.name != AUTO]
    launchers: list[Launcher] = [*local_jobs, torchrun(peers), torchrun_tuned(peers), ft_launcher(peers), Bare()]
    found = _measure_in_turns(launchers, runs, peers, recovery.kill_node, spares=True)
    _print_all("a node's SIGKILL → the first step after it on all 4 ranks, 2 of them on a spare", found)


def _local_jobs() -> list[NvrxSlurm]:
    return [
        NvrxSlurm(COLD),
        NvrxSlurm(WARM, PrewarmSpec(imports=MODULES)),
        NvrxSlurm(AUTO, PrewarmSpec(imports="auto")),
    ]


def _measure_in_turns(
    launchers: Sequence[Launcher], runs: int, peers: Path, kill: Kill, *, spares: bool
) -> dict[str, list[Recovery]]:
    python = str(interpreter(["torch"], peers))

    def command(registry: WorkerRegistry, room: Path) -> tuple[str, ...]:
        return (python, str(WORKER), str(room / "checkpoint.pt"), *registry.address)

    found: dict[str, list[Recovery]] = {launcher.name: [] for launcher in launchers}
    # In turns of a few kills each: other load on the machine affects all launchers alike.
    for done in range(0, runs, TURN):
        count = min(TURN, runs - done)
        for launcher in launchers:
            spare = count if spares else 0
            found[launcher.name] += recovery.measured(launcher, count, spares=spare, kill=kill, command=command)
    return {name: recoveries for name, recoveries in found.items() if recoveries}


def _print_all(title: str, found: dict[str, list[Recovery]]) -> None:
    samples = {name: [each.took_s for each in recoveries] for name, recoveries in found.items()}
    print_rows(title, samples, unit="ms", first=COLD)
    for name, recoveries in found.items():
        print_rows(f"{name}, phase by phase", _phases(recoveries), unit="ms", first="")
    for name in [each.name for each in _local_jobs() if each.name != COLD]:
        targets = [
            Target(f"{name}: ≥ 6 × faster than the best peer", name, ("torchrun", "ft_launcher"), at_least=6.0),
            Target(f"{name}: ≤ 0.45 × its own cold start", COLD, (name,), at_most=0.45),
        ]
        print_targets(samples, targets)


def _phases(recoveries: Sequence[Recovery]) -> Samples:
    """How long each phase took, until the last rank had passed its end; of nvrx-slurm the journal's first."""
    phases: Samples = {}
    for each in recoveries:
        until = each.killed
        for name, took in each.phases.items():
            phases.setdefault(name, []).append(took)
            until += took
        ranks = [{**worker.stamps, "first step": worker.started} for worker in each.world.values()]
        for name in ranks[0]:
            end = max(stamps[name] for stamps in ranks)
            label = "spawned → first line" if each.phases and name == "first line" else f"→ {name}"
            phases.setdefault(label, []).append(end - until)
            until = end
    return phases
