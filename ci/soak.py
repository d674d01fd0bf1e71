"""`python -m ci.soak --minutes 60`: all simulations for so long, on all cores; exit code 1 if a promise was broken.

The control plane is explored, guided by coverage, from the corpus of tests/seeds on; scenarios that reach something
new, and those that break a promise, are written into --keep. The other simulations run fresh seeds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from nvrx_slurm.util.clock import SystemClock

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "tests" / "seeds"
SHARES = {"job": 0.6, "inprocess": 0.2, "transport": 0.2}
"""What `nvrx-slurm ci simulate --of` names → its share of the time. A new simulation is one more line."""

SEEDS = 500
"""Of one call of a simulation that is not guided: between two looks at the clock."""


def main() -> int:
    """One simulation after the other, each on all cores."""
    parser = argparse.ArgumentParser(prog="python -m ci.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--first", type=int, help="the first seed; default: the time, so that no two soaks are the same"
    )
    parser.add_argument("--keep", type=Path, default=ROOT / "build" / "seeds")
    parser.add_argument("--of", action="append", choices=SHARES, help="only these; repeatable")
    chosen = parser.parse_args()
    clock = SystemClock()
    first = int(clock.wall()) * 1_000 if chosen.first is None else chosen.first
    shares = {of: share for of, share in SHARES.items() if not chosen.of or of in chosen.of}
    broken = []
    for of, share in shares.items():
        minutes = chosen.minutes * share / sum(shares.values())
        print(f"--- {of}: {minutes:.1f} minutes from seed {first} on, {chosen.jobs} processes", flush=True)
        if of == "job":
            corpus = ["--corpus", str(CORPUS), "--keep", str(chosen.keep), "--minutes", str(minutes)]
            code = simulate(of, first, chosen.jobs, *corpus)
        else:
            # These are not guided, so time is kept here: fresh seeds in calls of SEEDS until it is over.
            until, seed, code = clock.monotonic() + 60.0 * minutes, first, 0
            while clock.monotonic() < until and not code:
                code = simulate(of, seed, chosen.jobs, "--seeds", str(SEEDS))
                seed += SEEDS
        if code:
            broken.append(of)
    print(f"broken: {', '.join(broken)}" if broken else "no promise was broken")
    return 1 if broken else 0


def simulate(of: str, first: int, jobs: int, *options: str) -> int:
    """One call of the command; returns its exit code."""
    command = [sys.executable, "-m", "nvrx_slurm", "ci", "simulate", "--of", of, "--first", str(first)]
    return subprocess.run([*command, "--jobs", str(jobs), *options], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
