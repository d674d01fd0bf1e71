"""Usage: workload_beat.py RUNS: `beat` and an empty `section` of `workload`. The environment has NVRX_BEAT_FILE."""

import sys
from time import perf_counter

from nvrx_slurm.workload import beat, section

BEATS, SECTIONS = 200_000, 20_000

for _ in range(int(sys.argv[1]) + 1):  # the first one warms up, and is dropped by the reader
    began = perf_counter()
    for step in range(BEATS):
        beat(step=step)
    beaten = perf_counter()
    for _ in range(SECTIONS):
        with section("checkpoint", 600):
            pass
    print("beat", (beaten - began) / BEATS * 1e6)
    print("section", (perf_counter() - beaten) / SECTIONS * 1e6, flush=True)
