"""Datasets, samplers and functions for tests, at module level so that spawned workers can import them."""

import collections
import dataclasses
import os
import random
import signal
import time
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info


def as_list(samples):
    """A collate_fn that returns the samples unchanged."""
    return list(samples)


def untouched(sample):
    """A collate_fn for batch_size=None that returns the sample unchanged."""
    return sample


def worker_id():
    info = get_worker_info()
    return None if info is None else info.id


class Numbers(Dataset):
    """Sample i is tensor(i)."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.tensor(i)


class OnDevice(Numbers):
    """Sample i is a CUDA tensor."""

    def __getitem__(self, i):
        return torch.full((100,), i, device="cuda")


class WhoAmI(Numbers):
    """Sample i is (i, ID of the worker that fetched it)."""

    def __getitem__(self, i):
        return int(i), worker_id()


class Value(Numbers):
    """Every sample is the dataset's `value`, which tests change between epochs."""

    value = 0

    def __getitem__(self, i):
        return self.value


class Slow(Numbers):
    """Sample i takes `seconds[i]`, by default 0."""

    def __init__(self, n, seconds):
        super().__init__(n)
        self.seconds = seconds

    def __getitem__(self, i):
        time.sleep(self.seconds.get(i, 0))
        return torch.tensor(i)


class Held(Numbers):
    """Sample `at` creates the file FILE.reached, and waits until FILE exists; after 240 s it fails."""

    def __init__(self, n, at, file):
        super().__init__(n)
        self.at, self.file = at, str(file)

    def __getitem__(self, i):
        if i == self.at:
            self.wait()
        return torch.tensor(i)

    def wait(self):
        open(f"{self.file}.reached", "w").close()
        end = time.monotonic() + 240
        while not os.path.exists(self.file):
            assert time.monotonic() < end, "the file does not appear"
            time.sleep(0.01)


class Given(Dataset):
    """The samples are the elements of a list."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return self.samples[i]


class Draws(Numbers):
    """Each sample is the worker's info, and a draw from each of its random generators."""

    def __getitem__(self, i):
        info = get_worker_info()
        return {
            "seed": info.seed,
            "id": info.id,
            "num_workers": info.num_workers,
            "initial": torch.initial_seed(),
            "torch": torch.rand(()).item(),
            "random": random.random(),
            "numpy": float(np.random.rand()),
        }


class NthDraw(Numbers):
    """Each sample is how many samples this worker has fetched before."""

    made = 0

    def __getitem__(self, i):
        self.made += 1
        return self.made - 1


class TwoArguments(Exception):
    def __init__(self, code, text):
        super().__init__(code, text)


class WithMessage(Exception):
    def __init__(self, message=None):
        super().__init__(f"told: {message}")
        self.message = message


class Failing(Numbers):
    """Raises `errors[i]()` at sample i."""

    def __init__(self, n, errors):
        super().__init__(n)
        self.errors = errors

    def __getitem__(self, i):
        if i in self.errors:
            raise self.errors[i]()
        return i


def key_error():
    return KeyError("no such key")


def runtime_error():
    return RuntimeError("runtime\nof two lines")


def stop_iteration():
    return StopIteration()


def two_arguments():
    return TwoArguments(3, "three")


def with_message():
    return WithMessage("hello")


def os_error():
    return FileNotFoundError(2, "no file", "name")


class Index(Dataset):
    """Each sample is the type and repr of its index, as the worker receives it."""

    def __len__(self):
        return 1000

    def __getitem__(self, i):
        return type(i).__name__, repr(i)


class WholeIndex(Index):
    """A batch is the type and repr of its index batch, and the types of its indices."""

    def __getitems__(self, indices):
        return [(type(indices).__name__, repr(indices), [type(i).__name__ for i in indices])]


class Images(Dataset):
    """Sample i is (image, label). The image is random bytes that depend only on i."""

    def __init__(self, n, shape=(3, 64, 64)):
        self.n = n
        self.shape = shape

    def __len__(self):
        return self.n

    def image(self, i):
        return torch.randint(0, 256, self.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(i))

    def __getitem__(self, i):
        return self.image(i), i


class Dying(Numbers):
    """At sample `at` the worker ends: `how` is a signal or an exit status."""

    def __init__(self, n, at, how):
        super().__init__(n)
        self.at = at
        self.how = how

    def __getitem__(self, i):
        if i == self.at:
            if isinstance(self.how, signal.Signals):
                os.kill(os.getpid(), self.how)
                time.sleep(30)
            os._exit(self.how)
        return torch.tensor(i)


class DyingOnce(Dying):
    """Dying, but only if the marker file does not exist."""

    def __init__(self, n, at, how, marker):
        super().__init__(n, at, how)
        self.marker = marker

    def __getitem__(self, i):
        if i == self.at and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            return super().__getitem__(i)
        return torch.tensor(i)


def first_time(marker):
    """Creates a file. Returns False if it already exists."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Shards(IterableDataset):
    """Worker w yields lengths[w] samples: (w, 0), (w, 1), ..."""

    def __init__(self, lengths, reported=None):
        self.lengths = lengths
        self.reported = reported

    def __len__(self):
        if self.reported is None:
            raise TypeError("no length")
        return self.reported

    def __iter__(self):
        info = get_worker_info()
        w = 0 if info is None else info.id
        for i in range(self.lengths[w]):
            yield torch.tensor([w, i])


class Epochs(IterableDataset):
    """Yields (worker, epoch, i); each iter() begins a new epoch."""

    epoch = -1

    def __iter__(self):
        self.epoch += 1
        for i in range(3):
            yield worker_id(), self.epoch, i


class LazySampler(Sampler):
    """Yields indices one by one; the log records when."""

    def __init__(self, n, log, draw=False):
        self.n, self.log, self.draw = n, log, draw

    def __len__(self):
        return self.n

    def __iter__(self):
        self.log.append("iter")
        for i in range(self.n):
            self.log.append(i)
            if self.draw:
                torch.rand(())
            yield i
        self.log.append("end")


class EagerSampler(LazySampler):
    """Draws everything in __iter__."""

    def __iter__(self):
        self.log.append("iter")
        order = torch.randperm(self.n).tolist() if self.draw else list(range(self.n))
        return iter(order)


class FailingSampler(Sampler):
    """Raises KeyError instead of yielding index `at`, then continues."""

    def __init__(self, n, at):
        self.n, self.at = n, at

    def __len__(self):
        return self.n

    def __iter__(self):
        return self.Walk(self.n, self.at)

    class Walk:
        def __init__(self, n, at):
            self.n, self.at, self.i = n, at, -1

        def __iter__(self):
            return self

        def __next__(self):
            self.i += 1
            if self.i >= self.n:
                raise StopIteration
            if self.i == self.at:
                raise KeyError("sampler")
            return self.i


Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Record:
    name: str
    data: torch.Tensor
    more: object = None


class Labelled(torch.Tensor):
    """A tensor subclass whose instances carry attributes."""


class Array(np.ndarray):
    """A NumPy subclass."""


class Config(Mapping):
    """A mapping that cannot be written to."""

    def __init__(self, values=()):
        self._values = dict(values)

    def __getitem__(self, key):
        return self._values[key]

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)


class Choosy(Config):
    """A mapping that cannot be built from a dict."""

    def __init__(self, *, keys, values):
        super().__init__(zip(keys, values, strict=True))


class Store(Config, MutableMapping):
    def __setitem__(self, key, value):
        self._values[key] = value

    def __delitem__(self, key):
        del self._values[key]


class Row(Sequence):
    """A sequence, built from a list."""

    def __init__(self, values):
        self._values = list(values)

    def __getitem__(self, index):
        return self._values[index]

    def __len__(self):
        return len(self._values)


class FixedRow(Row):
    """A sequence that cannot be built from a list."""

    def __init__(self, first, *others):
        super().__init__([first, *others])

    def __reduce__(self):
        return FixedRow, tuple(self._values)


class Bag(Row, MutableSequence):
    def __setitem__(self, index, value):
        self._values[index] = value

    def __delitem__(self, index):
        del self._values[index]

    def insert(self, index, value):
        self._values.insert(index, value)


class BadText(Exception):
    def __str__(self):
        raise ValueError("no text")


class Unpicklable:
    def __reduce__(self):
        raise TypeError("this object stays where it is")


class Recorded(Numbers):
    """Adds a line to a file for each fetched sample. The samples in `held` wait like those of `Held`."""

    def __init__(self, n, file, held=()):
        super().__init__(n)
        self.file, self.held = str(file), held

    def __getitem__(self, i):
        with open(f"{self.file}.made", "a") as file:
            file.write(f"{i}\n")
        if i in self.held:
            Held(self.n, i, f"{self.file}.{i}").wait()
        return torch.tensor(i)

    def made(self):
        if not os.path.exists(f"{self.file}.made"):
            return []
        with open(f"{self.file}.made") as file:
            return [int(line) for line in file]

    def reached(self, i):
        return os.path.exists(f"{self.file}.{i}.reached")

    def let_go(self, i):
        open(f"{self.file}.{i}", "w").close()
