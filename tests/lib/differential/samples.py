"""The kinds of samples: sample i of a kind depends only on i, except where it draws random numbers or inspects state.

`COLLATED` are the kinds that default_collate accepts, `REFUSED` those that it refuses, `OTHER` those that are only
tried with user-defined collate functions, because default_collate would walk into them. ``roundtrip/`` tries all kinds
of values.
"""

import collections
import dataclasses
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


class Plain:
    def __init__(self, i):
        self.number, self.tensor = i, numbers(i, 3)
        self.itself = self


def numbers(i, *shape, dtype=torch.float32):
    """Random content that depends only on the index."""
    generator = torch.Generator().manual_seed(i)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def pair_of_views(i):
    base = numbers(i, 8)
    return base[:6], base[2:]


def labelled(i):
    t = numbers(i, 2).as_subclass(Labelled)
    t.label = f"label {i}"
    return t


def row(i):
    """A row of a large tensor."""
    return torch.arange(8000, dtype=torch.float32).reshape(1000, 8)[i % 1000]


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
    "float": lambda i: NAN[i % 7] if i % 7 < 5 else i / 3,
    "bool": lambda i: i % 2 == 0,
    "str": lambda i: f"text {i} \u00e4\U0001f600",
    "bytes": lambda i: bytes([i % 256, 0]),
    "scalar": lambda i: torch.tensor(i),
    "f32": lambda i: numbers(i, 5),
    "f64": lambda i: numbers(i, 2, 2, dtype=torch.float64),
    "large": lambda i: numbers(i, 3, 40, 50),
    "permuted": lambda i: numbers(i, 2, 3, 4).permute(2, 0, 1),
    "holes": lambda i: numbers(i, 12)[::3],
    "row": row,
    "views": pair_of_views,
    "array": lambda i: np.arange(3.0) + i,
    "numpy scalar": lambda i: np.float32(i / 7),
    "dict": lambda i: {"a": i, "b": numbers(i, 2), 3: str(i)},
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
    "object": Plain,
}

OTHER = {
    "sparse": lambda i: numbers(i, 3, 4).relu().to_sparse(),
    "parameter": lambda i: torch.nn.Parameter(numbers(i, 3)),
    "subclass": labelled,
    "structured array": lambda i: np.array([(i, 0.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "functions": lambda i: (len, numbers, Plain, torch.add),
    "exception": lambda i: ValueError("kept", i),
    "large bytes": lambda i: bytes([i % 256]) * 40000,
    "storage": lambda i: numbers(i, 3).untyped_storage(),
}

MAKE = {**COLLATED, **REFUSED, **OTHER}
