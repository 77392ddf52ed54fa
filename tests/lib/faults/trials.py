"""What drivers of trials share: what is drawn from a seed, and data that say what they are."""

import random
import time
import warnings

import torch
from torch.utils.data import Dataset


def quiet():
    """No threads of torch's beside those of a trial, and no warnings that a trial is sure to have."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)


def seed_of(args):
    """The given seed, or a random one. It is printed."""
    seed = random.randrange(1 << 32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    return seed


def drawn(kind, count, args):
    """Yields (the arguments that reproduce a trial, the trial) `count` times, or for `args.only` alone."""
    seed = seed_of(args)
    for at in range(count) if args.only is None else [args.only]:
        trial = kind.random(random.Random(f"{seed}-{at}"))
        yield f"--seed {seed} --only {at}: {trial}", trial


class Numbered(Dataset):
    """Items of `size` elements, each of them the item's number; with `pickled` in what takes a pickle."""

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
    """Which item a batch is; an error if it is not that item in each of its elements."""
    tensor = batch["tensor"] if isinstance(batch, dict) else batch
    i = int(tensor[0])
    assert bool((tensor == i).all()), f"batch {i} is wrong"
    if isinstance(batch, dict):
        assert (batch["i"], batch["set"]) == (i, {i}), f"batch {i} is wrong"
    return i
