"""Logs the statistics of a loader once per epoch, from Lightning, transformers or accelerate.

The curves are written for TensorBoard and for Weights & Biases in its offline mode, which needs no account.

python examples/measuring/logging_callbacks.py lightning
python examples/measuring/logging_callbacks.py transformers
python examples/measuring/logging_callbacks.py accelerate --folder runs
tensorboard --logdir runs     view the curves
"""

import argparse
import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import rustloader

EPOCHS = 2


def curves(loader: Any) -> dict[str, float]:
    """Returns the statistics of a loader, which a library may have wrapped, by the names of their curves."""
    return {f"loader/{name}": value for name, value in rustloader.stats(loader).scalars().items()}


class Points(Dataset):
    """Points in the plane, labelled by their side of a line."""

    def __init__(self, n: int) -> None:
        self.points = torch.randn(n, 2)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"points": self.points[i], "labels": (self.points[i].sum() > 0).float()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.binary_cross_entropy_with_logits(self.layer(points).flatten(), labels)}


def with_lightning(dataset: Dataset, folder: str) -> None:
    import lightning
    from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

    class LogLoader(lightning.Callback):
        def on_train_epoch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(curves(trainer.train_dataloader), step=trainer.global_step)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=[TensorBoardLogger(folder), WandbLogger(save_dir=folder, offline=True)],
        callbacks=[LogLoader()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(dataset, batch_size=8, num_workers=2, persistent_workers=True))


def with_transformers(dataset: Dataset, folder: str) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class LogLoader(TrainerCallback):
        def on_epoch_end(self, *_: Any, train_dataloader: Any, **__: Any) -> None:
            trainer.log(curves(train_dataloader))

    settings = TrainingArguments(
        output_dir=folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=8,
        dataloader_num_workers=2,
        dataloader_persistent_workers=True,
        report_to=["tensorboard", "wandb"],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(Model(), settings, train_dataset=dataset, callbacks=[LogLoader()])
    trainer.train()


def with_accelerate(dataset: Dataset, folder: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with=["tensorboard", "wandb"], project_dir=folder)
    accelerator.init_trackers("loader")
    model = Model()
    loader = DataLoader(dataset, batch_size=8, num_workers=2, persistent_workers=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for epoch in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
        # accelerate has no callbacks: the program owns the loop.
        accelerator.log(curves(loader), step=(epoch + 1) * len(loader))
    accelerator.end_training()


def main() -> None:
    ways = {"lightning": with_lightning, "transformers": with_transformers, "accelerate": with_accelerate}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=ways)
    parser.add_argument("--folder", default="runs", help="where the files go (default: %(default)s)")
    options = parser.parse_args()
    os.makedirs(options.folder, exist_ok=True)
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": options.folder}
    rustloader.install()
    ways[options.library](Points(128), options.folder)
    print(f"{rustloader.engine_batches()} batches from the engine")


if __name__ == "__main__":
    main()
