"""Objects that imitate only what torch needs of a sampler, a dataset, a function or a setting work as with torch."""

import fractions
import functools
import operator
import types
import unittest.mock

import numpy as np
import pytest
import torch
from parity_table import Raised, attempt, drain, rows
from sample_data import Numbers, as_list, untouched
from support import DataLoader, LoaderIter, values

# Samplers, and the index batches that they yield


class Iterates:
    """Has `__iter__` and nothing else."""

    def __init__(self, *items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


class Sequence:
    """Has `__getitem__` and nothing else, as sequences had before there were iterators."""

    def __init__(self, *items):
        self.items = items

    def __getitem__(self, i):
        return self.items[i]


class Steps:
    """Its iterator has `__next__` and nothing else."""

    def __init__(self, *items):
        self.items = items

    def __iter__(self):
        items = iter(self.items)

        class Step:
            def __next__(self):
                return next(items)

        return Step()


class Falsy(Iterates):
    def __bool__(self):
        return False


class Unequal(Iterates):
    """Can neither be compared nor hashed."""

    def __eq__(self, other):
        raise RuntimeError("compared")


SAMPLERS = {
    "iterates": Iterates(2, 0, 1),
    "sequence": Sequence(2, 0, 1),
    "steps": Steps(2, 0, 1),
    "falsy": Falsy(2, 0, 1),
    "unequal": Unequal(2, 0, 1),
    "array": np.array([2, 0, 1]),
    "dict": {2: None, 0: None},
    "text": "012",
    "a mock": unittest.mock.MagicMock(__iter__=lambda self: iter([2, 0, 1])),
    "no iterator": object(),
    "iter gives no iterator": types.SimpleNamespace(__iter__=lambda: 1),
}
BATCHES = {
    "iterates": Iterates(2, 0),
    "sequence": Sequence(2, 0),
    "steps": Steps(2, 0),
    "falsy": Falsy(2, 0),
    "unequal": Unequal(2, 0),
    "array": np.array([2, 0]),
    "text": "20",
    "no batch": 1,
    "nothing": None,
}

# Datasets


class Items:
    """Has `__getitem__` and nothing else."""

    def __getitem__(self, i):
        if not 0 <= int(i) < 3:
            raise IndexError("no such item")
        return torch.tensor(int(i)) + getattr(self, "offset", 0)


class Slots:
    __slots__ = ()
    __getitem__ = Items.__getitem__


class NoTruth(Items):
    def __bool__(self):
        raise RuntimeError("asked for its truth")

    def __eq__(self, other):
        raise RuntimeError("compared")


class Answers(Items):
    """Has the same value for every attribute."""

    def __init__(self, answer):
        self.answer = answer

    def __getattr__(self, name):
        if name.startswith("__") and name != "__getitems__":
            raise AttributeError(name)
        return self.answer


class Raises(Items):
    @property
    def __getitems__(self):
        raise KeyError("__getitems__")


class Pretends(Items):
    """Claims to be something else."""

    __class__ = torch.Tensor


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, kind):
        self.kind = kind

    def __iter__(self):
        return iter(self.kind(torch.tensor(0), torch.tensor(1), torch.tensor(2)))


DATASETS = {
    "items": Items,
    "slots": Slots,
    "no truth": NoTruth,
    "answers None": lambda: Answers(None),
    "answers a function": lambda: Answers(lambda indices: [torch.tensor(int(i)) for i in indices]),
    "answers nonsense": lambda: Answers(1),
    "raises": Raises,
    "pretends": Pretends,
    "list": lambda: [10, 11, 12],
    "tuple": lambda: (10, 11, 12),
    "text": lambda: "abc",
    "bytes": lambda: b"abc",
    "range": lambda: range(10, 13),
    "dict": lambda: {0: 10, 1: 11, 2: 12},
    "array": lambda: np.arange(3),
    "tensor": lambda: torch.arange(3),
    "a proxy": lambda: types.MappingProxyType({0: 10, 1: 11, 2: 12}),
    "None": lambda: None,
}

# Functions


class Call:
    """Has `__call__` and nothing else; is false and cannot be compared."""

    __slots__ = ()

    def __call__(self, samples):
        return list(samples)

    def __bool__(self):
        return False

    def __eq__(self, other):
        raise RuntimeError("compared")


class OnlyCall(Call):
    def __getattribute__(self, name):
        raise RuntimeError(f"asked for {name}")


COLLATES = {
    "builtin": len,
    "class": list,
    "method": [7].__add__,
    "operator": operator.itemgetter(0),
    "partial": functools.partial(as_list),
    "falsy": Call(),
    "only a call": OnlyCall(),
    "not callable": 3,
    "wrong arguments": lambda a, b: a,
    "mock": unittest.mock.Mock(side_effect=as_list),
}

# What the workers send


class Lies:
    """isinstance() says that it is a tensor."""

    __class__ = torch.Tensor

    def __reduce__(self):
        return Lies, ()

    def __eq__(self, other):
        return type(other) is Lies


class AnswersAll:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args: self

    def __eq__(self, other):
        return type(other) is AnswersAll


class NoLength(list):
    def __len__(self):
        raise RuntimeError("asked for its length")

    def __eq__(self, other):
        return type(other) is NoLength


SENT = {"lies": Lies, "answers all": AnswersAll, "no length": functools.partial(NoLength, [1, 2])}

# Settings


class FalsyInit:
    def __call__(self, worker):
        torch.utils.data.get_worker_info().dataset.offset = 10

    def __bool__(self):
        return False


SETTINGS = {
    "a timeout of Fraction": dict(timeout=fractions.Fraction(120)),
    "a timeout of NumPy": dict(timeout=np.float32(120)),
    "a timeout of torch": dict(timeout=torch.tensor(120.0)),
    "workers of NumPy": dict(num_workers=np.int64(2)),
    "workers of bool": dict(num_workers=True),
    "prefetch_factor of NumPy": dict(prefetch_factor=np.int32(2)),
    "prefetch_factor of bool": dict(prefetch_factor=True),
    "in_order of None": dict(in_order=None, num_workers=1),
    "in_order of a list": dict(in_order=[0]),
    "worker_init_fn false": dict(worker_init_fn=FalsyInit()),
}


BATCH_SIZES = [None, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from torch's half-built iterator
@rows(name=SAMPLERS, batch_size=BATCH_SIZES)
def test_samplers(DataLoader, name, batch_size):
    settings = dict(batch_size=batch_size, num_workers=2, collate_fn=untouched)
    loader = attempt(DataLoader, Items(), sampler=name, **settings)
    yield from [loader] if isinstance(loader, Raised) else drain(loader)


@rows(name=BATCHES)
def test_batches_of_indices(DataLoader, name):
    yield from drain(DataLoader(Items(), batch_sampler=[name, [1]], num_workers=1, collate_fn=as_list))


@rows(name=DATASETS, batch_size=BATCH_SIZES)
def test_datasets(DataLoader, name, batch_size):
    for seen in drain(DataLoader(name(), sampler=[2, 0, 1], batch_size=batch_size, num_workers=2)):
        # In torch's traceback the fetcher's own line stands above the property's.
        yield seen.description[0] if name is Raises and isinstance(seen, Raised) else seen


@rows(kind=[Iterates, Sequence, Steps, Falsy, Unequal])
def test_streams(DataLoader, kind):
    yield from drain(DataLoader(Stream(kind), batch_size=2, num_workers=1))


@rows(name=COLLATES, batch_size=BATCH_SIZES)
def test_collate_functions(DataLoader, name, batch_size):
    yield from drain(DataLoader([[0], [1], [2]], num_workers=1, batch_size=batch_size, collate_fn=name))


def with_new(make, sample):
    return [sample, make()]


@rows(name=SENT)
def test_what_is_sent(DataLoader, name):
    loader = DataLoader([0, 1], num_workers=1, batch_size=None, collate_fn=functools.partial(with_new, name))
    for seen in drain(loader, 2):
        assert seen[1] == name()
        yield type(seen), seen[0], type(seen[1]).__qualname__


@rows(name=SETTINGS)
def test_settings(DataLoader, name):
    yield from drain(DataLoader(Items(), sampler=[2, 0, 1], batch_size=None, **dict(dict(num_workers=2), **name)))


def test_a_prefetch_factor_that_is_no_whole_number():
    # torch's text. torch's own iterator is not run: it fails half-built, and its queue's thread is left with an error.
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        iter(DataLoader(Items(), sampler=[0], num_workers=1, prefetch_factor=2.5))


def test_loaders_and_iterators_that_compare_by_value():
    class Iter(LoaderIter):
        def __eq__(self, other):
            raise RuntimeError("compared")

    class Loader(DataLoader):
        def __eq__(self, other):
            raise RuntimeError("compared")

        def _get_iterator(self):
            return Iter(self)

    loader = Loader(Numbers(3), batch_size=None, num_workers=1, persistent_workers=True)
    for _ in range(2):
        assert values(loader) == [0, 1, 2]
    loader._iterator._shutdown_workers()
