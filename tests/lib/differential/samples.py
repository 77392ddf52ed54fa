"""The kinds of samples: sample i of a kind depends only on i, except where it draws random numbers or inspects state.

`COLLATED` are the kinds that default_collate accepts, `REFUSED` those that it refuses, `OTHER` those that are only
tried with user-defined collate functions, because default_collate would walk into them.
Left out is what torch's loader gets wrong or hangs on: conj and neg views, quantized and mkldnn tensors,
objects that cannot be pickled.
"""

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import random

import numpy as np
import torch
from torch.utils.data import get_worker_info

import rustloader

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Record:
    name: str
    data: torch.Tensor
    more: object = None


class Labelled(torch.Tensor):
    """A tensor subclass whose instances carry attributes."""


class Mapping(collections.UserDict):
    """A mapping that is not a dict."""


class Array(np.ndarray):
    """An array subclass."""


class Color(enum.Enum):
    RED = 1
    GREEN = 2


class Plain:
    def __init__(self, i):
        self.number, self.tensor = i, numbers(i, 3)
        self.itself = self


def numbers(i, *shape, dtype=torch.float32):
    """Random content that depends only on the index."""
    g = torch.Generator().manual_seed(i)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=g, dtype=torch.complex64 if dtype.is_complex else torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=g).to(dtype)


def pair_of_views(i):
    base = numbers(i, 8)
    return base[:6], base[2:]


def twice(i):
    t = numbers(i, 3)
    return [t, t]


def labelled(i):
    t = numbers(i, 2).as_subclass(Labelled)
    t.label = f"label {i}"
    return t


def row(i):
    """A row of a large tensor."""
    return torch.arange(8000, dtype=torch.float32).reshape(1000, 8)[i % 1000]


def cycle(i):
    v = [i]
    v.append(v)
    return v


def nested_lists(i):
    v = i
    for _ in range(40):
        v = [v]
    return v


def jagged(i):
    return torch.nested.nested_tensor([numbers(i, 2), numbers(i, 3)])


def draws(_i):
    return {"torch": torch.rand(()), "random": random.random(), "numpy": float(np.random.rand())}


def around(_i):
    info = get_worker_info()
    if info is None:
        return (-1, -1, -1, "", torch.initial_seed())
    return info.id, info.num_workers, info.seed, type(info.dataset).__name__, torch.initial_seed()


NAN = [0.0, -0.0, float("nan"), float("inf"), 5e-324]

# Kinds whose content depends on which worker makes them, and on what it made before.
WORKER_DEPENDENT = ("draws", "around")
# Kinds whose content seed_by decides.
DRAWN = ("draws", "sample seed")
# Kinds that are the same with and without workers.
SIMPLE = ("int", "float", "bool", "str", "bytes", "scalar", "f32", "f64", "dict")

COLLATED = {
    "int": lambda i: i,
    "big int": lambda i: i - 2**62,
    "float": lambda i: NAN[i % 7] if i % 7 < 5 else i / 3,
    "bool": lambda i: i % 2 == 0,
    "str": lambda i: f"text {i} \u00e4\U0001f600",
    "bytes": lambda i: bytes([i % 256, 0]),
    "scalar": lambda i: torch.tensor(i),
    "u8": lambda i: numbers(i, 3, 4, dtype=torch.uint8),
    "f32": lambda i: numbers(i, 5),
    "f64": lambda i: numbers(i, 2, 2, dtype=torch.float64),
    "bf16": lambda i: numbers(i, 4, dtype=torch.bfloat16),
    "complex": lambda i: numbers(i, 2, dtype=torch.complex64),
    "bool tensor": lambda i: numbers(i, 3, dtype=torch.bool),
    "empty tensor": lambda i: torch.empty(0, 3),
    "large": lambda i: numbers(i, 3, 40, 50),
    "permuted": lambda i: numbers(i, 2, 3, 4).permute(2, 0, 1),
    "expanded": lambda i: numbers(i, 1, 3).expand(4, 3),
    "holes": lambda i: numbers(i, 12)[::3],
    "row": row,
    "views": pair_of_views,
    "twice": twice,
    "array": lambda i: np.arange(3.0) + i,
    "array in F order": lambda i: np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3) + i),
    "numpy scalar": lambda i: np.float32(i / 7),
    "numpy int": lambda i: np.int16(i),
    "dict": lambda i: {"a": i, "b": numbers(i, 2), 3: str(i)},
    "ordered dict": lambda i: collections.OrderedDict(b=i, a=numbers(i, 1)),
    "mapping": lambda i: Mapping({"x": i, "y": [float(i)]}),
    "named tuple": lambda i: Pair(i, numbers(i, 2)),
    "nested": lambda i: {"a": [(i, {"b": [numbers(i, 1), (str(i),)]})]},
    "mixed dtypes": lambda i: numbers(i, 2, dtype=torch.float64 if i % 3 == 1 else torch.float32),
    "draws": draws,
    "around": around,
    "sample seed": lambda i: rustloader.sample_seed(),
}

REFUSED = {
    "none": lambda i: None,
    "ragged": lambda i: numbers(i, 1 + i % 3),
    "dataclass": lambda i: Record(f"name {i}", numbers(i, 2), [i]),
    "requires grad": lambda i: numbers(i, 2).requires_grad_(),
    "huge int": lambda i: 2**70 + i,
    "string array": lambda i: np.array([f"s{i}", "longer"]),
    "object array": lambda i: np.array([i, None, "x"], dtype=object),
    "enum": lambda i: Color(1 + i % 2),
    "set": lambda i: {i, str(i)},
    "python complex": lambda i: complex(i, -0.0),
    "object": Plain,
}

OTHER = {
    "sparse": lambda i: numbers(i, 3, 4).relu().to_sparse(),
    "csr": lambda i: numbers(i, 3, 4).relu().to_sparse_csr(),
    "nested tensor": jagged,
    "parameter": lambda i: torch.nn.Parameter(numbers(i, 3)),
    "subclass": labelled,
    "array subclass": lambda i: (np.arange(4) + i).view(Array),
    "structured array": lambda i: np.array([(i, 0.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "dates": lambda i: [np.datetime64(i, "D"), datetime.date.fromordinal(1 + i), datetime.timedelta(i)],
    "read-only array": lambda i: np.frombuffer(bytes([i % 256, 1]), np.uint8),
    "strided array": lambda i: (np.arange(24).reshape(4, 6) + i)[::2, 1::2],
    "python values": lambda i: (
        decimal.Decimal(i),
        fractions.Fraction(i, 7),
        range(i),
        slice(i),
        ...,
        pathlib.PurePath("a"),
    ),
    "torch values": lambda i: (torch.float16, torch.Size([i, 2]), torch.device("cpu"), torch.strided),
    "functions": lambda i: (len, numbers, Plain, torch.add),
    "exception": lambda i: ValueError("kept", i),
    "deep": nested_lists,
    "cycle": cycle,
    "bytearray": lambda i: bytearray([i % 256] * (i % 5)),
    "large bytes": lambda i: bytes([i % 256]) * 40000,
    "array.array": lambda i: array.array("d", [i, 0.5]),
    "deque": lambda i: collections.deque([i, numbers(i, 1)], maxlen=3),
    "defaultdict": lambda i: collections.defaultdict(list, a=[i]),
    "frozenset": lambda i: frozenset([i, (i, "x")]),
    "storage": lambda i: numbers(i, 3).untyped_storage(),
    "empty containers": lambda i: ((), [], {}, set(), "", b""),
}

MAKE = {**COLLATED, **REFUSED, **OTHER}
