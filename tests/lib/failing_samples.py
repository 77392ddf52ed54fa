"""Datasets with failing samples, and the batches expected with `on_error`, computed without a loader."""

import random
import sys

import torch
from sample_data import Numbers
from torch.utils.data import IterableDataset
from torch.utils.data._utils import fetch

BAD = (1, 4, 5, 6, 7, 14, 20, 21, 22)
SIZE = 23


class Broken(Numbers):
    """Sample i is (i, a number that it draws), or fails."""

    def __init__(self, n=SIZE, bad=BAD):
        super().__init__(n)
        self.bad = frozenset(bad)

    def __getitem__(self, i):
        drawn = self.draw()
        if i in self.bad:
            raise ValueError(f"bad {i}")
        return torch.tensor([float(i), drawn])

    def draw(self):
        return 0.0


class Drawing(Broken):
    """Broken, with random numbers."""

    def draw(self):
        return torch.rand(()).item() + random.random()


class InBatches(Drawing):
    """Fetches a batch in one call."""

    def __getitems__(self, indices):
        return [self[i] for i in indices]


class CalledByFetcher(Broken):
    """Each sample is whether torch's fetcher called this very object for it."""

    def __getitem__(self, i):
        # In Python 3.11 a comprehension has its own frame.
        frames = [sys._getframe(1), sys._getframe(2)]
        return any(
            frame.f_code is fetch._MapDatasetFetcher.fetch.__code__ and frame.f_locals["self"].dataset is self
            for frame in frames
        )


class Stream(IterableDataset):
    """Yields the numbers below n, some of which fail. Each worker yields all of them."""

    def __init__(self, n=SIZE, bad=BAD):
        super().__init__()
        self.n, self.bad = n, frozenset(bad)

    def __iter__(self):
        return StreamIterator(self.n, self.bad)


class StreamIterator:
    """Continues after an error."""

    def __init__(self, n, bad):
        self.n, self.bad, self.i = n, bad, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.i >= self.n:
            raise StopIteration
        self.i += 1
        if self.i - 1 in self.bad:
            raise ValueError(f"bad {self.i - 1}")
        return self.i - 1


class SavedIterator(StreamIterator):
    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.i = state["i"]


class SavedStream(Stream):
    def __iter__(self):
        return SavedIterator(self.n, self.bad)


class Endless(IterableDataset):
    """Fails forever, after `samples` samples."""

    def __init__(self, samples=0):
        super().__init__()
        self.samples = samples

    def __iter__(self):
        iterator = StreamIterator(1 << 60, ())
        iterator.bad = range(self.samples, 1 << 60)
        return iterator


def minus(index, error):
    """An ``on_error`` that returns the negative of the index, or of the number in the error's text."""
    number = int(str(error).split()[1])
    assert index in (None, number) and type(error) is ValueError
    return torch.tensor([float(-number), 0.0]) if index is not None else -number


def index_batches(n=SIZE, batch_size=4, drop_last=False):
    batches = [list(range(at, min(at + batch_size, n))) for at in range(0, n, batch_size)]
    return [batch for batch in batches if len(batch) == batch_size or not drop_last]


def left(batches, bad=BAD):
    """Index batches without bad samples; a batch of bad samples only is dropped."""
    remaining = [[i for i in batch if i not in bad] for batch in batches]
    return [batch for batch in remaining if batch]


def negated(batches, bad=BAD):
    """Index batches in which bad samples are negated."""
    return [[-i if i in bad else i for i in batch] for batch in batches]


def numbers(batches):
    """The first number of each sample, by batch."""
    return [[int(x) for x in (batch[:, 0] if batch.dim() > 1 else batch)] for batch in batches]


def failed(stats):
    """(index, action) of each failed sample."""
    return [(it.index, it.action) for it in stats.faults.failures]
