"""A rollout: plays under the policy's newest weights, and leaves each trajectory in its ring until the policy has it.

The ring overwrites nothing: when it is full, the policy is behind, and the rollout waits.
"""

from __future__ import annotations

import os
import sys

import numpy as np
from trajectories import FEATURES, play

from nvrx_slurm.transport import (
    Directory,
    Following,
    PayloadClient,
    PayloadServer,
    RingFull,
    SharedRing,
    TransportError,
)
from nvrx_slurm.workload import beat

SLOTS, SLOT_BYTES = 4, 1 << 20
WAIT_S = 0.5  # so soon it is seen that the policy needs no more


def my_life() -> tuple[int, int, int]:
    """Which rollout this is, and which of those that took its place, one after the other."""
    number = int(os.environ["NVRX_REPLICA"].rpartition("-")[2])
    return number, int(os.environ["NVRX_GENERATION"]), int(os.environ["NVRX_CYCLE"])


def newest(weights: np.ndarray, news: Following, client: PayloadClient) -> np.ndarray:
    """The policy's weights, if they can be had; others want them too, so they stay there."""
    published = news.next(timeout_s=0.0)
    if not published:
        return weights
    try:
        return np.asarray(client.read(published[-1].ref, deadline=5.0, keep=True))
    except TransportError as error:  # newer ones have taken their place already, or the policy starts anew
        print(f"goes on with older weights: {error}", file=sys.stderr, flush=True)
        return weights


def main() -> None:
    with (
        Directory() as directory,
        SharedRing.create(slots=SLOTS, slot_bytes=SLOT_BYTES, overwrite=False) as ring,
        PayloadServer(ring) as server,
        PayloadClient() as client,
    ):
        life, number, weights = my_life(), 0, np.zeros(FEATURES, dtype=np.float32)
        news, end = directory.follow("weights"), directory.follow("end")
        while not end.next(timeout_s=0.0):
            weights = newest(weights, news, client)
            try:
                directory.publish(server.write(play(life, number, weights), timeout_s=WAIT_S))
            except RingFull:
                continue
            number += 1
            beat(step=number)
    print(f"the policy needs no more; played {number} trajectories", flush=True)


if __name__ == "__main__":
    main()
