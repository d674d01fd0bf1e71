"""`python -m tests.transport.ring_creator`: makes a ring with a payload, tells its name and tracker, and waits."""

from __future__ import annotations

import signal
import sys
from multiprocessing.resource_tracker import _resource_tracker  # type: ignore[attr-defined]

from nvrx_slurm.transport.ring import SharedRing


def main() -> None:
    ring = SharedRing.create(2, 4096)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the start of the tracker would have unblocked it
    ring.write_raw(b"of the creator")
    print(ring.name, _resource_tracker._pid, flush=True)
    signal.sigwait({signal.SIGTERM})
    ring.close()
    ring.unlink()


if __name__ == "__main__":
    sys.exit(main())
