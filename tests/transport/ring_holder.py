"""`python -m tests.transport.ring_holder RING`: claims slot 0, reports that, and waits to be killed."""

from __future__ import annotations

import signal
import sys

from nvrx_slurm.transport.ring import Claim, SharedRing

if __name__ == "__main__":
    ring = SharedRing.attach(sys.argv[1])
    claim = ring.claim(0)
    print("has it" if isinstance(claim, Claim) else claim, flush=True)
    signal.pause()
