"""Shared parts of the examples in this folder: random token sequences and a small model. Replace them with your own."""

import torch
from torch import nn
from torch.utils.data import Dataset


class Texts(Dataset):
    """Sequences of 4 to 60 tokens, each of which counts up from a random token."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(n)
        self.lengths = torch.randint(4, 61, (n,), generator=generator)
        self.starts = torch.randint(0, 40, (n,), generator=generator)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.starts[i] + torch.arange(int(self.lengths[i]))}


class Model(nn.Module):
    """Predicts each token from the one before, so that it needs no attention mask. Returns the loss per token."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 100))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.net(input_ids[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten())
