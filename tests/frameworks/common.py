"""What the training scripts share: a tiny data set, a result, and a place where the test kills a rank."""

import gc
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed.nn  # before there is a group: its functions have the group of that time as a default

FOLDER = Path(sys.argv[1])
HOLDS = [int(step) for step in os.environ.get("HOLD_AT", "").split(",") if step]


class Points(torch.utils.data.Dataset):
    """64 points of a line in eight dimensions."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(64, 8, generator=generator)
        self.targets = self.inputs.sum(dim=1, keepdim=True)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


def network() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def hold(step: int) -> None:
    """The last rank stops here before this step, in the cycle that is to be struck; its peers wait for it."""
    cycle = int(os.environ.get("NVRX_CYCLE", "0"))
    if HOLDS[cycle : cycle + 1] == [step] and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        (FOLDER / f"held-{cycle}").touch()
        signal.pause()


def loss_of(model: torch.nn.Module) -> float:
    """Over all points."""
    points = Points()
    with torch.no_grad():
        return torch.nn.functional.mse_loss(model(points.inputs), points.targets).item()


def conclude(loss: float, step: int, **more: object) -> None:
    """Rank 0's result."""
    if os.environ["RANK"] == "0":
        (FOLDER / "result.json").write_text(json.dumps({"loss": loss, "step": step, **more}))


def end_group() -> None:
    """After `main`: what refers to the group keeps Gloo's threads, which can abort the process at its end."""
    gc.collect()
    torch.distributed.destroy_process_group()


def began(step: int) -> None:
    """Where this start begins: 0, or what it has resumed from."""
    if os.environ["RANK"] == "0":
        with (FOLDER / "began").open("a") as file:
            file.write(f"{step}\n")
