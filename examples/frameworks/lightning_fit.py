"""Lightning: fit with validation, save a checkpoint, resume from it, validate; in one process, or in several with DDP.

Lightning rebuilds loaders, for example with a distributed sampler. `rustloader.install()` applies to the new ones, too.

python examples/frameworks/lightning_fit.py                                   one process, persistent workers
python examples/frameworks/lightning_fit.py --devices 2                       DDP over gloo
python examples/frameworks/lightning_fit.py --no-install                      on torch's loader: the same losses
python -m rustloader run examples/frameworks/lightning_fit.py --no-install    on the engine: the command installs it
"""

import tempfile
from pathlib import Path

import lightning
import torch
from small_data import Points, arguments
from torch import nn
from torch.utils.data import DataLoader

import rustloader


class Data(lightning.LightningDataModule):
    def loader(self, n: int, shuffle: bool) -> DataLoader:
        return DataLoader(Points(n), batch_size=16, shuffle=shuffle, num_workers=2, persistent_workers=True)

    def train_dataloader(self) -> DataLoader:
        return self.loader(256, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self.loader(64, shuffle=False)


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        points, above = batch
        return nn.functional.binary_cross_entropy_with_logits(self.net(points), above)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        # Validation is complete at this point, and the metrics cover all processes.
        metrics = self.trainer.callback_metrics
        self.print(f"epoch {self.current_epoch}: loss {metrics['train'].item()}, validation {metrics['val'].item()}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def trainer(epochs: int, devices: int) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--devices", type=int, default=1, help="number of processes")
    options = parser.parse_args()
    if options.install:
        rustloader.install()

    lightning.seed_everything(7, workers=True)
    first = trainer(1, options.devices)
    model = Model()
    first.fit(model, datamodule=Data())
    with tempfile.TemporaryDirectory() as folder:
        # All processes must use the same path.
        checkpoint = Path(first.strategy.broadcast(folder)) / "after-one-epoch.ckpt"
        first.save_checkpoint(checkpoint)
        second = trainer(2, options.devices)
        model = Model()
        second.fit(model, datamodule=Data(), ckpt_path=checkpoint)
    (figures,) = second.validate(model, datamodule=Data(), verbose=False)
    model.print(f"resumed and validated: {figures['val']}")
    print(f"process {second.global_rank}: {rustloader.engine_batches()} batches from the engine", flush=True)


if __name__ == "__main__":
    main()
