"""transformers: a tiny BERT from a configuration, trained by Trainer, then resumed in the middle of an epoch.

python examples/frameworks/transformers_trainer.py
python examples/frameworks/transformers_trainer.py --no-install     on torch's loader: the same losses
python -m rustloader run examples/frameworks/transformers_trainer.py --no-install
"""

import tempfile
from pathlib import Path

import torch
from small_data import arguments
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

import rustloader

WORDS = 100


class Sentences(Dataset):
    """Sentences of tokens, padded to the same length, with a mask; the class says whether the first token is small."""

    def __init__(self, n: int, longest: int = 24) -> None:
        random = torch.Generator().manual_seed(n)
        self.tokens = torch.randint(3, WORDS, (n, longest), generator=random)
        self.lengths = torch.randint(4, longest + 1, (n,), generator=random)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        mask = (torch.arange(self.tokens.shape[1]) < self.lengths[i]).long()
        masked = torch.rand(mask.shape) < 0.1  # token 1 stands for a token that the worker masks
        tokens = torch.where(masked, 1, self.tokens[i]) * mask
        return {"input_ids": tokens, "attention_mask": mask, "labels": (self.tokens[i, 0] < WORDS // 2).long()}


def trainer(folder: str) -> Trainer:
    set_seed(7)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
        )
    )
    settings = TrainingArguments(
        output_dir=folder,
        num_train_epochs=2,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        dataloader_num_workers=2,
        eval_strategy="epoch",
        logging_strategy="epoch",
        save_strategy="steps",
        save_steps=24,  # of 32 steps: in the middle of the second epoch
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=7,
    )
    return Trainer(model, settings, train_dataset=Sentences(128), eval_dataset=Sentences(32))


def show(title: str, history: list[dict[str, float]]) -> None:
    """Prints the exact losses, because Trainer itself prints rounded ones."""
    for line in history:
        for name in line.keys() & {"loss", "eval_loss"}:
            print(f"{title}: epoch {line['epoch']}: {name} {line[name]}")


def main() -> None:
    options = arguments(__doc__).parse_args()
    if options.install:
        rustloader.install()

    with tempfile.TemporaryDirectory() as folder:
        whole = trainer(folder)
        whole.train()
        show("from the start", whole.state.log_history)
        resumed = trainer(folder)
        resumed.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-24"))
        # The checkpoint contains the log of the first epoch, which the first run has shown.
        show("resumed", [line for line in resumed.state.log_history if line["epoch"] > 1])
    print(f"process 0: {rustloader.engine_batches()} batches from the engine")


if __name__ == "__main__":
    main()
