"""`python -m tests.transport.ring_family`: a ring, and children that its creator has forked and spawned."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

from nvrx_slurm.transport.ring import Claim, RingHandle, SharedRing


def spawned(handle: RingHandle) -> None:
    ring = SharedRing.attach(handle)
    assert ring.read(timeout_s=30.0) == b"to the spawned"
    ring.write_raw(b"from the spawned")
    ring.close()


def forked(ring: SharedRing, claim: Claim) -> None:
    """A forked child, which has copies of all that its parent has."""
    assert not claim.finish(consumed=True)  # only its parent may finish it
    del claim
    ring.write_raw(b"from the forked")
    with ring:
        pass  # closes it, and leaves the file to its creator


def main() -> None:
    with SharedRing.create(3, 64) as ring:
        ring.write_raw(b"of the parent")
        claim = ring.claim(0)
        assert isinstance(claim, Claim)
        child = os.fork()
        if child == 0:
            forked(ring, claim)
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        assert Path(f"/dev/shm/{ring.name}").exists()
        assert ring.read(timeout_s=0.0) == b"from the forked"
        assert claim.finish(consumed=True)
        assert ring.metrics().late == 1
        ring.write_raw(b"to the spawned")
        process = multiprocessing.get_context("spawn").Process(target=spawned, args=(ring.handle,))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert ring.read(timeout_s=0.0) == b"from the spawned"
    print("well")


if __name__ == "__main__":
    main()
