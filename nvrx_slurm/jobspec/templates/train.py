"""A training that survives failures, with the standard library only. Put your own in its place.

It fits eight weights to noisy samples, data-parallel over all ranks. What makes it restartable is what any training
needs: the ranks connect by MASTER_ADDR and MASTER_PORT (as under torchrun), start from the newest checkpoint, save a
complete one every few steps, and exit when a peer is lost.
"""

import argparse
import json
import os
import random
import socket
import time
from pathlib import Path
from typing import TextIO

try:
    from nvrx_slurm.workload import beat  # reports the step; does nothing outside of a job
except ImportError:

    def beat(*, step: int) -> None:
        pass


RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
TRUE_WEIGHTS = (3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 2.0, -6.0)


def meet(timeout_s: float = 60.0) -> list[TextIO]:
    """The connections of rank 0 to all others, in rank order; of another rank, that to rank 0."""
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    if RANK == 0:
        peers = {}
        with socket.create_server(("", port), backlog=WORLD) as server:
            server.settimeout(timeout_s)
            for _ in range(1, WORLD):
                peer = server.accept()[0].makefile("rw")
                peers[receive(peer)[0]] = peer
        return [peers[rank] for rank in sorted(peers)]
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection((host, port), timeout_s)
            if connection.getsockname() != connection.getpeername():  # before rank 0 listens we may reach ourselves
                break
            connection.close()
        except ConnectionRefusedError:  # rank 0 does not listen yet
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)
    connection.settimeout(None)
    peer = connection.makefile("rw")
    send(peer, [RANK])
    return [peer]


def send(peer: TextIO, values: list[float]) -> None:
    print(json.dumps(values), file=peer, flush=True)


def receive(peer: TextIO) -> list[float]:
    line = peer.readline()
    if not line.endswith("\n"):
        raise ConnectionResetError("a peer has closed its connection")  # its process has ended: so does this one
    values: list[float] = json.loads(line)
    return values


def all_reduce(peers: list[TextIO], values: list[float]) -> list[float]:
    """The sums over all ranks, added in rank order: the same bits every time."""
    if RANK == 0:
        for peer in peers:
            values = [mine + its for mine, its in zip(values, receive(peer), strict=True)]
        for peer in peers:
            send(peer, values)
        return values
    send(peers[0], values)
    return receive(peers[0])


def gradient_and_loss(weights: list[float], step: int, samples: int = 16) -> list[float]:
    """Of this rank's share of the batch, which depends on step and rank alone; the loss is the last element."""
    draw = random.Random(f"{step} {RANK}")
    result = [0.0] * (len(weights) + 1)
    for _ in range(samples):
        inputs = [draw.gauss(0.0, 1.0) for _ in weights]
        error = draw.gauss(0.0, 0.1)
        for weight, true, value in zip(weights, TRUE_WEIGHTS, inputs, strict=True):
            error += (weight - true) * value
        for index, value in enumerate(inputs):
            result[index] += error * value / samples / WORLD
        result[-1] += error * error / samples / WORLD
    return result


def save(file: Path, **values: object) -> None:
    """A worker may be killed at any moment: the file is complete, or still the one before."""
    new = file.with_suffix(".new")
    with new.open("w") as opened:
        json.dump(values, opened)
        opened.flush()
        os.fsync(opened.fileno())
    new.replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(description="A training that survives failures.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--step-time", type=float, default=0.1, help="seconds that each step takes at least")
    parser.add_argument("--checkpoint-dir", type=Path, default="checkpoints", help="on storage that all nodes share")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps")
    options = parser.parse_args()
    checkpoint, step, weights = options.checkpoint_dir / "checkpoint.json", 0, [0.0] * len(TRUE_WEIGHTS)

    peers = meet()
    if RANK == 0:  # alone: by the time that another rank reads, the file could be a newer one
        options.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        if checkpoint.exists():
            saved = json.loads(checkpoint.read_text())
            step, weights = saved["step"], saved["weights"]
            print(f"resuming after step {step}", flush=True)
    newest, *weights = all_reduce(peers, [float(step), *weights])  # the others add zeros
    for step in range(int(newest) + 1, options.steps + 1):
        time.sleep(options.step_time)  # the work of a real step
        *gradient, loss = all_reduce(peers, gradient_and_loss(weights, step))
        weights = [weight - 0.02 * slope for weight, slope in zip(weights, gradient, strict=True)]
        beat(step=step)
        if RANK == 0 and step % options.checkpoint_every == 0:
            save(checkpoint, step=step, weights=weights)
            print(f"step {step} of {options.steps}, loss {loss:.4f}", flush=True)
    if RANK == 0:
        error = sum((found - true) ** 2 for found, true in zip(weights, TRUE_WEIGHTS, strict=True))
        save(options.checkpoint_dir / "trained.json", weights=weights, error=error)
        checkpoint.unlink(missing_ok=True)  # the next job begins at the beginning
        print(f"done: {options.steps} steps, error {error!r}", flush=True)


if __name__ == "__main__":
    main()  # an error ends the process: nvrx-slurm, like torchrun, then restarts all ranks
