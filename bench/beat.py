"""What one sign of progress costs the worker: by nvrx-slurm, by NVRx, and as a datagram."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from bench.commands import COMMAND_S
from bench.errors import PeerFailed
from bench.tables import Target, print_rows, print_targets
from nvrx_slurm.jobspec import env
from nvrx_slurm.util.files import RUNTIME_ROOTS
from nvrx_slurm.workload.slot import Slot

BEATERS = Path(__file__).parent / "beaters"
OURS, NVRX, DATAGRAM = "nvrx-slurm", "NVRx RankMonitorClient", "a Unix datagram"
TARGETS = {
    "beat": [
        Target("≤ 1 s a million, so 1 µs each", None, (OURS,), at_most=1.0),
        Target(f"≥ 20 × cheaper than {NVRX}", OURS, (NVRX,), at_least=20.0),
    ],
    "section": [Target(f"≥ 10 × cheaper than {NVRX}", OURS, (NVRX,), at_least=10.0)],
}

Samples = dict[str, dict[str, list[float]]]  # beat or section → who → seconds of a million


def beats(runs: int, peers: Path) -> None:
    """Each beats in a process of its own, one after the other."""
    root = next(root for root in RUNTIME_ROOTS if root.is_dir())
    samples: Samples = defaultdict(dict)
    with tempfile.TemporaryDirectory(dir=root) as name:
        folder = Path(name)
        Slot.create(folder / "slot").close()
        _measure(samples, OURS, "workload_beat", Path(sys.executable), runs, {"NVRX_BEAT_FILE": str(folder / "slot")})
        _measure(samples, DATAGRAM, "datagram", Path(sys.executable), runs, {})
        if (python := peers / "python").exists():
            monitor = {"RANK": "0", "FT_RANK_MONITOR_IPC_SOCKET": str(folder / "monitor")}
            _measure(samples, NVRX, "rank_monitor", python, runs, monitor)
        else:
            print(f"{NVRX} is left out: there is no {python} (bench/README.md says how to install it)", flush=True)
    for what, rows in samples.items():
        print_rows(f"a million times {what}, so the ns of one", rows, unit="ms", first=OURS)
        print_targets(rows, TARGETS[what])


def _measure(samples: Samples, who: str, beater: str, python: Path, runs: int, given: Mapping[str, str]) -> None:
    """Adds what a beater prints, its first run left out. Raises PeerFailed."""
    argv = [str(python), str(BEATERS / f"{beater}.py"), str(runs)]
    done = subprocess.run(
        argv, env=env.child_environment(given), capture_output=True, text=True, timeout=2 * COMMAND_S, check=False
    )
    if done.returncode != 0:
        raise PeerFailed(f"{' '.join(argv)} exited with {done.returncode}: {done.stderr[-2000:]}")
    taken: dict[str, list[float]] = defaultdict(list)
    for line in done.stdout.splitlines():
        what, seconds = line.split()
        taken[what].append(float(seconds))
    for what, runs_of_it in taken.items():
        samples[what][who] = runs_of_it[1:]
