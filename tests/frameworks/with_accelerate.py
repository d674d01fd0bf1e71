"""A loop over what accelerate has prepared: saves its whole state, and loads it from the last whole folder."""

import common
import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader

EPOCHS, SAVE_EVERY = 6, 5


def main() -> None:
    accelerator = Accelerator(cpu=True)
    model = common.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(common.Points(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = max((int(mark.stem) for mark in common.FOLDER.glob("*.whole")), default=0)
    if step:
        accelerator.load_state(str(common.FOLDER / f"step_{step}"))
    common.began(step)
    for _ in range(step // len(loader), EPOCHS):
        done = step % len(loader)
        for inputs, targets in skip_first_batches(loader, done) if done else loader:
            common.hold(step)
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            step += 1
            if step % SAVE_EVERY == 0:
                accelerator.save_state(str(common.FOLDER / f"step_{step}"))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:  # all ranks have written their part
                    (common.FOLDER / f"{step}.whole").touch()
    common.conclude(common.loss_of(accelerator.unwrap_model(model)), step)


if __name__ == "__main__":
    main()
    common.end_group()
