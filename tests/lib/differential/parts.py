"""What a program uses: datasets, collate functions, init functions. All record their calls."""

import torch
from torch.utils import data
from torch.utils.data import default_collate, default_convert, get_worker_info

from . import describe, samples
from .recorder import rng

# The index of the last sample that this process made. It decides whether a collate function fails.
last = None


class TwoArguments(Exception):
    def __init__(self, code, text):
        super().__init__(code, text)


class WithMessage(Exception):
    message = "a class with a message"

    def __init__(self, message=None):
        super().__init__(f"told: {message}")


def fail(kind, where):
    """Raises an error of the given kind."""
    text = f"in {where}"
    if kind == "chained":
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            raise ValueError(text) from cause
    if kind == "group":
        raise ExceptionGroup(text, [ValueError(1), TypeError(2)])
    makers = {
        "KeyError": lambda: KeyError(text),
        "two lines": lambda: RuntimeError(f"{text}\nof two lines"),
        "OSError": lambda: FileNotFoundError(2, text, "name"),
        "StopIteration": StopIteration,
        "two arguments": lambda: TwoArguments(3, text),
        "message": lambda: WithMessage(text),
        "unicode": lambda: UnicodeDecodeError("utf-8", b"x\xff", 1, 2, text),
        "IndexError": lambda: IndexError(text),
        "assertion": lambda: AssertionError(text),
    }
    raise makers[kind]()


class Part:
    def __init__(self, program, recorder):
        self.program, self.recorder = program, recorder

    def fails(self, where, at):
        return self.program.error_in == where and at in self.program.error_at

    def fail(self, where):
        fail(self.program.error, where)


# Datasets


class Dataset(Part):
    # Users change it between epochs, and a worker_init_fn may change it, too.
    shift = 0

    def sample(self, i):
        """Returns sample i. Records the call, with the states of the random generators before it."""
        global last
        # Other threads may set `last`, too.
        number = last = int(i)
        fails = self.fails("dataset", number)
        self.recorder("get", [describe.name_of(type(i)), number, fails], rng())
        if fails:
            self.fail("dataset")
        p = self.program
        values = [samples.MAKE[kind](abs(number) + self.shift) for kind in p.samples]
        if p.structure == "alone":
            return values[0]
        containers = {"tuple": tuple, "list": list, "dict": lambda v: dict(zip(p.samples, v, strict=True))}
        return containers[p.structure](values)


class Map(Dataset):
    def __len__(self):
        return self.program.size

    def __getitem__(self, i):
        return self.sample(i)


class GetItems(Map):
    def __getitems__(self, indices):
        self.recorder("getitems", [describe.name_of(type(indices)), len(indices)], rng())
        return [self.sample(i) for i in indices]


class Iterable(Dataset, data.IterableDataset):
    def __len__(self):
        return self.program.size // (3 if self.program.dataset == "iterable, longer than it says" else 1)

    def __str__(self):
        return "a dataset"

    def begin(self):
        """Records a call of __iter__, and returns the number of samples of this worker."""
        info = get_worker_info()
        worker, count = (0, 1) if info is None else (info.id, info.num_workers)
        fails = self.program.error_in == "iter" and self.program.error_at[0] % count == worker
        self.recorder("iter", [worker, fails], rng())
        if fails:
            self.fail("iter")
        if self.program.dataset == "uneven shards":
            return self.program.size * (worker + 1) // count
        if self.program.dataset == "empty shards":
            return self.program.size if worker == 0 else 0
        return self.program.size

    def __iter__(self):
        return self.walk(self.begin())

    def walk(self, length):
        for i in range(length):
            yield self.sample(i)
        self.recorder("stop", [], rng())


class ItsOwnIterator(Iterable):
    """Continues after an error, unlike a generator."""

    def __iter__(self):
        self.positions = iter(range(self.begin()))
        return self

    def __next__(self):
        i = next(self.positions, None)
        if i is None:
            self.recorder("stop", [], rng())
            raise StopIteration
        return self.sample(i)

    def __getstate__(self):
        return {k: v for k, v in vars(self).items() if k != "positions"}


def dataset(program, recorder):
    kinds = {"map": Map, "getitems": GetItems, "its own iterator": ItsOwnIterator}
    return kinds.get(program.dataset, Iterable)(program, recorder)


# Functions


class Collate(Part):
    def __call__(self, batch):
        kind = self.program.collate
        fails = self.fails("collate", last)
        size = len(batch) if isinstance(batch, (list, tuple, dict)) else -1
        self.recorder("collate", [describe.name_of(type(batch)), size, fails], rng())
        if fails:
            self.fail("collate")
        if kind == "list":
            return list(batch) if isinstance(batch, list) else [batch]
        if kind == "draws":
            return [samples.draws(0), batch]
        if kind == "dict":
            return {"batch": batch, "size": size}
        if kind == "tensors that share":
            base = torch.arange(30.0).reshape(5, 6) + size
            return [base, batch, base[1:3], base.t(), base[:, ::5], base]
        return {"wrapped default": default_collate, "convert": default_convert}[kind](batch)


class OtherCollate(Part):
    """The collate_fn that replaces a loader's between epochs."""

    def __call__(self, batch):
        self.recorder("other collate", [describe.name_of(type(batch))], rng())
        return ["other", batch]


class Init(Part):
    def __call__(self, worker_id):
        info = get_worker_info()
        kind = self.program.init
        fails = self.program.error_in == "init" and self.program.error_at[0] % info.num_workers == worker_id
        self.recorder("init", [worker_id, fails], rng())
        if fails:
            self.fail("init")
        if kind == "draws":
            torch.rand(3)
        if kind == "changes the dataset":
            info.dataset.shift = 1000 * (worker_id + 1)


def collate(program, recorder):
    return {} if program.collate == "default" else {"collate_fn": Collate(program, recorder)}


def init(program, recorder):
    return {} if program.init == "none" else {"worker_init_fn": Init(program, recorder)}
