"""Datasets that do what their indices say, so that one loader serves many tests, because starting workers is slow."""

import multiprocessing
import os
import subprocess
import sys
import time

import torch
from sample_data import Draws, Numbers, worker_id
from support import DataLoader
from torch.utils.data import Dataset, default_collate

FLOATS = 30_000


class MethodCalls(Dataset):
    """Sample (name, ...) is what the method of that name returns."""

    def __getitem__(self, order):
        name, *arguments = order
        return getattr(self, name)(*arguments)

    def number(self, i):
        return torch.tensor(i)

    def draw(self):
        return Draws.__getitem__(self, 0)

    def large(self, i):
        return torch.arange(FLOATS, dtype=torch.float32) + i

    def who(self):
        return worker_id(), os.getpid(), os.getppid()

    def fail(self, text):
        raise KeyError(text)

    def hold(self, file, i):
        """Waits until the file exists."""
        end = time.monotonic() + 60
        while not os.path.exists(file) and time.monotonic() < end:
            time.sleep(0.01)
        return torch.tensor(i)

    def die(self, signal):
        os.kill(os.getpid(), signal)
        time.sleep(60)

    def inner_loader(self, workers):
        return [int(x) for x in DataLoader(range(3), num_workers=workers)]

    def process(self):
        multiprocessing.Process(target=print).start()

    def subprocess(self):
        return subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout

    def fork(self, how):
        """Forks a child that ends in the given way. Returns its exit code."""
        pid = os.fork()
        if pid == 0:
            if how == "os._exit":
                os._exit(7)
            if how == "sys.exit":
                sys.exit(7)
            if how == "raise":
                raise ValueError("in the child")
            return torch.full((FLOATS,), -1.0) if how == "return a large tensor" else how
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def collate(samples):
    """Collates tensors with default_collate, and returns other samples unchanged."""
    return default_collate(samples) if isinstance(samples[0], torch.Tensor) else samples


class Meeting:
    """A barrier for processes."""

    def __init__(self, folder, parties, seconds=240):
        self.folder, self.parties, self.seconds = folder, parties, seconds

    def __call__(self, name):
        open(os.path.join(self.folder, str(name)), "w").close()
        end = time.monotonic() + self.seconds
        while len(os.listdir(self.folder)) < self.parties:
            if time.monotonic() > end:
                raise RuntimeError(f"only {os.listdir(self.folder)} of {self.parties} workers have arrived")
            time.sleep(0.02)


class MeetsWhenUnpickled(Numbers):
    """Unpickling it waits until all workers are unpickling it."""

    def __init__(self, n, meeting):
        super().__init__(n)
        self.meeting = meeting

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.meeting(os.getpid())


class Shares(Dataset):
    """Writes to every shared object that it holds."""

    def __init__(self, n, context):
        self.tensor = torch.arange(n)
        self.lock, self.event = context.Lock(), context.Event()
        self.event.set()
        self.value = context.Value("i", 0)
        self.array = context.Array("i", n)
        self.queue = context.Queue()

    def __len__(self):
        return len(self.tensor)

    def __getitem__(self, i):
        with self.lock:
            self.value.value += 1
        self.event.wait(60)
        self.array[i] = i * i
        self.queue.put(i)
        before = self.tensor[i].item()
        self.tensor[i] = -i
        return before


class Holds(Numbers):
    """A dataset that holds an object."""

    def __init__(self, n, thing):
        super().__init__(n)
        self.thing = thing


class PickledOnce(Numbers):
    """Can be pickled for one worker, but not for a second."""

    pickled = 0

    def __getstate__(self):
        self.pickled += 1
        if self.pickled > 1:
            raise TypeError("no second time")
        return self.__dict__


class Sums(Numbers):
    """A batch is the type, the length and the sum of its index batch."""

    def __getitems__(self, indices):
        return type(indices).__name__, len(indices), int(sum(indices))
