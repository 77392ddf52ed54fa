"""Samples of every kind of collection and value, through both loaders (P24, P25)."""

import collections
import collections.abc
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import types
import typing
import uuid

import numpy as np
import pytest
import torch
from parity_table import Raised, drain, rows
from sample_data import Array, Given, Pair, Record, untouched
from support import BOTH, DataLoader, epoch, outcomes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Typed(typing.NamedTuple):
    x: torch.Tensor
    y: int = 0


class Frozen(collections.abc.Mapping):
    """A user's mapping, which is immutable and cannot be built from a dict."""

    def __init__(self, **items):
        self._items = items

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class FromDict(Frozen):
    """Like `Frozen`, but built from a dict, as torch requires."""

    def __init__(self, items):
        super().__init__(**items)


class Growing(FromDict, collections.abc.MutableMapping):
    def __setitem__(self, key, value):
        self._items[key] = value

    def __delitem__(self, key):
        del self._items[key]


class Row(collections.abc.Sequence):
    """A user's sequence, built from a list."""

    def __init__(self, items):
        self._items = list(items)

    def __getitem__(self, i):
        return self._items[i]

    def __len__(self):
        return len(self._items)


class Rows(Row, collections.abc.MutableSequence):
    def __setitem__(self, i, value):
        self._items[i] = value

    def __delitem__(self, i):
        del self._items[i]

    def insert(self, i, value):
        self._items.insert(i, value)


class NoList(Row):
    """A sequence that cannot be built from a list."""

    def __init__(self, a, b):
        super().__init__([a, b])


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 3


class Dict(dict):
    """A dict that carries an attribute."""

    label = None


class List(list):
    label = None


class Tuple(tuple):
    label = None


class Str(str):
    label = None


class Int(int):
    pass


@dataclasses.dataclass
class Batch:
    """The result of a user's collate function."""

    images: torch.Tensor
    names: list
    extra: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor


def labelled(value, label):
    value.label = label
    return value


def nest(value, depth):
    wrappers = [lambda v: {"k": v}, lambda v: [v, 1], lambda v: (v,), lambda v: Pair(v, "s"), lambda v: {2: [v]}]
    for level in range(depth):
        value = wrappers[level % len(wrappers)](value)
    return value


def orders(n):
    """Arrays in Fortran order, or in neither that nor C order."""
    cubes = [np.arange(n**3).reshape(n, n, n) for _ in range(4)]
    return [cubes[0].transpose(1, 0, 2), cubes[1].T, cubes[2][::2], np.asfortranarray(cubes[3])]


def t(i):
    return torch.arange(3) + i


SAMPLES = {
    "namedtuple": lambda i: Pair(t(i), {"k": i}),
    "typed namedtuple": lambda i: Typed(t(i), i),
    "namedtuple in a namedtuple": lambda i: Pair(Pair(i, i), Typed(t(i))),
    "OrderedDict": lambda i: collections.OrderedDict(b=t(i), a=i),
    "defaultdict": lambda i: collections.defaultdict(list, a=t(i), b=[1.5, i]),
    "Counter": lambda i: collections.Counter(a=i, b=2),
    "UserDict": lambda i: collections.UserDict(a=t(i)),
    "UserList": lambda i: collections.UserList([t(i), i]),
    "UserString": lambda i: collections.UserString("ab"),
    "ChainMap": lambda i: collections.ChainMap({"a": i}, {"b": t(i)}),
    "deque": lambda i: collections.deque([t(i), i]),
    "namespace": lambda i: types.SimpleNamespace(a=i),
    "mapping": lambda i: Frozen(a=t(i), b=i),
    "mapping from a dict": lambda i: FromDict({"a": t(i), "b": i}),
    "mutable mapping": lambda i: Growing({"a": t(i), "b": {"c": i}}),
    "sequence": lambda i: Row([t(i), i]),
    "mutable sequence": lambda i: Rows([t(i), {"a": i}]),
    "sequence that takes no list": lambda i: NoList(t(i), i),
    "dict subclass": lambda i: labelled(Dict(a=t(i)), i),
    "list subclass": lambda i: labelled(List([t(i)]), i),
    "tuple subclass": lambda i: labelled(Tuple([t(i), 1]), i),
    "str subclass": lambda i: labelled(Str("a"), i),
    "int subclass": lambda i: Int(i),
    "range": lambda i: range(i, i + 3),
    "None": lambda i: None,
    "None in a tuple": lambda i: (t(i), None),
    "str": lambda i: "abc"[: i + 1],
    "bytes": lambda i: b"abc"[: i + 1],
    "bytearray": lambda i: bytearray(b"abc"),
    "Decimal": lambda i: decimal.Decimal("1.10"),
    "Path": lambda i: pathlib.PurePosixPath("a") / str(i),
    "enum": lambda i: Colour.RED,
    "int enum": lambda i: Level.LOW,
    "UUID": lambda i: uuid.UUID(int=i),
    "complex": lambda i: complex(i, 1),
    "set": lambda i: {i, 2},
    "frozenset": lambda i: frozenset([i]),
    "dataclass": lambda i: Record("n", t(i)),
    "type": lambda i: int,
    "keys of many kinds": lambda i: {1: t(i), None: i, (1, "a"): "s", False: 2.5, 1.5: [i], Colour.RED: i},
    "keys in another order": lambda i: dict([("a", i), ("b", 2)][:: 1 - 2 * (i % 2)]),
    "empty": lambda i: ([], (), {}, "", b""),
    "ten deep": lambda i: nest(t(i), 10),
    "fifty deep": lambda i: nest(i, 50),
    "mixed numbers": lambda i: [1, 2.5, True, Int(3), np.int8(4)][i],
    "mixed numpy scalars": lambda i: [np.float32(1), np.float64(2), np.int16(3), np.uint8(4)][i],
    "numpy scalars": lambda i: tuple(
        d(i) for d in (np.int8, np.uint64, np.float16, np.float64, np.bool_, np.complex64)
    ),
    "numpy strings": lambda i: (np.str_("a"), np.bytes_(b"b")),
    "numpy dates": lambda i: np.datetime64("2020-01-01"),
    "numpy records": lambda i: np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "numpy object": lambda i: np.array([None, "a"], dtype=object),
    "numpy 0-d": lambda i: np.array(i, dtype=np.int16),
    "masked": lambda i: np.ma.masked_array([1.0, 2.0], mask=[0, 1]),
    "tensors of several kinds": lambda i: [t(i), t(i).double(), t(i) > 0, t(i).half(), torch.tensor(1j)],
    "tensors of two shapes": lambda i: torch.zeros(2 + i % 2),
    "tensors of two dtypes": lambda i: torch.zeros(2, dtype=[torch.float32, torch.int64][i % 2]),
    "lists of two lengths": lambda i: [1] * (1 + i % 2),
    "dicts of two kinds": lambda i: {"a": 1, "b": 2} if i % 2 else {"a": 1},
    "types of two kinds": lambda i: [1, "a"][i % 2],
    "tensor and array": lambda i: [torch.ones(2), np.ones(2)][i % 2],
    "shared leaves": lambda i: [v := t(i), v, {"k": v}],
    "arrays of a subclass": lambda i: [np.arange(6).view(Array), np.arange(100_000).view(Array)],
    "orders other than C and F": lambda i: [*orders(5), *orders(40)],
    "many leaves": lambda i: {f"k{k}": [k, str(k), (None, float(k)), b"x" * k, np.arange(k)] for k in range(1000)},
    # default_collate has quirks in a worker.
    "tensors of two precisions": lambda i: torch.ones(2, dtype=[torch.float32, torch.float64][i % 2]),
    "tensors that require a gradient": lambda i: torch.zeros(2, requires_grad=True),
    "tensor and number": lambda i: [torch.zeros(2), 3][i % 2],
    "dicts of other keys": lambda i: {"ab"[i % 2]: 1},
    "objects of no kind": lambda i: types.SimpleNamespace(),
}


FOURS = {
    "tensors": [torch.arange(12).reshape(3, 4) + i for i in range(4)],
    "0-d": [torch.tensor(1.5 * i) for i in range(4)],
    "0 bytes": [torch.zeros(0, 3)] * 4,
    "large": [torch.full((300, 400), i, dtype=torch.float64) for i in range(4)],
    "transposed": [torch.arange(12).reshape(3, 4).t() + i for i in range(4)],
    "channels last": [torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last) for _ in range(4)],
    "expanded": [torch.tensor([float(i)]).expand(5) for i in range(4)],
    "float": [0.1, float("nan"), float("inf"), -0.0],
    "int": [0, -1, 2**62, -(2**63)],
    "bool": [True, False, True, True],
    "int and bool": [1, True, 2, False],
    "str": ["a", "", "ü\ud800", "x" * 100_000],
    "bytes": [b"a", b"", b"\0\xff", b"y" * 100_000],
    "numpy array": [np.arange(6, dtype=np.int16).reshape(2, 3) * i for i in range(4)],
    "numpy float": [np.float32(i) for i in range(4)],
    "numpy int": [np.int64(i) for i in range(4)],
    "numpy bool": [np.bool_(i % 2) for i in range(4)],
    "fortran": [np.asfortranarray(np.arange(6.0).reshape(2, 3)) for _ in range(4)],
    "dict": [{"x": torch.ones(3) * i, "y": i, "z": "s"} for i in range(4)],
    "ordered dict": [collections.OrderedDict(b=i, a=[1.0, i]) for i in range(4)],
    "list": [[i, 1.0, "s"] for i in range(4)],
    "tuple": [(torch.ones(2), i) for i in range(4)],
    "namedtuple": [Pair(torch.ones(2), {"k": i}) for i in range(4)],
    "nested": [{"a": [({"b": (i, torch.zeros(1))},)], "c": []} for i in range(4)],
    "64 floats": [{f"f{k}": k + i / 7 for k in range(64)} for i in range(4)],
}
try:
    torch.as_tensor(FOURS["numpy bool"])
except TypeError:  # torch 2.6 with NumPy 2
    del FOURS["numpy bool"]

OBJECTS = [
    None,
    ...,
    True,
    2**100,
    -1.5,
    1 + 2j,
    "ü",
    b"\0",
    bytearray(b"abc"),
    b"z" * 3_000_000,
    range(3),
    slice(1, 2, 3),
    {1, 2},
    frozenset([3]),
    (),
    [],
    {},
    (1,),
    [[[]]],
    {"a": {}},
    Pair(1, None),
    Record("r", None),
    Colour.RED,
    datetime.datetime(2020, 1, 2),
    fractions.Fraction(1, 3),
    collections.deque([1, 2]),
    collections.Counter("aab"),
    np.float16(1.5),
    np.datetime64("2020-01-01"),
    int,
    len,
    torch.float32,
    torch.Size([1, 2]),
    torch.device("cpu"),
    torch.strided,
    collections.defaultdict(list, a=[1]),
    {(1, 2): None, None: 3, 1.5: "x"},
    "y" * 3_000_000,
    list(range(100_000)),
]

ARRAYS = {
    "plain": np.arange(10),
    "large": np.arange(90_000, dtype=np.float32).reshape(300, 300),
    "fortran": np.asfortranarray(np.arange(120.0).reshape(10, 12)),
    "large fortran": np.asfortranarray(np.arange(90_000.0).reshape(300, 300)),
    "0-d": np.array(3.5),
    "empty": np.zeros((0, 3), dtype=np.int8),
    "strided": np.arange(100)[::7],
    "large strided": np.arange(300_000)[::3],
    "reversed": np.arange(10)[::-1],
    "transposed": np.arange(120).reshape(2, 3, 20).transpose(1, 2, 0),
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "read only": np.frombuffer(b"abcdefgh", dtype=np.uint8),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "half": np.arange(5, dtype=np.float16),
    "big endian": np.arange(5, dtype=">i4"),
    "strings": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "dates": np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
    "records": np.array([(1, 2.5, "x")], dtype=[("a", "i4"), ("b", "f8"), ("c", "U3")]),
    "objects": np.array([1, "a", None, [2]], dtype=object),
}


KINDS = {
    **{name: [make(i) for i in range(4)] for name, make in SAMPLES.items()},
    **{f"four of {name}": samples for name, samples in FOURS.items()},
    **{f"array, {name}": [array] * 4 for name, array in ARRAYS.items()},
    "objects": [OBJECTS] * 4,
}
WAYS = {
    "default_collate": dict(batch_size=4),
    "default_convert": dict(batch_size=None),
    "as it is": dict(batch_size=None, collate_fn=untouched),
}


@rows(way=WAYS)
@pytest.mark.forks
def test_p24_p25_each_kind(DataLoader, way):
    """Each batch is of one kind; one that cannot be collated is the same error at its place."""
    each = 4 if way["batch_size"] else 1
    samples = [sample for four in KINDS.values() for sample in four[:each]]
    errors = []
    for kind, batch in zip([*KINDS, "end"], drain(DataLoader(Given(samples), num_workers=2, **way)), strict=False):
        if isinstance(batch, Raised):
            errors.append(kind)
        yield batch
    assert errors[-1] == "end" and "mapping" not in errors and len(errors) < len(KINDS) / 2
    assert ("None" in errors) == (each == 4)


@rows()
def test_p25_all_kinds_in_one_batch(DataLoader):
    sample = {kind: four[2] for kind, four in KINDS.items()}
    yield from drain(DataLoader(Given([sample, sample]), num_workers=2, **WAYS["as it is"]))


@pytest.mark.ours
@pytest.mark.parametrize("batch_size", [None, 1])
@pytest.mark.forks
def test_t24_a_kind_that_cannot_be_sent_is_an_error_in_its_place(batch_size):
    samples = [{"a": 1}, types.MappingProxyType({"a": 1}), {"a": 3}]
    results = outcomes(iter(DataLoader(Given(samples), num_workers=1, batch_size=batch_size)), 4)
    assert [o[0] for o in results] == ["value", "error", "value", "end"] and results[1][1] is TypeError


def to_batch(samples):
    return Batch(torch.stack([s["image"] for s in samples]), [s["name"] for s in samples], {"n": len(samples)})


@rows(size=[3, 20_000])
def test_p24_dataclasses_through_a_collate_function(DataLoader, size):
    samples = [{"image": torch.full((size,), float(i)), "name": f"n{i}"} for i in range(5)]
    yield from drain(DataLoader(Given(samples), num_workers=2, batch_size=2, collate_fn=to_batch))
    yield from drain(DataLoader(Given([Slotted(torch.ones(size))]), num_workers=1, **WAYS["as it is"]))


def test_p25_default_factories_and_orders_are_kept():
    sample = {"d": collections.defaultdict(int, b=1, a=2), "o": collections.OrderedDict(z=1, a=2)}
    (batch,) = epoch(DataLoader(Given([sample]), num_workers=1, batch_size=None, collate_fn=untouched))
    assert batch["d"]["missing"] == 0 and list(batch["d"])[:2] == ["b", "a"]
    batch["o"].move_to_end("z")
    assert list(batch["o"]) == ["a", "z"]


def test_p25_what_is_one_object_everywhere_stays_one():
    """Enum members, None, types and functions keep their identity."""
    sample = [Colour.RED, None, int, untouched, ..., NotImplemented, True, torch.float32, torch.strided, Level.LOW]
    for cls in BOTH:
        (batch,) = cls(Given([sample]), num_workers=1, batch_size=None, collate_fn=untouched)
        assert all(a is b for a, b in zip(batch, sample, strict=True)), cls
