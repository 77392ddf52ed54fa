"""Pinning a value of any type gives exactly what torch's own function gives (P24, T12)."""

import collections
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from pinning_support import pinning
from sample_data import Bag, Choosy, Config, FixedRow, Given, Labelled, Pair, Record, Row, Store
from support import DataLoader, epoch, same_tensor
from torch.utils.data import _utils

BIG = 5000  # elements: more than 16 KiB in every dtype but the smallest


@pytest.fixture(scope="module")
def host():
    with pinning() as host:
        yield host


def sent(values, **kw):
    """The values as they arrive from a worker."""
    return epoch(DataLoader(Given(list(values)), batch_size=None, num_workers=1, **kw))


def small(n=3):
    return torch.arange(float(n))


def big(n=0):
    return torch.arange(float(BIG)) + n


class Locked(Store):
    """A mutable mapping that refuses to be copied."""

    def __copy__(self):
        raise TypeError("no copies")


class Custom:
    """A type with a `pin_memory` of its own."""

    def __init__(self, data):
        self.data = data

    def pin_memory(self):
        return Custom([x.pin_memory() for x in self.data])


class CustomDict(dict):
    """A dict with a `pin_memory` of its own: the method takes precedence."""

    def pin_memory(self):
        return "pinned by its own method"


class Text(str):
    def pin_memory(self):
        return "in 2.15 the method is called, in 2.6 a str is a str"


class Triple(tuple):
    """A tuple subclass without fields."""


def store(kind=Store):
    mapping = kind({"a": small(), "b": [big()]})
    mapping.name = "extra"
    return mapping


def bag():
    sequence = Bag([small(), {"x": big()}])
    sequence.name = "extra"
    return sequence


def default_dict():
    mapping = defaultdict(list)
    mapping["a"] = [small(), big()]
    return mapping


def nested():
    return {"x": [big(), (small(), [small(2), {"y": (big(3), "text", None)}])], "n": 1}


def twice():
    x, y = big(), small()
    return {"input": x, "target": x, "row": x[:10], "labels": [y, y], "list": [[x], 1]}


VALUES = {
    "tensor": big,
    "small tensor": small,
    "number of no dimension": lambda: torch.tensor(2.5),
    "empty": lambda: torch.zeros(0, 3),
    "dict": lambda: {"a": big(), "b": small(), 3: torch.tensor(1)},
    "empty dict": dict,
    "list": lambda: [big(), small(), 1, 2.5, True, None, "text", b"bytes", 1j],
    "ints": lambda: [[1, 2, 3], (4, 5)],
    "tuple": lambda: (big(), small()),
    "empty tuple": tuple,
    "nested": nested,
    "twice the same": twice,
    "a tuple as a key": lambda: {(1, 2): small(), (big(), 3): 4},
    "OrderedDict": lambda: OrderedDict(b=big(), a=small()),
    "defaultdict": default_dict,
    "Counter": lambda: collections.Counter(a=2),
    "deque": lambda: collections.deque([big(), small()]),
    "Mapping": lambda: Config({"a": big(), "b": [small()]}),
    "Mapping that cannot be made": lambda: Choosy(keys=["a"], values=[big()]),
    "MutableMapping": store,
    "MutableMapping that cannot be copied": lambda: store(Locked),
    "namedtuple": lambda: Pair(big(), {"x": small()}),
    "tuple subclass": lambda: Triple([big(), 2]),
    "Sequence": lambda: Row([big(), small()]),
    "Sequence that cannot be made": lambda: FixedRow(big(), small()),
    "range": lambda: range(3),
    "MutableSequence": bag,
    "str": lambda: "text",
    "bytes": lambda: b"bytes",
    "None": lambda: None,
    "custom type": lambda: Custom([big(), small()]),
    "custom type in a list": lambda: [Custom([big()]), {"c": Custom([small()])}],
    "custom dict": lambda: CustomDict(a=small()),
    "custom str": lambda: Text("mine"),
    "dataclass": lambda: Record("name", big()),
    "dataclass in a dict": lambda: {"item": Record("name", big(), small()), "x": big()},
    "set": lambda: {1, 2},
    "ndarray": lambda: np.arange(BIG),
    "ndarrays": lambda: {"a": np.arange(BIG), "b": np.float32(2), "c": [np.arange(3)], "t": big()},
    "tensor subclass": lambda: [big().as_subclass(Labelled)],
}


def described(value, host, seen):
    """A value as plain data: its types and content, which tensors are pinned, and which objects are the same."""
    first = seen.setdefault(id(value), (len(seen), value))[0]
    if isinstance(value, torch.Tensor):
        return "tensor", first, type(value).__name__, host.owns(value), value.stride(), value.dtype, value.tolist()
    if isinstance(value, np.ndarray):
        return "array", first, type(value).__name__, value.tolist()
    if isinstance(value, (str, bytes, int, float, complex, type(None), set, range, np.generic)):
        return type(value).__name__, value
    items = []
    if isinstance(value, Mapping):
        items = [(described(k, host, seen), described(v, host, seen)) for k, v in value.items()]
    elif isinstance(value, (tuple, Sequence, collections.deque)):
        items = [described(x, host, seen) for x in value]
    extra = {name: described(x, host, seen) for name, x in getattr(value, "__dict__", {}).items() if name != "_values"}
    return type(value).__name__, first, items, extra


@pytest.fixture(scope="module")
def arrived(host):
    """Each value as it arrives with pinning, and without."""
    samples = [make() for make in VALUES.values()]
    return dict(zip(VALUES, zip(sent(samples, pin_memory=True), sent(samples), strict=True), strict=True))


@pytest.mark.parametrize("name", VALUES)
def test_p24_each_type_becomes_what_torchs_function_makes_of_it(host, arrived, name):
    pinned, plain = arrived[name]
    expected = _utils.pin_memory.pin_memory(plain, "cuda")
    assert described(pinned, host, {}) == described(expected, host, {})


def test_p24_each_occurrence_of_a_tensor_is_copied_as_by_torch(host):
    (got,) = sent([twice()], pin_memory=True)
    got["target"].zero_()
    got["labels"][0].fill_(7)
    assert torch.equal(got["input"], big()) and torch.equal(got["list"][0][0], big())
    assert torch.equal(got["row"], big()[:10]) and torch.equal(got["labels"][1], small())


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES = [
    *FLOATS,
    *(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(torch.bool, torch.complex64, torch.complex128),
    *(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)),
]


@pytest.mark.parametrize("n", [3, 2 * BIG])
def test_every_dtype(host, n):
    tensors = [torch.arange(n).remainder(2).to(dtype) for dtype in DTYPES]
    (got,) = sent([tensors], pin_memory=True)
    assert len(got) == len(DTYPES)
    assert all(same_tensor(a, b) and host.owns(a) for a, b in zip(got, tensors, strict=True))


LAYOUTS = {
    "transposed": lambda x: x.t(),
    "channels last": lambda x: x.reshape(2, 4, -1, 4).to(memory_format=torch.channels_last),
    "permuted": lambda x: x.reshape(2, 4, -1, 4).permute(3, 0, 2, 1),
    "a single row": lambda x: x[:1],
    "no dimension": lambda x: x[0, 0],
    "no element": lambda x: x[:0],
}


@pytest.mark.parametrize("rows", [8, 400])
def test_layouts_are_those_of_torchs_function(host, rows):
    tensors = [change(torch.arange(rows * 32.0).reshape(rows, 32)) for change in LAYOUTS.values()]
    for name, tensor, (got,) in zip(LAYOUTS, tensors, sent([[x] for x in tensors], pin_memory=True), strict=True):
        expected = _utils.pin_memory.pin_memory(tensor, "cuda")
        assert same_tensor(got, expected), name
        assert host.owns(got) == (tensor.numel() > 0), name
        assert got.untyped_storage().nbytes() >= expected.untyped_storage().nbytes(), name


@pytest.mark.ours
def test_an_expanded_tensor_keeps_its_strides(host):
    """torch's `pin_memory` refuses memory that several elements share."""
    tensors = [torch.arange(float(rows)).reshape(-1, 1).expand(-1, 64) for rows in (8, 5000)]
    for tensor, (got,) in zip(tensors, sent([[x] for x in tensors], pin_memory=True), strict=True):
        assert torch.equal(got, tensor) and got.stride() == tensor.stride() and host.owns(got)


def test_t12_a_replaced_function_is_called_with_all_that_arrives(host, monkeypatch):
    calls = []

    def pin_memory(data, device=None):
        calls.append(type(data))
        return "theirs"

    monkeypatch.setattr(_utils.pin_memory, "pin_memory", pin_memory)
    assert sent([big(), [small(), "x"], {"a", "b"}], pin_memory=True) == ["theirs"] * 3
    assert calls == [torch.Tensor, list, set]


def test_t12_a_replaced_method_of_tensor_is_called(host, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: "theirs")
    assert sent([{"x": big(), "y": [small()]}], pin_memory=True) == [{"x": "theirs", "y": ["theirs"]}]
