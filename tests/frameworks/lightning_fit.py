"""A Lightning Trainer that resumes from the last checkpoint of its ModelCheckpoint."""

import os

import common
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = common.network()

    def on_train_start(self) -> None:
        common.began(self.global_step)

    def training_step(self, batch, batch_idx):
        common.hold(self.global_step)
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.network(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=6,
        callbacks=[ModelCheckpoint(dirpath=common.FOLDER / "checkpoints", save_last=True)],
        default_root_dir=common.FOLDER,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    line = Line()
    trainer.fit(line, DataLoader(common.Points(), batch_size=8, shuffle=True), ckpt_path="last")
    environment = type(trainer.strategy.cluster_environment).__name__
    common.conclude(common.loss_of(line.network), trainer.global_step, environment=environment)


if __name__ == "__main__":
    main()
    common.end_group()
