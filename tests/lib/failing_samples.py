"""Datasets some of whose samples fail, and what `on_error` makes of them, worked out without a loader."""

import random
import sys

import torch
from sample_data import Numbers
from torch.utils.data import IterableDataset
from torch.utils.data._utils import fetch

BAD = (1, 4, 5, 6, 7, 14, 20, 21, 22)
SIZE = 23


class Broken(Numbers):
    """Sample i is (i, a number that it drew), or fails."""

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
    """The same, with random numbers."""

    def draw(self):
        return torch.rand(()).item() + random.random()


class InBatches(Drawing):
    """Makes a batch in one call."""

    def __getitems__(self, indices):
        return [self[i] for i in indices]


class Shown(Broken):
    """Sample i is whether torch's fetcher has asked this very dataset for it."""

    def __getitem__(self, i):
        # Python 3.11 makes a comprehension a frame of its own.
        frames = [sys._getframe(1), sys._getframe(2)]
        return any(
            frame.f_code is fetch._MapDatasetFetcher.fetch.__code__ and frame.f_locals["self"].dataset is self
            for frame in frames
        )


class Stream(IterableDataset):
    """The numbers below n, of which some fail. Each worker has all of them."""

    def __init__(self, n=SIZE, bad=BAD):
        super().__init__()
        self.n, self.bad = n, frozenset(bad)

    def __iter__(self):
        return StreamIterator(self.n, self.bad)


class StreamIterator:
    """Goes on after an error. Has a state."""

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
    """Fails at each step, after the first few samples."""

    def __init__(self, samples=0):
        super().__init__()
        self.samples = samples

    def __iter__(self):
        iterator = StreamIterator(1 << 60, ())
        iterator.bad = range(self.samples, 1 << 60)
        return iterator


def minus(index, error):
    """An ``on_error``: the negative of the index, or of the number in the text."""
    number = int(str(error).split()[1])
    assert index in (None, number) and type(error) is ValueError
    return torch.tensor([float(-number), 0.0]) if index is not None else -number


def index_batches(n=SIZE, batch_size=4, drop_last=False):
    found = [list(range(at, min(at + batch_size, n))) for at in range(0, n, batch_size)]
    return [batch for batch in found if len(batch) == batch_size or not drop_last]


def left(batches, bad=BAD):
    """Index batches without the bad samples, and without those of bad samples alone."""
    found = [[i for i in batch if i not in bad] for batch in batches]
    return [batch for batch in found if batch]


def turned(batches, bad=BAD):
    """Index batches with the negative of bad samples."""
    return [[-i if i in bad else i for i in batch] for batch in batches]


def numbers(batches):
    """The numbers of the samples of batches, as ints."""
    return [[int(x) for x in (batch[:, 0] if batch.dim() > 1 else batch)] for batch in batches]


def failed(stats):
    """The indices of the failed samples, and what was done."""
    return [(it.index, it.action) for it in stats.faults.failures]
