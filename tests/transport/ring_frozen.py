"""`python -m tests.transport.ring_frozen RING`: stops itself (SIGSTOP) in the middle of a step on slot 0."""

from __future__ import annotations

import os
import signal
import sys

from nvrx_slurm.transport.ring import SharedRing


def main(name: str) -> None:
    ring = SharedRing.attach(name)
    ring._steps.memory.holding(0, lambda: os.kill(os.getpid(), signal.SIGSTOP), 1.0)
    print("went on", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
