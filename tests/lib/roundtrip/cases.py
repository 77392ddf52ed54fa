"""Values by name: hand-written batches, beside the random ones. Each function makes one value, always the same.

`n` is the side of the tensors and arrays: 8 is below the size from which memory is sent apart, 72 is above it.
"""

import collections
import types

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided, sliding_window_view
from sample_data import Array, Bag, Choosy, Config, FixedRow, Labelled, Pair, Record, Row, Store
from torch.utils.data import default_collate

from roundtrip import objects
from roundtrip.build_arrays import ARRAY_DTYPES, array
from roundtrip.build_containers import deep
from roundtrip.build_tensors import DTYPES, labelled, nested, sparse, tensor

__all__ = ["CASES", "SAMPLES", "SIDES"]

SIDES = (8, 72)


def square(n, dtype=torch.float32):
    return torch.arange(n * n).reshape(n, n).to(dtype)


def channels_last(x):
    return x.reshape(2, 2, -1, x.size(-1)).to(memory_format=torch.channels_last)


LAYOUTS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "every second row": lambda x: x[::2],
    "a column": lambda x: x[:, 1],
    "every third column": lambda x: x[:, ::3],
    "every second column, transposed": lambda x: x.t()[::2],
    "a corner": lambda x: x[2:4, 1:3],
    "a row": lambda x: x[3],
    "an element": lambda x: x[3, 2],
    "one row": lambda x: x[1:2],
    "one column": lambda x: x[:, 2:3],
    "permuted": lambda x: x.reshape(2, -1, 2, x.size(1) // 2).permute(2, 0, 3, 1),
    "channels last": channels_last,
    "a row, expanded": lambda x: x[3].expand(5, -1),
    "a column, expanded": lambda x: x[:, :1].expand(-1, 9),
    "every second row, expanded": lambda x: x[::2, 3:4].expand(-1, 9),
    "an element, expanded": lambda x: x[0, 0].expand(7),
    "dimensions of one": lambda x: x.reshape(1, x.size(0), 1, -1),
    "unfolded": lambda x: x.unfold(1, 2, 2),
    "windows": lambda x: x.view(-1).unfold(0, 3, 1),
    "elements at one address": lambda x: torch.zeros(4).as_strided((3, 2), (1, 1)),
    "the diagonal": lambda x: x.diagonal(),
    "the imaginary part": lambda x: x.to(torch.complex64).imag,
    "no rows": lambda x: x[5:5],
    "no rows at the end": lambda x: x[x.size(0) :],
    "no columns": lambda x: x[3:, 4:4],
    "no rows, strided": lambda x: x[2:2:3].t(),
    "no rows, expanded": lambda x: x[4:4, :1].expand(0, 7),
    "no rows of another dtype": lambda x: x.view(torch.int16)[7:7],
    "no rows that require grad": lambda x: x[5:5].requires_grad_(),
    "no rows of a parameter": lambda x: torch.nn.Parameter(x[6:6]),
}
# Tensors over one storage.
SHARED = {
    "split": lambda x: list(x.split(3)),
    "whole and split": lambda x: [x, *x.split(2)],
    "unbound": lambda x: list(x.unbind(1)),
    "halves": lambda x: [x[::2], x[1::2]],
    "whole and middle": lambda x: [x, x[1:3]],
    "middle and whole": lambda x: [x[1:3], x],
    "row and expanded": lambda x: [x[:1].expand(5, -1), x[0]],
    "expanded and whole": lambda x: [x[:, :1].expand(-1, 9), x],
    "channels last and whole": lambda x: [channels_last(x).permute(0, 2, 3, 1), x.t(), x],
    "dtypes": lambda x: [x, x.view(torch.int32), x.view(torch.uint8), x.view(torch.float64)],
    "row, column and diagonal": lambda x: [x[0], x[:, 0], x.diagonal()],
    "windows and rows": lambda x: [x.view(-1).unfold(0, 5, 2), x[3:5]],
    "nothing in common": lambda x: [x[:, 0], x[:, 1], x[:, 5:8], x[1::2, 4]],
    "one element in common": lambda x: [x[:, 0], x[:, 1], x[:, 5:8], x[1::2, 4], x[3, :2]],
    "neighbours": lambda x: [x[5:7], x[7:8], x[0:0], x[2:2]],
    "unaligned": lambda x: [x.view(torch.uint8).view(-1)[1:], x.view(-1)[1:2]],
    "among others": lambda x: {"a": x[:2], "b": torch.zeros(3), "c": [x[1:3]], "d": x[4:], "e": np.arange(5)},
    "an array": lambda x: (lambda a: (lambda t: [a, t, t[2:], a[::-1]])(torch.from_numpy(a)))(x.numpy().copy()),
    "parameters": lambda x: {
        "p": (p := torch.nn.Parameter(x)),
        "data": x[3:],
        "leaf": x[4:].clone().requires_grad_(),
        "same": p,
        "frozen": torch.nn.Parameter(x, False),
    },
    "subclasses": lambda x: [x.as_subclass(Labelled)[:5], x.as_subclass(Labelled)[3:], x[1:]],
    "rows of a CSR tensor": lambda x: (lambda s: [s, s.values()])(x.to_sparse_csr()),
    "rows of a jagged tensor": lambda x: (lambda t: [t, t.values()])(
        torch.nested.nested_tensor([x, x[:3]], layout=torch.jagged)
    ),
    "a storage": lambda x: [x, x.untyped_storage(), x[2:]],
    "a storage amidst the memory of others": lambda x: (
        lambda m: [
            torch.frombuffer(m, dtype=torch.uint8),
            torch.frombuffer(m, dtype=torch.uint8, offset=8, count=16).untyped_storage(),
        ]
    )(bytearray(x.numpy().tobytes())),
    "a collated batch": lambda x: (lambda batch: [batch, batch[:1], batch[:, 0]])(default_collate([x, x + 1])),
}
# One object in several places.
TWICE = {
    "a list": lambda x: [1, "a"],
    "an empty list": lambda x: [],
    "a dict": lambda x: {"k": 1},
    "a tuple": lambda x: (1, "a"),
    "a tensor": lambda x: x,
    "a tensor without elements": lambda x: x[:0],
    "overlapping windows": lambda x: torch.zeros(5).as_strided((3, 3), (1, 1)),
    "an array": lambda x: x.numpy(),
    "an array without elements": lambda x: x[:0].numpy(),
    "an object": lambda x: Record("r", x),
    "a list of a tensor": lambda x: [x],
    "a long text": lambda x: "x" * 50_000,
    "long bytes": lambda x: b"x" * 50_000,
}
# Tensors that torch's reducers pickle.
REDUCED = {
    "subclass": lambda x: labelled(x, {"name": "x", "also": x.clone()}),
    "slice of a subclass": lambda x: x.as_subclass(Labelled)[1:, ::2],
    "subclass that requires grad": lambda x: labelled(x, "x").requires_grad_(),
    "strided nested": lambda x: torch.nested.nested_tensor([x, x[:4], x[:1]]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x[:4], x[:1]], layout=torch.jagged),
    "jagged with holes": lambda x: torch.nested.narrow(
        x, 1, torch.zeros(len(x), dtype=torch.int64), torch.arange(1, len(x) + 1), layout=torch.jagged
    ),
    "coo": lambda x: x.to_sparse(),
    "coo, not coalesced": lambda x: torch.sparse_coo_tensor(
        torch.zeros(1, x.numel(), dtype=torch.int64), torch.ones(x.numel()), (3,)
    ),
    "hybrid coo": lambda x: x.to_sparse(1),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
    "parameter": lambda x: torch.nn.Parameter(x),
    "frozen parameter": lambda x: torch.nn.Parameter(x.long(), requires_grad=False),
    "buffer": lambda x: torch.nn.Buffer(x),
    "leaf that requires grad": lambda x: x.requires_grad_(),
    "meta": lambda x: x.to("meta")[1:, 2:],
    "meta parameter": lambda x: torch.nn.Parameter(x.to("meta")),
    "uninitialized parameter": lambda x: torch.nn.UninitializedParameter(),
    "module": lambda x: filled(torch.nn.Linear(len(x), len(x))),
    "packed sequence": lambda x: torch.nn.utils.rnn.pack_sequence([x, x[:4]]),
    "17 dimensions": lambda x: x.reshape((1,) * 15 + x.shape).transpose(-1, -2),
    "storage": lambda x: x.untyped_storage(),
    "conj": lambda x: torch.complex(x, x + 1).conj(),
    "neg": lambda x: torch.complex(x, x + 1).conj().imag,
    "conj and neg": lambda x: torch._neg_view(torch.complex(x, x + 1).conj()),
    "conj that requires grad": lambda x: torch.complex(x, x + 1).conj().requires_grad_(),
    "conj parameter": lambda x: torch.nn.Parameter(torch.complex(x, x + 1).conj()),
    "neg parameter": lambda x: torch.nn.Parameter(torch.complex(x, x + 1).conj().imag),
    "frozen conj parameter": lambda x: torch.nn.Parameter(torch.complex(x, x + 1).conj(), requires_grad=False),
    "conj of a slice": lambda x: torch.complex(x, x + 1)[1:].conj(),
}
if hasattr(torch, "quantize_per_tensor"):
    REDUCED |= {
        "quint8": lambda x: torch.quantize_per_tensor(x, 0.5, 3, torch.quint8),
        "qint32": lambda x: torch.quantize_per_tensor(x, 0.01, 0, torch.qint32),
        "quint8, transposed": lambda x: torch.quantize_per_tensor(x, 0.5, 3, torch.quint8).t(),
        "quint8, slice": lambda x: torch.quantize_per_tensor(x, 0.5, 3, torch.quint8)[1:],
        "qint8 per channel": lambda x: torch.quantize_per_channel(
            x, (x[0] + 1) / 8, torch.arange(len(x)) % 9, 0, torch.qint8
        ),
        "quint8 per column": lambda x: torch.quantize_per_channel(
            x, (x[0] + 1) / 8, torch.zeros(len(x)), 1, torch.quint8
        ),
        "quint8, floats as zero points": lambda x: torch.quantize_per_channel(
            x, (x[0] + 1) / 8, x[0] / 7, 0, torch.quint8
        ),
    }

PAIR = np.dtype([("a", "i4"), ("b", "f8")])
NESTED = np.dtype([("a", "i1"), ("b", [("c", ">f4"), ("d", "U3")]), ("e", "u2", (2, 2)), ("f", "M8[s]")])
ARRAY_LAYOUTS = {
    "whole": lambda a: a,
    "transposed": lambda a: a.T,
    "in F order": np.asfortranarray,
    "backwards": lambda a: a[::-1],
    "mirrored": lambda a: a[:, ::-1],
    "backwards, with steps": lambda a: a[::-2, ::3],
    "a column": lambda a: a[:, 1],
    "three dimensions, transposed": lambda a: a.reshape(2, 4, -1).transpose(1, 2, 0),
    "three dimensions, with steps": lambda a: a.reshape(2, 4, -1).transpose(2, 0, 1)[::2],
    "a row, broadcast": lambda a: np.broadcast_to(a[0], (5, len(a))),
    "a column, broadcast": lambda a: np.broadcast_to(a[:, :1], (len(a), 9)),
    "windows": lambda a: sliding_window_view(a, 3, axis=1),
    "no dimension": lambda a: a[0, 0:1].reshape(()),
    "no rows": lambda a: a[0:0],
    "no columns, transposed": lambda a: a[:, 0:0].T,
    "one row, transposed": lambda a: a[1:2].T,
    "dimensions of one": lambda a: a[None, :, None],
    "an odd stride": lambda a: as_strided(a, (1, *a.shape), (3, *a.strides)),
    "unaligned": lambda a: np.frombuffer(b"\0" + a.tobytes(), np.uint8)[1:].view(a.dtype),
}
ARRAYS = {
    "nested fields": lambda n: np.ones((n, n), NESTED),
    "gaps": lambda n: np.zeros(
        (n, n), np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 10], "itemsize": 20})
    ),
    "a field": lambda n: np.ones((n, n), NESTED)["b"],
    "a plain field": lambda n: np.ones((n, n), NESTED)["a"],
    "objects": lambda n: np.array([[i, str(j)][j % 2] for i in range(n) for j in range(n)], object).reshape(n, n),
    "objects in F order": lambda n: np.array([[(i, j) for i in range(n)] + [None] for j in range(n)], object).T,
    "tensors among objects": lambda n: (lambda t: [objects_of(t, t[1:], np.arange(n)), t])(square(n)),
    "times of 25 seconds": lambda n: np.arange(n * n).astype("M8[25s]").reshape(n, n),
    "empty strings": lambda n: np.full((n, n), ""),
    "40 dimensions": lambda n: np.arange(n * n).reshape((1,) * 38 + (n, n)),
    "matrix": lambda n: np.asmatrix(np.arange(n * n).reshape(n, n)),
    "recarray": lambda n: np.rec.array(np.ones((n, n), PAIR)),
    "chararray": lambda n: np.char.array(np.arange(n * n).astype(str).reshape(n, n)),
    "masked": lambda n: np.ma.masked_greater(np.arange(n * n).reshape(n, n), 3),
    "masked with a fill value": lambda n: np.ma.masked_array(np.ones((n, n)), mask=np.eye(n), fill_value=7),
    "masked records": lambda n: np.ma.array([(1, 2.0)] * n, PAIR, mask=[(0, 1)] * n),
    "masked scalar": lambda n: np.ma.masked,
    "subclass": lambda n: np.arange(n * n).reshape(n, n).view(Array),
    "0-d subclass": lambda n: np.array(float(n)).view(Array),
    "no rows": lambda n: np.zeros((0, n)),
    "no columns, F order": lambda n: np.asfortranarray(np.zeros((n, 0, 2), "f4")),
    "no strings": lambda n: np.zeros((0, n), "U3"),
    "no records": lambda n: np.zeros((0, n), PAIR),
    "0-d string": lambda n: np.array("x" * n),
    "0-d object": lambda n: np.array({"a": n}, object),
    "0-d record": lambda n: np.array((n, 2.5), PAIR),
    "0-d big endian": lambda n: np.array(n, ">u2"),
    "bytes and bytearrays": lambda n: (lambda b: [bytes(b), b, b, Record("r", bytes(b), b)])(bytearray(range(n)) * n),
}


def objects_of(*values):
    result = np.empty(len(values), object)
    result[:] = values
    return result


def filled(module):
    for i, parameter in enumerate(module.parameters()):
        torch.nn.init.constant_(parameter, i)
    return module


def frozen(a):
    a.flags.writeable = False
    return a


# What can be neither sent nor, mostly, pickled.
NOT_SENT = {
    "mkldnn": lambda n: torch.ones(n).to_mkldnn(),
    "mkldnn among others": lambda n: {"x": [torch.ones(n), torch.ones(n).to_mkldnn()], "y": n},
    "mkldnn in an object": lambda n: Record("r", torch.ones(n).to_mkldnn()),
    "with a history": lambda n: torch.ones(n, requires_grad=True) * 2,
    "with a history, in an object": lambda n: Record("r", torch.ones(n, requires_grad=True) * 2),
    "sparse with a history": lambda n: torch.ones(n, requires_grad=True).to_sparse(),
    "a mapping proxy": lambda n: types.MappingProxyType({"a": 1}),
    "a memoryview": lambda n: memoryview(b"abc"),
}


def with_attribute(value, i):
    value.label = i
    return value


def few(n, i=0):
    """n numbers, beginning with i."""
    return torch.arange(float(n)) + i


# Samples of one batch, which default_collate makes into a batch or refuses.
SAMPLES = {
    "tensors": lambda n: [square(n) + i for i in range(4)],
    "0-d tensors": lambda n: [torch.tensor(1.5 * i) for i in range(4)],
    "tensors without elements": lambda n: [torch.zeros(0, 3)] * 4,
    "transposed": lambda n: [square(n).t() + i for i in range(4)],
    "channels last": lambda n: [channels_last(square(n)) for i in range(4)],
    "expanded": lambda n: [few(1, i).expand(n) for i in range(4)],
    "slices": lambda n: [few(n)[::2], few(n)[1::2]],
    "some without elements": lambda n: [few(n)[:0], few(n)],
    "float32 and float64": lambda n: [few(n), few(n).double()],
    "float64 and float32": lambda n: [few(n).double(), few(n)],
    "int32 and int64": lambda n: [few(n).int(), few(n).long()],
    "bool and int": lambda n: [few(n) > 1, few(n).long()],
    "half and bfloat16": lambda n: [few(n).half(), few(n).bfloat16()],
    "float and int": lambda n: [few(n), few(n).long()],
    "unequal shapes": lambda n: [few(n), few(n)[1:]],
    "unequal dimensions": lambda n: [few(n), few(n)[None]],
    "leaves": lambda n: [few(n).requires_grad_(), few(n).requires_grad_()],
    "one leaf": lambda n: [few(n), few(n).requires_grad_()],
    "parameters": lambda n: [torch.nn.Parameter(few(n)), torch.nn.Parameter(few(n))],
    "frozen parameters": lambda n: [torch.nn.Parameter(few(n), False), torch.nn.Parameter(few(n), False)],
    "sparse": lambda n: [few(n).to_sparse(), few(n).to_sparse()],
    "sparse after dense": lambda n: [few(n), few(n).to_sparse()],
    "subclasses": lambda n: [few(n).as_subclass(Labelled), few(n).as_subclass(Labelled)],
    "subclass second": lambda n: [few(n), few(n).as_subclass(Labelled)],
    "conj": lambda n: [torch.complex(few(n), few(n)).conj()] * 2,
    "one conj": lambda n: [torch.complex(few(n), few(n)), torch.complex(few(n), few(n)).conj()],
    "neg": lambda n: [torch.complex(few(n), few(n)).conj().imag] * 2,
    "tensor and array": lambda n: [few(n), few(n).numpy()],
    "array and tensor": lambda n: [few(n).numpy().copy(), few(n)],
    "tensor and number": lambda n: [few(n), 3],
    "arrays": lambda n: [np.arange(n * n) + i for i in range(4)],
    "arrays of two precisions": lambda n: [np.arange(n, dtype="f4"), np.arange(float(n))],
    "unequal arrays": lambda n: [np.arange(n), np.arange(n - 1)],
    "arrays in F order": lambda n: [np.asfortranarray(np.arange(n * n).reshape(n, n))] * 2,
    "slices of arrays": lambda n: [np.arange(n)[::2], np.arange(n)[1::2]],
    "reversed arrays": lambda n: [np.arange(n)[::-1], np.arange(n)[::-1]],
    "arrays of a subclass": lambda n: [np.arange(n * n).view(Array)] * 2,
    "memory maps": lambda n: [np.arange(n * n).view(np.memmap)] * 2,
    "arrays of objects": lambda n: [np.array([None] * n)] * 2,
    "masked arrays": lambda n: [np.ma.masked_array([1.0, 2.0], mask=[0, 1])] * 2,
    "array and list": lambda n: [np.arange(n), list(range(n))],
    "0-d arrays": lambda n: [np.array(1.5), np.array(2)],
    "numpy's floats": lambda n: [np.float32(1), np.float64(2), np.float16(3)],
    "numpy's ints": lambda n: [np.int8(1), np.int64(2), np.uint8(3)],
    "numpy's bools": lambda n: [np.bool_(i % 2) for i in range(4)],
    "numpy's dates": lambda n: [np.datetime64("2020"), np.datetime64("2021")],
    "numpy's strings": lambda n: [np.str_("a"), np.bytes_(b"b")],
    "floats": lambda n: [0.1, float("nan"), float("inf"), -0.0],
    "ints": lambda n: [0, -1, 2**62, -(2**63)],
    "bools": lambda n: [True, False, True, True],
    "ints and bools": lambda n: [1, True, 2, False],
    "ints and floats": lambda n: [1, 2.5],
    "floats and ints": lambda n: [1.5, 2],
    "bools and floats": lambda n: [True, 2.5],
    "ints of a subclass": lambda n: [1, objects.Whole(3)],
    "large ints": lambda n: [2**63, 1],
    "very large ints": lambda n: [1, 2**100],
    "complex numbers": lambda n: [1j, 2j],
    "texts": lambda n: ["a", "", "ü\ud800", "x" * n * n],
    "bytes": lambda n: [b"a", b"", b"\0\xff", b"y" * n * n],
    "None": lambda n: [None, None],
    "None after a float": lambda n: [1.0, None],
    "types of two kinds": lambda n: [1, "a"],
    "objects without a way to be collated": lambda n: [objects.Plain(), objects.Plain()],
    "dataclasses": lambda n: [Record("a", few(n)), Record("b", few(n))],
    "dicts": lambda n: [{"x": few(n, i), "y": i, "z": "s"} for i in range(4)],
    "dicts in two orders": lambda n: [dict([("a", i), ("b", 2)][:: 1 - 2 * i]) for i in range(2)],
    "a key too few": lambda n: [{"a": 1, "b": 2}, {"a": 1}],
    "a key too many": lambda n: [{"a": 1}, {"a": 1, "b": 2}],
    "dicts of other keys": lambda n: [{"a": 1}, {"b": 1}],
    "keys of many kinds": lambda n: [
        {1: few(n), None: i, (1, "a"): "s", False: 2.5, objects.Color.RED: i} for i in (0, 1)
    ],
    "lists": lambda n: [[i, 1.0, "s", few(n)] for i in range(4)],
    "lists of two lengths": lambda n: [[1, 2], [1]],
    "tuples": lambda n: [(few(n), i) for i in range(4)],
    "tuples of two kinds": lambda n: [(1, "a"), (2.5, "b")],
    "named tuples": lambda n: [Pair(few(n), {"k": i}) for i in range(4)],
    "named tuples in each other": lambda n: [Pair(Pair(i, i), few(n)) for i in range(2)],
    "ordered dicts": lambda n: [collections.OrderedDict(b=few(n), a=i) for i in range(2)],
    "default dicts": lambda n: [collections.defaultdict(list, a=few(n), b=[1.5, i]) for i in range(2)],
    "counters": lambda n: [collections.Counter(a=i, b=2) for i in range(2)],
    "user's dicts": lambda n: [collections.UserDict(a=few(n)) for _ in range(2)],
    "user's lists": lambda n: [collections.UserList([few(n), i]) for i in range(2)],
    "user's strings": lambda n: [collections.UserString("ab")] * 2,
    "chained maps": lambda n: [collections.ChainMap({"a": i}, {"b": few(n)}) for i in range(2)],
    "deques": lambda n: [collections.deque([few(n), i]) for i in range(2)],
    "mappings": lambda n: [Config({"a": few(n), "b": i}) for i in range(2)],
    "mappings that take no dict": lambda n: [Choosy(keys=["a"], values=[few(n)]) for _ in range(2)],
    "mutable mappings": lambda n: [with_attribute(Store({"a": few(n), "b": {"c": i}}), i) for i in range(2)],
    "sequences": lambda n: [Row([few(n), i]) for i in range(2)],
    "mutable sequences": lambda n: [with_attribute(Bag([few(n), {"a": i}]), i) for i in range(2)],
    "sequences that take no list": lambda n: [FixedRow(few(n), i) for i in range(2)],
    "dicts of a subclass": lambda n: [with_attribute(objects.DictWithMore(a=few(n)), i) for i in range(2)],
    "lists of a subclass": lambda n: [with_attribute(objects.ListWithMore([few(n)]), i) for i in range(2)],
    "texts of a subclass": lambda n: [objects.Text("a")] * 2,
    "ranges": lambda n: [range(i, i + 3) for i in range(2)],
    "sets": lambda n: [{1}, {2}],
    "empty containers": lambda n: [([], (), {}, "", b"")] * 2,
    "nested": lambda n: [{"a": [({"b": (i, few(n))},)], "c": []} for i in range(4)],
    "ten deep": lambda n: [deep("list", 5, deep("dict", 5, few(n, i))) for i in range(2)],
    "64 floats": lambda n: [{f"f{k}": k + i / 7 for k in range(64)} for i in range(4)],
    "many leaves": lambda n: [{f"k{k}": [k, str(k), (None, float(k)), b"x" * k, np.arange(k)] for k in range(50)}] * 2,
    "shared leaves": lambda n: [(lambda x: [x, x, {"k": x}])(few(n, i)) for i in range(2)],
    "strided nested tensors": lambda n: [nested("strided", (n, 2), 1)] * 2,
    "jagged tensors": lambda n: [nested("jagged", (n, 2), 1)] * 2,
    "meta": lambda n: [few(n).to("meta")] * 2,
    **{
        f"arrays of {name}": lambda n, name=name: [array(name, (n, n), i) for i in range(2)]
        for name in ("uint16", ">f8", "S5", "U3", "M8[ns]", "record")
    },
    **{f"{name}s": lambda n, name=name: [tensor(name, (n, n), i) for i in range(2)] for name in DTYPES},
}

BY_SQUARE = {
    **{f"layout: {name}": make for name, make in LAYOUTS.items()},
    **{f"layout, pickled: {name}": lambda x, make=make: Record("r", [make(x)] * 2) for name, make in LAYOUTS.items()},
    **{f"shared: {name}": make for name, make in SHARED.items()},
    **{f"shared, pickled: {name}": lambda x, make=make: Record("r", make(x)) for name, make in SHARED.items()},
    **{
        f"twice: {name}": lambda x, make=make: (lambda v: [v, {"again": v, (1, "k"): (v,)}])(make(x))
        for name, make in TWICE.items()
    },
    **{f"reduced: {name}": lambda x, make=make: (lambda v: [v, v])(make(x)) for name, make in REDUCED.items()},
    "reduced: all in an object": lambda x: Record("r", {name: make(x.clone()) for name, make in REDUCED.items()}),
}
CASES = {
    "every dtype": lambda n: {name: tensor(name, (n, n), 1) for name in DTYPES},
    "every shape": lambda n: [tensor("float32", shape, 1) for shape in [(), (0,), (2, 0, 3), (n,), (n, 1, n)]],
    "every dtype of arrays": lambda n: {name: array(name, (n, n), 1) for name in ARRAY_DTYPES},
    "every dtype of arrays in F order": lambda n: {name: array(name, (n, n), 1, "F") for name in ARRAY_DTYPES},
    "every dtype of arrays, read-only": lambda n: [frozen(array(name, (n, n), 1)) for name in ARRAY_DTYPES],
    "every dtype of arrays in an object": lambda n: Record("r", [array(name, (n, n), 1) for name in ARRAY_DTYPES]),
    "every atom": lambda n: [make() for make in objects.ATOMS.values()],
    "sparse tensors": lambda n: [sparse(layout, n) for layout in ("coo", "csr", "csc", "bsr", "bsc", "hybrid")],
    "tensors as keys": lambda n: (lambda t: {t: 1, (t, 2): t, "a": [t]})(square(n)),
    "one and its equals": lambda n: [1, [1, 2], (1, 2), [1, 2], (), (), "s", "s", None, 2.5, 2.5, True, [[], [[]]]],
    "a key again as a value": lambda n: (lambda key: [key, {key: 3}])((1, 2)),
    "containers within each other": lambda n: (lambda a: (lambda b: [b, a, b, a[0]])((a, a)))([square(n)]),
    "many lists": lambda n: (lambda many: [*many, many[3], many[90]])([[i] for i in range(100)]),
    "many leaves": lambda n: (lambda leaves: [leaves[7 * i % 300] for i in range(900)])(
        [torch.tensor(i) if i % 2 else np.array(i) for i in range(300)]
    ),
    **{name: lambda n, make=make: make(square(n)) for name, make in BY_SQUARE.items()},
    **{
        f"array: {name}": lambda n, make=make: [make(np.arange(float(n * n)).reshape(n, n))]
        for name, make in ARRAY_LAYOUTS.items()
    },
    **{f"array: {name}": make for name, make in ARRAYS.items()},
    **{f"array, pickled: {name}": lambda n, make=make: Record("r", make(n)) for name, make in ARRAYS.items()},
    **{f"not sent: {name}": make for name, make in NOT_SENT.items()},
    **{f"samples: {name}": make for name, make in SAMPLES.items()},
}
