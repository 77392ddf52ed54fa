"""`share(dataset)`: a copy of the dataset whose large attributes are shared."""

import dataclasses
import logging
import sys

import numpy as np
import pytest
import torch
from isolation import in_child
from support import rustloader
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.sharing.arrays import SharedTensor
    from rustloader.sharing.sequences import SharedDict, SharedList, SharedTuple

    share = rustloader.share

LARGE = [f"images/{number:06d}.jpg" for number in range(20_000)]


class Images(Dataset):
    def __init__(self, paths=LARGE, **more):
        self.paths = paths
        self.__dict__.update(more)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.paths[index]


def lines(caplog, level=logging.INFO):
    return [record.getMessage() for record in caplog.records if record.levelno == level and record.name == "rustloader"]


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.INFO, "rustloader")


def test_large_attributes_are_shared_on_a_copy(caplog):
    given = dict(
        labels={path: number for number, path in enumerate(LARGE)},
        pairs=tuple((path, 1) for path in LARGE),
        array=np.arange(200_000),
        tensor=torch.arange(200_000),
        small=["a", "b"],
        name="x" * (2 << 20),
    )
    dataset = Images(**given)
    before = dict(vars(dataset))
    shared = share(dataset)
    assert type(shared) is Images and shared is not dataset
    assert {name: type(value) for name, value in vars(shared).items()} == {
        "paths": SharedList,
        "labels": SharedDict,
        "pairs": SharedTuple,
        "array": np.ndarray,
        "tensor": SharedTensor,
        "small": list,
        "name": str,
    }
    assert vars(dataset).keys() == before.keys() and all(vars(dataset)[name] is before[name] for name in before)
    assert shared.paths == LARGE and shared.labels == given["labels"] and shared.pairs == given["pairs"]
    assert np.array_equal(shared.array, given["array"]) and not shared.array.flags.writeable
    assert torch.equal(shared.tensor, given["tensor"]) and shared.small is given["small"]
    assert not lines(caplog, logging.WARNING)
    messages = lines(caplog)
    assert len(messages) == 5 and all(" in shared memory" in line for line in messages)
    assert messages[0].startswith("share(dataset): Images."), messages
    # A second call has nothing left to share.
    caplog.clear()
    assert share(shared) is shared
    assert lines(caplog) == ["share(dataset): everything large in Images is already shared"]
    assert not lines(caplog, logging.WARNING)


@pytest.mark.warns
def test_the_threshold_counts_the_memory_of_objects():
    size = sys.getsizeof(LARGE) + sum(map(sys.getsizeof, LARGE))
    assert type(share(Images(), threshold=int(size * 0.9)).paths) is SharedList
    assert type(share(Images(), threshold=int(size * 1.1)).paths) is list
    rows = [[number, str(number)] for number in range(10_000)]
    assert type(share(Images(rows)).paths) is SharedList
    assert type(share(Images(rows[:1000])).paths) is list


def test_datasets_in_datasets():
    table = TensorDataset(torch.arange(400_000.0).reshape(-1, 4), torch.arange(100_000))
    inner, small = Images(), Images(["a"])
    both = ConcatDataset([inner, small, Subset(inner, list(range(19_999, -1, -1)))])
    shared = share(both, threshold=100_000)
    assert [type(part) for part in shared.datasets] == [Images, Images, Subset]
    first, second, third = shared.datasets
    assert type(first.paths) is SharedList and third.dataset is first and type(third.indices) is SharedList
    assert second is small and type(both.datasets[0].paths) is list and both.datasets[2].dataset is inner
    assert list(shared) == list(both)
    tables = share(StackDataset(a=table, b=table), threshold=100_000)
    assert type(tables.datasets) is dict and tables.datasets["a"] is tables.datasets["b"]
    assert [type(tensor) for tensor in tables.datasets["a"].tensors] == [SharedTensor, SharedTensor]
    assert torch.equal(tables[7]["a"][0], table[7][0])


def test_cycles_and_bound_methods():
    class Circular(Images):
        def __init__(self):
            super().__init__()
            self.child, self.read, self.parts = Images(["a"], parent=self), self.get, [self]

        def get(self):
            return self

    dataset = Circular()
    shared = share(dataset)
    assert shared.child.parent is shared and shared.read() is shared and shared.parts[0] is shared
    assert type(shared.paths) is SharedList
    assert dataset.child.parent is dataset and dataset.read() is dataset and type(dataset.paths) is list
    endless = []
    endless.append(endless)
    assert share(Images(endless=endless)).endless is endless


def test_the_same_list_twice_is_shared_once():
    shared = share(Images(images=LARGE, again=[LARGE, LARGE], splits={"train": LARGE, "val": ["b"]}))
    assert shared.paths is shared.images is shared.again[0] is shared.again[1] is shared.splits["train"]
    assert type(shared.splits) is dict and shared.splits["val"] == ["b"]


@dataclasses.dataclass(frozen=True)
class Frozen(Dataset):
    paths: list


class Guarded(Images):
    def __setattr__(self, name, value):
        if name in self.__dict__:
            raise AttributeError("set once")
        super().__setattr__(name, value)


class Slots(Images):
    __slots__ = ("slot",)

    def __init__(self, paths):
        super().__init__(paths)
        self.slot = 5


class Copied(Images):
    copies = 0

    def __copy__(self):
        copied = Copied(self.paths)
        copied.copies = self.copies + 1
        return copied


class Delegating(Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __getattr__(self, name):
        return getattr(self.dataset, name)


class Handle(Images):
    def __init__(self, paths):
        super().__init__(paths)
        self.handle = object()

    def __getstate__(self):
        return {**self.__dict__, "handle": None}


class Listed(list, Dataset):
    __getitem__ = list.__getitem__

    def __init__(self, paths):
        super().__init__([1, 2])
        self.paths = paths


class Duck:
    """Has no base class."""

    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.paths[index]


# Makes a dataset, and says whether a copy of it is whole.
HOLDERS = {
    "frozen": (Frozen, lambda shared, dataset: True),
    "property": (Guarded, lambda shared, dataset: True),
    "slots": (Slots, lambda shared, dataset: shared.slot == dataset.slot == 5),
    "copied": (Copied, lambda shared, dataset: shared.copies == 1),
    "getattr": (lambda paths: Delegating(Images(paths)), lambda shared, dataset: True),
    "state": (Handle, lambda shared, dataset: shared.handle is dataset.handle),
    "no base class": (Duck, lambda shared, dataset: shared[5] == LARGE[5]),
    "list": (Listed, lambda shared, dataset: list(shared) == [1, 2]),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_every_way_to_hold_attributes(name):
    make, is_whole = HOLDERS[name]
    dataset = make(LARGE)
    shared = share(dataset)
    assert shared is not dataset and type(shared) is type(dataset) and is_whole(shared, dataset)
    assert shared.paths == LARGE and type(shared.paths) is SharedList and type(dataset.paths) is list


class Closing(Images):
    def __del__(self):
        pass


@pytest.mark.warns
def test_a_copy_whose_original_closes_things_is_refused():
    with pytest.raises(TypeError, match=r"a Closing has a __del__, .*share its large attributes in its __init__"):
        share(Closing())
    small = Closing(["a"])
    assert share(small) is small


@pytest.mark.warns
def test_nothing_to_share_is_reported(caplog):
    small = Images(["a", "bc"], transform=len)
    assert share(small) is small
    (line,) = lines(caplog, logging.WARNING)
    assert "nothing in Images is shared: its attributes, and those of the datasets in it, include no list" in line
    assert "of at least 1048576 bytes (threshold)" in line and "the largest is Images.paths, with about" in line
    caplog.clear()
    assert share(small, threshold=10**9) is small and "1000000000 bytes (threshold)" in caplog.text


class Item:
    def __init__(self, table, number):
        self.table, self.number = table, number


@pytest.mark.warns
def test_what_cannot_be_shared_is_kept_and_named(caplog, tmp_path):
    common = {number: "x" * 100 for number in range(1000)}
    np.save(tmp_path / "array.npy", np.zeros(300_000))
    mapped = np.load(tmp_path / "array.npy", mmap_mode="r")
    given = dict(
        functions=[(lambda: 0) for _ in range(20_000)],
        common=[Item(common, number) for number in range(1000)],
        objects=np.array(LARGE * 10, dtype=object),
        grad=torch.zeros(500_000, requires_grad=True),
        mapped=mapped,
        view=np.asarray(mapped),
        moved=torch.zeros(500_000).share_memory_(),
        ordered=type("Own", (list,), {})(LARGE),
    )
    dataset = Images(**given)
    shared = share(dataset)
    assert type(shared.paths) is SharedList
    assert all(getattr(shared, name) is value for name, value in given.items())
    messages = lines(caplog, logging.WARNING)
    for name, reason in (
        ("functions", "local object"),
        ("common", "its items refer to common objects, and each item would get a copy of them"),
        ("objects", "dtype object holds Python objects"),
        ("grad", "requires grad cannot be shared"),
    ):
        assert any(
            f"Images.{name}, a " in line and "is not shared: " in line and reason in line for line in messages
        ), messages
    assert len(messages) == 4
    assert any("Images.ordered, a Own of about" in line and "its class would be lost" in line for line in lines(caplog))


def test_items_of_classes_are_shared_if_they_have_nothing_in_common():
    items = [Item((number, str(number)), number) for number in range(10_000)]
    shared = share(Images(items))
    assert type(shared.paths) is SharedList and shared[77].table == (77, "77") and len(shared) == 10_000


def test_large_arrays_of_a_list_are_shared_one_by_one():
    arrays = [np.full(200_000, number) for number in range(5)] + [np.zeros(3)]
    shared = share(Images(arrays))
    assert type(shared.paths) is list and shared.paths[5] is arrays[5]
    assert all(not array.flags.writeable and array[0] == number for number, array in enumerate(shared.paths[:5]))


def test_too_little_memory_names_the_attribute():
    def body():
        import resource

        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        dataset = Images(array=np.broadcast_to(np.zeros(1), (1 << 25,)))
        resource.setrlimit(resource.RLIMIT_AS, (size + (128 << 20),) * 2)
        try:
            share(dataset)
        except MemoryError as error:
            return [str(error), *error.__notes__]

    text, note = in_child(lambda: {"value": body()})["value"]
    assert "ulimit -v" in text and str(1 << 28)[:4] in text, text
    assert note == "rustloader.share() failed at Images.array"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shared_table_is_gathered_as_a_plain_one(workers):
    table = TensorDataset(torch.arange(400_000.0).reshape(-1, 4), torch.arange(100_000))
    plain = Subset(table, list(range(99_999, 0, -11)))
    shared = share(plain, threshold=50_000)
    assert type(shared.indices) is SharedList and type(shared.dataset.tensors[0]) is SharedTensor
    batches = zip(*(rustloader.DataLoader(each, 1000, num_workers=workers) for each in (plain, shared)), strict=True)
    for one, other in batches:
        assert type(other) is list and all(type(part) is torch.Tensor for part in other)
        assert all(map(torch.equal, one, other))
