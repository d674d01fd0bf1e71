"""A training with torch and gloo, as a user writes it, that reports its first step, and when it got how far.

Usage: torch_worker.py CHECKPOINT HOST PORT, where a `bench.worker_registry.WorkerRegistry` listens. When the registry
closes the connection the worker goes on; a dead peer ends it, through the collective.
"""

import time

STAMPS = {"first line": time.monotonic()}

import json  # noqa: E402  the stamp comes first
import os  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

STAMPS["imports"] = time.monotonic()
WIDTH, BATCH, STEP_S = 512, 32, 0.02


def main() -> None:
    checkpoint = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    STAMPS["process group"] = time.monotonic()
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    STAMPS["model and optimizer"] = time.monotonic()
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    STAMPS["checkpoint"] = time.monotonic()
    registry = None
    while True:
        inputs = torch.randn(BATCH, WIDTH)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs).backward()
        optimizer.step()
        if registry is None:
            now = time.monotonic()
            if dist.get_rank() == 0 and not checkpoint.exists():
                fresh = checkpoint.with_suffix(".new")
                torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, fresh)
                fresh.replace(checkpoint)
            registry = socket.create_connection((sys.argv[2], int(sys.argv[3])))
            world = os.environ["MASTER_PORT"]
            registry.sendall(f"{world} {dist.get_rank()} {os.getpid()} {now!r} {json.dumps(STAMPS)}\n".encode())
            beat()
        time.sleep(STEP_S)


def beat() -> None:
    """The sign of progress that a script under nvrx-slurm gives."""
    if "NVRX_BEAT_SOCKET" in os.environ:
        from nvrx_slurm.workload import beat

        beat(step=1)


if __name__ == "__main__":
    main()
