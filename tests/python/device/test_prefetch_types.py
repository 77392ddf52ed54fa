"""The types of batches that `prefetch_to_device` moves, on a device without hardware (`standin.py`)."""

import array
import collections
import collections.abc
import copy
import dataclasses
import gc
import pickle
import types

import numpy as np
import pytest
import torch
from prefetch_support import prefetch, tensors
from sample_data import Config, Pair, Row
from support import rustloader

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.device.prefetch.moving import Move
    from rustloader.device.prefetch.streams import Streams, parts


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    rest: list


class Record(collections.UserDict):
    """Has an attribute of its own."""

    kind = None


class Made(Row):
    """Computes its items at each access."""

    def __getitem__(self, k):
        return super().__getitem__(k) + 0.5


class Attributes(dict):
    """Its items are also attributes; a missing one raises KeyError."""

    __getattr__ = dict.__getitem__


class BuildsItems(collections.abc.Mapping):
    """Builds its items at each access."""

    def __getitem__(self, key):
        return torch.arange(3)

    def __iter__(self):
        return iter("ab")

    def __len__(self):
        return 2


class Graph:
    """Moves as Lightning and PyG expect it, and records each call."""

    calls = ()

    def __init__(self, x):
        self.x = x

    def to(self, device, non_blocking=False):
        moved = Graph(move_here(self.x))
        moved.calls = (*self.calls, (device, non_blocking))
        return moved


class InPlace:
    """Moves in place: `to` returns nothing and takes no `non_blocking`."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        self.x = move_here(self.x)


move_here = None


@pytest.fixture
def moved(device):
    """Sends a batch through a prefetcher and runs its copies."""
    global move_here
    move_here = device.copy

    def moved(batch):
        (got,) = prefetch([batch])
        device.run_all()
        return got

    yield moved
    move_here = None


def is_on(device, tensor):
    return tensor.untyped_storage().data_ptr() in device.blocks


def test_containers_keep_their_types(device, moved):
    x = torch.arange(3)
    record = Record(x=x, n=1)
    record.kind = "a kind"
    # Values that contain x once, and a function that finds it.
    values = [
        ([x, "text", 3], lambda v: v[0]),
        ((x, None), lambda v: v[0]),
        (Pair(x, 2.5), lambda v: v.first),
        (Frozen(x, "name"), lambda v: v.x),
        (Slotted(x, [x, 1]), lambda v: v.rest[0]),
        (collections.OrderedDict(b=x, a=1), lambda v: v["b"]),
        (collections.defaultdict(list, x=x), lambda v: v["x"]),
        (record, lambda v: v["x"]),
        (Config({"x": x}), lambda v: v["x"]),
        (Row([x, 1]), lambda v: v[0]),
        (collections.deque([x, 1], maxlen=5), lambda v: v[0]),
        (types.MappingProxyType({"x": x}), lambda v: v["x"]),
        (Attributes(x=x, n=1), lambda v: v.x),
    ]
    batch = {f"key {k}": value for k, (value, _) in enumerate(values)}
    got = moved(batch)
    assert list(got) == list(batch)
    for (value, find), arrived in zip(values, got.values(), strict=True):
        assert type(arrived) is type(value) and arrived is not value, value
        assert is_on(device, find(arrived)) and find(arrived).tolist() == [0, 1, 2], value
        assert find(value) is x and not is_on(device, x), value  # the loader's own objects are as they were
    items, _, pair, frozen, slotted, _, default, record, _, _, deque, *_ = got.values()
    assert items[1:] == ["text", 3] and pair.second == 2.5 and frozen.name == "name" and slotted.rest[1] == 1
    assert record.kind == "a kind" and deque.maxlen == 5 and default.default_factory is list


@pytest.mark.parametrize(
    "batch",
    [
        None,
        "text",
        b"bytes",
        3,
        2.5,
        1j,
        range(1000, 1004),
        array.array("d", [1000.5, 2000.5]),
        Made([1000, 2000]),
        torch.Size([1, 2]),
        {"a": [1, "b", (None,)]},
        np.ones(3),
        {1, 2},
        Frozen,
        object(),
        Row([1, 2]),
        torch.float32,
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_what_has_no_tensors_stays_the_same_object(device, batch):
    (got,) = prefetch([batch])
    assert got is batch and device.copies == 0


def test_tensors_are_copied_once_and_not_if_they_are_on_the_device(device, moved):
    x, on_device = torch.ones(3), device.copy(torch.ones(2))
    one, (other, rest, last) = moved((x, [x, torch.ones(3), on_device]))
    assert one is other and rest is not one and last is on_device and device.copies == 3


def test_items_that_a_container_builds_live_until_they_are_copied(device):
    batch = next(iter(prefetch([BuildsItems()])))
    gc.collect()
    device.run_all()
    assert set(batch) == {"a", "b"} and not device.faults


def test_objects_move_themselves(device, moved):
    graph, inplace = Graph(torch.arange(2)), InPlace(torch.arange(3))
    got, same = moved([graph, inplace])
    assert got is not graph and got.calls == ((device.device, True),) and is_on(device, got.x)
    assert same is inplace and is_on(device, inplace.x)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support:UserWarning")
def test_torchs_own_types_move_by_their_own_way():
    """On the device `meta`: `Move` records the tensors that such a type creates and reads."""
    streams = object.__new__(Streams)
    streams.device = torch.device("meta")
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    sparse = torch.eye(3).to_sparse()
    rows = torch.eye(3).to_sparse_csr()
    columns = torch.eye(3).to_sparse_csc()
    parameter = torch.nn.Parameter(torch.ones(2))
    move = Move(streams)
    got = move([packed, sparse, rows, columns, parameter, torch.ones(5)])
    assert type(got[0]) is type(packed) and got[0].data.is_meta
    assert all(x.device.type == "meta" for x in got[1:])
    assert got[1].is_sparse and got[2].layout is torch.sparse_csr and got[3].layout is torch.sparse_csc
    storages = {part.untyped_storage()._cdata for x in got[1:] for part in parts(x)}
    assert storages <= set(move.made) and len(storages) == 2 + 3 + 3 + 1 + 1
    assert got[0].data.untyped_storage()._cdata in move.made
    # The tensors that these types copy themselves are kept until the copy is done.
    assert any(x is packed.data or x.data_ptr() == packed.data.data_ptr() for x in move.read)


class Time:
    """Its method `to` is about time zones."""

    def to(self, zone):
        raise TypeError(f"no time zone: {zone}")


def test_error_of_a_method_to_has_its_place_and_names_the_type(device):
    iterator = iter(prefetch([tensors(1)[0], {"at": Time()}, tensors(1)[0]], depth=3))
    next(iterator)
    with pytest.raises(TypeError, match="no time zone") as raised:
        next(iterator)
    assert raised.value.__notes__ == [f"prefetch_to_device() called the method to() of a {__name__}.Time"]
    next(iterator)
    assert next(iterator, None) is None


def test_a_batch_that_is_copied_within_inference_mode_is_an_ordinary_one(device):
    batches = iter(prefetch(tensors(3), depth=2))
    with torch.inference_mode():
        got = [next(batches), next(batches)]
    got += batches
    device.run_all()
    assert not any(batch.is_inference() for batch in got) and [batch[0].item() for batch in got] == [0, 1, 2]


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda batches: pickle.loads(pickle.dumps(batches))])
@pytest.mark.parametrize("where", ["cpu", None])
def test_a_copy_begins_anew(device, make, where):
    loader = rustloader.StatefulDataLoader(range(6), batch_size=2)
    batches = prefetch(loader, device=where, depth=3)
    next(iter(batches))
    copied = make(batches)
    assert type(copied) is type(batches) and copied.device == batches.device and copied._depth == 3
    assert (copied.loader is loader) == (make is copy.copy)
    got = list(copied)
    device.run_all()
    assert [batch.tolist() for batch in got] == [[0, 1], [2, 3], [4, 5]]
