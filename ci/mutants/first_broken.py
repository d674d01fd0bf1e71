"""`python -m ci.mutants.first_broken OF SEEDS NODES`: simulate until a promise is broken, and print which.

Prints `broken SEED PROMISE` (of a job: `broken SEED MONITOR: PROMISE`), `crashed SEED ERROR` or `kept`. Unlike
`nvrx-slurm ci simulate` it does not look for the fewest faults that still break the promise.
"""

from __future__ import annotations

import logging
import sys

from nvrx_slurm.lab.simulation.histories import RUNNERS
from nvrx_slurm.lab.simulation.loop import collect_garbage, uncollected
from nvrx_slurm.lab.simulation.run import RunResult, run_seed


def main() -> None:
    """Run the seeds in their order."""
    of, seeds, nodes = sys.argv[1], *map(int, sys.argv[2:])
    logging.getLogger("nvrx").setLevel(logging.CRITICAL)
    with uncollected():
        for seed in range(seeds):
            try:
                result = run_seed(seed, nodes) if of == "job" else RUNNERS[of](seed)
            except Exception as error:
                print("crashed", seed, f"{type(error).__name__}: {error}".partition("\n")[0])
                return
            if result.broken:
                oracle = f"{result.seen_by}: " if isinstance(result, RunResult) else ""
                print("broken", seed, f"{oracle}{result.promise}")
                return
            collect_garbage()
    print("kept")


if __name__ == "__main__":
    main()
