"""Measures the CPU time that one worker takes per sample: without a cache, filling one, and reading from it.

The samples are rows of a tensor, which cost almost nothing to make. "fill" minus "plain" is the cost of adding one.
`rustloader/metrics/prediction.py` has the costs on which the advice on caches is based.

example:
  python benches/caching.py
"""

import itertools

import torch
from torch.utils.data import Dataset

import rustloader

SIZES = [80, 1024, 4096, 65536, 196608]
BATCH, ROUNDS = 64, 3


class Rows(Dataset[torch.Tensor]):
    def __init__(self, size: int) -> None:
        count = max(10, min(500, 10**8 // size // BATCH)) * BATCH
        self.table = torch.zeros(count, size // 4)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.table[index].clone()


def seconds(dataset: Dataset[torch.Tensor], samples: int, epochs: int) -> list[float]:
    """Returns the CPU seconds per sample in each epoch of a loader with one persistent worker."""
    loader = rustloader.DataLoader(dataset, batch_size=BATCH, num_workers=1, persistent_workers=True)
    totals = [0.0]
    for _ in range(epochs):
        for _ in loader:
            pass
        totals.append(rustloader.stats(loader).workers[0].cpu_seconds or 0.0)
    return [(after - before) / samples for before, after in itertools.pairwise(totals)]


def measure(size: int) -> tuple[float, float, float]:
    """Returns the CPU seconds per sample of ``size`` bytes: without a cache, filling one, and reading from it."""
    rows = Rows(size)
    plain = min(seconds(rows, len(rows), 2))
    filling, *reading = seconds(rustloader.cache(rows, memory=2 * len(rows) * (size + 200)), len(rows), 3)
    return plain, filling, min(reading)


if __name__ == "__main__":
    print("lowest of", ROUNDS, "rounds, us per sample")
    for size in SIZES:
        plain, fill, read = (min(times) * 1e6 for times in zip(*(measure(size) for _ in range(ROUNDS)), strict=True))
        print(f"{size:7,} B: plain {plain:6.2f}, fill {fill:6.2f} ({fill - plain:+.2f}), read {read:6.2f}", flush=True)
