"""Shared code of the Ray tests: datasets, comparisons, and checks of what a loader leaves behind."""

import contextlib
import os
import random
import threading
import time

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import rustloader

# Workers must be gone this many seconds after their loader, its process or a node has ended. On a quiet machine, they
# need 2.
GONE = 40


def noisy(size=60, numel=40):
    class Noisy(Dataset):
        """Defined in a function, so that only cloudpickle can send it."""

        def __init__(self):
            self.data = np.arange(size)

        def __len__(self):
            return size

        def __getitem__(self, index):
            self.data[index] += 1
            info = get_worker_info()
            noise = torch.rand(numel), np.random.rand(2), random.random()
            return index, *noise, (info.id, info.num_workers, info.seed)

    return Noisy()


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for at in range(info.id, 31, info.num_workers):
            yield torch.tensor(at), torch.rand(2)


class Threads(Dataset):
    """Samples that contain the ID of their thread."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(0.01)
        return index, threading.get_ident()


def epochs(dataset, context, count=2, **options):
    torch.manual_seed(5)
    options = {"batch_size": 4, "num_workers": 2, "persistent_workers": True, **options}
    loader = rustloader.DataLoader(dataset, multiprocessing_context=context, **options)
    return [list(loader) for _ in range(count)]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition, seconds=GONE):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def links():
    """The number of threads of this process that serve a connection."""
    count = 0
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            count += file.read() == "rl_link\n"
    return count
