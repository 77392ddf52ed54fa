"""`rustloader.cache`: a dataset builds each sample once, and the cache returns it unchanged from then on."""

import copy
import logging
import multiprocessing
import multiprocessing.resource_sharer
import os
import pickle
import random
import signal
from collections import namedtuple

import numpy as np
import pytest
import torch
from isolation import in_child
from sample_data import Labelled, Numbers, Record, Unpicklable
from support import DataLoader, rng_states, rustloader, same
from torch.utils.data import Dataset, IterableDataset, Subset

pytestmark = pytest.mark.ours

if rustloader is not None:
    cache = rustloader.cache

Point = namedtuple("Point", "x y")


class Kept(Dataset):
    """Samples are the items of a list, called if callable. `built` has the indices of those built in this process."""

    def __init__(self, items):
        self.items, self.built = items, []

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.built.append(index)
        item = self.items[index]
        return item() if callable(item) else item


class KeptBatches(Kept):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Noted(Numbers):
    """Appends a byte to a file for each sample that any process builds."""

    def __init__(self, length, file):
        super().__init__(length)
        self.file = str(file)

    def __getitem__(self, index):
        with open(self.file, "ab", 0) as file:
            file.write(b".")
        return torch.full((50,), float(index)), index

    def count(self):
        return os.path.getsize(self.file)


class NotedBatches(Noted):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def image():
    from PIL import Image

    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), np.uint8))


def tagged(tensor):
    tensor.path = "a.jpg"
    return tensor


def read_only(array):
    array.flags.writeable = False
    return array


def state(item):
    """What a pickle of a tensor or array keeps, and `same` does not compare."""
    if isinstance(item, torch.Tensor):
        return vars(item)
    return item.flags.writeable if isinstance(item, np.ndarray) else None


def items():
    base = torch.arange(100.0)
    return [
        None,
        True,
        -5,
        1 << 70,
        2.5,
        float("nan"),
        3 + 4j,
        "text \N{SNOWMAN}",
        b"bytes",
        "",
        torch.tensor(3),
        torch.empty(0, 4),
        torch.arange(12).reshape(3, 4).T,
        base[10:20],
        torch.rand(3, requires_grad=True),
        torch.rand(5, dtype=torch.float64).to(torch.bfloat16),
        torch.randint(0, 255, (3, 100, 100), dtype=torch.uint8),
        torch.eye(3).to_sparse(),
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(["a", "bc"]),
        np.datetime64("2020-01-01"),
        np.float32(2),
        np.arange(10_000.0),
        [1, [2, (3, {"a": [4]})], ()],
        {"a": torch.ones(3), 1: None, ("t", 2): b"x"},
        {3, 4},
        Point(torch.ones(2), 5),
        Record(3, "name") if rustloader is not None else None,
        Labelled(torch.ones(3)) if rustloader is not None else None,
        b"x" * 100_000,
        image(),
        tagged(torch.arange(3.0)),
        tagged(base[30:50]),
        tagged(torch.zeros(3, requires_grad=True)),
        tagged(torch.nn.Parameter(torch.ones(2))),
        torch.nn.Buffer(torch.ones(2)),
        read_only(np.arange(6).reshape(2, 3)),
        read_only(np.arange(10_000.0)),
        read_only(np.array(["a", "bc"])[:0]),
        read_only(np.zeros(9, "i4, f8")),
    ]


def test_samples_are_returned_unchanged():
    data = Kept(items())
    cached = cache(data, "64MiB")
    for index, item in enumerate(data.items):
        for _ in range(3):
            sample = cached[index]
            if type(item).__name__ == "Image":
                assert type(sample) is type(item) and (sample.mode, sample.tobytes()) == (item.mode, item.tobytes())
            else:
                assert same(sample, item) and state(sample) == state(item), (index, item, sample)
    # One of them is built twice, to check that it is not random.
    assert sorted(set(data.built)) == list(range(len(data))) and len(data.built) == len(data) + 1
    assert cached.usage().hits == 2 * len(data) and cached.usage().misses == len(data)


def test_objects_that_occur_twice_in_a_sample_still_do():
    tensor, text = torch.arange(5), ["a"]
    cached = cache(Kept([[tensor, tensor, text, text]]))
    for _ in range(2):
        first, second, one, other = cached[0]
        assert first is second and one is other and torch.equal(first, tensor)


def test_a_sample_may_be_changed_in_place():
    data = Kept([lambda: torch.zeros(3), lambda: torch.zeros(50_000), lambda: {"list": [1]}])
    cached = cache(data)
    for _ in range(2):
        cached[0].add_(1), cached[1].add_(1), cached[2]["list"].append(2)
        assert [tensor.sum().item() for tensor in (cached[0], cached[1])] == [0, 0]
        assert cached[2] == {"list": [1]}


def test_it_acts_as_its_dataset():
    data = Kept([torch.ones(3)] * 5)
    data.classes = ["cat", "dog"]
    cached = cache(data)
    assert len(cached) == 5 and cached.classes == ["cat", "dog"] and cached.dataset is data
    assert isinstance(cached, Dataset) and not hasattr(cached, "other") and not hasattr(cached, "__getitems__")
    assert "Kept" in repr(cached) and "bytes" in repr(cached)
    assert hasattr(cache(NotedBatches(3, "")), "__getitems__")
    # torch's Subset uses `__getitems__` only if its dataset has it.
    assert not hasattr(cache(Subset(data, [0, 1])), "__getitems__")


class Protocols(Kept):
    """Has special methods, and takes any index."""

    def __getitem__(self, index):
        return index

    def __iter__(self):
        return iter(self.items)

    def __reversed__(self):
        return iter(self.items[::-1])

    def __contains__(self, item):
        return item == "anything"

    def __call__(self, number):
        return number + len(self)

    def __bool__(self):
        return False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.left = True

    def __setitem__(self, index, value):
        self.items[index] = value


class Plain:
    """Takes any index, and has no special methods except those that a cache needs."""

    def __getitem__(self, index):
        return index

    def __len__(self):
        return 3


def outcomes_of_protocols(data):
    """What Python's protocols do with a dataset."""
    with data as entered:
        pass
    return list(data), list(reversed(data)), "anything" in data, 5 in data, data(4), bool(data), entered is data


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_it_has_the_special_methods_of_its_dataset(method):
    data = Protocols([5, 6])
    cached = cache(data)
    assert outcomes_of_protocols(cached) == outcomes_of_protocols(data) and data.left
    assert isinstance(cached, rustloader.CachedDataset) and callable(cached) and "<CachedDataset of" in repr(cached)
    with pytest.raises(TypeError, match="does not support item assignment"):
        cached[0] = 1
    for copied in (copy.copy(cached), copy.deepcopy(cached)):
        assert list(copied) == [5, 6] and copied(4) == 6
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(outcomes_of_protocols, (cached,)) == outcomes_of_protocols(data)
    multiprocessing.resource_sharer.stop()


def test_it_has_no_special_methods_that_its_dataset_lacks():
    data = Plain()
    cached = cache(data, then=lambda sample: sample * 10)
    for name in ("__call__", "__contains__", "__enter__", "__bool__", "__setitem__", "__getitems__"):
        assert not any(name in vars(base) for base in type(cached).__mro__)
    assert not callable(cached) and bool(cached)
    assert list(cached) == [0, 10, 20] and list(reversed(cached)) == [20, 10, 0] and 10 in cached and 5 not in cached
    assert list(cache(Protocols([5, 6]), then=lambda sample: sample * 10)) == [50, 60]


def test_attributes_are_set_on_the_dataset():
    data = Kept([torch.ones(3)] * 5)
    data.table = "its own"
    cached = cache(data)
    cached.handle = 5
    assert data.handle == cached.handle == 5 and "handle" not in vars(cached)
    cached.then = len
    assert cached[0] == 3 and not hasattr(data, "then")


class WholeBatches(Kept):
    """``__getitems__`` returns a whole batch."""

    def __getitem__(self, index):
        return self.__getitems__([index])

    def __getitems__(self, indices):
        return self.items(torch.tensor(indices))

    def __len__(self):
        return 8


def columns(rows):
    return rows, rows * 10


def as_is(batch):
    return batch


@pytest.mark.parametrize(
    "make", [columns, lambda rows: {"a": rows}, lambda rows: rows * 2, lambda rows: [rows, rows, rows]]
)
def test_batches_that_are_not_lists_of_samples_are_left_alone(make):
    data = WholeBatches(make)
    cached = cache(data)
    for order in (range(8), [3, 0, 1, 2, 7, 7]):
        arguments = {"batch_size": 2, "sampler": order, "collate_fn": as_is}
        expected = list(torch.utils.data.DataLoader(data, **arguments))
        for _ in range(2):
            assert same(list(DataLoader(cached, **arguments)), expected)
    with pytest.raises(TypeError, match="then= needs samples, but __getitems__ of WholeBatches does not return a list"):
        next(iter(DataLoader(cache(data, then=len), batch_size=2)))


class Unloadable:
    """Its pickles cannot be loaded."""

    def __reduce__(self):
        return int, ("no number",)


@pytest.mark.warns
def test_samples_that_no_pickle_can_keep_are_built_each_time(caplog):
    data = Kept([0, Unpicklable, Unloadable, torch.ones(3)])
    cached = cache(data)
    kinds = [type(cached[n]) for _ in range(3) for n in range(4)]
    assert kinds == [int, Unpicklable, Unloadable, torch.Tensor] * 3
    usage = cached.usage()
    assert (usage.hits, usage.misses, usage.refused) == (4, 8, 2)
    (record,) = [record for record in caplog.records if "cannot be kept" in record.message]
    assert "sample 1 (Unpicklable)" in record.message


class Payload(int):
    """An index that carries something besides its value."""


class Labelling(Kept):
    def __getitem__(self, index):
        return super().__getitem__(index), getattr(index, "load", type(index).__name__)


@pytest.mark.warns
def test_only_ints_and_numpys_integers_are_rows(caplog):
    data = Labelling(list("abcde"))
    cached = cache(data)
    first, second = Payload(1), Payload(1)
    first.load, second.load = "first", "second"
    assert [cached[index] for index in (1, np.int64(1), np.uint8(1))] == [("b", "int")] * 3
    assert [cached[index] for index in (first, second, True)] == [("b", "first"), ("b", "second"), ("b", "bool")]
    assert cached[torch.tensor(1)] == ("b", "Tensor")
    # Indices beyond the table are passed to the dataset.
    assert cached[-1] == cached[-1] == ("e", "int")
    with pytest.raises(IndexError):
        cached[5]
    with pytest.raises(TypeError):
        cached["a"]
    assert (cached.usage().hits, cached.usage().misses) == (2, 9)
    (record,) = caplog.records
    assert "indices of type Payload" in record.message and "pass int(index)" in record.message
    loader = DataLoader(cached, sampler=[first, 2, second], batch_size=3, num_workers=1)
    assert [list(loader) for _ in range(2)] == [[[("b", "c", "b"), ("first", "int", "second")]]] * 2


def test_indices_of_many_samples_count_as_many_misses():
    cached = cache(torch.arange(10))
    for index in ([1, 2], slice(1, 8, 3), np.array([3, 4]), torch.tensor([5, 6, 7])):
        assert torch.equal(cached[index], torch.arange(10)[index])
    assert (cached.usage().hits, cached.usage().misses) == (0, 10)


@pytest.mark.warns
def test_under_and_over_other_datasets(tmp_path):
    data = Noted(10, tmp_path / "made")
    cached, over = cache(data, "16MiB"), cache(Subset(data, [5, 7]), "16MiB")
    assert [over[1][1], over[1][1]] == [7, 7] and (over.usage().hits, over.usage().misses) == (1, 1)
    shared = rustloader.share(cached, threshold=1)
    assert shared[3][1] == cached[3][1] == 3 and (cached.usage().hits, cached.usage().misses) == (1, 1)


def test_a_full_cache_still_serves_what_it_has(caplog):
    data = Kept([torch.full((1000,), n) for n in range(100)])
    size = 8 * 1000 + 100
    with caplog.at_level(logging.INFO, "rustloader"):
        cached = cache(data, 50 * size)
        for _ in range(3):
            assert all(torch.equal(cached[n], data.items[n]) for n in range(100))
    usage = cached.usage()
    kept = usage.hits // 2
    assert 45 <= kept < 50 and usage.misses == 300 - 2 * kept and usage.samples_bytes + usage.bytes_left < 50 * size
    (record,) = [record for record in caplog.records if "limit" in record.message]
    assert record.levelname == "INFO" and str(usage.limit) in record.message


def test_a_size_that_is_unavailable_is_refused():
    data = Kept([0] * 1000)
    with pytest.raises(ValueError, match=r"memory=1125899906842624 bytes is too large: \d+ bytes of memory"):
        cache(data, 1 << 50)
    with pytest.raises(ValueError, match="memory=10240 bytes is too small: the index alone takes 32768 bytes"):
        cache(data, "10KiB")
    for wrong, error in [("many", ValueError), (0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]:
        with pytest.raises(error, match="memory must be a positive number of bytes, or a size such as"):
            cache(data, wrong)
    assert cache(data, "1 MB").usage().limit == 999_424


def _limited(kind, limit):
    import resource

    resource.setrlimit(kind, (limit, limit))
    data = Kept([torch.ones(1000)] * 1000)
    cached = cache(data)
    total = sum(int(cached[n].sum()) for _ in range(2) for n in range(1000))
    try:
        cache(data, "200GiB")
        refused = ""
    except ValueError as error:
        refused = str(error)
    return {"total": total, "limit": cached.usage().limit, "refused": refused}


@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_limits_of_the_process(name):
    import resource

    limit = (8 << 30) if name == "RLIMIT_FSIZE" else (64 << 30)
    report = in_child(_limited, getattr(resource, name), limit)
    assert report["total"] == 2_000_000 and report["limit"] < limit, report
    assert "bytes is too large" in report["refused"]


def test_errors_for_what_cannot_be_cached_name_a_remedy():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    class Endless:
        def __getitem__(self, index):
            return index

    with pytest.raises(TypeError, match="Stream is not one: cache a map-style dataset of the files that it reads"):
        cache(Stream())
    with pytest.raises(TypeError, match="Endless has no __len__: add one"):
        cache(Endless())
    with pytest.raises(TypeError, match="then must be a function of a sample, got 3"):
        cache(Kept([1]), then=3)
    with pytest.raises(TypeError, match="version must be a str, got 3"):
        cache(Kept([1]), version=3)
    with pytest.raises(TypeError, match="key must be a str"):
        cache(Kept([1]), key=3)
    with pytest.raises(ValueError, match="a key or a path"):
        cache(Kept([1]), key="a", path="b")


def test_a_pickle_by_value_is_refused():
    cached = cache(Kept([1]))
    with pytest.raises(TypeError, match=r"Pickle its dataset \(`cached.dataset`\), and call rustloader.cache\(\)"):
        pickle.dumps(cached)


def test_copies_have_the_same_cache():
    cached = cache(Kept([torch.ones(3)] * 3), then=len)
    for copied in (copy.copy(cached), copy.deepcopy(cached)):
        assert (copied[1], len(copied), copied.table) == (3, 3, cached.table)
    assert copy.copy(cached).dataset is cached.dataset is not copy.deepcopy(cached).dataset
    assert (cached.usage().hits, cached.usage().misses) == (1, 1)


class Stops(Kept):
    """Notes each sample, and fails at index 5 for the first time."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index == 5 and self.built.count(5) == 1:
            raise ValueError("not yet")
        return sample


@pytest.mark.parametrize("path", [False, True])
def test_samples_of_a_batch_before_an_error_are_kept(path, tmp_path):
    data, passed = Stops([torch.full((20,), n) for n in range(8)]), []
    cached = cache(data, "1MiB", then=lambda row: passed.append(int(row[0])), path=tmp_path / "file" if path else None)
    loader = DataLoader(cached, batch_size=8, collate_fn=len)
    with pytest.raises(ValueError, match="not yet"):
        next(iter(loader))
    # The first one is built twice, to check that it is not random.
    assert data.built == [0, 0, 1, 2, 3, 4, 5] and passed == [0, 1, 2, 3, 4]
    assert list(loader) == [8] and data.built[7:] == [5, 6, 7] and passed[5:] == list(range(8))
    assert (cached.usage().hits, cached.usage().misses) == (5, 9)


def test_the_note_of_an_error_names_the_sample_of_a_cached_dataset():
    loader = DataLoader(cache(Stops([torch.zeros(2)] * 8)), batch_size=4, num_workers=1)
    with pytest.raises(ValueError, match="not yet") as caught:
        list(loader)
    assert caught.value.__notes__ == ["Worker 0 was fetching batch 1 (index [4, 5, 6, 7]), and was at sample 5."]


def test_a_dataset_may_return_one_buffer_for_all_samples():
    class OneBuffer(Dataset):
        def __init__(self):
            self.buffer = torch.zeros(20)

        def __len__(self):
            return 16

        def __getitem__(self, index):
            return self.buffer.fill_(index)

    cached = cache(OneBuffer(), then=torch.clone)
    for _ in range(2):
        assert [batch[:, 0].tolist() for batch in DataLoader(cached, batch_size=8)] == [[*range(8)], [*range(8, 16)]]
    cached = cache(OneBuffer())
    list(DataLoader(cached, batch_size=8))
    assert [int(sample[0]) for sample in cached] == list(range(16))


@pytest.mark.warns
@pytest.mark.parametrize("then", [None, torch.clone])
def test_a_cached_sample_that_kills_workers_is_skipped(then):
    class Killing(Kept):
        def __getitem__(self, index):
            if index == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    cached = cache(Killing([torch.full((2,), n) for n in range(8)]), then=then)
    loader = DataLoader(cached, batch_size=4, num_workers=1, on_error="skip", max_restarts=5)
    assert [batch[:, 0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 6, 7]]


class Views(Dataset):
    """Samples are views of the dataset's own memory."""

    def __init__(self, wrap=lambda row: row):
        self.rows, self.wrap = torch.arange(6000.0).reshape(20, 300), wrap

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return self.wrap(self.rows[index])


class ViewBatches(Views):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Unpicklables(list):
    def __reduce_ex__(self, protocol):
        raise TypeError("not to be pickled")

    def __deepcopy__(self, memo):
        return Unpicklables(copy.deepcopy(list(self), memo))


def add_one(sample):
    if isinstance(sample, list):
        (sample,) = sample
    return sample.add_(1) if isinstance(sample, torch.Tensor) else np.add(sample, 1, out=sample)


WRAPS = [torch.Tensor.detach, torch.Tensor.numpy, lambda row: [row], lambda row: Unpicklables([row])]


@pytest.mark.warns
@pytest.mark.parametrize("kind", [Views, ViewBatches])
@pytest.mark.parametrize("memory", ["1MiB", 32768])
@pytest.mark.parametrize("wrap", WRAPS)
def test_then_may_change_its_argument_in_place(kind, memory, wrap):
    """Batches are the same while the cache is empty, half-filled and full, and if it does not hold all samples."""
    data = kind(wrap)
    cached = cache(data, memory, then=add_one)
    cached[3], cached[-1], cached[5]
    epochs = [torch.cat(list(DataLoader(cached, batch_size=6))) for _ in range(3)]
    assert all(torch.equal(epoch, torch.arange(6000.0).reshape(20, 300) + 1) for epoch in epochs)
    assert torch.equal(data.rows, torch.arange(6000.0).reshape(20, 300))


@pytest.mark.warns
def test_set_epoch_warns_once_samples_are_cached(caplog):
    class Curriculum(Kept):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch
            return "set"

    data = Curriculum([1, 2])
    cached = cache(data)
    assert not hasattr(cache(Kept([1])), "set_epoch")
    assert cached.set_epoch(0) == "set" and not caplog.records
    list(cached)
    assert [cached.set_epoch(epoch=epoch) for epoch in (1, 2)] == ["set"] * 2 and data.epoch == 2
    (record,) = caplog.records
    assert "set_epoch() of Curriculum has no effect on samples that are already in the cache" in record.message


# Random datasets


class Random(Numbers):
    def __init__(self, length, draw):
        super().__init__(length)
        self.draw = draw

    def __getitem__(self, index):
        return index, self.draw()


@pytest.mark.warns
@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(2), lambda: np.random.rand()])
def test_a_random_dataset_is_detected(draw, caplog):
    cached = cache(Random(1000, draw))
    first = [cached[n] for n in range(20)]
    (record,) = caplog.records
    assert "sample 0 of Random differs when it is made again" in record.message and "then=" in record.message
    assert all(same(cached[n], first[n]) for n in range(20))


@pytest.mark.warns
@pytest.mark.parametrize("number", range(len(items())) if rustloader is not None else [])
def test_samples_that_are_equal_are_not_called_random(number, caplog):
    """Each sample is built again, so its parts have other addresses and identities."""
    cached = cache(Kept([lambda: items()[number]] * 800))
    kept = [cached[n] for n in range(8)]
    assert len(cached.dataset.built) == 16 and len(kept) == 8
    random_items = {14, 15, 16}
    assert bool(caplog.records) == (number in random_items), [record.message for record in caplog.records]


def test_an_error_when_a_sample_is_built_a_second_time_is_not_raised():
    class FailsSecondTime(Kept):
        def __getitem__(self, index):
            self.built.append(index)
            if self.built.count(index) == 2:
                raise OSError("once only")
            return torch.ones(3)

    cached = cache(FailsSecondTime(range(3)))
    assert [int(cached[0].sum()) for _ in range(3)] == [3, 3, 3] and cached.usage().hits == 2


@pytest.mark.warns
def test_building_a_sample_twice_advances_no_random_stream():
    """A program that draws random numbers after the first samples draws the same ones with a cache."""
    states = []
    for wrap in (lambda data: data, cache):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        data = wrap(Random(1000, lambda: (torch.rand(1), random.random(), np.random.rand())))
        for n in range(30):
            data[n]
        states.append(rng_states())
    assert states[0] == states[1]


def augment(sample):
    return *sample, torch.rand(1).item(), random.random(), np.random.rand()


@pytest.mark.parametrize("seed_by", [None, "sample", "batch"])
@pytest.mark.parametrize("workers", [0, 2])
def test_then_draws_the_same_with_a_cold_a_half_filled_and_a_full_cache(seed_by, workers):
    def epoch(cached):
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        return [batch for batch in DataLoader(cached, batch_size=8, num_workers=workers, seed_by=seed_by, shuffle=True)]

    plain = Kept([(torch.full((3,), n), n) for n in range(60)])

    class Plain(Kept):
        def __getitem__(self, index):
            return augment(super().__getitem__(index))

    cached = cache(plain, then=augment)
    half = cache(plain, then=augment)
    for n in range(0, 60, 2):
        half[n]
    expected = epoch(Plain(plain.items))
    for batches in (epoch(cached), epoch(cached), epoch(half)):
        assert same(batches, expected)
    assert cached.usage().hits == 60 and half.usage().hits == 30


@pytest.mark.parametrize("kind", [Kept, KeptBatches])
def test_what_the_dataset_draws_does_not_change_what_then_draws(kind):
    class Drawing(kind):
        def __getitem__(self, index):
            torch.rand(3), random.random(), np.random.rand()
            return super().__getitem__(index)

    def epoch(cached):
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        return list(DataLoader(cached, batch_size=8))

    cached = cache(Drawing([(torch.full((3,), n), n) for n in range(60)]), then=augment)
    assert hasattr(cached, "__getitems__") == (kind is KeptBatches)
    cold, full = epoch(cached), epoch(cached)
    assert same(cold, full) and len(cold[0]) == 5 and (cached.usage().hits, cached.usage().misses) == (60, 60)


def test_then_is_called_each_time_and_may_fail():
    calls = []

    def then(sample):
        calls.append(sample)
        if len(calls) == 2:
            raise RuntimeError("once")
        return sample * 2

    cached = cache(Kept([3]), then=then)
    assert cached[0] == 6
    with pytest.raises(RuntimeError, match="once"):
        cached[0]
    assert cached[0] == 6 and calls == [3, 3, 3] and cached.usage().misses == 1


# Processes


@pytest.mark.warns
def test_a_closed_descriptor_ends_filling_and_nothing_else():
    data = Kept([torch.full((500,), n) for n in range(20)])
    cached = cache(data)
    cached[0]
    os.close(cached.table.fileno())
    file = os.open("/dev/null", os.O_WRONLY)
    try:
        assert all(torch.equal(cached[n], data.items[n]) for _ in range(2) for n in range(20))
        assert data.built.count(0) == 2 and data.built.count(1) == 2
        with pytest.raises(OSError, match="closed by other code"):
            cached.table.fileno()
    finally:
        os.close(file)


# Batches


SHAPES = {
    "tensor": lambda n: torch.full((40, 300), n),
    "small tensor": lambda n: torch.full((4,), n / 2),
    "scalar tensor": lambda n: torch.tensor(n, dtype=torch.int16),
    "no elements": lambda n: torch.empty(0, 3),
    "int": lambda n: n,
    "float": lambda n: n / 7,
    "tuple": lambda n: (torch.full((3, 200, 100), n, dtype=torch.uint8), n, n / 2, torch.tensor([n])),
    "list": lambda n: [torch.full((70, 80), n / 3), n],
    "dict": lambda n: {"image": torch.full((100, 100), n), "label": n, "weight": n / 2},
    # These are left to torch.
    "strided": lambda n: torch.arange(n, n + 12).reshape(3, 4).T,
    "ints": lambda n: (n, n + 1),
    "bool": lambda n: (n % 2 == 0, torch.ones(2)),
    "text": lambda n: (torch.ones(3), str(n)),
    "text of a dict": lambda n: {"a": str(n), "b": "b"},
    "nested": lambda n: (torch.full((3,), n), {"a": (n, torch.ones(2))}),
    "array": lambda n: (np.full((3,), n), n),
    "keys of many kinds": lambda n: {1: torch.ones(1), "a": n},
    "twice": lambda n: (torch.full((5,), n),) * 2,
    "numpy's number": lambda n: (np.float32(n), n),
    "big int": lambda n: n + (1 << 62),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_batches_equal_those_of_the_dataset(shape):
    data = Kept([SHAPES[shape](n) for n in range(50)])
    # One worker makes batch 6 after batch 4, so it finds the samples that both contain.
    cached, order = cache(data), [*reversed(range(50)), 13, 13, 14]
    for wrap in (lambda data: data, lambda data: Subset(Subset(data, range(50)), list(range(50)))):
        expected = list(torch.utils.data.DataLoader(wrap(data), sampler=order, batch_size=8))
        for workers in (2, 2, 0):
            loader = DataLoader(wrap(cached), sampler=order, batch_size=8, num_workers=workers)
            assert same(list(loader), expected)
    assert cached.usage().misses == 50 and cached.usage().hits == 6 * len(order) - 50


def test_batches_of_mixed_samples_are_left_to_torch():
    def outcome(data):
        try:
            return list(DataLoader(data, batch_size=2, num_workers=1))
        except Exception as error:
            return type(error), str(error).splitlines()[-1]

    for items in (
        [torch.ones(2), torch.ones(3)],
        [1, 2.5],
        [(1, 2.0), [1, 2.0]],
        [{"a": 1}, {"b": 1}],
        [1, None],
        [1, 1 << 70],
    ):
        data = Kept(items)
        cached = cache(data)
        for _ in range(2):
            assert same(outcome(cached), outcome(data)), items


@pytest.mark.forks
def test_a_batch_is_gathered_and_a_changed_default_collate_is_respected(tmp_path):
    """A gathered batch builds no samples: it calls neither `__getitem__` nor `batch`."""
    cached = cache(Kept([(torch.full((100, 100), n), n) for n in range(40)]))
    list(DataLoader(cached, batch_size=8))
    file = tmp_path / "calls"

    real = rustloader.CachedDataset.__getitem__, rustloader.CachedDataset.batch

    def note(self, index):
        with open(file, "a") as out:
            out.write(".")
        return real[0](self, index)

    def note_all(self, indices, iterate):
        with open(file, "a") as out:
            out.write("." * len(indices))
        return real[1](self, indices, iterate)

    def calls(**kw):
        file.write_text("")
        batches = [batch[1].tolist() for batch in DataLoader(cached, batch_size=8, num_workers=1, **kw)]
        assert [n for batch in batches for n in batch] == list(range(40))
        return len(file.read_text())

    def own_ints(_):
        def doubled(batch, *, collate_fn_map=None):
            return torch.tensor(batch)

        torch.utils.data._utils.collate.default_collate_fn_map[int] = doubled

    rustloader.CachedDataset.__getitem__, rustloader.CachedDataset.batch = note, note_all
    try:
        assert calls() == 0
        assert calls(seed_by="sample") == calls(worker_init_fn=own_ints) == 40
        cached.then = tuple
        assert calls() == 40
    finally:
        rustloader.CachedDataset.__getitem__, rustloader.CachedDataset.batch = real


def test_statistics_have_hits_and_the_size_of_a_possible_cache():
    data = Kept([np.zeros((100, 100), np.float32) for _ in range(400)])
    loader = DataLoader(data, batch_size=4, num_workers=1)
    list(loader)
    estimate = rustloader.stats(loader).cache_estimate
    assert 400 * 40_000 < estimate.bytes < 400 * 41_000 and estimate.free_bytes > estimate.bytes
    cached = cache(data, "64MiB")
    loader = DataLoader(Subset(cached, range(200)), batch_size=4, num_workers=1)
    list(loader), list(loader)
    stats = rustloader.stats(loader)
    assert stats.cache == cached.usage() and (stats.cache.hits, stats.cache.misses) == (200, 200)
    assert stats.cache_estimate is None and "200 hits (50% of the samples), 200 misses, 8.0" in str(stats)
    assert stats.as_dict(flat=True)["cache_hits"] == 200


@pytest.mark.parametrize("path", [False, True])
def test_workers_on_other_machines_have_one_cache_per_machine(path, tmp_path):
    from remote_support import LoopbackContext

    data = Noted(100, tmp_path / "made")
    cached = cache(data, "16MiB", then=tuple, path=tmp_path / "file" if path else None)
    options = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": LoopbackContext(tmp_path)}
    loader = DataLoader(cached, batch_size=5, shuffle=True, **options)
    for _ in range(3):
        batches = list(loader)
        assert sorted(torch.cat([batch[1] for batch in batches]).tolist()) == list(range(100))
        assert all((rows[:, 0] == indices).all() for rows, indices in batches)
    # One is made a second time, to check that the dataset is not random.
    assert data.count() == 101
    # Without a file, the workers share it with each other, but not with this process.
    assert path or cached.usage().misses == 0
