"""Datasets and samplers with and without state: at module level, so that spawned workers can import them."""

import itertools

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info


def unchanged(batch):
    """A collate_fn that leaves samples as they are."""
    return batch


def worker_id():
    info = get_worker_info()
    return 0 if info is None else info.id


def record(i, worker=0):
    """A sample whose parts differ in type."""
    return {"id": i, "name": f"sample {i}", "numbers": [i, i + 1, i + 2], "worker": worker}


# Map-style. Derived classes may have another `sample`, also of the iterable datasets.


class Records(Dataset):
    """Sample i is record(i)."""

    sample = staticmethod(record)

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return self.sample(int(i))


class DrawingRecords(Records):
    """Ignores the index and draws from torch's global generator, whose state is the dataset's state."""

    def __init__(self, size, with_generator=True):
        super().__init__(size)
        self.with_generator = with_generator

    def __getitem__(self, i):
        return record(int(torch.randint(self.size, ())))

    def state_dict(self):
        return {"generator": torch.get_rng_state()} if self.with_generator else {}

    def load_state_dict(self, state):
        if self.with_generator:
            torch.set_rng_state(state["generator"])


class CountingRecords(Records):
    """Counts its samples, also in its state. A sample is (index, number of samples made before it)."""

    made = 0

    def __getitem__(self, i):
        self.made += 1
        return self.sample(int(i), self.made)

    def sample(self, i, made):
        return i, made - 1

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = state["made"]


# Iterable


class RecordIterator:
    """An iterator with a state over `size` records, which are random if `draws` is true."""

    def __init__(self, size, draws=False, with_generator=False, sample=record):
        self.size, self.draws, self.with_generator, self.sample = size, draws, with_generator, sample
        self.worker, self.i = worker_id(), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.i >= self.size:
            raise StopIteration
        i = int(torch.randint(self.size, ())) if self.draws else self.i
        self.i += 1
        return self.sample(i, self.worker)

    def state_dict(self):
        state = {"i": self.i}
        if self.with_generator:
            state["generator"] = torch.get_rng_state()
        return state

    def load_state_dict(self, state):
        self.i = state["i"]
        if self.with_generator:
            torch.set_rng_state(state["generator"])


class Shards(IterableDataset):
    """Worker i yields sizes[i] records; the iterator has the state."""

    sample = staticmethod(record)

    def __init__(self, sizes, draws=False, with_generator=True):
        self.sizes, self.draws, self.with_generator = sizes, draws, with_generator

    def __iter__(self):
        return RecordIterator(self.sizes[worker_id()], self.draws, self.with_generator, self.sample)


class GeneratorShards(IterableDataset):
    """Like Shards, with a generator; the dataset has the state, and resumes from it once."""

    sample = staticmethod(record)

    def __init__(self, sizes):
        self.sizes, self.i, self.resumed = sizes, 0, None

    def __iter__(self):
        self.i, self.resumed = self.resumed or 0, None
        return self.records()

    def records(self):
        worker = worker_id()
        for i in range(self.i, self.sizes[worker]):
            self.i = i + 1
            yield self.sample(i, worker)

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.i = self.resumed = state["i"]


class LazyGenerator(GeneratorShards):
    """Like GeneratorShards, but __iter__ is a generator function, whose body starts with the first sample."""

    def __iter__(self):
        self.i, self.resumed = self.resumed or 0, None
        yield from self.records()


class Restarting(GeneratorShards):
    """Like GeneratorShards, but its state after the end is that of the beginning."""

    def records(self):
        yield from super().records()
        self.i = 0


class StatelessShards(IterableDataset):
    """Like Shards, without a state."""

    sample = staticmethod(record)

    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        worker = worker_id()
        return (self.sample(i, worker) for i in range(self.sizes[worker]))


class OwnIterator(IterableDataset):
    """Is its own iterator; counts the calls of iter() in its state."""

    def __init__(self, size):
        self.size, self.i, self.iter_calls = size, 0, 0

    def __iter__(self):
        self.iter_calls += 1
        self.i = 0
        return self

    def __next__(self):
        if self.i >= self.size:
            raise StopIteration
        self.i += 1
        return self.i - 1

    def state_dict(self):
        return {"i": self.i, "iter_calls": self.iter_calls}

    def load_state_dict(self, state):
        self.i = state["i"]


class CountedIterations(IterableDataset):
    """Its iterator has no state; its own is the number of calls of iter()."""

    def __init__(self, size):
        self.size, self.iter_calls = size, 0

    def __iter__(self):
        self.iter_calls += 1
        return iter(range(self.size))

    def state_dict(self):
        return {"iter_calls": self.iter_calls}

    def load_state_dict(self, state):
        self.iter_calls = state["iter_calls"]


class BothStateful(IterableDataset):
    """The dataset has a state, and its iterator has another."""

    def __init__(self, size):
        self.size, self.epochs = size, 0

    def __iter__(self):
        self.epochs += 1
        return RecordIterator(self.size)

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"] - 1


class GrowingState(IterableDataset):
    """Its state gains a key with each sample, and loses some."""

    def __init__(self, size):
        self.size, self.i, self.seen, self.resumed = size, 0, {}, False

    def __iter__(self):
        if not self.resumed:
            self.i, self.seen = 0, {}
        self.resumed = False
        while self.i < self.size:
            self.seen[f"key {self.i}"] = {"value": self.i, "square": [self.i**2]}
            if self.i % 4 == 3:
                del self.seen[f"key {self.i - 3}"]
            self.i += 1
            yield self.i - 1

    def state_dict(self):
        return {"i": self.i, "seen": self.seen}

    def load_state_dict(self, state):
        self.i, self.seen, self.resumed = state["i"], state["seen"], True


# Samplers


class CountingIterator:
    """An iterator over a list of indices, with a state."""

    def __init__(self, indices):
        self.indices, self.i = indices, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.i >= len(self.indices):
            raise StopIteration
        self.i += 1
        return self.indices[self.i - 1]

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.i = state["i"]


class IteratorWithState(Sampler):
    """A sampler, or with `batch` a batch sampler, whose iterator has a state."""

    def __init__(self, size, batch=None):
        self.size, self.batch = size, batch

    def __len__(self):
        return len(self.all())

    def all(self):
        order = [(7 * i + 3) % self.size for i in range(self.size)]
        if self.batch is None:
            return order
        return [order[i : i + self.batch] for i in range(0, self.size, self.batch)]

    def __iter__(self):
        return CountingIterator(self.all())


class SamplerWithState(IteratorWithState):
    """Like IteratorWithState, with the state in the sampler itself; its iterator is a generator."""

    i, resumed = 0, None

    def __iter__(self):
        self.i, self.resumed = self.resumed or 0, None
        return self.counted()

    def counted(self):
        for index in itertools.islice(self.all(), self.i, None):
            self.i += 1
            yield index

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.resumed = state["i"]


class OwnIteratorWithState(IteratorWithState):
    """Like SamplerWithState, but its own iterator: each call of iter() restarts it, except the one after a load."""

    i, resumed, calls = 0, False, 0

    def __iter__(self):
        self.calls += 1
        if not self.resumed:
            self.i = 0
        return self

    def __next__(self):
        self.resumed = False
        indices = self.all()
        if self.i >= len(indices):
            raise StopIteration
        self.i += 1
        return indices[self.i - 1]

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.i, self.resumed = state["i"], True


class WithoutState(IteratorWithState):
    """Like IteratorWithState, without a state."""

    def __iter__(self):
        return iter(self.all())
