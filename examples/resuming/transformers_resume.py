"""transformers: a Trainer whose checkpoints contain the loader's state. Stop it at any moment and run it again.

python examples/resuming/transformers_resume.py --folder run
"""

from typing import Any

import torch
from stoppable import Points, Steps, arguments
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from rustloader import StatefulDataLoader


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(points)
        return {"loss": nn.functional.binary_cross_entropy_with_logits(logits, labels), "logits": logits}


def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    points, labels = zip(*samples, strict=True)
    return {"points": torch.stack(points), "labels": torch.stack(labels)}


class ResumingTrainer(Trainer):
    """A Trainer whose StatefulDataLoader restores its own position.

    `ignore_data_skip=True` keeps the Trainer from skipping batches as well.
    """

    loader: StatefulDataLoader
    steps: Steps

    def get_train_dataloader(self) -> StatefulDataLoader:
        self.loader = StatefulDataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            shuffle=True,
            num_workers=self.args.dataloader_num_workers,
            collate_fn=self.data_collator,
            seed_by="sample",
        )
        return self.loader

    def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **keywords)
        self.steps.show(self.state.global_step + 1, f"loss {loss.item()}")
        return loss


class SavesLoader(TrainerCallback):
    """A callback that saves the loader's state in each checkpoint, and restores it when training starts."""

    def __init__(self, trainer: ResumingTrainer, checkpoint: str | None) -> None:
        self.trainer = trainer
        self.checkpoint = checkpoint

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self.checkpoint is not None:
            self.trainer.loader.load_state_dict(torch.load(f"{self.checkpoint}/loader.pt"))

    def on_save(self, args: TrainingArguments, state: Any, *_: Any, **__: Any) -> None:
        folder = f"{args.output_dir}/checkpoint-{state.global_step}"
        torch.save(self.trainer.loader.state_dict(), f"{folder}/loader.pt")


def main() -> None:
    options = arguments(__doc__).parse_args()
    set_seed(7)
    settings = TrainingArguments(
        output_dir=str(options.folder),
        num_train_epochs=3,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        dataloader_num_workers=2,
        save_strategy="steps",
        save_steps=options.every,
        ignore_data_skip=True,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=7,
    )
    trainer = ResumingTrainer(Model(), settings, train_dataset=Points(256), data_collator=collate)
    trainer.steps = Steps(options.step_seconds)
    checkpoint = get_last_checkpoint(str(options.folder)) if options.folder.exists() else None
    trainer.add_callback(SavesLoader(trainer, checkpoint))
    trainer.train(resume_from_checkpoint=checkpoint)


if __name__ == "__main__":
    main()
