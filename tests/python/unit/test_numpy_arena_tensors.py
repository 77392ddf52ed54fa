"""Arrays in the arena under torch's default_convert: the tensors are the same, and their arrays remain visible."""

import collections
import copy
import weakref
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from numpy_arena_support import SIZE, Made, batches_of, fresh
from support import DataLoader, same
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_convert

import rustloader

pytestmark = pytest.mark.ours

Pair = collections.namedtuple("Pair", "a b")


def read_only(array):
    array.flags.writeable = False
    return array


def filled(shape, index, dtype=np.float32):
    return np.full(shape, index, dtype)


# Samples, and whether they are sent without a copy.
SAMPLES = {
    "C order": (lambda i: filled((3, 200, 100), i), True),
    "F order": (lambda i: filled((3, 200, 100), i).T, True),
    "channels first": (lambda i: filled((200, 100, 3), i).transpose(2, 0, 1), True),
    "one channel": (lambda i: filled((200, 200, 1), i).transpose(2, 0, 1), True),
    "of a batch": (lambda i: filled((200, 200), i)[None], True),
    "first of a batch": (lambda i: filled((40, 1, 64, 64), i)[:, 0], True),
    "beside scalars": (lambda i: (fresh(i), np.float32(i), np.arange(i), i / 7, 1j, None, "x", b"y", True), True),
    "expanded": (lambda i: np.broadcast_to(filled((1, 40000), i), (2, 40000)), False),
    "read-only": (lambda i: read_only(filled((200, 200), i)), False),
    "memory map": (lambda i: filled((200, 200), i).view(np.memmap), False),
    "objects": (lambda i: [filled(3, i, object), fresh(i)], False),
    "beside a set": (lambda i: {"a": fresh(i), "b": {i}}, False),
    "in a named tuple": (lambda i: [Pair(fresh(i), i)], False),
    "in an ordered dict": (lambda i: collections.OrderedDict(a=fresh(i), b=[fresh(i)]), False),
} | {
    dtype: (lambda i, dtype=dtype: filled((400, 200), i, dtype), True)
    for dtype in "bool uint16 int16 uint32 int32 uint64 int64 float16 float64 complex64 complex128".split()
}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", SAMPLES)
def test_arrays_that_are_sent_without_a_copy(name):
    make, is_adopted = SAMPLES[name]
    batches, stats = batches_of(Made(make, 3), collate_fn=default_convert)
    assert same(batches, [default_convert(make(i)) for i in range(3)])
    assert (stats.copies.count == 0) is (stats.copies.adopted > 0) is is_adopted, stats.copies


def test_holes_are_closed_by_a_copy():
    batches, stats = batches_of(Made(lambda i: filled((64, 2, 64, 64), i)[:, :1]), collate_fn=default_convert)
    assert [batch.tolist() for batch in batches] == [filled((64, 1, 64, 64), i).tolist() for i in range(6)]
    assert stats.copies.count == 6 and stats.copies.bytes == 6 << 20


def test_tensors_of_one_array_share_it():
    def make(index):
        array = fresh(index)
        return {"a": array, "b": array[: SIZE // 2], "c": torch.from_numpy(array)}

    batches, stats = batches_of(Made(make), collate_fn=default_convert)
    for index, batch in enumerate(batches):
        assert all((tensor == index).all() for tensor in batch.values())
        batch["b"][:] = 255
        assert all((tensor[: SIZE // 2] == 255).all() for tensor in batch.values())
    assert stats.copies.count == 6 and stats.copies.adopted == 0


# Ways to keep a sample. The dataset writes into kept samples when it produces the next one.

CONTAINERS = {
    "list": lambda a: [a],
    "tuple": lambda a: (a, 1),
    "dict": lambda a: {"a": a},
    "nested": lambda a: [({"a": a},)],
    "named tuple": lambda a: Pair(a, 1),
    "deque": lambda a: collections.deque([a]),
}


def array_in(value):
    while not isinstance(value, np.ndarray | torch.Tensor):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value


class KeepsSamples:
    def __init__(self, contain, keep):
        self.contain, self.keep, self.kept = contain, keep, []

    def __len__(self):
        return 10

    def __getitem__(self, index):
        for kept in self.kept:
            if kept() is not None:
                array_in(kept())[:] = 255
        sample = self.contain(fresh(index))
        self.kept.append(self.keep(sample))
        return sample


def in_a_closure(sample):
    return lambda: sample


def copied_shallowly(sample):
    return in_a_closure(copy.copy(sample))


def in_a_generator(sample):
    def keep():
        local = sample
        while True:
            yield local

    generator = keep()
    next(generator)
    return generator.__next__


def by_weak_reference(sample):
    return weakref.ref(array_in(sample))


@pytest.mark.parametrize("keep", [in_a_closure, copied_shallowly, in_a_generator, by_weak_reference])
@pytest.mark.parametrize("name", CONTAINERS)
def test_what_keeps_a_sample_reaches_no_batch(name, keep):
    batches, stats = batches_of(KeepsSamples(CONTAINERS[name], keep), collate_fn=default_convert, prefetch_factor=4)
    assert [int(array_in(batch).max()) for batch in batches] == [*range(10)]
    assert stats.copies.count == 10 and stats.copies.adopted == 0


# Programs in which arrays become no tensors of the arena, or others than torch's function would make


class KeepsTensors:
    """A `collate_fn` of the program that keeps what torch's function returns, and writes into it later."""

    def __init__(self):
        self.kept = []

    def __call__(self, sample):
        for tensor in self.kept:
            tensor[:] = 255
        self.kept.append(default_convert(sample))
        return self.kept[-1]


class AddsOne(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result + 1 if function is torch.as_tensor else result


def enter_mode(worker_id):
    AddsOne().__enter__()


def replace_as_tensor(worker_id):
    original = torch.as_tensor
    torch.as_tensor = lambda data: original(data) + 1


def replace_default_convert(worker_id):
    torch.utils.data._utils.collate.default_convert = lambda data: data


def register_reducer(worker_id):
    ForkingPickler.register(np.ndarray, lambda array: (int, ()))


class ReplacesAsTensor(Made):
    """Replaces `as_tensor` in the dataset, after the fetcher was created."""

    def __getitem__(self, index):
        if type(torch.as_tensor) is not type(lambda: 0):
            replace_as_tensor(0)
        return super().__getitem__(index)


class InLists(Made):
    def __getitem__(self, index):
        return [super().__getitem__(index)]


# The dataset, options of the loader, the type of the batches, and what is added to their numbers.
CHANGED = {
    "kept by collate_fn": (Made, {"collate_fn": KeepsTensors()}, torch.Tensor, 0),
    "a mode of torch": (Made, {"worker_init_fn": enter_mode}, torch.Tensor, 1),
    "as_tensor replaced": (Made, {"worker_init_fn": replace_as_tensor}, torch.Tensor, 1),
    "as_tensor replaced later": (ReplacesAsTensor, {}, torch.Tensor, 1),
    "default_convert replaced": (InLists, {"worker_init_fn": replace_default_convert}, np.ndarray, 0),
    "a reducer of arrays": (Made, {"worker_init_fn": register_reducer}, torch.Tensor, 0),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_the_program_changes_is_respected(name):
    kind, options, batch, added = CHANGED[name]
    batches, stats = batches_of(kind(fresh, 10), **{"collate_fn": default_convert, **options}, prefetch_factor=4)
    assert {type(array_in(each)) for each in batches} == {batch}
    assert [int(array_in(each).max()) for each in batches] == [index + added for index in range(10)]
    assert stats.copies.adopted == 0 or batch is np.ndarray


# Options


class Failing(Made):
    def __getitem__(self, index):
        if index % 3 == 1:
            raise ValueError(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("on_error", ["skip", "replace", lambda index, error: fresh(index)])
def test_samples_that_fail(on_error):
    loader = DataLoader(Failing(fresh, 9), batch_size=None, num_workers=1, on_error=on_error)
    batches = list(loader)
    assert all(type(batch) is torch.Tensor and (batch == batch[0]).all() for batch in batches)
    numbers = [int(batch[0]) for batch in batches]
    if on_error == "skip":
        assert numbers == [0, 2, 3, 5, 6, 8]
        assert rustloader.stats(loader).copies.count == 0
    elif on_error == "replace":
        assert numbers[::3] == [0, 3, 6] and numbers[2::3] == [2, 5, 8]
        assert len(numbers) == 9 and all(n % 3 != 1 for n in numbers), "another sample replaces one that fails"
    else:
        assert numbers == [*range(9)]


@pytest.mark.parametrize("kw", [{"seed_by": "sample"}, {"batch_size": 2}, {"persistent_workers": True}])
def test_other_options_need_no_copy_either(kw):
    loader = DataLoader(Made(fresh, 8), num_workers=2, collate_fn=default_convert, **{"batch_size": None, **kw})
    for _ in range(2):
        batches = [tensor for batch in loader for tensor in (batch if "batch_size" in kw else [batch])]
        assert [int(tensor.max()) for tensor in batches] == [*range(8)]
        assert {type(tensor) for tensor in batches} == {torch.Tensor}
    assert rustloader.stats(loader).copies.count == 0


def refuse(tensor):
    raise ValueError("no tensors")


def register_refusal(worker_id):
    ForkingPickler.register(torch.Tensor, refuse)


def test_an_error_names_the_type_of_the_batch():
    with pytest.raises(ValueError, match=r"could not send its batch of type torch\.Tensor"):
        batches_of(Made(fresh), collate_fn=default_convert, worker_init_fn=register_refusal)
