"""Datasets whose workers die at given samples, a given number of times."""

import contextlib
import os
import random
import signal
import sys
import time

import numpy as np
import torch
from sample_data import as_list, worker_id
from support import DataLoader
from torch.utils.data import Dataset, IterableDataset


class Deaths:
    """Ends this process at samples; `fatal` maps each to the number of deaths. Files in `folder` count them."""

    def __init__(self, folder=None, fatal=(), how=signal.SIGKILL):
        self.folder, self.fatal, self.how = str(folder), dict(fatal), how

    def pass_by(self, sample):
        for death in range(self.fatal.get(sample, 0)):
            try:
                os.close(os.open(f"{self.folder}/{sample}-{death}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            if isinstance(self.how, signal.Signals):
                os.kill(os.getpid(), self.how)
                time.sleep(60)
            if self.how == "SystemExit":
                sys.exit(3)
            os._exit(self.how)

    def count(self):
        """Returns the deaths so far."""
        return len(os.listdir(self.folder))


NO_DEATHS = Deaths()


def drawn():
    """Draws a number from each generator."""
    return torch.randint(1 << 40, ()).item(), random.getrandbits(40), int(np.random.randint(1 << 30))


class Mortal(Dataset):
    """Sample i is (i, random numbers)."""

    def __init__(self, n, deaths=NO_DEATHS):
        self.n, self.deaths = n, deaths

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.deaths.pass_by(i)
        return i, *drawn()


class MortalStream(IterableDataset):
    """Worker w yields lengths[w] samples (w, i, random numbers). `deaths` has keys (w, i)."""

    def __init__(self, lengths, deaths=NO_DEATHS):
        self.lengths, self.deaths = lengths, deaths

    def __iter__(self):
        w = worker_id()
        for i in range(self.lengths[w]):
            self.deaths.pass_by((w, i))
            yield w, i, *drawn()


class DiesAgain(MortalStream):
    """Worker 0 dies at its sample 5, and then four times before it reaches that sample again."""

    def __init__(self, lengths, folder):
        super().__init__(lengths, Deaths(folder, {(0, 5): 1, "again": 4}))

    def __iter__(self):
        for sample in super().__iter__():
            if sample[:2] == (0, 2) and os.path.exists(f"{self.deaths.folder}/(0, 5)-0"):
                self.deaths.pass_by("again")
            yield sample


class ShuffledStream(MortalStream):
    """MortalStream in an order that `__iter__` draws."""

    def __iter__(self):
        w = worker_id()
        return self.samples(w, torch.randperm(self.lengths[w]).tolist(), *drawn())

    def samples(self, w, order, *before):
        for i in order:
            yield w, i, *before, *drawn()


class StatefulStream(IterableDataset):
    """MortalStream with a state."""

    def __init__(self, lengths, deaths=NO_DEATHS):
        self.lengths, self.deaths = lengths, deaths

    def __iter__(self):
        return Stream(self)


class Stream:
    def __init__(self, dataset):
        self.dataset, self.worker, self.place = dataset, worker_id(), 0

    def __iter__(self):
        return self

    def __next__(self):
        i = self.place
        if i >= self.dataset.lengths[self.worker]:
            raise StopIteration
        self.dataset.deaths.pass_by((self.worker, i))
        self.place += 1
        return self.worker, i, *drawn()

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def loader_of(dataset, cls=DataLoader, **kw):
    options = {"num_workers": 2, "batch_size": 2, "collate_fn": as_list, "max_restarts": 20, "seed_by": "sample"}
    return cls(dataset, **options | kw)


def epochs(loader, count=1, seed=3):
    """Returns the batches of each of `count` epochs."""
    torch.manual_seed(seed)
    return [list(loader) for _ in range(count)]


def kill(*pids):
    """Kills processes. Some may have ended and been reaped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
