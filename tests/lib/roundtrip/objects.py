"""Classes and atoms that the trees are made of; workers import them by name."""

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import operator
import pathlib
import struct
import threading
import types
import uuid

import numpy as np
import torch
from sample_data import Array, Labelled, Pair, Record, Unpicklable

__all__ = ["ATOMS", "NASTY", "Array", "Labelled", "Pair", "Record"]


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Flags(enum.IntFlag):
    A = 1
    B = 2


class Plain:
    """An object with a __dict__."""


class Slotted:
    __slots__ = ("first", "second")


class Reduced:
    """Rebuilt from the arguments that __reduce__ returns."""

    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return Reduced, tuple(self.parts)


class Stateful:
    """Pickled through __getstate__ and __setstate__."""

    def __init__(self, *parts):
        self.parts = list(parts)

    def __getstate__(self):
        return {"kept": self.parts}

    def __setstate__(self, state):
        self.parts = state["kept"]


class ListWithMore(list):
    """A list subclass whose instances carry attributes."""


class DictWithMore(dict):
    """A dict subclass whose instances carry attributes."""


class Text(str):
    pass


class Whole(int):
    pass


class FrozenArray(np.ndarray):
    """A NumPy subclass whose pickle carries an attribute."""

    note = None

    def __array_finalize__(self, other):
        self.note = getattr(other, "note", None)

    def __reduce__(self):
        function, arguments, state = super().__reduce__()
        return function, arguments, (state, self.note)

    def __setstate__(self, state):
        super().__setstate__(state[0])
        self.note = state[1]


class Tagged(torch.Tensor):
    """A tensor subclass with a __torch_function__ of its own."""

    @classmethod
    def __torch_function__(cls, function, types_, args=(), kwargs=None):
        return super().__torch_function__(function, types_, args, kwargs or {})


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: object


@dataclasses.dataclass(slots=True)
class SlottedRecord:
    name: object
    data: object


def float_from_bits(bits):
    """The float64 with these 64 bits."""
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


def fail_to_load():
    raise ValueError("not in this process")


class FailsToLoad:
    def __reduce__(self):
        return fail_to_load, ()


# Created afresh for each tree, so that identity reflects only the tree itself.
ATOMS = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "Ellipsis": lambda: ...,
    "NotImplemented": lambda: NotImplemented,
    "inf": lambda: float("inf"),
    "-0.0": lambda: -0.0,
    "nan": lambda: float("nan"),
    "nan payload": lambda: float_from_bits(0x7FF8000000001234),
    "nan sign": lambda: float_from_bits(0xFFF0000000000001),
    "complex": lambda: complex(-0.0, float("inf")),
    "i64 min": lambda: -(2**63),
    "i64 max": lambda: 2**63 - 1,
    "i64 over": lambda: 2**63,
    "big int": lambda: -(3**400),
    "empty str": lambda: "",
    "str": lambda: "".join(["süß ", "漢字 🙂 \0"]),
    "surrogate": lambda: "".join(["a", "\ud800", "\udcff"]),
    "long str": lambda: "xyz" * 12_000,
    "empty bytes": lambda: b"",
    "bytes": lambda: bytes(range(256)),
    "long bytes": lambda: b"\0\xff" * 40_000,
    "bytearray": lambda: bytearray(b"abc"),
    "long bytearray": lambda: bytearray(b"abc" * 20_000),
    "str subclass": lambda: Text("text"),
    "int subclass": lambda: Whole(7),
    "Decimal": lambda: decimal.Decimal("-1.50E+400"),
    "Decimal NaN": lambda: decimal.Decimal("NaN123"),
    "Fraction": lambda: fractions.Fraction(-1, 3),
    "Path": lambda: pathlib.Path("/tmp") / "a b",
    "PurePath": lambda: pathlib.PureWindowsPath("c:\\x"),
    "datetime": lambda: datetime.datetime(2020, 1, 2, 3, 4, 5, 6, datetime.timezone(datetime.timedelta(hours=2))),
    "date": lambda: datetime.date(1, 1, 1),
    "timedelta": lambda: datetime.timedelta(-1, 5),
    "UUID": lambda: uuid.UUID(int=5),
    "enum": lambda: Color.RED,
    "flags": lambda: Flags.A | Flags.B,
    "range": lambda: range(1, 10, 3),
    "slice": lambda: slice(None, 2**70, -1),
    "type": lambda: collections.OrderedDict,
    "class": lambda: Record,
    "function": lambda: float_from_bits,
    "builtin": lambda: len,
    "partial": lambda: functools.partial(float_from_bits, 5),
    "getter": lambda: operator.itemgetter(1, "a"),
    "np.float16": lambda: np.float16(-0.0),
    "np.float64": lambda: np.float64("nan"),
    "np.longdouble": lambda: np.longdouble(1) / 3,
    "np.int8": lambda: np.int8(-3),
    "np.uint64": lambda: np.uint64(2**64 - 1),
    "np.bool": lambda: np.bool_(True),
    "np.complex64": lambda: np.complex64(1 - 2j),
    "np.str": lambda: np.str_("sü"),
    "np.bytes": lambda: np.bytes_(b"ab"),
    "np.datetime64": lambda: np.datetime64("NaT", "ns"),
    "np.timedelta64": lambda: np.timedelta64(5, "D"),
    "np.void": lambda: np.array([(1, 2.5)], dtype=[("a", "i2"), ("b", "f8")])[0],
    "np.dtype": lambda: np.dtype([("a", ">i4"), ("b", "f2", (2,))]),
    "np.dtype metadata": lambda: np.dtype("f8", metadata={"unit": "m"}),
    "torch.Size": lambda: torch.Size([2, 0, 3]),
    "torch.dtype": lambda: torch.bfloat16,
    "torch.device": lambda: torch.device("cuda", 1),
    "torch.layout": lambda: torch.sparse_csr,
    "torch.memory_format": lambda: torch.channels_last,
    "array.array": lambda: array.array("d", [1.0, -0.0]),
    "empty tuple": lambda: (),
    "empty frozenset": lambda: frozenset(),
    "ValueError": lambda: ValueError("text", 3),
    "KeyError": lambda: KeyError(),
}

# What cannot be sent, or cannot be loaded.
NASTY = {
    "lambda": lambda: lambda: 0,
    "generator": lambda: (i for i in ()),
    "lock": lambda: threading.Lock(),
    "memoryview": lambda: memoryview(b"abc"),
    "mappingproxy": lambda: types.MappingProxyType({}),
    "__reduce__ raises": Unpicklable,
    "local class": lambda: type("Local", (), {})(),
    "module": lambda: types,
    "loading raises": FailsToLoad,
    "non-leaf": lambda: torch.ones(3, requires_grad=True) * 2,
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "sparse that requires grad": lambda: torch.ones(2, 2).to_sparse().requires_grad_(),
    "meta storage": lambda: torch.ones(3, device="meta").untyped_storage(),
    "very deep": lambda: functools.reduce(lambda inner, _: [inner], range(20_000), 1),
}
