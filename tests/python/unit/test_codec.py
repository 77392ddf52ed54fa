"""The codec alone: plain values arrive unchanged, everything else is left to pickle."""

from __future__ import annotations

import collections
import contextlib
import gc
import math
import random
import struct
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from pairwise import pairs

from rustloader._core import _roundtrip, is_plain_leaf

np = pytest.importorskip("numpy")

LIMIT = 16 * 1024
WAYS = pytest.mark.parametrize("exchange", [True, False], ids=["c-api", "capsule"])


def roundtrip(obj: Any, **options: Any) -> Any:
    plain, result = _roundtrip(obj, **options)
    assert plain, f"not plain: {type(obj)}"
    return result


def each(check: Callable[[Any], None], cases: Iterable[Any]) -> None:
    """Checks each case; an error gets a note that names the case."""
    for case in cases:
        try:
            check(case)
        except BaseException as error:
            error.add_note(f"case {case!r}")
            raise


def is_plain(obj: Any) -> bool:
    return _roundtrip(obj)[0]


def check_tensor(got: torch.Tensor, want: torch.Tensor) -> None:
    assert type(got) is torch.Tensor
    assert (got.dtype, got.shape, got.device) == (want.dtype, want.shape, want.device)
    assert not got.requires_grad
    assert got._base is None
    assert got.storage_offset() == (0 if want.numel() else want.storage_offset())
    size = want.element_size()
    extent = 1 + sum((n - 1) * s for n, s in zip(got.shape, got.stride(), strict=True)) if got.numel() else 0
    assert got.untyped_storage().nbytes() == extent * size
    assert torch.equal(got, want)


def raw_bytes(storage: torch.UntypedStorage) -> bytes:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def every_dtype() -> list[torch.dtype]:
    values = (getattr(torch, name) for name in dir(torch))
    return sorted({d for d in values if isinstance(d, torch.dtype)}, key=str)


def is_supported(name: str) -> bool:
    """True if this torch has the dtype and imports it through DLPack (torch 2.6 does not import float8)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hasattr(torch, name) and is_plain_leaf(torch.empty(1, dtype=getattr(torch, name)))


DLPACK = [
    name
    for name in (
        "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex32 "
        "complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
        "float8_e8m0fnu float4_e2m1fn_x2"
    ).split()
    if is_supported(name)
]
assert len(DLPACK) >= 16


@pytest.mark.parametrize("count", [0, 1, 6, 40_000])
def test_every_dtype(count: int) -> None:
    each(lambda name: check_dtype(name, count), DLPACK)


def check_dtype(name: str, count: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dtype = getattr(torch, name)
        size = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(0, 2 if name == "bool" else 256, (count * size,), dtype=torch.uint8)
        want = torch.empty(count, dtype=dtype)
        want.untyped_storage().copy_(raw.untyped_storage())
        got = roundtrip([want])[0]
    assert got.dtype is dtype
    assert got.shape == want.shape
    assert raw_bytes(got.untyped_storage()) == raw_bytes(raw.untyped_storage())


def test_other_dtypes_are_left_to_pickle() -> None:
    seen = 0
    for dtype in every_dtype():
        if str(dtype).removeprefix("torch.") in DLPACK:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tensor = torch.empty(4, dtype=dtype)
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        assert not is_plain(tensor), dtype
        seen += 1
    assert seen > 5  # int4 looks like int8 to DLPack


@WAYS
@pytest.mark.parametrize(
    "make",
    [
        lambda b: b.clone(),
        lambda b: b.t(),
        lambda b: b.t().contiguous(),
        lambda b: b[::2],
        lambda b: b[:, 1],
        lambda b: b[:, ::3],
        lambda b: b.t()[::2],
        lambda b: b[2:4, 1:3],
        lambda b: b[3],
        lambda b: b[3, 2],
        lambda b: b[0:0],
        lambda b: b[:, 0:0],
        lambda b: b[1:2],
        lambda b: b[:, 2:3],
        lambda b: b.reshape(2, 3, 2, 4).permute(2, 0, 3, 1),
        lambda b: b.reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
        lambda b: b[3].expand(5, 8),
        lambda b: b[:, :1].expand(6, 9),
        lambda b: b[::2, 3:4].expand(3, 9),
        lambda b: b[0, 0].expand(7),
        lambda b: b.reshape(1, 6, 1, 8),
        lambda b: b.unfold(1, 2, 2),
        lambda b: b.diagonal(),
        lambda b: b.double().imag if b.is_complex() else b.double(),
    ],
)
def test_layouts(make: Any, exchange: bool) -> None:
    base = torch.arange(48.0).reshape(6, 8)
    want = make(base)
    got = roundtrip({"x": want}, exchange=exchange)["x"]
    check_tensor(got, want)
    if want.numel() and is_dense(want):
        assert got.stride() == want.stride()
    got.fill_(1.0) if 0 not in got.stride() else None
    assert base[0, 1] == 1.0 and base[5, 7] == 47.0


def is_dense(t: torch.Tensor) -> bool:
    dims = sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1 and s)
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return False
        expected *= size
    return True


def test_random_views() -> None:
    each(check_random_view, range(60))


def check_random_view(seed: int) -> None:
    rng = random.Random(seed)
    shape = [rng.randint(1, 6) for _ in range(rng.randint(0, 4))]
    want = torch.arange(math.prod(shape), dtype=rng.choice([torch.int16, torch.float32, torch.int64])).reshape(shape)
    for _ in range(rng.randint(0, 4)):
        if want.dim() == 0:
            want = want.expand(3) if rng.random() < 0.3 else want.reshape(1)
            continue
        dim = rng.randrange(want.dim())
        step = rng.randrange(4)
        if step == 0:
            want = want.transpose(dim, rng.randrange(want.dim()))
        elif step == 1:
            want = want.narrow(dim, want.size(dim) // 2, want.size(dim) - want.size(dim) // 2)
        elif step == 2 and want.size(dim):
            want = want[(slice(None),) * dim + (slice(None, None, 2),)]
        elif want.size(dim):
            want = want.select(dim, want.size(dim) - 1)
    got = roundtrip((want,))[0]
    check_tensor(got, want)
    if want.numel() and is_dense(want):
        assert got.stride() == want.stride()


@pytest.mark.parametrize(
    "make", [lambda b: b, lambda b: b.t(), lambda b: b[::2], lambda b: b[:, ::3], lambda b: b.t()[3:-1]]
)
def test_large_layouts(make: Any) -> None:
    want = make(torch.arange(600.0 * 400).reshape(600, 400))
    got = roundtrip([want])[0]
    assert torch.equal(got, want)
    assert got._base is None
    assert got.untyped_storage().nbytes() == want.numel() * 4
    order = sorted(range(2), key=want.stride)
    assert sorted(range(2), key=got.stride) == order


@pytest.mark.parametrize("count", [10, 20_000])
def test_windows_keep_their_strides(count: int) -> None:
    base = torch.arange(float(count))
    want = base.unfold(0, 3, 1)
    got = roundtrip([want])[0]
    check_tensor(got, want)
    assert got.stride() == want.stride()
    got[0, 1] = -1
    assert got[1, 0] == -1 and base[1] == 1
    want = torch.zeros(4).as_strided((3, 2), (1, 1))
    check_tensor(roundtrip(want), want)


def test_large_expanded_copies_its_extent_once() -> None:
    want = torch.arange(3.0).expand(100_000_000_000, 3)
    got = roundtrip(want)
    assert (got.shape, got.stride(), got.untyped_storage().nbytes()) == (want.shape, (0, 1), 12)


class Sub(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore")
def test_special_tensors_are_left_to_pickle() -> None:
    x = torch.ones(3)
    c = torch.ones(3, dtype=torch.complex64)
    assert not is_plain(torch.ones(3, requires_grad=True))
    assert not is_plain(torch.ones(3, requires_grad=True) * 2)
    assert not is_plain(torch.nn.Parameter(x))
    assert not is_plain(x.as_subclass(Sub))
    assert not is_plain(c.conj())
    assert not is_plain(c.conj().imag)
    assert not is_plain(torch._efficientzerotensor((3,)))
    assert not is_plain(x.to_sparse())
    assert not is_plain(torch.ones(2, 2).to_sparse_csr())
    assert not is_plain(torch.nested.nested_tensor([x, x]))
    assert not is_plain(torch.nested.nested_tensor([x, x], layout=torch.jagged))
    assert not is_plain(torch.ones(3, device="meta"))
    assert not is_plain(torch._to_functional_tensor(x))
    assert not is_plain(torch.ones((1,) * 17))
    if torch.backends.mkldnn.is_available():
        assert not is_plain(x.to_mkldnn())
    assert is_plain(c.imag)
    assert is_plain(torch.ones(3, requires_grad=True).detach())
    assert _roundtrip(c.conj(), exchange=False) == (False, None)
    assert _roundtrip(x.to_sparse(), exchange=False) == (False, None)


def test_no_error_is_left_behind() -> None:
    for _ in range(3):
        is_plain(torch.ones(3).to_sparse())
        assert [].__len__() == 0


def test_inference_tensors() -> None:
    with torch.inference_mode():
        x = torch.ones(3)
    assert torch.equal(roundtrip(x), x)


@pytest.mark.parametrize("count", [5, 100_000])
def test_delivered_tensors_are_ordinary(count: int) -> None:
    x = torch.arange(float(count))
    got = roundtrip(x)
    got.add_(1)
    assert torch.equal(x, torch.arange(float(count)))
    assert got._version == 1
    view = got[1:]
    assert got.detach_() is got
    del got
    gc.collect()
    assert torch.equal(view, torch.arange(1.0, count) + 1)
    view.requires_grad_().sum().backward()
    assert view.grad is not None
    array = roundtrip(x).numpy()
    assert array.flags.writeable
    array[:] = 3
    assert array.sum() == 3 * count
    copied = roundtrip(roundtrip(x))
    assert torch.equal(copied, x)


def test_tensors_die_on_other_threads() -> None:
    held = [roundtrip(torch.full((n,), 7.0)) for n in (3, 50_000) for _ in range(50)]

    def drop() -> None:
        with contextlib.suppress(IndexError):  # the other thread may take the last one
            while True:
                assert held.pop().sum() > 0

    threads = [threading.Thread(target=drop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_memory_is_given_back() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    x = torch.zeros(4_000_000)
    a = np.zeros(4_000_000, np.float32)
    for exchange in (True, False):
        roundtrip([x, a], exchange=exchange)
        before = resident()
        for _ in range(20):
            roundtrip([x, a], exchange=exchange)
        # 640 MB passed through; the allocator may keep a few of the 16 MB pieces.
        assert resident() - before < 200 << 20


VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    1.5,
    -0.0,
    math.inf,
    1j,
    complex(-0.0, math.inf),
    "",
    "text",
    "süß 漢字 🙂",
    "\0",
    b"",
    b"\0\xff",
    b"x" * 100_000,
    [],
    (),
    {},
    [1, 2, 3],
    (1, 2),
    [1, 2.0],
    [1, True],
    [None, None],
    (5, "a"),
    [[1, 2], [3]],
    [(1,), ()],
    [1, None],
    {1: "a", "b": 2, None: 3, (1, 2): 4, 1.5: 5, b"k": 6, True + 1: 7},
    [[], {}, ()],
    {"z": 1, "a": 2},
    [list(range(1000))],
    [2**62] * 3,
]


@pytest.mark.parametrize("indices", [False, True])
def test_values(indices: bool) -> None:
    def check(value: Any) -> None:
        got = roundtrip(value, indices=indices)
        assert repr(got) == repr(value)
        assert types_of(got) == types_of(value)

    each(check, VALUES)


def types_of(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value), [types_of(v) for v in value]
    if type(value) is dict:
        return dict, [(types_of(k), types_of(v)) for k, v in value.items()]
    return type(value)


def test_nan_keeps_its_bits() -> None:
    nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000001234))[0]
    assert struct.pack("<d", roundtrip([nan])[0]) == struct.pack("<d", nan)


class MyInt(int):
    pass


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        2**63,
        [1, 2**64],
        -(2**63) - 1,
        "\ud800",
        MyInt(3),
        Point(1, 2),
        collections.OrderedDict(a=1),
        collections.defaultdict(int),
        object(),
        {1, 2},
        frozenset(),
        bytearray(b"x"),
        range(3),
        np.float32(1),
        np.int64(1),
        torch.float32,
        torch.Size([1]),
        torch.zeros(2).untyped_storage(),
        slice(1),
        ...,
        int,
        [1, MyInt(2)],
        {"a": {"b": object()}},
    ],
    ids=lambda v: repr(v).split(" at 0x")[0][:30],
)
def test_everything_else_is_left_to_pickle(value: Any) -> None:
    assert not is_plain(value)
    assert not is_plain([torch.zeros(100_000), value])
    assert not _roundtrip(value, indices=True)[0]


def test_indices_hold_no_leaves() -> None:
    assert not _roundtrip(torch.zeros(2), indices=True)[0]
    assert not _roundtrip([np.zeros(2)], indices=True)[0]


def test_identity() -> None:
    tensors = torch.zeros(3), torch.zeros(0), torch.zeros(50_000), torch.zeros(5).as_strided((3, 3), (1, 1))
    arrays = np.zeros(3), np.zeros(0), np.zeros(50_000)
    for twice in ([1], (1,), {"a": 1}, [], {}, ["a", [2.0]], *tensors, *arrays):
        got = roundtrip([twice, twice])
        assert got[0] is got[1] and type(got[0]) is type(twice), twice
        got = roundtrip({"a": [twice], "b": (2.0, twice), "c": {(1, "k"): twice}})
        assert got["a"][0] is got["b"][1] is got["c"][1, "k"]
    assert roundtrip([1, [1, 2], (1, 2)]) == [1, [1, 2], (1, 2)]
    key = (1, 2)
    got = roundtrip([key, {key: 3}])
    assert next(iter(got[1])) is got[0]
    inner = [torch.ones(2)]
    outer = (inner, inner)
    got = roundtrip([outer, inner, outer, inner[0]])
    assert got[0] is got[2] and got[0][0] is got[0][1] is got[1] and got[3] is got[1][0]


def test_identity_among_many() -> None:
    many = [[i] for i in range(100)]
    got = roundtrip([*many, many[3], many[90]])
    assert got[100] is got[3] and got[101] is got[90] and got[:100] == many
    assert len({id(v) for v in got}) == 100
    leaves = [torch.tensor(i) if i % 2 else np.array(i) for i in range(1000)]
    order = random.Random(2).choices(range(1000), k=3000)
    got = roundtrip([leaves[i] for i in order])
    first: dict[int, Any] = {}
    for i, value in zip(order, got, strict=True):
        assert int(value) == i and first.setdefault(i, value) is value
    assert roundtrip([(), (), "s", "s", 1, 1, None, 2.5, 2.5]) == [(), (), "s", "s", 1, 1, None, 2.5, 2.5]


def test_equal_batches_are_equal_in_index_batches() -> None:
    twice = [1, 2]
    got = roundtrip([twice, twice, (3,)], indices=True)
    assert got == [[1, 2], [1, 2], (3,)] and got[0] is got[1]


def check_group(got: list[torch.Tensor], want: list[torch.Tensor], nbytes: int) -> None:
    """The tensors share one storage of `nbytes` bytes, at the same distances as before."""
    low = min(t.data_ptr() for t in want)
    start = got[0].untyped_storage().data_ptr()
    for g, w in zip(got, want, strict=True):
        assert (g.dtype, g.shape, g.stride()) == (w.dtype, w.shape, w.stride())
        assert g._base is None and g.is_leaf and torch.equal(g, w)
        assert g.untyped_storage().data_ptr() == start and g.untyped_storage().nbytes() == nbytes
        assert g.data_ptr() - start == w.data_ptr() - low


@pairs(
    make=[
        lambda x: list(x.split(3)),
        lambda x: [x, *x.split(2)],
        lambda x: list(x.unbind(1)),
        lambda x: [x[::2], x[1::2]],
        lambda x: [x, x[1:3]],
        lambda x: [x[1:3], x],
        lambda x: [x[:1].expand(5, x.size(1)), x[0]],
        lambda x: [x[:, :1].expand(-1, 9), x],
        lambda x: [x.view(2, 2, -1, 2).to(memory_format=torch.channels_last).permute(0, 2, 3, 1), x.t(), x],
        lambda x: [x, x.view(torch.int32), x.view(torch.uint8), x.view(torch.float64)],
        lambda x: [x[0], x[:, 0], x.diagonal()],
        lambda x: [x.view(-1).unfold(0, 5, 2), x[3:5]],
    ],
    n=[8, 200],  # below the limit, above it
    adopt=[None, 4096],
    exchange=[True, False],
)
def test_aliasing(make: Any, n: int, adopt: int | None, exchange: bool) -> None:
    base = torch.arange(float(n * n)).reshape(n, n)
    want = make(base)
    inside = [t for t in want if base.data_ptr() <= t.data_ptr() < base.data_ptr() + 4 * n * n]
    got = roundtrip(want, exchange=exchange, adopt=adopt)
    assert all(torch.equal(g, w) and g._base is None for g, w in zip(got, want, strict=True))
    # A write to one is visible through the others, as it was before.
    for g, w in zip(got, want, strict=True):
        if 0 not in g.stride() and g.dtype == torch.float32:
            g.mul_(2) if not is_window(g) else g[0].fill_(7)
            w.mul_(2) if not is_window(w) else w[0].fill_(7)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert inside


def is_window(t: torch.Tensor) -> bool:
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) < t.numel()


@pytest.mark.parametrize("n", [8, 200])
def test_groups_have_one_storage_of_their_bytes(n: int) -> None:
    x = torch.arange(float(n * n)).reshape(n, n)
    for want in ([x, x[2:4]], [x[::2], x[1::2]], [x, x.view(torch.int16)], list(x.unbind(1))):
        check_group(roundtrip(want), want, 4 * n * n)
    middle = [x[2], x[2:4], x[3, 1:]]
    check_group(roundtrip([torch.ones(3), *middle])[1:], middle, 8 * n)
    got = roundtrip({"a": x[:2], "b": torch.zeros(n), "c": [x[1:3]], "d": x[4:], "e": np.arange(n)})
    assert got["a"].untyped_storage().data_ptr() == got["c"][0].untyped_storage().data_ptr()
    assert got["d"].untyped_storage().nbytes() == 4 * n * (n - 4)


def test_what_shares_no_element_is_copied_apart() -> None:
    x = torch.arange(400.0 * 100).reshape(400, 100)
    want = [x[:, 0], x[:, 1], x[:, 5:8], x[1::2, 9]]
    for g, w in zip(roundtrip(want), want, strict=True):
        check_tensor(g, w)
    got = roundtrip([*want, x[3, :2]])  # this view shares elements with others, so all stay together
    assert len({t.untyped_storage().data_ptr() for t in got}) == 1
    apart = [x[5:8], x[8:9], x[0:0], x[20:20]]
    for g, w in zip(roundtrip(apart), apart, strict=True):
        check_tensor(g, w)


def test_a_few_rows_move_a_few_rows() -> None:
    huge = torch.empty(1 << 28, dtype=torch.uint8)  # only the rows are touched
    rows = [huge[i << 20 : (i << 20) + 100].fill_(i) for i in range(64)]
    got = roundtrip([*rows, rows[3], rows[5][10:20]])
    assert got[67 - 3] is got[3]
    assert [t.untyped_storage().nbytes() for t in got] == [100] * 66
    assert got[65].tolist() == [5] * 10
    columns = torch.empty(1 << 16, 1 << 12, dtype=torch.uint8).fill_(0)
    got = roundtrip([columns[:10, 5], columns[:10, 6]])
    assert [t.untyped_storage().nbytes() for t in got] == [10, 10]


def test_arrays_are_copied_each_for_itself() -> None:
    a = np.arange(10)
    want = [a, a[::-1], a[2:5], torch.from_numpy(a), torch.from_numpy(a)[3:]]
    got = roundtrip(want)
    for g, w in zip(got, want, strict=True):
        assert g.tolist() == w.tolist()
    got[0][:] = 7
    assert got[1].tolist() == a[::-1].tolist() and got[3].tolist() == a.tolist()
    got[3].fill_(9)
    assert set(got[4].tolist()) == {9}


def test_unaligned_views_are_left_to_pickle() -> None:
    raw = torch.zeros(64, dtype=torch.uint8)
    assert is_plain([raw, raw[4:8].view(torch.float32)])
    assert not is_plain([raw[1:], raw[4:8].view(torch.float32)])


def test_random_aliases() -> None:
    each(check_random_aliases, range(40))


def check_random_aliases(seed: int) -> None:
    rng = random.Random(seed)
    base = torch.arange(float(rng.choice([60, 60 * 200]))).reshape(-1, 6)
    views = []
    for _ in range(rng.randint(2, 8)):
        view = base
        for _ in range(rng.randint(0, 3)):
            dim = rng.randrange(view.dim())
            size = view.size(dim)
            step = rng.randrange(3)
            if step == 0:
                view = view.transpose(0, dim)
            elif step == 1 and size > 1:
                start = rng.randrange(size)
                view = view.narrow(dim, start, rng.randint(1, size - start))
            else:
                view = view[(slice(None),) * dim + (slice(rng.randrange(size), None, rng.randint(1, 3)),)]
        views.append(view)
    got = roundtrip(views)
    for g, w in zip(got, views, strict=True):
        g.add_(1)
        w.add_(1)
        assert all(torch.equal(a, b) for a, b in zip(got, views, strict=True))


def nested(depth: int, make: Any = lambda v: [v]) -> Any:
    value: Any = None
    for _ in range(depth):
        value = make(value)
    return value


@pytest.mark.parametrize("make", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}])
def test_depth(make: Any) -> None:
    assert roundtrip(nested(64, make)) == nested(64, make)
    assert not is_plain(nested(65, make))
    assert not is_plain(nested(100_000, make))


def test_cycles() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert not is_plain(loop)
    loop *= 10
    assert not is_plain(loop)
    ring: dict[str, Any] = {}
    ring["a"] = (ring,)
    assert not is_plain(ring)


def test_ten_thousand_leaves() -> None:
    want = [torch.tensor(i) if i % 3 else np.array(i) for i in range(10_000)]
    got = roundtrip(want)
    assert [int(v) for v in got] == list(range(10_000))
    assert [type(v) for v in got] == [type(v) for v in want]


ARRAY_DTYPES = "? i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8 c8 c16 q Q g G".split()


@pytest.mark.parametrize("count", [0, 7, 30_000])
def test_array_dtypes(count: int) -> None:
    def check(dtype: str) -> None:
        want = np.arange(count).astype(dtype)
        check_array(roundtrip([want])[0], want)

    each(check, ARRAY_DTYPES)


def check_array(got: Any, want: Any) -> None:
    assert type(got) is np.ndarray
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.dtype.isnative and got.flags.writeable and got.flags.aligned
    assert np.array_equal(got, want)
    if want.flags.c_contiguous:
        assert got.flags.c_contiguous
    elif want.flags.f_contiguous:
        assert got.flags.f_contiguous
    if got.size:
        got[...] = 1
        assert (got == 1).all()


@pytest.mark.parametrize("scale", [1, 40])
@pytest.mark.parametrize(
    "make",
    [
        lambda a: a,
        lambda a: a.T,
        lambda a: np.asfortranarray(a),
        lambda a: a[::-1],
        lambda a: a[:, ::-1],
        lambda a: a[::-2, ::3],
        lambda a: a[:, 1],
        lambda a: a.reshape(2, 3, -1).transpose(1, 2, 0),
        lambda a: a.reshape(2, 3, -1).transpose(2, 0, 1)[::2],
        lambda a: np.broadcast_to(a[0], (5, a.shape[1])),
        lambda a: np.broadcast_to(a[:, :1], (6, 9)) if a.shape[0] == 6 else a[:, :1],
        lambda a: np.lib.stride_tricks.sliding_window_view(a, 3, axis=1),
        lambda a: a[0, 0:1].reshape(()),
        lambda a: a[0:0],
        lambda a: a[:, 0:0].T,
        lambda a: a[1:2].T,
        lambda a: a[None, :, None],
    ],
)
def test_array_layouts(make: Any, scale: int) -> None:
    base = np.arange(48.0 * scale * scale).reshape(6 * scale, 8 * scale)
    want = make(base)
    saved = base.copy()
    got = roundtrip({"a": want})["a"]
    check_array(got, want)
    assert np.array_equal(base, saved)


def test_arrays_read_only_unaligned_unpickled() -> None:
    import pickle

    frozen = np.arange(5)
    frozen.setflags(write=False)
    check_array(roundtrip(frozen), frozen)
    unaligned = np.frombuffer(b"\0" + np.arange(9.0).tobytes(), np.uint8)[1:].view("f8")
    assert not unaligned.flags.aligned
    check_array(roundtrip(unaligned), unaligned)
    field = np.zeros(5, [("a", "i1"), ("b", "f8")])["b"]
    check_array(roundtrip(field), field)
    loaded = pickle.loads(pickle.dumps(np.arange(3)))
    check_array(roundtrip(loaded), loaded)


class SubArray(np.ndarray):
    pass


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_special_arrays_are_left_to_pickle() -> None:
    a = np.zeros(3)
    for other in (
        a.astype(">f8"),
        a.astype(object),
        a.astype("M8[s]"),
        a.astype("m8[s]"),
        a.astype("S3"),
        a.astype("U3"),
        np.zeros(3, [("a", "i4")]),
        a.view(SubArray),
        np.ma.array(a),
        np.asmatrix(a),
        a.astype("V8"),
        np.zeros(3, np.dtype("f8", metadata={"a": 1})),
        np.zeros((1,) * 17),
    ):
        assert not is_plain(other), other.dtype


def test_large_arrays_outlive_everything() -> None:
    a = np.arange(100_000.0)
    got = roundtrip({"a": a, "b": [a * 2]})
    view = got["b"][0][10:20]
    alive = weakref.ref(got["a"])
    del got
    gc.collect()
    assert alive() is None
    assert view.tolist() == [2.0 * i for i in range(10, 20)]
    t = torch.from_numpy(roundtrip(a))
    gc.collect()
    assert t.sum() == a.sum()


BATCH = {
    "image": torch.arange(12.0).reshape(3, 4).t(),
    "big": torch.zeros(10_000),
    "array": np.arange(5),
    "bigarray": np.zeros((100, 100)).T,
    "rest": [1, 2.5, "text", b"bytes", None, (True, 1j), [1, 2, 3]],
    "bytes": bytes(range(256)) * 100,
}
SMALL, BIG = torch.arange(20), torch.zeros(5000, dtype=torch.int64)
TANGLED = {
    "small": [SMALL, SMALL[3:], SMALL.unfold(0, 3, 1), SMALL.view(torch.int32)],
    "big": (BIG[5:], BIG[::2], BIG, BATCH["image"]),
    "rest": [BATCH["rest"], BATCH["rest"], BATCH["image"], SMALL, BATCH["bytes"], BATCH["bytes"]],
}


@pytest.mark.parametrize("batch", [BATCH, TANGLED], ids=["plain", "tangled"])
def test_damaged_payloads_are_errors_or_values(batch: Any) -> None:
    each(lambda seed: check_damaged(batch, seed), range(20))


def check_damaged(batch: Any, seed: int) -> None:
    rng = random.Random(seed)
    errors = 0
    for _ in range(150):
        damage = [(rng.randrange(600), rng.randrange(256)) for _ in range(rng.randint(1, 3))]
        try:
            roundtrip(batch, damage=damage)
        except (RuntimeError, TypeError, ValueError, MemoryError, OverflowError):
            errors += 1
    assert errors


@pytest.mark.parametrize("small", [True, False])
def test_garbage_is_an_error(small: bool) -> None:
    rng = random.Random(1)
    for _ in range(2000):
        payload = bytes(rng.randrange(20 if small else 256) for _ in range(rng.randrange(60)))
        try:
            _roundtrip(payload, raw=True)
        except (RuntimeError, TypeError, ValueError, MemoryError, OverflowError):
            pass


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        b"\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x08\x01" * 1000 + b"\x00",
        b"\x0c\x08\x61\x05\x02\x09\0\0\0" + bytes(8),  # a leaf that does not exist
        b"\x0c\x08\x41\x80\x80\x40" + bytes(12),  # beyond the leaf
        b"\x0c\x08\x41\x01\0\0\0\0" + struct.pack("<Q", 2**64 - 8),  # the offset overflows
        b"\x0c\x08\x41\x01\0\0\0\0" + struct.pack("<Q", 4),  # unaligned
        b"\x08\x02" + (b"\x0c\x08\x41\x01" + bytes(12)) * 2,  # one leaf twice
        b"\x0c\x0d\x00" + bytes(16),  # a long double cannot be a tensor
        b"\x0a\x01\x08\x00\x00",  # a list as a key
        b"\x0e\x00",  # a reference to nothing
        b"\x08\x02\x0f\x00\x0e\x01",  # a reference to a mark that does not exist
        b"\x0f\x08\x01\x0e\x00",  # a reference to a value that is not complete
        b"\x08\x02\x0f\x0e\x00\x00",  # a mark on a reference to itself
        b"\x0f",
        b"\x0c\x08\x81\x01\x00\x00",  # a storage that does not exist
        b"\x10\x00\x08" + bytes(8) + b"\x0c\x08\x81\x02\x00\x00",  # beyond the storage
        b"\x10\x00\x10" + bytes(16) + b"\x0c\x08\x81\x01\x00\x04",  # an unaligned offset
        b"\x10\x00\x08" + bytes(8) + b"\x0c\x08\x81\x01\x00" + b"\xff" * 9 + b"\x01",
        b"\x10\x40\xff\xff\xff\xff\x07" + bytes(12) + b"\x00",  # a storage beyond the leaf
        b"\x10\x40\x08" + bytes(4) + struct.pack("<Q", 2**64 - 4) + b"\x00",
        b"\x10\x40\x08\x05" + bytes(11) + b"\x00",  # a storage in a leaf that does not exist
        b"\x11\x80\x80\x80\x01" + bytes(12),  # bytes beyond the leaf
        b"\x11\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" + bytes(12),
        b"\x11\x05" + bytes(4) + struct.pack("<Q", 2**64 - 4),
        b"\x11\x05\x01" + bytes(11),
    ],
)
def test_broken_payloads(payload: bytes) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        _roundtrip(payload, raw=True)


def test_a_view_inside_a_leaf() -> None:
    _, got = _roundtrip(b"\x0c\x08\x41\x04" + bytes(4) + struct.pack("<Q", 64), raw=True)
    assert (got.shape, got.dtype, got.storage_offset()) == ((4,), torch.int64, 0)
    assert got.untyped_storage().nbytes() == 32


@pytest.mark.parametrize("offset", [0, 64, 4096])
def test_adopted_leaves(offset: int) -> None:
    want = [
        torch.arange(10_000.0),
        torch.arange(600.0 * 40).reshape(600, 40).t(),
        np.arange(5000),
        torch.zeros(3),
    ]
    got = roundtrip(want, adopt=offset)
    for a, b in zip(got, want, strict=True):
        if isinstance(a, torch.Tensor):
            check_tensor(a, b)
            assert a.stride() == b.stride()
        else:
            check_array(a, b)
    with pytest.raises(RuntimeError, match="leaf 0"):
        _roundtrip(want[0], adopt=2)  # floats at an unaligned address


def test_what_is_not_aligned_is_copied_to_a_place_that_is() -> None:
    odd = torch.frombuffer(bytearray(40_001), dtype=torch.float32, offset=1)
    for want in (odd, [odd, odd[1:]], odd.numpy()):
        got = roundtrip(want, adopt=1)
        for a, b in zip(
            got if isinstance(want, list) else [got], want if isinstance(want, list) else [want], strict=True
        ):
            assert type(a) is type(b) and (a == b).all() and a.shape == b.shape


@pytest.mark.parametrize("n", [0, 1, 16 * 1024 - 1, 16 * 1024, 300_000])
@pytest.mark.parametrize("offset", [None, 0, 70])
def test_bytes_of_all_sizes_and_the_identity_of_large_ones(n: int, offset: int | None) -> None:
    some = bytes(i % 251 for i in range(n))
    got = roundtrip({"a": [some, some[1:]], "b": (some, torch.zeros(3))}, adopt=offset)
    assert got["a"] == [some, some[1:]] and got["b"][0] == some
    assert all(type(x) is bytes for x in got["a"])
    assert n < 16 * 1024 or got["b"][0] is got["a"][0]


def test_lease_buffer() -> None:
    array = roundtrip(np.arange(5000))
    buffer = array.base
    assert type(buffer).__name__ == "LeaseBuffer"
    assert len(buffer) == 40_000
    with memoryview(buffer) as view:
        assert (view.readonly, view.nbytes, view.format) == (False, 40_000, "B")
    storage = buffer.storage()
    assert (type(storage), storage.nbytes()) == (torch.UntypedStorage, 40_000)
    tensor = torch.empty(0, dtype=torch.int64).set_(storage)
    tensor[3] = -7
    assert array[3] == -7
    del array, buffer, storage
    gc.collect()
    assert tensor.sum() == sum(range(5000)) - 10


@WAYS
def test_deepcopy_save_share(exchange: bool, tmp_path: Any) -> None:
    import copy

    for count in (4, 50_000):
        got = roundtrip(torch.arange(count), exchange=exchange)
        assert torch.equal(copy.deepcopy(got), got)
        torch.save(got, tmp_path / "t.pt")
        assert torch.equal(torch.load(tmp_path / "t.pt"), got)
        assert (tmp_path / "t.pt").stat().st_size < count * 8 + 4096
        assert torch.equal(got.share_memory_(), torch.arange(count))
