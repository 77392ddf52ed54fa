"""`rustloader.share`: values, types and errors are those of the original."""

import collections
import collections.abc
import copy
import dataclasses
import gc
import io
import math
import mmap
import operator
import os
import pickle
import re
import resource
from decimal import Decimal
from fractions import Fraction
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from pathlib import PurePosixPath
from unittest import mock

import cgroups
import numpy as np
import pytest
import torch
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from isolation import in_child
from support import open_files, rustloader

from rustloader._core import SharedStore, memory_limits

pytestmark = pytest.mark.ours

if rustloader is not None:
    share = rustloader.share


@dataclasses.dataclass
class Box:
    content: object


class Named(str):
    pass


class Loud(str):
    def __hash__(self):
        return 7

    def __eq__(self, other):
        return isinstance(other, str) and str(self).lower() == str(other).lower()


def identical(a, b):
    """True if two values are equal and have the same types. Signs of zeros count, and NaNs are equal."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, dict):
        return identical(list(a.items()), list(b.items()))
    return a == b


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers(allow_nan=False) | st.binary()
    | st.text() | st.text(st.characters(categories=("Cs", "L")))
)  # fmt: skip
KEYS = st.integers() | st.text(max_size=5) | st.none() | st.booleans() | st.tuples(st.integers(), st.text(max_size=3))
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.builds(Box, SCALARS.filter(lambda value: value == value))
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@for_all(st.lists(VALUES, max_size=12))
def test_lists_and_tuples_of_any_values_are_returned_unchanged(given):
    for original, copied in ((given, "to_list"), (tuple(given), "to_tuple")):
        shared = share(original)
        assert len(shared) == len(original)
        for index in range(-len(original), len(original)):
            assert identical(shared[index], original[index])
        assert identical(list(shared), list(original))
        assert identical(list(reversed(shared)), list(reversed(original)))
        assert identical(getattr(shared, copied)(), original)
        for part in (slice(None), slice(1, None, 2), slice(None, None, -1), slice(-3, 100), slice(5, 2)):
            assert identical(shared[part], original[part])


@settings(max_examples=150, deadline=None)
@for_all(st.dictionaries(KEYS | st.floats() | st.binary(), VALUES, max_size=12))
def test_dicts_of_any_values_are_returned_unchanged(given):
    shared = share(given)
    assert identical(shared.to_dict(), given) and identical(list(shared), list(given))
    assert identical(list(shared.values()), list(given.values()))
    assert identical(list(reversed(shared.items())), list(reversed(given.items())))
    for key, value in given.items():
        if key == key:
            assert key in shared and identical(shared[key], value) and identical(shared.get(key), value)


# Dicts with the same keys, which the image stores once

TABLES = st.lists(st.text(max_size=5), min_size=1, max_size=4, unique=True).flatmap(
    lambda keys: st.lists(st.tuples(*(VALUES for _ in keys)).map(lambda row: dict(zip(keys, row, strict=True))))
)


@settings(max_examples=100, deadline=None)
@for_all(TABLES, TABLES)
def test_rows_of_tables_are_returned_unchanged(one, two):
    rows = [*one, *two, *[dict(reversed(row.items())) for row in one]]
    assert identical(list(share(rows)), rows)
    pairs = dict(enumerate(rows))
    assert identical(share(pairs).to_dict(), pairs)


def test_dicts_of_every_shape_are_returned_unchanged():
    one, text = [1], "x" * 100
    tied = {"a": one, "b": (one, text), "c": {"a": one, "d": text}}
    rows = [
        {"a": 1, "b": 2.5},
        {"b": 2.5, "a": 1},
        {},
        {"a": None, 1: "number", ("t",): True},
        {"\ud800": 1},
        {Named("a"): 1},
        collections.OrderedDict(a=1),
        {"a": np.arange(20_000), "b": torch.ones(5)},
        {"a": object},
        tied,
        *({f"key {number}": number} for number in range(300)),
        {str(number): number for number in range(1000)},
        {"a": 1, "b": 2.5},
    ]
    shared = share(rows)
    for row, item in zip(rows, shared, strict=True):
        assert type(item) is type(row) and list(item) == list(row)
        assert list(map(type, item)) == list(map(type, row)) and str(item) == str(row)
    assert np.array_equal(shared[7]["a"], rows[7]["a"]) and shared[7]["a"].flags.writeable
    back = shared[9]
    assert back["a"] is back["b"][0] is back["c"]["a"]
    assert shared[0] is not shared[0] and shared[0] == shared[-1]
    circle = {"a": 1}
    circle["b"] = circle
    (item,) = share([circle])
    assert item["b"] is item and item["a"] == 1


def test_keys_of_equal_dicts_take_no_memory():
    keys = [f"a key of some length {number}" for number in range(8)]
    rows = [dict.fromkeys(keys, number) for number in range(5000)]
    shared, values = share(rows), share([tuple(row.values()) for row in rows])
    assert shared == rows and shared.nbytes - values.nbytes < 10 * len(rows)
    back = pickle.loads(pickle.dumps(shared))
    assert back == rows and back.nbytes == shared.nbytes


def test_a_damaged_shape_is_an_error():
    kind, (_, image) = share([{"key": 1}, {"key": 2}]).__reduce_ex__(4)
    places = [at for at in range(len(image)) if image[at] == 0xF2]
    assert len(places) == 2
    for change in ({1: 1}, {4: 0xFF}, {6: 2}, {0: 0xF1}, {5: 10}):
        damaged = bytearray(image)
        for offset, byte in change.items():
            damaged[places[0] + offset] = byte
        shared = kind(type(share([])), bytes(damaged))
        with pytest.raises((ValueError, RuntimeError), match=r"damaged|corrupt"):
            shared[0]
        assert shared[1] == {"key": 2}
    # Damaged keys.
    damaged = image.replace(b"key", b"\xff\xff\xff")
    shared = kind(type(share([])), damaged)
    with pytest.raises((ValueError, RuntimeError)):
        shared[0]


def test_equality_membership_and_positions_are_those_of_a_list():
    items = ["a", 1, 1.0, True, None, b"a", "b", Named("c"), (1, "x"), [2], 0.5, "a", *range(3000)]
    shared, pair = share(items), share(tuple(items))
    assert shared == items and items == shared and shared == share(items) and not shared != items
    assert pair == tuple(items) and tuple(items) == pair
    assert shared != tuple(items) and shared != items[:-1] and shared != [*items[:-1], "z"] and pair != items
    for value in ("a", "c", 1, 1.0, True, None, b"a", (1, "x"), [2], 2999, "zz", 3000, Loud("A"), Box(1)):
        assert (value in shared) == (value in items), value
        assert shared.count(value) == items.count(value), value
        if value in items:
            assert shared.index(value) == items.index(value)
    for args in (("a", 1), (5, -2999), (2999, 0, 10**30), (2999, -(10**30), 10**30)):
        assert shared.index(*args) == items.index(*args)
    for args in (("zz",), ("b", 7), ("b", 0, 6), (2999, 10**30)):
        for sequence, plain in ((shared, items), (pair, tuple(items))):
            with pytest.raises(ValueError) as expected:
                plain.index(*args)
            with pytest.raises(ValueError) as raised:
                sequence.index(*args)
            if "not in list" in str(raised.value):
                assert str(raised.value) == f"{args[0]!r} is not in list"
            else:
                assert str(raised.value) == str(expected.value)
    one, two = [1], (2,)
    assert shared + one == [*items, 1] and one + shared == [1, *items] and share(one) * 2 == 2 * share(one) == [1, 1]
    assert two + share(two) == share(two) + two == share(two) + share(two) == 2 * share(two) == (2, 2) and hash(
        share((1, "a"))
    ) == hash((1, "a"))
    assert isinstance(shared, collections.abc.Sequence) and not isinstance(shared, list)


@pytest.mark.parametrize("key", [3, -4, "a", 1.0, None, 10**30, -(10**30), (0,), np.int64(9)])
@pytest.mark.parametrize("kind", [list, tuple])
def test_index_errors_have_pythons_texts(kind, key):
    original = kind(["a", "b", "c"])
    with pytest.raises((IndexError, TypeError)) as expected:
        original[key]
    with pytest.raises(type(expected.value)) as raised:
        share(original)[key]
    assert str(raised.value) == str(expected.value)


def test_indices_are_those_that_a_list_accepts():
    shared = share([10, 11, 12])
    assert shared[np.int64(1)] == shared[torch.tensor(-2)] == shared[True] == 11
    assert operator.length_hint(iter(shared)) == 3 and list(zip(shared, reversed(shared), strict=True))[2] == (12, 10)


KEYS_OF_ALL_KINDS = [
    "a",
    "",
    "é\U0001f600",
    "\ud800",
    b"a",
    1,
    2.5,
    -1,
    10**40,
    None,
    (1, "a"),
    ((1.0,), b"x"),
    Fraction(1, 3),
    Decimal("0.1"),
    PurePosixPath("a/b"),
    frozenset({1}),
    1j,
    float("inf"),
    Named("named"),
    Loud("Loud"),
    ((frozenset(),), 1),
]


def test_keys_are_found_as_in_a_dict():
    given = {key: position for position, key in enumerate(KEYS_OF_ALL_KINDS)}
    shared = share(given)
    equals = [
        np.str_("a"),
        True,
        1.0,
        np.int64(-1),
        np.float32(2.5),
        (True, "a"),
        ((1,), b"x"),
        complex(2.5),
        Named("a"),
    ]
    for key in (*KEYS_OF_ALL_KINDS, *equals):
        assert key in given and key in shared and shared[key] == given[key], key
    for key in ("b", b"b", 2, 0.1, (1, "b"), PurePosixPath("b"), frozenset(), (1,), ("a", 1), "1", Decimal("0.2")):
        assert key not in given and key not in shared and shared.get(key, 5) == 5 and shared.get(key) is None, key
        with pytest.raises(KeyError) as raised:
            shared[key]
        assert raised.value.args == (key,)
    for call in (shared.get, shared.__getitem__, shared.__contains__):
        with pytest.raises(TypeError, match="unhashable"):
            call([])
    assert shared == given and given == shared and shared != {**given, "x": 1} and shared != {**given, "a": "x"}
    assert isinstance(shared, collections.abc.Mapping) and shared | {"a": 1} == given | {"a": 1}
    assert shared.keys() == given.keys() and list(shared.keys() & {"a"}) == ["a"]
    assert {**shared} == given and dict(shared) == given and ("a", 0) in shared.items() and 0 in shared.values()


class Salted(int):
    """Its hash differs from process to process, as that of a str does."""

    salt = 1

    def __hash__(self):
        return hash((self.salt, int(self)))


def test_a_number_whose_hash_differs_in_another_process_is_found(monkeypatch):
    shared = share({Salted(5): "a", 6: "b"})
    monkeypatch.setattr(Salted, "salt", 2)
    assert shared[Salted(5)] == "a" and Salted(7) not in shared and shared[6] == shared[6.0] == "b"


def test_nan_and_values_that_compare_elementwise_are_as_in_a_dict():
    given = {float("nan"): 1, "a": 2}
    shared = share(given)
    assert 2 in shared.values() and 1 in shared.values() and 3 not in shared.values()
    for merged in shared | {"b": 3}, {"b": 3} | shared, shared | share({"b": 3}):
        assert len(merged) == 3 and list(merged.values()) == ([3, 1, 2] if next(iter(merged)) == "b" else [1, 2, 3])
    arrays = {"a": np.zeros(2)}
    assert share(arrays) != {"b": np.zeros(2)}
    assert share({"a": mock.ANY}) != {"b": 1} and share({"a": 1}) == {"a": mock.ANY}
    with pytest.raises(ValueError, match="ambiguous"):
        _ = share(arrays) == {"a": np.zeros(2)}


CHANGES = {
    **{
        name: lambda it, name=name: getattr(it, name)(0)
        for name in "append extend insert pop remove sort clear".split()
    },
    "__setitem__": lambda it: operator.setitem(it, 0, 2),
    "__delitem__": lambda it: operator.delitem(it, 0),
    "__iadd__": lambda it: operator.iadd(it, [1]),
}
CHANGES_OF_DICTS = {
    "update": lambda it: it.update(b=1),
    "pop": lambda it: it.pop("a"),
    "setdefault": lambda it: it.setdefault("a"),
    "clear": lambda it: it.clear(),
}


@pytest.mark.parametrize(
    ("original", "kind", "copies", "changes"),
    [([1], "List", "list", CHANGES), ({"a": 1}, "Dict", "dict", CHANGES_OF_DICTS)],
    ids=["list", "dict"],
)
def test_changes_are_refused_and_name_the_way_out(original, kind, copies, changes):
    shared = share(original)
    for name, change in changes.items():
        text = rf"a Shared{kind} is read-only \({name}\): change a copy made by to_{copies}\(\)"
        with pytest.raises(TypeError, match=text):
            change(shared)
    assert shared == original


def test_items_are_new_at_each_access():
    shared = share([[1], {"a": [2]}])
    shared[0].append(5)
    shared[1]["a"].clear()
    assert shared == [[1], {"a": [2]}]
    inner = [0]
    twice = share([[inner, inner]])[0]
    assert twice[0] is twice[1]
    loop = []
    loop.append(loop)
    back = share([loop])[0]
    assert back[0] is back


def test_a_generator_is_read_once():
    shared = share(str(number) for number in range(5000))
    assert shared == [str(number) for number in range(5000)]
    assert share(range(3)) == [0, 1, 2] and share({}.items()) == [] and share(set()) == []


def test_arrays_and_tensors_as_items():
    base = torch.arange(1_000_000)
    items = [base[:3], np.arange(6).reshape(2, 3).T, torch.zeros(0), Box(base[5:7]), torch.nn.Parameter(torch.ones(2))]
    shared = share(items)
    assert shared.nbytes < 100_000
    for index in (0, 1, 2, 4):
        assert type(shared[index]) is type(items[index]) and shared[index].tolist() == items[index].tolist()
        assert shared[index].dtype == items[index].dtype
    assert shared[3].content.tolist() == [5, 6]


def test_what_cannot_be_shared_says_why():
    with pytest.raises(TypeError, match="an array, a tensor, an iterable of items or a dataset, not a int"):
        share(5)
    with pytest.raises(TypeError, match="not a str"):
        share("abc")
    with pytest.raises(TypeError, match=r"lose its class: use share\(tuple\(x\)\)"):
        share(collections.namedtuple("Pair", "a b")(1, 2))
    with pytest.raises(TypeError, match=r"dtype object holds Python objects: share\(array.tolist\(\)\)"):
        share(np.array([object()]))
    with pytest.raises(TypeError, match=r"share\(tensor.detach\(\)\)"):
        share(torch.zeros(2, requires_grad=True))
    with pytest.raises(TypeError, match="only dense tensors"):
        share(torch.zeros(2).to_sparse())
    with pytest.raises(TypeError, match=r"a DataFrame is not shared as a whole: use share\(x\[column\].to_numpy\(\)\)"):
        share(type("DataFrame", (list,), {"__dataframe__": None})())
    with pytest.raises((pickle.PicklingError, AttributeError)) as raised:
        share(["a", lambda: 0])
    assert "item 1 (counted from 0)" in raised.value.__notes__[0]

    def broken():
        yield "a"
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        share(broken())


def test_representations_are_short():
    assert repr(share(list(range(10000)))).startswith("<SharedList of 10000 items, ")
    assert repr(share(list(range(10000)))).endswith(" bytes: [0, 1, 2, ...]>")
    assert repr(share({"a": 1})).endswith("bytes: {'a': 1}>") and repr(share((1,))).startswith(
        "<SharedTuple of 1 items"
    )


# Arrays and tensors


ARRAYS = [
    np.arange(12.0).reshape(3, 4),
    np.arange(12).reshape(3, 4).T,
    np.arange(24)[::3],
    np.zeros((0, 3)),
    np.array(5),
    np.array("a"),
    np.array(["2020-01-01"], "M8[D]"),
    np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]),
    np.arange(3, dtype=">i4"),
    np.broadcast_to(np.arange(1 << 20), (20, 1 << 20))[:, ::2],
    np.zeros((2, 3 << 20), np.float64)[:, 1:],
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.shape}")
def test_arrays(array):
    shared = share(array)
    assert type(shared) is np.ndarray and shared.dtype == array.dtype and shared.shape == array.shape
    assert shared.tobytes() == array.tobytes() and not shared.flags.writeable
    assert share(shared) is shared and not np.shares_memory(shared, array)
    if array.flags.f_contiguous:
        assert shared.flags.f_contiguous
    with pytest.raises(ValueError):
        shared.flags.writeable = True
    for back in (pickle.loads(pickle.dumps(shared, protocol=4)), copy.deepcopy(shared)):
        assert back.flags.writeable and (back == array).all()


TENSORS = [
    torch.arange(12).reshape(3, 4),
    torch.arange(12.0).reshape(3, 4).T,
    torch.zeros(0, 3),
    torch.tensor(5),
    torch.ones(3, dtype=torch.bfloat16),
    torch.tensor([True]),
    torch.ones(2, dtype=torch.complex64).conj(),
    torch.ones(2, dtype=torch.complex128),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}")
def test_tensors(tensor):
    shared = share(tensor)
    assert isinstance(shared, torch.Tensor) and shared.dtype == tensor.dtype and shared.shape == tensor.shape
    assert torch.equal(shared, tensor) and share(shared) is shared
    assert type(shared + shared) is type(shared.clone()) is type(shared[...]) is torch.Tensor
    file = io.BytesIO()
    torch.save(shared, file)
    file.seek(0)
    for back in (torch.load(file), pickle.loads(pickle.dumps(shared)), copy.deepcopy(shared)):
        assert type(back) is torch.Tensor and torch.equal(back, tensor)


def test_attributes_of_tensors_and_flags_of_arrays_are_kept():
    tensor, array = torch.arange(12.0), np.arange(12)
    tensor.path, array.flags.writeable = "a.jpg", False
    shared = share([tensor, {"a": [tensor]}, array, np.arange(3)])
    assert shared[0].path == shared[1]["a"][0].path == "a.jpg"
    assert [shared[n].flags.writeable for n in (2, 3)] == [False, True]
    whole = share(tensor)
    copies = whole, copy.deepcopy(whole), pickle.loads(pickle.dumps(whole)), pickle.loads(ForkingPickler.dumps(whole))
    resource_sharer.stop()
    assert [copied.path for copied in copies] == ["a.jpg"] * 4


@pytest.mark.parametrize("shape", [(3,), (0, 2)])
def test_a_tensor_is_shared_whatever_the_default_device(shape):
    with torch.device("meta"):
        shared = share(torch.zeros(shape, device="cpu"))
    assert shared.device.type == "cpu" and torch.equal(shared, torch.zeros(shape))


def test_a_write_to_a_shared_tensor_is_private():
    shared = share(torch.zeros(10_000))
    other = SharedStore(os.dup(shared.store.fileno()))
    array = torch.from_numpy(np.frombuffer(other.data(), np.float32).copy())
    shared[:] = 1
    assert shared.sum() == 10_000 and array.sum() == 0
    assert np.frombuffer(other.data(), np.float32).sum() == 0


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_write_that_bypasses_a_shared_arrays_flag_does_not_crash():
    shared = share(np.zeros(5000))
    torch.from_numpy(shared)[0] = 1
    assert share(shared) is shared


# Copies, pickles and foreign descriptors


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("original", [[1, "a", Box(2)], (1,), {"a": [1]}, [], {}], ids=str)
def test_pickles_carry_the_content(original, protocol):
    shared = share(original)
    back = pickle.loads(pickle.dumps(shared, protocol))
    assert type(back) is type(shared) and back == original and back.store.fileno() != shared.store.fileno()
    assert copy.copy(shared) is shared and copy.deepcopy([shared])[0] is shared


def test_a_damaged_pickle_is_an_error():
    kind, (_, image) = share(["abc", 1]).__reduce_ex__(4)
    before = open_files()
    for damaged in (image[:-1], image[:100], b"x" * 5000, b"", b"\0" + image[1:]):
        with pytest.raises(ValueError, match="cannot read this as a shared object"):
            kind(type(share([])), damaged)
    with pytest.raises(ValueError, match="kind 1, but 3 is expected"):
        kind(type(share({})), image)
    gc.collect()
    assert open_files().keys() == before.keys()


def test_its_memory_cannot_be_written():
    store = share(["a"]).store
    for write in (lambda: os.pwrite(store.fileno(), b"x", 0), lambda: os.ftruncate(store.fileno(), 0)):
        with pytest.raises(PermissionError):
            write()
    with pytest.raises((PermissionError, ValueError)):
        mmap.mmap(store.fileno(), 0)
    with pytest.raises(TypeError):
        memoryview(store)[0] = 1


def test_a_descriptor_that_was_closed_is_named():
    shared = share(["a"])
    fd = shared.store.fileno()
    keep = os.dup(fd)
    os.close(fd)
    with pytest.raises(OSError, match="closed by other code"):
        shared.store.fileno()
    assert shared == ["a"]
    os.dup2(keep, fd)
    os.close(keep)


def test_dropped_objects_leave_nothing():
    def shared_memory():
        with open("/proc/self/maps") as file:
            return sum("memfd:rustloader-shared" in line for line in file)

    gc.collect()
    before, mapped = open_files().keys(), shared_memory()
    for _ in range(200):
        things = [share(["a"]), share((1,)), share({"a": 1}), share(np.zeros(5)), share(torch.zeros(5))]
        iterator = iter(things[0])
    assert shared_memory() == mapped + 7 and next(iterator) == "a"
    things.clear()
    del iterator
    gc.collect()
    assert (open_files().keys(), shared_memory()) == (before, mapped)
    with pytest.raises(ZeroDivisionError):
        share(1 // (3 - number) for number in range(5))
    gc.collect()
    assert (open_files().keys(), shared_memory()) == (before, mapped)


class Pairs(collections.abc.Mapping):
    """Equal to a dict that is never built."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(range(self.length))

    def __getitem__(self, key):
        return -key

    def items(self):
        return ((key, -key) for key in range(self.length))


@pytest.mark.parametrize(
    ("make", "count", "megabytes"),
    [
        (lambda count: (bytes([number % 256]) * 10_000 for number in range(count)), 20_000, 6),
        (lambda count: (torch.full((5000,), number) for number in range(count)), 5_000, 6),
        # 16 bytes for each key until the table is built, and 16 for the table.
        (Pairs, 1 << 20, 38),
    ],
    ids=["bytes", "tensors", "dict"],
)
def test_building_holds_no_second_copy(make, count, megabytes):
    """The data are in a file in memory, which counts as resident only where it is mapped and read."""

    def peak():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

    def body():
        # The first calls load code and fill the allocators' pools.
        share(make(count // 50))
        before = peak()
        size = share(make(count)).nbytes
        return {"size": size, "growth": peak() - before}

    report = in_child(body)
    assert report["size"] > 30 << 20 and report["growth"] < megabytes << 20, report


# Limits


def error_of(make, *args):
    try:
        make(*args)
    except (MemoryError, OSError) as error:
        return [type(error).__name__, str(error)]
    return None


def test_a_memory_cgroup_that_is_too_small_is_an_error_with_sizes():
    def body():
        big = np.broadcast_to(np.zeros(1), (1 << 27,))
        errors = [error_of(share, big), error_of(share, (b"x" * (1 << 20) for _ in range(1000)))]
        errors.append(error_of(share, (str(number) * 100 for number in range(2_000_000))))
        return [*errors, share(["a"]) == ["a"]]

    with cgroups.cgroup_of_400_mb() as (join, limit, kills):
        *errors, works = cgroups.in_cgroup(join, body)
        assert works and kills() == 0
    for kind, text in errors:
        assert kind == "MemoryError" and limit in text and "bytes are left; share less" in text, text
    assert f"{1 << 30} bytes are needed in addition to 0 bytes written so far" in errors[0][1]


def test_a_memory_cgroup_that_is_nearly_full_has_room_for_a_small_object():
    def body():
        def left():
            return min(left for _, _, left in memory_limits())

        big, fd = np.broadcast_to(np.zeros(1), (1 << 20,)), os.memfd_create("rustloader-test")
        while left() > 6 << 20:
            os.write(fd, bytes(1 << 20))
        works = share(["a"]) == ["a"] and share({"a": 1}) == {"a": 1}
        error = error_of(share, big)
        os.close(fd)
        return works, error

    with cgroups.cgroup_of_400_mb() as (join, limit, kills):
        works, (kind, text) = cgroups.in_cgroup(join, body)
        assert works and kills() == 0
    needed = f"{8 << 20} bytes are needed in addition to 0 bytes written so far"
    assert kind == "MemoryError" and limit in text and needed in text, text


def test_an_address_space_that_is_too_small_is_a_memory_error():
    def body():
        big, half = np.broadcast_to(np.zeros(1), (1 << 30,)), np.broadcast_to(np.zeros(1), (5 << 20,))
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20),) * 2)
        errors = [error_of(share, (b"x" * (1 << 20) for _ in range(100))), error_of(share, big), error_of(share, half)]
        return [*errors, len(share(half[: 1 << 20]))]

    report = in_child(lambda: {"value": body()})
    *errors, works = report["value"]
    assert works == 1 << 20
    pattern = (
        r"cannot share this object: (\d+) bytes are needed in addition to (\d+) bytes written so far, "
        r"all of them are mapped( twice)? into the address space \(RLIMIT_AS, `ulimit -v`\), "
        r"and (\d+) bytes are left; .*"
    )
    sizes = []
    for kind, text in errors:
        match = re.fullmatch(pattern, text)
        assert kind == "MemoryError" and match, text
        wanted, written, left = (int(match[number]) for number in (1, 2, 4))
        times = 2 if match[3] else 1
        # The heap may have shrunk since the limit was set.
        assert times * (wanted + written) > left and left <= 72 << 20
        sizes.append((wanted, written, times))
    assert sizes[0][0] > 1 << 20 and 30 << 20 < sizes[0][1] < 64 << 20
    # These fail before anything is written. The last one would fit if it were mapped once.
    assert sizes[1:] == [(8 << 30, 0, 2), (40 << 20, 0, 2)]


def test_a_file_size_limit_causes_no_signal():
    def body():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        return error_of(share, (b"x" * (1 << 16) for _ in range(100)))

    report = in_child(lambda: {"value": body()})
    kind, text = report["value"]
    assert kind == "OSError" and "ulimit -f" in text, text
