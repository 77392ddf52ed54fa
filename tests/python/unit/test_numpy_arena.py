"""NumPy arrays that the worker does not keep are sent without a copy. Whatever it keeps, no batch changes."""

import ctypes
import weakref

import numpy as np
import pytest
import torch
from numpy_arena_support import SIZE, Made, batches_of, fresh, identity
from support import BOTH, DataLoader
from torch.utils.data import default_collate, default_convert

import rustloader

pytestmark = pytest.mark.ours
# Arrays arrive as arrays, or by torch's default as tensors.
ARRIVES = pytest.mark.parametrize("collate", [identity, default_convert], ids=["arrays", "tensors"])

# What is sent without a copy

PAIR = np.dtype([("a", "i4"), ("b", "f4")])


class Sample:
    def __init__(self, array):
        self.array = array


GIVEN_AWAY = {
    "array": fresh,
    "zeroes": lambda i: np.zeros(SIZE, np.uint8) + i,
    "view": lambda i: fresh(i)[1 : SIZE // 4 * 3],
    "of two dimensions": lambda i: fresh(i).reshape(64, -1),
    "transposed": lambda i: fresh(i).reshape(64, -1).T,
    "frombuffer": lambda i: np.frombuffer(fresh(i), np.uint8),
    "in a dict": lambda i: {"a": [fresh(i)], "b": (1, "x")},
    "in a tuple": lambda i: (fresh(i), {"b": {"c": fresh(i + 1)}}),
    "two": lambda i: (fresh(i), fresh(i + 1)),
    "resized": lambda i: resized(fresh(i), 2 * SIZE),
    "shrunk": lambda i: resized(fresh(i), SIZE - 8000),
}
# Here, nothing proves that no finalizer will write to the array.
NOT_PROVED = {
    "tensor": lambda i: torch.from_numpy(fresh(i)),
    "memoryview of it": lambda i: np.asarray(memoryview(fresh(i))),
    "misaligned": lambda i: fresh(i)[1:-7].view(np.float64),
    "twice": lambda i: [fresh(i)] * 2,
    "pickled": lambda i: Sample(fresh(i)),
    "structured": lambda i: np.full(SIZE // 8, i, PAIR),
    "with a weak reference": lambda i: watched(fresh(i)),
    "view of one with a weak reference": lambda i: watched(fresh(i))[1:],
    "of a subclass": lambda i: fresh(i).view(Array)[1:].view(np.ndarray),
    "in a kept dict": lambda i: KEPT.setdefault(i, {"a": [fresh(i)]}),
}
KEPT = {}


class Array(np.ndarray):
    pass


def watched(array):
    array_ref = weakref.ref(array)
    WATCHED.append(array_ref)
    return array


WATCHED = []


def resized(array, size):
    array.resize((size,), refcheck=False)
    return array


def plain(value):
    """Converts a value of GIVEN_AWAY or NOT_PROVED into one that `==` can compare."""
    match value:
        case np.ndarray() | torch.Tensor():
            return value.tolist()
        case Sample():
            return plain(value.array)
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    return value


@ARRIVES
@pytest.mark.parametrize("name", GIVEN_AWAY)
def test_what_the_worker_does_not_keep_is_sent_without_a_copy(name, collate):
    batches, stats = batches_of(Made(GIVEN_AWAY[name]), collate_fn=collate)
    kind = np.ndarray if collate is identity else torch.Tensor
    assert {type(leaf) for batch in batches for leaf in arrays_of(batch)} == {kind}
    assert [plain(batch) for batch in batches] == [plain(GIVEN_AWAY[name](i)) for i in range(6)]
    assert stats.copies.count == 0 and stats.copies.adopted >= 6, stats.copies
    assert stats.copies.adopted_bytes >= 6 * (SIZE // 2)


@ARRIVES
@pytest.mark.parametrize("name", NOT_PROVED)
def test_without_a_proof_an_array_is_copied(name, collate):
    if collate is default_convert and name == "structured":
        with pytest.raises(TypeError, match=r"numpy\.void"):
            batches_of(Made(NOT_PROVED[name]), collate_fn=collate)
        return
    KEPT.clear()
    batches, stats = batches_of(Made(NOT_PROVED[name]), collate_fn=collate)
    KEPT.clear()
    assert [plain(batch) for batch in batches] == [plain(NOT_PROVED[name](i)) for i in range(6)]
    assert stats.copies.count == 6 and stats.copies.adopted == 0, stats.copies


def samples(index):
    return np.full((40, 50, 50), index, np.uint8)


@ARRIVES
def test_lists_of_samples_are_sent_without_a_copy_from_threads_as_well(collate):
    for kw in ({}, {"worker_threads": 3}):
        batches, stats = batches_of(Made(samples, 12), batch_size=4, collate_fn=collate, **kw)
        assert [[int(a[0, 0, 0]) for a in batch] for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert all((a == a[0, 0, 0]).all() for batch in batches for a in batch)
        assert stats.copies.count == 0, kw


@ARRIVES
def test_blocks_come_back_and_batches_that_are_kept_stay_as_they_are(collate):
    loader = DataLoader(Made(fresh, 100), batch_size=None, collate_fn=collate, num_workers=2)
    kept = []
    for index, batch in enumerate(loader):
        assert (batch == index).all()
        if index % 10 == 0:
            kept.append((index, batch))
            batch[::2] = index  # the batch belongs to the program
    assert all((batch == index).all() for index, batch in kept)
    assert rustloader.stats(loader).arena.high_water_bytes < 40 * SIZE
    assert rustloader.stats(loader).copies.count == 0


def collated(samples):
    return {"tensor": torch.utils.data.default_collate(samples), "array": np.full(SIZE, samples[0][0], np.uint8)}


class KeepsArrays:
    """Collates like `collated`, and keeps the arrays."""

    def __init__(self):
        self.kept = []

    def __call__(self, samples):
        self.kept.append(collated(samples))
        return {**self.kept[-1], "tensor": self.kept[-1].pop("tensor")}


@pytest.mark.parametrize("wrap", [dict, Sample])
@pytest.mark.parametrize("keeps", [False, True])
def test_tensors_beside_an_array_stay_as_they_are_when_the_batch_is_dropped(wrap, keeps):
    class Tensors:
        def __len__(self):
            return 60

        def __getitem__(self, index):
            return torch.full((SIZE,), index, dtype=torch.uint8)

    collate = KeepsArrays() if keeps else collated
    loader = DataLoader(
        Tensors(), batch_size=2, num_workers=1, collate_fn=lambda it: wrap(collate(it)), prefetch_factor=4
    )
    batches = [batch.array if wrap is Sample else batch for batch in loader]
    for index, batch in enumerate(batches):
        assert (batch["array"] == 2 * index).all()
        assert (batch["tensor"] == torch.tensor([[2 * index], [2 * index + 1]])).all()
    stats = rustloader.stats(loader)
    copied = keeps or wrap is Sample
    assert stats.copies.count == (30 if copied else 0) and stats.copies.adopted == (30 if copied else 60)


# What the worker keeps


def generator_that_keeps(array):
    def keep():
        inner = array
        yield
        inner[:] = 255
        yield

    generator = keep()
    next(generator)
    return lambda: next(generator)


def cycle(array):
    loop = [array]
    loop.append(loop)
    array_ref = weakref.ref(array)
    del array, loop

    def write():
        if array_ref() is not None:
            array_ref()[:] = 255

    return write


def writer(view):
    """A function that writes through a view."""

    def write():
        view[:] = 255

    return write


def writer_into(container, find):
    def write():
        find(container)[:] = 255

    return write


def pointer_to(array):
    kept = (ctypes.c_uint8 * SIZE).from_buffer(array)
    return lambda: ctypes.memset(kept, 255, SIZE)


# Functions that keep an array, or something with its memory. Each returns a function that writes 255 into it.
KEEPERS = {
    "array": writer,
    "view": lambda a: writer(a[:]),
    "slice": lambda a: writer(a[: SIZE // 2]),
    "reshaped": lambda a: writer(a.reshape(4, -1)),
    "transposed": lambda a: writer(a.reshape(4, -1).T),
    "strided": lambda a: writer(a[::2]),
    "view of a view": lambda a: writer(a[1:][1:].view(np.int8)[:10].view(np.uint8)),
    "other dtype": lambda a: writer(a.view(PAIR).view(np.uint8)),
    "memoryview": lambda a: writer(np.asarray(memoryview(a))),
    "raw memoryview": lambda a: writer_into(memoryview(a), np.asarray),
    "frombuffer": lambda a: writer(np.frombuffer(a, np.uint8)),
    "ctypes": pointer_to,
    "tensor": lambda a: writer(torch.from_numpy(a)),
    "view of a tensor": lambda a: writer(torch.from_numpy(a)[5:].view(-1)),
    "dlpack": lambda a: writer(torch.from_dlpack(a)),
    "flat iterator": lambda a: writer_into(a.flat, lambda it: it.base),
    "generator": generator_that_keeps,
    "cycle": cycle,
}

# Functions of an array that return what is sent. A batch with an object of PICKLED is pickled.
SENT = {
    "array": lambda a: a,
    "view": lambda a: a[:],
    "tensor": torch.from_numpy,
    "list": lambda a: [a],
    "twice": lambda a: [a, a],
    "with a view": lambda a: [a[: SIZE - 7], a],
    "array and tensor": lambda a: {"a": a, "t": torch.from_numpy(a)},
}
PICKLED = {
    "pickled": Sample,
    "pickled with a view": lambda a: Sample(a.reshape(2, -1)),
}


def leaves(value):
    match value:
        case Sample():
            yield value.array
        case dict():
            yield from value.values()
        case list() | tuple():
            yield from value
        case _:
            yield value


def arrays_of(value):
    """The arrays and tensors at any depth."""
    for leaf in leaves(value):
        if isinstance(leaf, dict | list | tuple):
            yield from arrays_of(leaf)
        elif isinstance(leaf, np.ndarray | torch.Tensor):
            yield leaf


class Keeping:
    """Keeps the arrays of each sample, and writes to them when it produces the next one."""

    def __init__(self, keep, sent):
        self.keep, self.sent, self.writers = keep, sent, []

    def __len__(self):
        return 10

    def __getitem__(self, index):
        for write in self.writers:
            write()
        arrays = {name: fresh(index) for name in self.sent}
        self.writers = [self.keep(array) for array in arrays.values()]
        return {name: self.sent[name](array) for name, array in arrays.items()}


@ARRIVES
@pytest.mark.parametrize("keeper", KEEPERS)
def test_what_a_worker_writes_later_reaches_no_batch(keeper, collate):
    for sent in (SENT, PICKLED):
        batches, _ = batches_of(Keeping(KEEPERS[keeper], sent), collate_fn=collate, prefetch_factor=4)
        assert len(batches) == 10
        for index, batch in enumerate(batches):
            for name, value in batch.items():
                assert all((leaf == index).all() for leaf in leaves(value)), (name, index)


@ARRIVES
def test_what_the_program_writes_into_a_batch_reaches_no_worker(collate):
    class Cached:
        def __init__(self):
            self.cache = {}

        def __len__(self):
            return 40

        def __getitem__(self, index):
            return self.cache.setdefault(index % 3, fresh(index % 3))

    loader = DataLoader(Cached(), batch_size=None, collate_fn=collate, num_workers=1)
    for index, batch in enumerate(loader):
        assert (batch == index % 3).all()
        batch[:] = 255
    assert rustloader.stats(loader).copies.count == 40


@ARRIVES
def test_a_generator_may_go_on_with_what_it_has_yielded(collate):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            array = fresh(0)
            for index in range(20):
                array[:] = index
                yield array
            del array
            for index in range(20, 40):
                yield fresh(index)

    batches, stats = batches_of(Stream(), collate_fn=collate, prefetch_factor=8)
    assert [int(batch[0]) for batch in batches] == list(range(40))
    assert all((batch == batch[0]).all() for batch in batches)
    assert stats.copies.count == 20


class Writing(np.ndarray):
    """An array that writes to its memory when it is deleted."""

    def __del__(self):
        if self.base is not None:
            self.base[:] = 255


def finalized(value, array):
    weakref.finalize(value, array.fill, 255)
    return value


def with_callback(array):
    """A view whose finalizer writes through a weak reference to the owner of the memory, which outlives the view."""
    owner = weakref.ref(array)
    view = array[:]
    weakref.finalize(view, lambda: owner().fill(255))
    return view


FINALIZED = {
    "array": lambda a: finalized(a[:], a),
    "tensor": lambda a: finalized(torch.from_numpy(a), a),
    "view in a tensor": lambda a: torch.from_numpy(finalized(a[:], a)),
    "subclass in a tensor": lambda a: torch.from_numpy(a.view(Writing)),
    "beside": lambda a: {"a": a[:], "b": finalized(torch.zeros(2), a)},
    "weak reference": with_callback,
    "pickled": lambda a: Sample(finalized(a[:], a)),
}


def first_of(batch):
    return next(iter(leaves(batch)))


@ARRIVES
@pytest.mark.parametrize("name", FINALIZED)
def test_what_a_finalizer_writes_reaches_no_batch(name, collate):
    dataset = Made(lambda index: FINALIZED[name](fresh(index)), 20)
    batches, _ = batches_of(dataset, collate_fn=collate, prefetch_factor=4)
    assert [int(first_of(batch).max()) for batch in batches] == [*range(20)]


class Cache:
    """Collates each batch once, into an array over the memory of a tensor that torch collates, and keeps it."""

    def __init__(self):
        self.batches = {}

    def __call__(self, batch):
        key = int(batch[0][0])
        if key not in self.batches:
            self.batches[key] = default_collate(batch).numpy()
        return self.batches[key]


@pytest.mark.parametrize("beside", [None, {1}])
@pytest.mark.forks
def test_an_array_over_a_collated_tensor_that_the_worker_keeps_is_copied(beside):
    """With torch, each batch is a copy that was pickled."""

    def trace(cls):
        cache = Cache()
        loader = cls(
            [torch.full((100_000,), float(i)) for i in range(4)],
            batch_size=2,
            num_workers=1,
            persistent_workers=True,
            collate_fn=lambda batch: (cache(batch), beside),
        )
        values = []
        for _ in range(2):
            for array, _ in loader:
                values.append(float(array[0, 0]))
                array += 100
        return values

    expected, values = map(trace, BOTH)
    assert values == expected == [0, 2, 0, 2]
