"""Learns to read handwritten digits, data-parallel over any number of workers: numpy, TCP, and nothing else.

Started as torchrun starts a script (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or plainly, as a world of one.
The batch of a step depends on the step alone, and gradients are summed in rank order: so a training that was killed
and went on from its checkpoint ends with the same loss, bit for bit, as one of the same world that never stopped.
"""

# ruff: noqa: E402  numpy reads the number of threads once, when it loads

from __future__ import annotations

import os

# One thread a worker: the matrices are small, and with more threads the order of a sum could depend on the node.
for library in ("OPENBLAS", "MKL", "OMP"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

import argparse
import contextlib
import io
import json
import random
import sys
import time
from pathlib import Path

import numpy as np
from group import Group, PeerLost, join_group
from model import STATE, adam, cross_entropy, gradient_and_loss, load_digits, new_state, predict

try:
    from nvrx_slurm.workload import beat
except ImportError:  # nvrx-slurm is not needed: this is an ordinary script

    def beat(*, step: int) -> None:
        """Nobody listens."""


TRAINING_IMAGES = 1500  # the other 297 measure accuracy
CHECKPOINT = "checkpoint.npy"
Data = tuple[np.ndarray, np.ndarray]  # images, and the digit that each shows


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learns to read handwritten digits, data-parallel.")
    parser.add_argument("--checkpoint-dir", type=Path, required=True, help="on a file system that all nodes share")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--batch", type=int, default=256, metavar="IMAGES", help="of all workers together")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-time", type=float, default=0.0, metavar="SECONDS", help="let a step take so long")
    options = parser.parse_args(arguments)
    if not 0 < options.batch <= TRAINING_IMAGES:
        parser.error(f"--batch must be 1 to {TRAINING_IMAGES}, not {options.batch}")
    return options


def replace_file(path: Path, data: bytes) -> None:
    """Writes the file whole: whoever reads it, after whatever crash, finds the old content or the new."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with fresh.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def save_checkpoint(path: Path, state: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, state)
    replace_file(path, buffer.getvalue())


def load_checkpoint(path: Path) -> np.ndarray:
    """Raises FileNotFoundError before the first one was saved."""
    saved = np.load(path)
    if saved.dtype != STATE:
        sys.exit(f"{path} is of another model; remove it, or choose another --checkpoint-dir")
    return saved


def restore(group: Group, checkpoint: Path, state: np.ndarray) -> None:
    """Brings `state` to the last checkpoint. Rank 0 alone reads it and tells the others: all begin at one step."""
    if group.rank == 0:
        with contextlib.suppress(FileNotFoundError):
            state[...] = load_checkpoint(checkpoint)
            print(f"resuming after step {int(state['step'])}", flush=True)
    group.broadcast(state)


def my_part(step: int, batch: int, seed: int, rank: int, world: int) -> np.ndarray:
    """Which training images this rank looks at in this step; a matter of its arguments alone."""
    chosen = random.Random(f"batch {seed} {step}").sample(range(TRAINING_IMAGES), batch)
    return np.array_split(np.array(chosen), world)[rank]


def train(group: Group, world: int, options: argparse.Namespace, data: Data, state: np.ndarray) -> None:
    """Takes `state` from the step where it is to the last one, with checkpoints on the way."""
    due = time.monotonic()
    while state["step"] < options.steps:
        group.rest(max(0.0, due - time.monotonic()))
        due = time.monotonic() + options.step_time
        loss = take_step(group, world, options, data, state)
        if group.rank == 0:
            record(options, state, loss)


def take_step(group: Group, world: int, options: argparse.Namespace, data: Data, state: np.ndarray) -> float:
    """Takes `state` to the next step, together with all ranks; the loss of this step's batch."""
    images, digits = data
    mine = my_part(int(state["step"]) + 1, options.batch, options.seed, group.rank, world)
    total = gradient_and_loss(state["parameters"], images[mine], digits[mine])
    group.all_reduce(total)
    total /= options.batch
    adam(state, total[:-1], options.learning_rate)
    beat(step=int(state["step"]))
    return float(total[-1])


def record(options: argparse.Namespace, state: np.ndarray, loss: float) -> None:
    """What rank 0 leaves of a step: now and then a checkpoint, at the end always one, and now and then a line."""
    step = int(state["step"])
    if step % options.checkpoint_every == 0 or step == options.steps:
        save_checkpoint(options.checkpoint_dir / CHECKPOINT, state)
    if step % options.log_every == 0:
        print(f"step {step} loss {loss:.4f}", flush=True)


def conclude(folder: Path, data: Data, state: np.ndarray, world: int) -> None:
    """The loss over all training images and the accuracy on the others, on stdout and in `result.json`."""
    images, digits = data
    known, unseen = slice(None, TRAINING_IMAGES), slice(TRAINING_IMAGES, None)
    parameters, step = state["parameters"], int(state["step"])
    loss = cross_entropy(predict(parameters, images[known]), digits[known]) / TRAINING_IMAGES
    accuracy = float((predict(parameters, images[unseen]).argmax(axis=1) == digits[unseen]).mean())
    result = {"step": step, "loss": loss, "accuracy": accuracy, "world_size": world}
    replace_file(folder / "result.json", json.dumps(result).encode() + b"\n")
    print(f"final step {step} loss {loss:.10f} accuracy {accuracy:.2f}", flush=True)


def main() -> None:
    options = parse_arguments()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    host, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "29500"))
    options.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    data = load_digits()
    state = new_state(options.seed)
    try:
        group = join_group(rank, world, host, port)
        restore(group, options.checkpoint_dir / CHECKPOINT, state)
        train(group, world, options, data, state)
    except PeerLost as error:
        sys.exit(f"rank {rank}: lost {error} after step {int(state['step'])}; leaving")
    except TimeoutError as error:
        sys.exit(f"rank {rank}: {error}")
    if rank == 0:
        conclude(options.checkpoint_dir, data, state, world)


if __name__ == "__main__":
    main()
