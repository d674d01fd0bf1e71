"""DistributedDataParallel with a snapshot after each epoch, in the manner of pytorch/examples."""

import os

import common
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

SNAPSHOT = common.FOLDER / "snapshot.pt"
EPOCHS = 6


def main() -> None:
    dist.init_process_group("gloo")
    model = common.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    epochs_run = 0
    if SNAPSHOT.exists():
        snapshot = torch.load(SNAPSHOT)
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        epochs_run = snapshot["epochs_run"]
    ddp = DistributedDataParallel(model)
    points = common.Points()
    loader = DataLoader(points, batch_size=8, sampler=DistributedSampler(points))
    step = epochs_run * len(loader)
    common.began(step)
    for epoch in range(epochs_run, EPOCHS):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            common.hold(step)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(ddp(inputs), targets).backward()
            optimizer.step()
            step += 1
        if dist.get_rank() == 0:
            fresh = SNAPSHOT.with_suffix(".new")
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs_run": epoch + 1}, fresh
            )
            os.replace(fresh, SNAPSHOT)  # noqa: PTH105
    common.conclude(common.loss_of(model), step)


if __name__ == "__main__":
    main()
    common.end_group()
