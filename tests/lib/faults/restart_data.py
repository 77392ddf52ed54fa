"""Datasets of several drivers: samples that identify themselves, bad samples, and one at which a fault happens once."""

import ctypes
import multiprocessing.util
import os
import random
import signal
import time
from typing import NamedTuple

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


class Fault(NamedTuple):
    """What happens at a sample, once; `marker` is the file that remembers it. Names that are unknown here do nothing:
    such faults come from the main process."""

    name: str
    index: int
    marker: str

    def happen(self):
        """Returns what replaces the sample, or None."""
        match self.name:
            case "error":
                raise Bad(f"sample {self.index} fails")
            case "unpicklable":
                return lambda: None
            case "segv":
                signal.raise_signal(signal.SIGSEGV)
            case "exit":
                os._exit(3)
            case "late":
                time.sleep(1.5)
            case "stuck":
                time.sleep(10 * STUCK)
        return None


class Data:
    """Samples 0 to n-1.

    Attributes:
        draws: Whether samples contain random numbers, drawn from each of the three generators.
        bad: Indices of the samples that raise.
        stuck: Index of the sample that is stuck the first time, or None.
        held: Whether it is stuck in C and holds the GIL.
        fault: What else happens at a sample, or None.
        folder: Where workers leave their pids, and the stuck sample its marker; None in an undisturbed run.
    """

    fault = None

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
        if self.fault is not None and i == self.fault.index and first_time(self.fault.marker):
            replaced = self.fault.happen()
            if replaced is not None:
                return replaced
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
    """Worker w of W yields every W-th sample from w on. The iterator survives a bad sample. A fault's error ends it:
    later batches would have other boundaries than without the error."""

    workers = 1

    def __iter__(self):
        reader = Reader(self, worker_id() or 0)
        return (sample for sample in reader) if self.fault is not None and self.fault.name == "error" else reader


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


class Settings(NamedTuple):
    """A dataset and a loader over it, and how many epochs it runs."""

    kind: str
    workers: int
    prefetch: int
    persistent: bool
    in_order: bool
    dispatch: str | None
    window: int | str | None
    seed_by: str | None
    pickled: bool
    batch_size: int | None
    shuffle: bool
    n: int
    size: int
    delay: float
    epochs: int
    seed: int

    @classmethod
    def random(cls, rng, kinds, most_workers, epochs):
        flip = lambda chance=0.5: rng.random() < chance  # noqa: E731
        kind = rng.choice(kinds)
        streams = "stream" in kind
        return cls(
            kind=kind,
            workers=rng.randint(1, most_workers),
            prefetch=rng.randint(1, 3),
            persistent=flip(),
            in_order=flip(0.7),
            dispatch=None if streams else rng.choice([None, "shared_queue"]),
            window=rng.choice([None, None, 1, 8, "64kB"]),
            seed_by=rng.choice([None, "batch", "sample"]),
            pickled=flip(0.2),
            batch_size=rng.choice([None, 1, 4]),
            shuffle=not streams and flip(),
            n=rng.choice([24, 60, 120]),
            size=rng.choice([1, 100, 6000, 100_000]),
            delay=rng.choice([0, 0.0005, 0.002]),
            epochs=rng.choice(epochs),
            seed=rng.randrange(1 << 31),
        )

    def loader(self, cls, context, of_data=None, fault=None, **options):
        """Creates a loader of class `cls`. `of_data` are arguments of its dataset."""
        draws = self.seed_by is not None
        dataset = KINDS[self.kind](self.n, self.size, self.delay, draws, pickled=self.pickled, **of_data or {})
        dataset.workers, dataset.fault = self.workers, fault
        torch.manual_seed(self.seed)
        return cls(
            dataset,
            batch_size=self.batch_size,
            shuffle=self.shuffle,
            collate_fn=as_list if self.pickled and self.batch_size else None,
            num_workers=self.workers,
            worker_init_fn=None if dataset.folder is None else dataset.init,
            prefetch_factor=self.prefetch,
            multiprocessing_context=context,
            persistent_workers=self.persistent,
            in_order=self.in_order,
            dispatch=self.dispatch,
            reorder_window=self.window,
            seed_by=self.seed_by,
            **options,
        )
