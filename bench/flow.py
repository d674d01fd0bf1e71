"""A flow through `nvrx-slurm ci run` against the same job by hand: what the harness costs, its checks included."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench.commands import time_all
from bench.processes import temporary_folder
from bench.tables import Target, print_rows, print_targets

CI = Path(__file__).parent.parent / "ci"
OURS, BY_HAND = "ci run happy-path", "cluster up, submit --wait, cluster down"
MOST = 1.5

SCRIPT = """\
set -e
trap '"$0" cluster down --name "$1" >/dev/null' EXIT
"$0" cluster up --name "$1" --nodes 6 >/dev/null
eval "$("$0" cluster env --name "$1")"
"$0" submit --wait --folder "$(mktemp --directory --tmpdir="$2")" "$3"
"""


def flow(runs: int, peers: Path) -> None:
    """Run it in turns, each time on a Slurm that is started for it and taken down after it."""
    program = str(Path(sys.executable).with_name("nvrx-slurm"))
    with temporary_folder() as room:
        by_hand = (program, f"bench-{os.getpid()}", str(room), str(CI / "jobs" / "plain.yaml"))
        options = ("--on", "dev", "--artifacts", f"{room}/ci")
        commands = {
            OURS: (program, "ci", "run", str(CI / "flows" / "happy-path.yaml"), *options),
            BY_HAND: ("bash", "-c", SCRIPT, *by_hand),
        }
        samples = time_all(commands, runs, {})
    print_rows("a flow that passes", samples, unit="s", first=BY_HAND)
    print_targets(samples, [Target(f"≤ {MOST:g} × by hand", BY_HAND, (OURS,), at_most=MOST)])
