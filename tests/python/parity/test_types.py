"""Every kind of batch arrives as it was made (P24, P25)."""

import collections
import dataclasses
import datetime
import enum
import fractions
import pickle

import numpy as np
import pytest
import torch
from sample_data import Array, Given, Numbers, Pair, Record
from support import DataLoader, TorchDataLoader, epoch, raw, raw_storage, same, send

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def clonable_dtypes():
    found = []
    for d in {v for v in vars(torch).values() if isinstance(v, torch.dtype)}:
        try:
            torch.empty(4, dtype=d).clone()
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        found.append(d)
    return sorted(found, key=str)


def random_tensor(shape, dtype):
    tensor = torch.empty(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(
        0,
        2 if dtype is torch.bool else 256,
        (tensor.untyped_storage().nbytes(),),
        dtype=torch.uint8,
        generator=generator,
    )
    tensor.untyped_storage().copy_(noise.untyped_storage())
    return tensor


def test_p25_every_dtype():
    dtypes = clonable_dtypes()
    assert len(dtypes) >= 14
    for shape in [(4,), (3, 2, 5), (100, 100), (), (0,), (2, 0, 3)]:
        tensors = [random_tensor(shape, d) for d in dtypes]
        for sent, got in zip(tensors, send(*tensors), strict=True):
            assert (got.dtype, got.shape, got.stride(), got.device) == (
                sent.dtype,
                sent.shape,
                sent.stride(),
                sent.device,
            )
            assert raw_storage(got.untyped_storage()) == raw_storage(sent.untyped_storage())


def test_p25_every_dtype_through_default_collate():
    tensors = []
    for d in clonable_dtypes():
        try:
            torch.stack([torch.zeros(6, dtype=d)] * 2)
            torch._utils._element_size(d)  # default_collate asks it in a worker, and it does not know all
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        tensors.append(random_tensor((6, 1000), d))
    for n, inner in ((6, 1000), (2, 5)):
        samples = [{str(t.dtype): t[i, :inner] for t in tensors} for i in range(n)]
        (got,) = epoch(DataLoader(Given(samples), batch_size=n, num_workers=1))
        for t in tensors:
            # Cloned, then compared as bytes: not every dtype can be compared or made contiguous.
            assert raw(got[str(t.dtype)]) == b"".join(raw(t[i, :inner].clone()) for i in range(n)), t.dtype


SAMPLES = {
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
    torch.as_tensor(SAMPLES["numpy bool"])
except TypeError:  # torch 2.6 with NumPy 2
    del SAMPLES["numpy bool"]


@pytest.mark.parametrize("kind", SAMPLES)
def test_p24_all_that_default_collate_gives(kind):
    # In a worker, default_collate's results differ a little: torch's loader is the reference.
    expected = list(TorchDataLoader(Given(SAMPLES[kind]), batch_size=3, num_workers=2))
    got = epoch(DataLoader(Given(SAMPLES[kind]), batch_size=3, num_workers=2))
    assert same(got, expected)


@pytest.mark.parametrize("kind", SAMPLES)
def test_p24_all_that_default_convert_gives(kind):
    expected = list(DataLoader(Given(SAMPLES[kind]), batch_size=None))
    got = epoch(DataLoader(Given(SAMPLES[kind]), batch_size=None, num_workers=2))
    assert same(got, expected)


def test_an_empty_dataset():
    for workers in (0, 1, 2):
        assert epoch(DataLoader(Numbers(0), num_workers=workers)) == []
        assert epoch(DataLoader(Numbers(0), num_workers=workers, batch_size=None)) == []
        loader = DataLoader(Numbers(3), num_workers=workers, batch_size=4, drop_last=True)
        assert epoch(loader) == epoch(loader) == []


class Colour(enum.Enum):
    RED = 1


def test_p25_any_picklable_object_arrives():
    objects = [
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
    got = send(*objects, workers=2)
    for sent, back in zip(objects, got, strict=True):
        assert type(back) is type(sent) and back == sent


def test_dataclasses_arrive():
    sent = Record("a", torch.arange(5), {"k": (torch.ones(2, 2), None)})
    (got,) = send(sent)
    assert isinstance(got, Record) and same(got, sent)
    assert dataclasses.asdict(got)["name"] == "a"


ARRAYS = {
    "plain": np.arange(10),
    "large": np.arange(1_000_000, dtype=np.float32).reshape(1000, 1000),
    "fortran": np.asfortranarray(np.arange(120.0).reshape(10, 12)),
    "large fortran": np.asfortranarray(np.arange(1_000_000.0).reshape(1000, 1000)),
    "0-d": np.array(3.5),
    "empty": np.zeros((0, 3), dtype=np.int8),
    "strided": np.arange(100)[::7],
    "large strided": np.arange(1_000_000)[::3],
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


@pytest.mark.parametrize("kind", ARRAYS)
def test_p25_numpy_arrays(kind):
    sent = ARRAYS[kind]
    (got,) = send(sent)
    assert type(got) is np.ndarray and got.shape == sent.shape
    assert got.dtype.newbyteorder("=") == sent.dtype.newbyteorder("=")
    assert np.array_equal(got, sent, equal_nan=got.dtype.kind in "fcM")
    if sent.flags.c_contiguous or sent.flags.f_contiguous:
        assert (got.flags.c_contiguous, got.flags.f_contiguous) == (
            sent.flags.c_contiguous,
            sent.flags.f_contiguous,
        )
    assert got.flags.writeable
    if got.nbytes < 1000:
        # It can be resized in place only if it owns its memory.
        assert got.flags.owndata
    if got.size:
        got[...] = got.flat[0]


def test_p25_numpy_subclasses():
    masked = np.ma.masked_array([1.0, 2.0, 3.0], mask=[0, 1, 0])
    got = send(np.arange(6).view(Array), masked, np.arange(100_000).view(Array))
    assert type(got[0]) is Array and got[0].tolist() == list(range(6))
    assert type(got[1]) is type(masked) and got[1].mask.tolist() == [False, True, False]
    assert type(got[2]) is Array and int(got[2].sum()) == sum(range(100_000))


def test_p25_numpy_identity_within_a_batch():
    array = np.arange(100_000)
    (got,) = send({"a": array, "b": array, "c": [array]})
    assert got["a"] is got["b"] is got["c"][0]


def test_many_leaves_of_many_kinds():
    sample = {f"k{i}": [i, str(i), (None, float(i)), b"x" * i, np.arange(i)] for i in range(1000)}
    got = send(sample, sample)
    assert same(got, [sample, sample])


def test_p25_a_large_batch_among_small_ones():
    tensors = [torch.full((n,), n, dtype=torch.int32) for n in (1, 3_000_000, 2, 10_000_000, 5, 1_000_000)]
    for sent, got in zip(tensors, send(*tensors, workers=2), strict=True):
        assert torch.equal(sent, got)


@pytest.mark.parametrize("size", [5, 40])
def test_numpy_orders_other_than_c_and_f_arrive_in_c_order_as_from_torch(size):
    base = np.arange(size**3).reshape(size, size, size)
    arrays = [base.transpose(1, 0, 2), base.T, base[::2], np.asfortranarray(base)]
    loader = DataLoader([arrays], num_workers=1, batch_size=None, collate_fn=lambda x: x)
    (got,) = loader
    for ours, sent in zip(got, arrays, strict=True):
        theirs = pickle.loads(pickle.dumps(sent, protocol=4))
        assert ours.strides == theirs.strides
        assert np.array_equal(ours, sent)
