"""Lightning: batches of at most 512 tokens, dealt to the ranks by the sampler; Lightning calls its `set_epoch`.

python examples/sequences/lightning_tokens.py                one process
python examples/sequences/lightning_tokens.py --devices 2    DDP over gloo
"""

import argparse

import lightning
import torch
from texts import Model, Texts

from rustloader import StatefulDataLoader, TokenBudgetBatchSampler


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    rows = [sample["input_ids"] for sample in samples]
    pad = torch.nn.utils.rnn.pad_sequence
    return {"input_ids": pad(rows, True), "labels": pad(rows, True, padding_value=-100)}


class Training(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.sequences = Model(), 0

    def train_dataloader(self) -> StatefulDataLoader:
        dataset = Texts(500)
        sampler = TokenBudgetBatchSampler(dataset.lengths, max_tokens=512, window=100)
        return StatefulDataLoader(dataset, batch_sampler=sampler, collate_fn=padded, num_workers=2)

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.sequences += len(batch["input_ids"])
        return self.net(batch["input_ids"], batch["labels"])

    def on_train_epoch_end(self) -> None:
        epoch = self.trainer.train_dataloader.batch_sampler.epoch
        print(f"process {self.global_rank}, epoch {epoch}: {self.sequences} sequences", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="number of processes")
    devices = parser.parse_args().devices
    lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        # The batch sampler deals its batches itself.
        use_distributed_sampler=False,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Training())


if __name__ == "__main__":
    main()
