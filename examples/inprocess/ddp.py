"""DistributedDataParallel over gloo on the CPU, restarted within its processes.

    python launch.py 4 ddp.py --checkpoint-dir /tmp/ddp --fault raise:1:30 --fault kill:2:50 --fault hang:3:70
    torchrun --nproc-per-node 4 ddp.py --checkpoint-dir /tmp/ddp --fault raise:1:30

It learns to imitate a fixed random network. The batch of a step depends on the step alone and is shared out among
the ranks there are, so the training goes on to the same end, but for rounding, after a restart and with fewer ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import faults
import torch
import torch._dynamo  # DDP loads it when first used; an import that a restart cuts would stay half done
import torch.distributed as dist
from telling import tell_restarts, tell_start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nvrx_slurm.inprocess import CallWrapper, Wrapper

FEATURES, WIDTH, BATCH = 16, 32, 96
COLLECTIVE_S = 8  # below `hard_timeout`: who waits for a lost peer in a collective leaves it before its monitor acts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learns to imitate a random network.", parents=[faults.parser()])
    parser.add_argument("--checkpoint-dir", type=Path, required=True, help="on a file system that all nodes share")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
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


def join(folder: Path, iteration: int) -> None:
    """Meets the ranks of this iteration in a file of its own: rank 0 may be on another node than it was."""
    run = f"{os.environ['MASTER_PORT']}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder.resolve()}/rendezvous-{run}-{iteration}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=COLLECTIVE_S),
    )


class Training:
    """Student, optimizer and step: all that a checkpoint holds."""

    def __init__(self, checkpoint: Path) -> None:
        self.student = network(seed=2)
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=0.01)
        self.step = 0
        self._checkpoint = checkpoint
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            self.student.load_state_dict(saved["student"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step = saved["step"]

    def save(self) -> None:
        """Replaces the checkpoint whole: whoever loads it finds the old one or the new."""
        fresh = self._checkpoint.with_suffix(f".{os.getpid()}")
        state = {"student": self.student.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        torch.save(state, fresh)
        fresh.replace(self._checkpoint)

    def take_step(self, model: nn.Module, teacher: nn.Module) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        inputs, targets = batch_of(self.step + 1, teacher)
        mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine], reduction="sum") * world / BATCH
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1


@Wrapper(
    soft_timeout=timedelta(seconds=5),
    hard_timeout=timedelta(seconds=20),
    progress_watchdog_interval=timedelta(seconds=0.2),
    monitor_process_interval=timedelta(seconds=0.2),
)
def training(call: CallWrapper, options: argparse.Namespace, teacher: nn.Module, planned: faults.Faults) -> None:
    """From the last checkpoint to the last step, with the rank and the world that are in force now."""
    join(options.checkpoint_dir, call.iteration)
    state = Training(options.checkpoint_dir / "checkpoint.pt")
    model = DistributedDataParallel(state.student)  # meets all ranks: all have loaded before anybody saves
    rank = dist.get_rank()
    if rank == 0:
        tell_start(call, state.step)
    while state.step < options.steps:
        state.take_step(model, teacher)
        call.ping()
        if rank == 0:
            tell_restarts(call)
        if rank == 0 and (state.step % options.checkpoint_every == 0 or state.step == options.steps):
            with call.atomic():  # no restart cuts a checkpoint short
                state.save()
        planned.after(state.step)
        time.sleep(options.step_time)
    if rank == 0:
        conclude(options.checkpoint_dir, state, teacher)
    del model
    gc.collect()  # frees the model, which is part of a reference cycle: with Gloo it must not outlive the group
    dist.destroy_process_group()


def conclude(folder: Path, state: Training, teacher: nn.Module) -> None:
    inputs, targets = batch_of(0, teacher)
    with torch.no_grad():
        loss = nn.functional.mse_loss(state.student(inputs), targets).item()
    result = {"step": state.step, "loss": loss, "world_size": dist.get_world_size()}
    fresh = folder / f".result.json.{os.getpid()}"
    fresh.write_text(json.dumps(result) + "\n")
    fresh.replace(folder / "result.json")
    print(f"final step {state.step} loss {loss:.10f}, {dist.get_world_size()} ranks", flush=True)


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    options.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    training(options, network(seed=1), faults.Faults(options.fault))


if __name__ == "__main__":
    main()
