"""Datasets whose workers end at a chosen place in a chosen way. At module level, for spawned workers."""

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

# How a worker may end, and what Python's signal module has for it.
SIGNALS = {name: signal.Signals[name] for name in ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGTERM", "SIGABRT")}
# C++'s std::terminate ends by SIGABRT.
TERMINATE = "terminate()"
WAYS = [*SIGNALS, "os._exit(0)", "sys.exit(0)", "os._exit(3)", TERMINATE]
# Which worker ends, and which is the last sample requested of it.
VICTIM, LAST = 1, 7


def end(way, marker):
    """Ends this process, and leaves word of when it did. Only the first time: the marker must not be there yet."""
    try:
        fd = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    os.write(fd, f"{time.monotonic()} {os.getpid()}".encode())
    os.close(fd)
    # pytest's, which a forked worker has as well, would write pages of stacks between the results.
    faulthandler.disable()
    if way in SIGNALS:
        # To this thread: it must not run on while another one takes the signal.
        signal.raise_signal(SIGNALS[way])
        time.sleep(30)
    elif way == "sys.exit(0)":
        sys.exit(0)
    elif way == TERMINATE:
        ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()
    os._exit(int(way[-2]))


def use_the_parents_fork_server():
    """In a forked child: multiprocessing would wait for the server as for a child of its own, and fail."""
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None
    multiprocessing.forkserver.ensure_running = lambda: None


def sample(i):
    """Larger than what fits in a message, and every element identifies the sample."""
    return torch.full((6000,), float(i))


class Packed:
    """Pickled by a method of its own, with the sample inside."""

    def __init__(self, i, act=None):
        self.i, self.tensor, self.act = i, sample(i), act

    def __reduce__(self):
        if self.act is not None:
            end(*self.act)
        return Packed, (self.i,)


class Scene:
    """What a dataset of `n` samples and its worker_init_fn do: worker VICTIM ends once, at `place`, by `way`."""

    def __init__(self, place, way, marker, n=16):
        self.place, self.way, self.marker, self.n = place, way, marker, n
        if place == "birth":
            multiprocessing.util.register_after_fork(self, Scene.born)

    def born(self):
        """The process has just been forked, or the dataset unpickled: before its port is opened."""
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
    """The same samples; two workers take turns."""

    def __iter__(self):
        if worker_id() == VICTIM and self.place == "iter":
            end(self.way, self.marker)
        return (self.at(i) for i in range(worker_id(), self.n, 2))


def number(batch):
    """Which sample a batch is; an error if it is not that sample in each of its elements."""
    tensor = batch.tensor if isinstance(batch, Packed) else batch
    assert tensor.shape == (6000,), f"a batch is of shape {tuple(tensor.shape)}"
    return trials.number(tensor)


class Thief:
    """Reaps every child of this process as soon as it has ended."""

    def __enter__(self):
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.reap)
        self.thread.start()

    def reap(self):
        while not self.over.is_set():
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pass
            self.over.wait(0.0005)

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
