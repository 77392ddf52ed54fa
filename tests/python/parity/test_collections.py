"""Samples of every collection and kind of value, through both loaders (P24, P25)."""

import collections
import collections.abc
import dataclasses
import decimal
import enum
import pathlib
import types
import typing
import uuid

import numpy as np
import pytest
import torch
from sample_data import Given, Pair, Record
from support import BOTH, DataLoader, epoch, outcomes, outcomes_of, same

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Typed(typing.NamedTuple):
    x: torch.Tensor
    y: int = 0


class Frozen(collections.abc.Mapping):
    """A mapping of a user, which cannot be changed and cannot be made from a dict."""

    def __init__(self, **items):
        self._items = items

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class FromDict(Frozen):
    """The same, made from a dict as torch wants it."""

    def __init__(self, items):
        super().__init__(**items)


class Growing(FromDict, collections.abc.MutableMapping):
    def __setitem__(self, key, value):
        self._items[key] = value

    def __delitem__(self, key):
        del self._items[key]


class Row(collections.abc.Sequence):
    """A sequence of a user, made from a list."""

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
    """A sequence that takes no list."""

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
    """What a collate function of a user makes."""

    images: torch.Tensor
    names: list
    extra: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor


ATOMS = (str, bytes, range, collections.UserString)


def plain(value):
    """Tree of builtin types, with the name of each type, so that two of them can be compared."""
    name = type(value).__qualname__
    label = getattr(value, "label", None) if isinstance(value, (Dict, List, Tuple, Str)) else None
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value
    if dataclasses.is_dataclass(value):
        return name, [plain(getattr(value, f.name)) for f in dataclasses.fields(value)]
    if isinstance(value, collections.abc.Mapping):
        factory = getattr(value, "default_factory", None)
        return name, label, factory, [(plain(k), plain(v)) for k, v in value.items()]
    if isinstance(value, collections.abc.Sequence) and not isinstance(
        value, (str, bytes, range, collections.UserString)
    ):
        return name, label, [plain(v) for v in value]
    return name, label, value


def labelled(value, label):
    value.label = label
    return value


def nest(value, depth):
    kinds = [lambda v: {"k": v}, lambda v: [v, 1], lambda v: (v,), lambda v: Pair(v, "s"), lambda v: {2: [v]}]
    for level in range(depth):
        value = kinds[level % len(kinds)](value)
    return value


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
}


def compare(samples, names, **arguments):
    """One epoch of both loaders: the same outcomes, in types and values, one for each name."""

    def run(cls):
        got = outcomes_of(cls(Given(samples), num_workers=2, **arguments), len(names) + 1)
        return [plain(o[1]) if o[0] == "value" else o for o in got]

    theirs, ours = map(run, BOTH)
    assert ours[-1] == ("end",)
    for name, a, b in zip(names, theirs, ours, strict=False):
        assert same(b, a), (name, a, b)
    return dict(zip(names, ours, strict=False))


def errors_in(got):
    return [name for name, outcome in got.items() if isinstance(outcome, tuple) and outcome[0] == "error"]


def test_p24_default_collate_of_each_kind():
    """Each batch is of one kind; what cannot be collated is the same error in its place."""
    got = compare([make(i) for make in SAMPLES.values() for i in range(4)], list(SAMPLES), batch_size=4)
    errors = errors_in(got)
    assert "mapping" not in errors and "None" in errors and len(errors) < len(got) / 2


def test_p24_default_convert_of_each_kind():
    compare([make(1) for make in SAMPLES.values()], list(SAMPLES), batch_size=None)


def test_p25_each_kind_as_it_is():
    got = compare([make(1) for make in SAMPLES.values()], list(SAMPLES), batch_size=None, collate_fn=one)
    assert not errors_in(got)


def test_p25_all_kinds_in_one_batch():
    sample = {kind: make(2) for kind, make in SAMPLES.items()}
    got = compare([sample, sample], ["first", "second"], batch_size=None, collate_fn=one)
    assert got["first"][0] == "dict"


@pytest.mark.ours
@pytest.mark.parametrize("batch_size", [None, 1])
def test_t24_a_kind_that_cannot_be_sent_is_an_error_in_its_place(batch_size):
    samples = [{"a": 1}, types.MappingProxyType({"a": 1}), {"a": 3}]
    got = outcomes(iter(DataLoader(Given(samples), num_workers=1, batch_size=batch_size)), 4)
    assert [o[0] for o in got] == ["value", "error", "value", "end"] and got[1][1] is TypeError


def to_batch(samples):
    return Batch(torch.stack([s["image"] for s in samples]), [s["name"] for s in samples], {"n": len(samples)})


@pytest.mark.parametrize("size", [3, 20_000])
def test_p24_dataclasses_through_a_collate_function(size):
    samples = [{"image": torch.full((size,), float(i)), "name": f"n{i}"} for i in range(5)]
    got = compare(samples, ["first", "second", "last"], batch_size=2, collate_fn=to_batch)
    assert [o[0] for o in got.values()] == ["Batch"] * 3
    (batch,) = epoch(DataLoader(Given([Slotted(torch.ones(size))]), num_workers=1, batch_size=None, collate_fn=one))
    assert type(batch) is Slotted and torch.equal(batch.x, torch.ones(size))


def one(sample):
    return sample


def test_p25_default_factories_and_orders_are_kept():
    sample = {"d": collections.defaultdict(int, b=1, a=2), "o": collections.OrderedDict(z=1, a=2)}
    (got,) = epoch(DataLoader(Given([sample]), num_workers=1, batch_size=None, collate_fn=one))
    assert got["d"]["missing"] == 0 and list(got["d"])[:2] == ["b", "a"]
    got["o"].move_to_end("z")
    assert list(got["o"]) == ["a", "z"]


def test_p25_what_is_one_object_everywhere_stays_one():
    """Enum members, None, types and functions are themselves on the other side."""
    sample = [Colour.RED, None, int, one, ..., NotImplemented, True, torch.float32, torch.strided, Level.LOW]
    for cls in BOTH:
        (got,) = cls(Given([sample]), num_workers=1, batch_size=None, collate_fn=one)
        assert all(a is b for a, b in zip(got, sample, strict=True)), cls
