"""Many restarts in one iterator: the process holds no more after all of them than after the first tenth."""

import contextlib
import gc
import multiprocessing.process
import multiprocessing.util
import os
import signal
import time

import torch
from sample_data import worker_id
from torch.utils.data import Dataset, IterableDataset

from .trials import held

# Seconds within which a killed worker must be replaced.
REPLACED = 60
# How much each figure may grow, in its own unit, since the C heap fluctuates. The default is 0.
ALLOWED = {"anonymous_kib": 4096, "shared_kib": 4096, "mappings": 20, "python_objects": 2000}


class Endless(Dataset):
    """Samples that fit in a message, and samples that need a block of their own."""

    def __len__(self):
        return 100_000_000

    def __getitem__(self, i):
        return i, torch.full((10 if i % 3 else 6000,), i % 1000)


class EndlessStream(IterableDataset):
    """Yields the worker's ID. Its iterator has a state, so that a replacement replays little."""

    def __iter__(self):
        return EndlessIterator()


class EndlessIterator:
    i = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.i += 1
        worker = worker_id()
        return self.i, torch.full((10 if self.i % 3 else 6000,), worker)

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.i = state["i"]


# Kinds of loaders: (dataset, arguments).
KINDS = {
    "map": (Endless, {}),
    "queue": (Endless, {"dispatch": "shared_queue"}),
    "unordered": (Endless, {"in_order": False}),
    "pinned": (Endless, {"pin_memory": True}),
    "forkserver": (Endless, {"multiprocessing_context": "forkserver"}),
    "stream": (EndlessStream, {}),
}


def measure():
    """Measures what this process holds. No pool is trimmed, since the iterator is alive."""
    from support import children

    gc.collect()
    with open("/proc/self/maps") as file:
        maps = len(file.readlines())
    return {
        **held(),
        "mappings": maps,
        "children": len(children()),
        "known_processes": len(multiprocessing.process._children),
        "finalizers": len(multiprocessing.util._finalizer_registry),
        "python_objects": len(gc.get_objects()),
    }


class Restarting:
    """One iterator, whose workers are killed in turn."""

    def __init__(self, kind, restarts):
        import rustloader

        dataset, options = KINDS[kind]
        self.in_order = options.get("in_order", True)
        self.streams = dataset is EndlessStream
        loader_class = rustloader.StatefulDataLoader if self.streams else rustloader.DataLoader
        self.loader = loader_class(
            dataset(), batch_size=None, num_workers=2, max_restarts=restarts, prefetch_factor=2, **options
        )
        self.iterator = iter(self.loader)
        self.low_water = 0
        self.ahead = set()

    def take(self):
        """Takes a batch and checks it."""
        i, tensor = next(self.iterator)
        assert bool((tensor == (self.low_water % 2 if self.streams else i % 1000)).all()), f"batch {i} is wrong"
        if self.in_order:
            assert i == (self.low_water // 2 + 1 if self.streams else self.low_water), (
                f"batch {i} instead of {self.low_water}"
            )
            self.low_water += 1
            return
        assert i not in self.ahead and i >= self.low_water, f"batch {i} came twice"
        self.ahead.add(i)
        while self.low_water in self.ahead:
            self.ahead.remove(self.low_water)
            self.low_water += 1

    def restart(self, worker):
        """Kills a worker, and takes batches until its replacement has delivered some."""
        pid = self.iterator._workers[worker].pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + REPLACED
        while self.iterator._workers[worker].pid == pid:
            self.take()
            assert time.monotonic() < until, "the worker is not replaced"
        # Several from each worker: deaths without a batch between them would delay the next restart.
        for _ in range(10):
            self.take()

    def end(self):
        self.iterator._shutdown_workers()
        self.loader = self.iterator = None


def growth(before, after):
    return [
        f"{name} has grown from {before[name]} to {after[name]}"
        for name in before
        if after[name] > before[name] + ALLOWED.get(name, 0)
    ]


def run(restarts, only=None):
    """Restarts the workers of one iterator of each kind. Returns the number of failed kinds."""
    from pinning_support import pinning

    failed = 0
    for kind in KINDS if only is None else [only]:
        start = time.monotonic()
        with pinning() if kind == "pinned" else contextlib.nullcontext():
            restarting = Restarting(kind, restarts)
            first = None
            for at in range(restarts):
                restarting.restart(at % 2)
                if at + 1 == max(1, restarts // 10):
                    first = measure()
            last = measure()
            restarting.end()
        wrong = growth(first, last)
        failed += bool(wrong)
        print(
            f"{'WRONG ' * bool(wrong)}{kind}: {restarts} restarts in {time.monotonic() - start:.0f} s, then {last}",
            *wrong,
            sep="\n",
            flush=True,
        )
    return failed
