"""Shared by the drivers: trials drawn from a seed, and samples that identify themselves."""

import random
import time
import warnings

import torch
from torch.utils.data import Dataset


def quiet():
    """Disables torch's thread pool, and warnings that every trial would raise."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)


def seed_of(args):
    """Returns the given seed, or a random one, and prints it."""
    seed = random.randrange(1 << 32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    return seed


def drawn(kind, count, args):
    """Yields (the trial's name with the arguments that reproduce it, the trial) `count` times, or for `args.only`."""
    seed = seed_of(args)
    for at in range(count) if args.only is None else [args.only]:
        trial = kind.random(random.Random(f"{seed}-{at}"))
        yield f"--seed {seed} --only {at}: {trial}", trial


class Numbered(Dataset):
    """Sample i consists of `size` elements i; with `pickled`, in an object that must be pickled."""

    def __init__(self, n, size, pickled, delay=0):
        self.n, self.size, self.pickled, self.delay = n, size, pickled, delay

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if self.delay:
            time.sleep(self.delay)
        tensor = torch.full((self.size,), i, dtype=torch.int32)
        return {"i": i, "set": {i}, "tensor": tensor} if self.pickled else tensor


def number(batch):
    """Returns the number of a batch's sample. Raises AssertionError if any element differs."""
    tensor = batch["tensor"] if isinstance(batch, dict) else batch
    i = int(tensor[0])
    assert bool((tensor == i).all()), f"batch {i} is wrong"
    if isinstance(batch, dict):
        assert (batch["i"], batch["set"]) == (i, {i}), f"batch {i} is wrong"
    return i
