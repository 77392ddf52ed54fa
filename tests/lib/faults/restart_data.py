"""Datasets of the restart driver: samples that identify themselves, bad samples, and one that is stuck once."""

import ctypes
import multiprocessing.util
import os
import random
import time

import numpy as np
import torch
from sample_data import first_time, worker_id
from torch.utils.data import Dataset, IterableDataset

from . import killer

# Seconds for which a stuck sample sleeps if its worker is not killed.
STUCK = 60


class Bad(Exception):
    """The error of a bad sample."""


def stuck_in_c():
    """Never returns, and holds the GIL; a signal, such as the one that asks for the stack, does not end it."""
    reader, _ = os.pipe()
    ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), ctypes.c_size_t(1))


class Data:
    """Samples 0 to n-1.

    Attributes:
        draws: Whether samples contain random numbers, drawn from each of the three generators.
        bad: Indices of the samples that raise.
        stuck: Index of the sample that is stuck the first time, or None.
        held: Whether it is stuck in C and holds the GIL.
        folder: Where workers leave their pids, and the stuck sample its marker; None in an undisturbed run.
    """

    def __init__(self, n, size, delay, draws, bad=frozenset(), stuck=None, held=False, pickled=False, folder=None):
        self.n, self.size, self.delay, self.draws, self.bad = n, size, delay, draws, bad
        self.stuck, self.held, self.pickled, self.folder = stuck, held, pickled, folder
        if folder is not None:
            multiprocessing.util.register_after_fork(self, Data.born)

    def born(self):
        if self.folder is not None and multiprocessing.parent_process() is not None:
            killer.note_birth(self.folder)

    def __setstate__(self, state):
        vars(self).update(state)
        self.born()

    def init(self, worker):
        """The worker_init_fn."""
        if self.folder is not None:
            killer.note_worker(self.folder, worker)

    def sample(self, i):
        if i == self.stuck and self.folder is not None and first_time(os.path.join(self.folder, "stuck")):
            stuck_in_c() if self.held else time.sleep(STUCK)
        time.sleep(self.delay)
        if i in self.bad:
            raise Bad(f"sample {i} is bad")
        tensor = torch.full((self.size,), i, dtype=torch.int32)
        sample = {"i": i, "set": {i}, "tensor": tensor} if self.pickled else {"i": i, "tensor": tensor}
        if self.draws:
            sample["draws"] = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return sample

    @property
    def good(self):
        return [i for i in range(self.n) if i not in self.bad]


class Samples(Data, Dataset):
    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.sample(int(i))


class CountingSamples(Samples):
    """Samples with a dataset state that they do not depend on."""

    made = 0

    def __getitem__(self, i):
        self.made += 1
        return self.sample(int(i))

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = state["made"]


class Stream(Data, IterableDataset):
    """Worker w of W yields every W-th sample from w on. The iterator survives a bad sample."""

    workers = 1

    def __iter__(self):
        return Reader(self, worker_id() or 0)


class StatefulStream(Stream):
    def __iter__(self):
        return StatefulReader(self, worker_id() or 0)


class Reader:
    def __init__(self, data, i):
        self.data, self.i = data, i

    def __iter__(self):
        return self

    def __next__(self):
        if self.i >= self.data.n:
            raise StopIteration
        self.i += self.data.workers
        return self.data.sample(self.i - self.data.workers)


class StatefulReader(Reader):
    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.i = state["i"]


KINDS = {"map": Samples, "counting map": CountingSamples, "stream": Stream, "stateful stream": StatefulStream}


def as_list(samples):
    """A collate_fn for what default_collate does not know."""
    return samples


def numbers(batch):
    """Returns the numbers of a batch's samples."""
    if isinstance(batch, list):
        return tuple(sample["i"] for sample in batch)
    return tuple(batch["i"].tolist()) if isinstance(batch["i"], torch.Tensor) else (batch["i"],)


def content(batch):
    """Returns a batch's complete contents in comparable form, with tensors as bytes."""
    if isinstance(batch, torch.Tensor):
        return str(batch.dtype), tuple(batch.shape), batch.numpy().tobytes()
    if isinstance(batch, dict):
        return tuple((key, content(value)) for key, value in batch.items())
    if isinstance(batch, (list, tuple)):
        return type(batch).__name__, tuple(map(content, batch))
    return type(batch).__name__, repr(batch)
