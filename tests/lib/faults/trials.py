"""Shared by the drivers: the command line, trials drawn from a seed, their loop, and samples that name themselves."""

import argparse
import hashlib
import itertools
import os
import random
import signal
import time
import traceback
import warnings

import numpy as np
import torch
from torch.utils.data import Dataset


def quiet():
    """Disables torch's thread pool, and warnings that every trial would raise."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)


def arguments(driver, doc, **options):
    """Parses the command line of a driver. `options` has (default, help) by name. The default gives the type: False is
    that of a flag, [] that of an option that may be repeated, and a class that of an option without a default. Every
    driver has --seed; `seed` is its default."""
    parser = argparse.ArgumentParser(prog=f"python -m faults.{driver}", description=doc.partition("\n")[0])
    options = {"seed": (int, "seed of the trials (default: random)"), **options}
    for name, (default, text) in options.items():
        if default is False:
            kind = {"action": "store_true"}
        elif default == []:
            kind = {"action": "append", "default": [], "metavar": "TEXT"}
        else:
            kind = {"type": default} if isinstance(default, type) else {"type": type(default), "default": default}
        parser.add_argument(f"--{name}", help=text, **kind)
    return parser.parse_args()


ONLY = (int, "run only the trial with this number")


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


def overdue(*_):
    raise TimeoutError("the trial does not end")


def run_all(trials, play, limit=None, progress=None, sep="\n", after=list):
    """Plays each of `trials`, (name, trial), until `play(trial, number)` returns None instead of a list of problems. An
    exception is a problem, and so is a trial that takes longer than `limit` seconds. After each trial, `after()`
    returns more problems, and `progress(number, failed)` is called. Returns (the number of trials, of failed ones)."""
    number = failed = 0
    if limit is not None:
        signal.signal(signal.SIGALRM, overdue)
    for number, (name, trial) in enumerate(trials, 1):
        signal.alarm(limit or 0)
        try:
            wrong = play(trial, number)
        except Exception:
            wrong = [traceback.format_exc()]
        signal.alarm(0)
        if wrong is None:
            return number - 1, failed
        wrong = [*wrong, *after()]
        failed += bool(wrong)
        if wrong:
            print(f"WRONG {name}", *wrong, sep=sep, flush=True)
        if progress is not None:
            progress(number, failed)
    return number, failed


def status_of(pid, seconds):
    """Waits for a child. Returns its wait status, or None if it hangs; it is then killed."""
    end = time.monotonic() + seconds
    while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.001)
    if found != (0, 0):
        return found[1]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def held():
    """Returns figures of what this process holds."""
    from support import mappings, open_files

    with open("/proc/self/status") as file:
        sizes = dict(line.split(":", 1) for line in file)
    return {
        "anonymous_kib": int(sizes["RssAnon"].split()[0]),
        "shared_kib": int(sizes["RssShmem"].split()[0]),
        "descriptors": len(open_files()),
        "arena_mappings": len(mappings()),
        "threads": int(sizes["Threads"]),
    }


class Numbered(Dataset):
    """Sample i consists of `size` elements i; with `pickled`, in an object that must be pickled."""

    def __init__(self, n, size, pickled):
        self.n, self.size, self.pickled = n, size, pickled

    def __len__(self):
        return self.n

    def __getitem__(self, i):
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


def hash_of(batch):
    """Hashes a batch: types, dtypes, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=16)

    def add(value):
        digest.update(type(value).__name__.encode())
        if isinstance(value, torch.Tensor):
            value = value.numpy()
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode())
            digest.update(np.ascontiguousarray(value).data)
        elif isinstance(value, dict):
            for item in itertools.chain.from_iterable(value.items()):
                add(item)
        elif isinstance(value, list | tuple):
            digest.update(f"{len(value)}".encode())
            for item in value:
                add(item)
        else:
            digest.update(repr(value).encode())

    add(batch)
    return digest.digest()
