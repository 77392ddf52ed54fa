"""Datasets whose workers end at a chosen place in a chosen way. They are at module level for spawned workers."""

import ctypes
import faulthandler
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import signal
import sys
import threading
import time

import torch
from sample_data import worker_id
from torch.utils.data import Dataset, IterableDataset

from . import trials

# Ways in which a worker may end, and their signals.
SIGNALS = {name: signal.Signals[name] for name in ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGTERM", "SIGABRT")}
# C++'s std::terminate raises SIGABRT.
TERMINATE = "terminate()"
WAYS = [*SIGNALS, "os._exit(0)", "sys.exit(0)", "os._exit(3)", TERMINATE]
# The worker that ends, and the last sample requested of it.
VICTIM, LAST = 1, 7


def end(way, marker):
    """Ends this process and records the moment in the file `marker`. Does nothing if that file exists."""
    try:
        fd = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    os.write(fd, f"{time.monotonic()} {os.getpid()}".encode())
    os.close(fd)
    # A forked worker inherits pytest's fault handler, which would write pages of stacks between the results.
    faulthandler.disable()
    if way in SIGNALS:
        # Raised in this thread, which must not continue while another thread handles the signal.
        signal.raise_signal(SIGNALS[way])
        time.sleep(30)
    elif way == "sys.exit(0)":
        sys.exit(0)
    elif way == TERMINATE:
        ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()
    os._exit(int(way[-2]))


def use_the_parents_fork_server():
    """Call this in a forked child: multiprocessing would wait for the server as for its own child, and fail."""
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None
    multiprocessing.forkserver.ensure_running = lambda: None


def sample(i):
    """A sample too large for a message, in which every element identifies it."""
    return torch.full((6000,), float(i))


class Packed:
    """A sample with a `__reduce__` method, in which the worker may end."""

    def __init__(self, i, act=None):
        self.i, self.tensor, self.act = i, sample(i), act

    def __reduce__(self):
        if self.act is not None:
            end(*self.act)
        return Packed, (self.i,)


class Scene:
    """A base of datasets of `n` samples: worker VICTIM ends once, at `place`, by `way`."""

    def __init__(self, place, way, marker, n=16):
        self.place, self.way, self.marker, self.n = place, way, marker, n
        if place == "birth":
            multiprocessing.util.register_after_fork(self, Scene.born)

    def born(self):
        """Runs when the process has been forked or the dataset unpickled, before its port is opened."""
        if self.place == "birth" and multiprocessing.current_process().name.endswith(f"-{VICTIM + 1}"):
            end(self.way, self.marker)

    def __setstate__(self, state):
        vars(self).update(state)
        self.born()

    def init(self, worker):
        if worker != VICTIM:
            return
        if self.place == "init":
            end(self.way, self.marker)
        elif self.place in ("idle", "between"):
            signal.signal(signal.SIGUSR1, lambda *_: end(self.way, self.marker))
            open(self.marker + ".ready", "w").close()
        elif self.place == "shutdown":
            multiprocessing.util.Finalize(None, end, (self.way, self.marker), exitpriority=1)

    def at(self, i):
        if self.place == "item" and i == LAST:
            end(self.way, self.marker)
        if self.place == "packing":
            return Packed(i, (self.way, self.marker) if i == LAST else None)
        return sample(i)


class Samples(Scene, Dataset):
    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.at(i)


class Streams(Scene, IterableDataset):
    """The same samples; two workers alternate."""

    def __iter__(self):
        if worker_id() == VICTIM and self.place == "iter":
            end(self.way, self.marker)
        return (self.at(i) for i in range(worker_id(), self.n, 2))


def number(batch):
    """Returns the number of a batch's sample. Raises AssertionError if any element differs."""
    tensor = batch.tensor if isinstance(batch, Packed) else batch
    assert tensor.shape == (6000,), f"a batch has shape {tuple(tensor.shape)}"
    return trials.number(tensor)


class Reaper:
    """Reaps every child of this process as soon as it has ended."""

    def __enter__(self):
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.reap)
        self.thread.start()

    def reap(self):
        while not self.stopped.is_set():
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pass
            self.stopped.wait(0.0005)

    def __exit__(self, *_):
        self.stopped.set()
        self.thread.join()
