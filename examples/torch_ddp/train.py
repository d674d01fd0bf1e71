"""An ordinary torchrun script: DistributedDataParallel over gloo on the CPU, with checkpoint and resume.

    torchrun --standalone --nproc-per-node 2 train.py --checkpoint-dir checkpoints

It learns to imitate a fixed random network. The batch of a step depends on the step alone, so a training that was
interrupted and resumed ends with the same loss as one of the same world that never stopped.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FEATURES, WIDTH, BATCH = 16, 32, 64


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learns to imitate a random network, with DDP on the CPU.")
    parser.add_argument("--checkpoint-dir", type=Path, required=True, help="on a file system that all nodes share")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--step-time", type=float, default=0.0, metavar="SECONDS", help="wait so long after a step")
    return parser.parse_args()


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def batch_of(seed: int, teacher: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of inputs and what the teacher makes of them."""
    inputs = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return inputs, teacher(inputs)


def save(path: Path, step: int, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Replaces the checkpoint whole: whoever loads it finds the old one or the new."""
    fresh = path.with_suffix(f".{os.getpid()}")
    torch.save({"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, fresh)
    fresh.replace(path)


def load(path: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> int:
    """The step of the last checkpoint, its content now in `model` and `optimizer`; 0 before the first."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def train(options: argparse.Namespace, teacher: nn.Module, model: DistributedDataParallel) -> int:
    """Trains from the last checkpoint to the last step, which it returns."""
    rank, world = dist.get_rank(), dist.get_world_size()
    checkpoint = options.checkpoint_dir / "checkpoint.pt"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    done = load(checkpoint, model, optimizer)
    dist.barrier()  # all have read the same checkpoint before one writes the next
    if rank == 0 and done:
        print(f"resuming after step {done}", flush=True)
    for step in range(done + 1, options.steps + 1):
        inputs, targets = batch_of(step * world + rank, teacher)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % options.log_every == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
        if rank == 0 and (step % options.checkpoint_every == 0 or step == options.steps):
            save(checkpoint, step, model, optimizer)
        time.sleep(options.step_time)
    return max(done, options.steps)


def conclude(folder: Path, step: int, teacher: nn.Module, model: DistributedDataParallel) -> None:
    inputs, targets = batch_of(-1, teacher)
    with torch.no_grad():
        loss = nn.functional.mse_loss(model.module(inputs), targets).item()
    fresh = folder / f".result.json.{os.getpid()}"
    fresh.write_text(json.dumps({"step": step, "loss": loss, "world_size": dist.get_world_size()}) + "\n")
    fresh.replace(folder / "result.json")
    print(f"final step {step} loss {loss:.10f}", flush=True)


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    options.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    teacher = network(seed=1)
    model = DistributedDataParallel(network(seed=2))
    step = train(options, teacher, model)
    if dist.get_rank() == 0:
        conclude(options.checkpoint_dir, step, teacher, model)
    del model
    gc.collect()  # frees the model, which is part of a reference cycle: with Gloo it must not outlive the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
