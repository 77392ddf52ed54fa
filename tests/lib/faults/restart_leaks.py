"""Many restarts in one iterator: what the process holds after a tenth of them is what it holds after all."""

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

# Seconds in which a killed worker has to be replaced.
REPLACED = 60
# What each figure may grow by, in its own unit; the heap of the C library is not the same at all times.
ALLOWED = {"anonymous_kib": 4096, "shared_kib": 4096, "mappings": 20, "python_objects": 2000}


class Endless(Dataset):
    """Samples of a message, and of a block of their own."""

    def __len__(self):
        return 100_000_000

    def __getitem__(self, i):
        return i, torch.full((10 if i % 3 else 6000,), i % 1000)


class EndlessStream(IterableDataset):
    """Yields the worker's number. Its iterator has a state, so that a replacement replays little."""

    def __iter__(self):
        return Endlessly()


class Endlessly:
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


def held():
    """What this process holds. No pool is emptied: the iterator lives."""
    from support import children, mappings, open_files

    gc.collect()
    with open("/proc/self/status") as file:
        sizes = dict(line.split(":", 1) for line in file)
    with open("/proc/self/maps") as file:
        maps = len(file.readlines())
    return {
        "anonymous_kib": int(sizes["RssAnon"].split()[0]),
        "shared_kib": int(sizes["RssShmem"].split()[0]),
        "descriptors": len(open_files()),
        "mappings": maps,
        "arena_mappings": len(mappings()),
        "threads": int(sizes["Threads"]),
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
        self.got = 0
        self.ahead = set()

    def take(self):
        """A batch: the right one."""
        i, tensor = next(self.iterator)
        assert bool((tensor == (self.got % 2 if self.streams else i % 1000)).all()), f"batch {i} is wrong"
        if self.in_order:
            assert i == (self.got // 2 + 1 if self.streams else self.got), f"batch {i} in the place of {self.got}"
            self.got += 1
            return
        assert i not in self.ahead and i >= self.got, f"batch {i} came twice"
        self.ahead.add(i)
        while self.got in self.ahead:
            self.ahead.remove(self.got)
            self.got += 1

    def restart(self, worker):
        """Kills a worker and takes batches until it has been replaced, and has made one."""
        pid = self.iterator._workers[worker].pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + REPLACED
        while self.iterator._workers[worker].pid == pid:
            self.take()
            assert time.monotonic() < until, "the worker is not replaced"
        # Several from each: deaths without a batch between them would be backed off.
        for _ in range(10):
            self.take()

    def end(self):
        self.iterator._shutdown_workers()
        self.loader = self.iterator = None


def grown(before, after):
    return [
        f"{name} has grown from {before[name]} to {after[name]}"
        for name in before
        if after[name] > before[name] + ALLOWED.get(name, 0)
    ]


def run(restarts, only=None):
    """Restarts the workers of one iterator of each kind; the number of kinds that are wrong."""
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
                    first = held()
            last = held()
            restarting.end()
        wrong = grown(first, last)
        failed += bool(wrong)
        print(
            f"{'WRONG ' * bool(wrong)}{kind}: {restarts} restarts in {time.monotonic() - start:.0f} s, then {last}",
            *wrong,
            sep="\n",
            flush=True,
        )
    return failed
