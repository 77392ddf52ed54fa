"""The datasets of `faults.cache_programs`, which workers of every start method import."""

import os

import numpy as np
import torch
from torch.utils.data import Dataset


class Samples(Dataset):
    """Deterministic samples of many sizes and types."""

    def __init__(self, length, large):
        self.length, self.large = length, large

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        size = 1 + index * 37 % self.large
        match index % 5:
            case 0:
                return torch.full((size,), index)
            case 1:
                return {"array": np.full(size, index, np.int16), "text": str(index) * (index % 50)}
            case 2:
                return index, bytes([index % 256]) * size
            case 3:
                return {index, size}
            case _:
                return [torch.arange(3), (index, None), index / 7]


class Scans(Samples):
    """The samples of dataset `salt`: the first `empty` are equal in all datasets, the others differ.

    With `main`, a use in that process raises: everything that a dataset opens there would cross the fork.
    """

    def __init__(self, length, large, salt, empty):
        super().__init__(length, large)
        self.salt, self.empty, self.main = salt, empty, None

    def __getitem__(self, index):
        if os.getpid() == self.main:
            raise AssertionError("the dataset is used in the main process")
        # A step of 5 keeps the type of the sample.
        return torch.zeros(4) if index < self.empty else super().__getitem__(index + self.salt * 5 * 1009)


class Batches(Scans):
    """The same samples, made in batches."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def in_a_list(sample):
    """Wraps a sample, and changes a tensor in place, as an augmentation may."""
    if isinstance(sample, torch.Tensor):
        sample += 1
    return [sample]


def as_list(samples):
    return samples
