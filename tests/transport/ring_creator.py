"""`python -m tests.transport.ring_creator`: creates a ring with a payload, prints its name and its tracker, and
waits."""

from __future__ import annotations

import signal
import sys
from multiprocessing.resource_tracker import _resource_tracker  # type: ignore[attr-defined]

from nvrx_slurm.transport.ring import SharedRing


def main() -> None:
    ring = SharedRing.create(2, 4096)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # now, as starting the tracker unblocks it
    ring.write_raw(b"of the creator")
    print(ring.name, _resource_tracker._pid, flush=True)
    signal.sigwait({signal.SIGTERM})
    ring.close()
    ring.unlink()


if __name__ == "__main__":
    sys.exit(main())
