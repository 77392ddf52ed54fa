"""Tensors that need torch's reducers go through the arena, without a descriptor (P25, T5)."""

import warnings

import pytest
import torch
from sample_data import Given, Labelled, Record, untouched
from support import DataLoader, arena_bytes, open_files, outcomes, raw_storage, send
from torch.utils.data import Dataset

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MB = 1 << 20
SIZES = pytest.mark.parametrize("n", [4, 200])


def numbers(n, dtype=torch.float32):
    """n x n elements of any dtype: the same ones each time, from bytes that are valid in every dtype."""
    size = torch.empty(0, dtype=dtype).element_size()
    tensor = torch.empty(n, n, dtype=dtype)
    content = torch.arange(n * n * size).remainder(100).to(torch.uint8)
    tensor.untyped_storage().copy_(content.untyped_storage())
    return tensor


def sparse(n):
    return torch.where(numbers(n) > 0, torch.arange(float(n * n)).reshape(n, n), 0.0)


def labelled(n):
    tensor = numbers(n).as_subclass(Labelled)
    tensor.label = {"name": "x", "also": torch.arange(n * n)}
    return tensor


def nested(n, layout):
    return torch.nested.nested_tensor([numbers(n), numbers(n)[: n // 2], numbers(n)[:1]], layout=layout)


KINDS = {
    "subclass": labelled,
    "slice of a subclass": lambda n: numbers(n).as_subclass(Labelled)[1:, ::2],
    "subclass that requires grad": lambda n: labelled(n).requires_grad_(),
    "nested": lambda n: nested(n, torch.strided),
    "jagged": lambda n: nested(n, torch.jagged),
    "jagged with holes": lambda n: torch.nested.narrow(
        numbers(n), 1, torch.zeros(n, dtype=torch.int64), torch.arange(1, n + 1), layout=torch.jagged
    ),
    "coo": lambda n: sparse(n).to_sparse(),
    "coo, not coalesced": lambda n: torch.sparse_coo_tensor(
        torch.zeros(1, n * n, dtype=torch.int64), torch.ones(n * n), (3,)
    ),
    "hybrid coo": lambda n: sparse(n).to_sparse(1),
    "csr": lambda n: sparse(n).to_sparse_csr(),
    "csc": lambda n: sparse(n).to_sparse_csc(),
    "bsr": lambda n: sparse(n).to_sparse_bsr((2, 2)),
    "bsc": lambda n: sparse(n).to_sparse_bsc((2, 2)),
    "parameter": lambda n: torch.nn.Parameter(numbers(n)),
    "frozen parameter": lambda n: torch.nn.Parameter(numbers(n, torch.int64), requires_grad=False),
    "buffer": lambda n: torch.nn.Buffer(numbers(n)),
    "leaf that requires grad": lambda n: numbers(n).requires_grad_(),
    "meta": lambda n: torch.empty(n, n, device="meta")[1:, 2:],
    "meta parameter": lambda n: torch.nn.Parameter(torch.empty(n, n, device="meta")),
    "uninitialized parameter": lambda n: torch.nn.UninitializedParameter(),
    "module": lambda n: torch.nn.Linear(n, n),
    "packed sequence": lambda n: torch.nn.utils.rnn.pack_sequence([numbers(n), numbers(n)[: n // 2]]),
    "17 dimensions": lambda n: numbers(n).reshape((1,) * 15 + (n, n)).transpose(-1, -2),
}


def of_dtype(name):
    return lambda n: numbers(n, getattr(torch, name))


DTYPES = (
    "bfloat16 complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn_x2 int4 uint3 bits8"
)
KINDS |= {name: of_dtype(name) for name in DTYPES.split() if hasattr(torch, name)}


def parts(value):
    """The properties to compare of a value of any kind, and the dense tensors that it consists of."""
    if isinstance(value, torch.nn.Module):
        return [type(value)], list(value.parameters())
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return [type(value)], [value.data, value.batch_sizes]
    if isinstance(value, torch.nn.parameter.UninitializedTensorMixin):
        return [type(value), value.requires_grad, value.dtype], []
    about = [type(value), value.dtype, value.layout, value.device, value.requires_grad]
    if not isinstance(value, Labelled):
        about += [value.is_leaf]  # torch creates an instance of a subclass by an operation
    elif hasattr(value, "label"):
        about += [value.label["name"], value.label["also"].tolist()]
    if value.is_nested:
        dense = [value.values(), *value.unbind()]
    elif value.layout == torch.sparse_coo:
        about += [value.shape, value.is_coalesced()]
        dense = [value._indices(), value._values()]
    elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
        dense = [value.crow_indices(), value.col_indices(), value.values()]
    elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
        dense = [value.ccol_indices(), value.row_indices(), value.values()]
    else:
        dense = [value]
    return about, dense


def check(kind, got, sent):
    (about, dense), (expected_about, expected) = parts(got), parts(sent)
    assert about == expected_about, kind
    for a, b in zip(dense, expected, strict=True):
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device), kind
        if b.device.type == "meta":
            assert (a.stride(), a.storage_offset()) == (b.stride(), b.storage_offset()), kind
        elif b.untyped_storage().nbytes() == b.numel() * b.element_size():  # not every dtype can be compared
            assert a.stride() == b.stride(), kind
            assert raw_storage(a.untyped_storage()) == raw_storage(b.untyped_storage()), kind
        else:
            assert torch.equal(a, b), kind


@SIZES
def test_p25_each_kind_arrives(n):
    sent = {kind: make(n) for kind, make in KINDS.items()}
    for kind, got in zip(sent, send(*sent.values()), strict=True):
        check(kind, got, sent[kind])
    (got,) = send(Record("r", [sent], {"again": list(sent.values())}))
    for kind, again in zip(sent, got.more["again"], strict=True):
        assert got.data[0][kind] is again, kind
        check(kind, again, sent[kind])


class EachKind(Dataset):
    """Sample i is a value of kind i // 2, and the number of descriptors that the worker has."""

    def __len__(self):
        return 2 * len(KINDS)

    def __getitem__(self, i):
        return list(KINDS.values())[i // 2]((4, 200)[i % 2]), len(open_files())


@pytest.mark.ours
def test_p25_no_kind_takes_a_descriptor():
    iterator = iter(DataLoader(EachKind(), num_workers=1, batch_size=None, collate_fn=untouched, prefetch_factor=4))
    kept = [next(iterator)]
    before = len(open_files())
    for sample in iterator:
        kept.append(sample)
        assert len(open_files()) <= before
    assert {count for _, count in kept} == {kept[0][1]}


# Values that torch's loader gets wrong


LAZY = {
    "conj": lambda t: t.conj(),
    "neg": lambda t: t.conj().imag,
    "both": lambda t: torch._neg_view(t.conj()),
    "conj that requires grad": lambda t: t.conj().requires_grad_(),
    "conj parameter": lambda t: torch.nn.Parameter(t.conj()),
    "neg parameter": lambda t: torch.nn.Parameter(t.conj().imag),
    "frozen conj parameter": lambda t: torch.nn.Parameter(t.conj(), requires_grad=False),
    "conj of a slice": lambda t: t[1:].conj(),
}


@pytest.mark.ours
@SIZES
@pytest.mark.forks
def test_p25_conj_and_neg_views_of_each_kind_arrive_resolved(n):
    base = torch.complex(torch.arange(float(n * n)), torch.arange(float(n * n)) + 1)
    views = {kind: make(base) for kind, make in LAZY.items()}
    for kind, got in zip(views, send(*[{"x": t, "again": [t], "plain": base} for t in views.values()]), strict=True):
        sent, arrived = views[kind], got["x"]
        assert arrived is got["again"][0] and torch.equal(got["plain"], base), kind
        assert (type(arrived), arrived.requires_grad, arrived.is_leaf) == (type(sent), sent.requires_grad, True), kind
        assert not arrived.is_conj() and not arrived.is_neg(), kind
        assert torch.equal(arrived.detach(), sent.detach().resolve_conj().resolve_neg()), kind


QUANTIZED = {
    "per tensor": lambda x: torch.quantize_per_tensor(x, 0.5, 3, torch.quint8),
    "qint32": lambda x: torch.quantize_per_tensor(x, 0.01, 0, torch.qint32),
    "per channel": lambda x: torch.quantize_per_channel(
        x, torch.rand(len(x)) + 0.1, torch.arange(len(x)) % 9, 0, torch.qint8
    ),
    "per channel, axis 1": lambda x: torch.quantize_per_channel(
        x, torch.rand(x.size(1)) + 0.1, torch.zeros(x.size(1)), 1, torch.quint8
    ),
    "per channel, floats": lambda x: torch.quantize_per_channel(
        x, torch.rand(len(x)) + 0.1, torch.rand(len(x)), 0, torch.quint8
    ),
    "transposed": lambda x: torch.quantize_per_tensor(x, 0.5, 3, torch.quint8).t(),
    "slice": lambda x: torch.quantize_per_tensor(x, 0.5, 3, torch.quint8)[1:],
}


@pytest.mark.ours
@pytest.mark.skipif(not hasattr(torch, "quantize_per_tensor"), reason="this torch has no quantized tensors")
@SIZES
@pytest.mark.forks
def test_p25_quantized_tensors_arrive_right(n):
    tensors = {kind: make(torch.rand(n, n)) for kind, make in QUANTIZED.items()}
    for kind, (got, again) in zip(tensors, send(*[[t, t] for t in tensors.values()]), strict=True):
        sent = tensors[kind]
        assert got is again, kind
        assert (got.dtype, got.qscheme(), got.shape) == (sent.dtype, sent.qscheme(), sent.shape), kind
        assert torch.equal(got.int_repr(), sent.int_repr()) and torch.equal(got.dequantize(), sent.dequantize()), kind


NOT_SENT = {
    "mkldnn": lambda n: torch.rand(n).to_mkldnn(),
    "mkldnn among others": lambda n: {"x": [torch.rand(n), torch.rand(n).to_mkldnn()], "y": n},
    "mkldnn in an object": lambda n: Record("r", torch.rand(n).to_mkldnn()),
    "with a history": lambda n: torch.rand(n, requires_grad=True) * 2,
    "with a history, in an object": lambda n: Record("r", torch.rand(n, requires_grad=True) * 2),
    "sparse with a history": lambda n: torch.rand(n, requires_grad=True).to_sparse(),
    "without memory": lambda n: torch._efficientzerotensor((n,)),
    "functional": lambda n: torch._to_functional_tensor(torch.rand(n)),
}


@pytest.mark.ours
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no mkldnn")
@pytest.mark.forks
def test_p25_what_cannot_be_sent_is_an_error_and_never_a_hang():
    kinds = [kind for kind in NOT_SENT for _ in range(2)]
    samples = [NOT_SENT[kind](n) for kind, n in zip(kinds, [4, 100_000] * len(NOT_SENT), strict=True)]
    mixed = Given([x for sample in samples for x in (sample, 1)])
    loader = DataLoader(mixed, num_workers=1, batch_size=None, collate_fn=untouched, timeout=30)
    got = outcomes(iter(loader), 2 * len(samples) + 1)
    for kind, failed, sent in zip(kinds, got[::2], got[1::2], strict=False):
        assert failed[0] == "error" and "worker process 0" in failed[2] and sent == ("value", 1), kind
    assert got[-1] == ("end",)


# The part of a storage that is sent


EMPTY = {
    "middle": lambda x: x[5:5],
    "end": lambda x: x[10:],
    "rows": lambda x: x[3:, 4:4],
    "strided": lambda x: x[2:2:3].t(),
    "expanded": lambda x: x[4:4, :1].expand(0, 7),
    "another dtype": lambda x: x.view(torch.int16)[7:7],
    "that requires grad": lambda x: x[5:5].requires_grad_(),
    "parameter": lambda x: torch.nn.Parameter(x[6:6]),
}


@pytest.mark.parametrize("wrap", [list, lambda tensors: Record("r", tensors)], ids=["plain", "pickled"])
def test_an_empty_slice_keeps_its_offset(wrap):
    slices = {kind: make(torch.rand(10, 10)) for kind, make in EMPTY.items()}
    for kind, got in zip(slices, send(*[wrap([t, t, torch.zeros(0)]) for t in slices.values()]), strict=True):
        sent = slices[kind]
        got, again, other = got if isinstance(got, list) else got.data
        assert got is again and got is not other and other.storage_offset() == 0, kind
        assert (type(got), got.dtype, got.requires_grad) == (type(sent), sent.dtype, sent.requires_grad), kind
        assert (got.shape, got.stride()) == (sent.shape, sent.stride()), kind
        assert got.storage_offset() == sent.storage_offset(), kind
        assert got._base is None and got.is_leaf and torch.equal(got.detach().clone(), sent.detach()), kind
        assert torch.cat([got.flatten(), other]).numel() == 0 and got.detach().numpy().size == 0, kind


ROWS = {
    "plain": list,
    "pickled": lambda rows: Record("rows", rows),
    "subclass": lambda rows: [row.as_subclass(Labelled) for row in rows],
    "leaves": lambda rows: [row.requires_grad_() for row in rows],
    "parameters": lambda rows: [torch.nn.Parameter(row) for row in rows],
    "one view": lambda rows: [torch.as_strided(rows[0], (64, 16 * 1024), (1 << 22, 1))],
}


@pytest.mark.ours
@pytest.mark.parametrize("how", ROWS)
def test_64_rows_of_a_gigabyte_move_64_rows(how):
    huge = torch.empty(1 << 28)  # pages exist only where they are written to
    rows = [huge[i << 22 : (i << 22) + 16 * 1024].fill_(i) for i in range(64)]
    (got,) = send(ROWS[how](rows))
    got = got if isinstance(got, list) else got.data
    got = list(got[0]) if how == "one view" else got
    assert [t.detach().unique().tolist() for t in got] == [[i] for i in range(64)]
    # The rows have 4 MiB.
    assert arena_bytes() < 12 * MB
    assert sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in got}.values()) == 4 * MB


@pytest.mark.parametrize("n", [8, 20_000])
def test_t5_sparse_tensors_share_memory_with_their_values(n):
    csr = torch.eye(n // 4).to_sparse_csr() if n > 100 else torch.eye(n).to_sparse_csr()
    jagged = torch.nested.nested_tensor([torch.ones(n), torch.ones(3)], layout=torch.jagged)
    (got,) = send({"csr": csr, "values": csr.values(), "jagged": jagged, "flat": jagged.values()})
    got["values"].fill_(7)
    got["flat"].fill_(9)
    assert got["csr"].values().unique().tolist() == [7] and got["jagged"].values().unique().tolist() == [9]


@pytest.mark.parametrize("n", [8, 20_000])
def test_t5_overlapping_slices_of_a_subclass_share_memory(n):
    base = torch.arange(float(n)).as_subclass(Labelled)
    (got,) = send([base[: n // 2], base[n // 4 :], base.as_subclass(torch.Tensor)[1:]])
    assert [type(t) for t in got] == [Labelled, Labelled, torch.Tensor]
    got[2].fill_(-1)
    assert got[0].tolist() == [0] + [-1] * (n // 2 - 1) and set(got[1].tolist()) == {-1}
    got[1][0] = 5
    assert got[0][n // 4] == 5 and got[2][n // 4 - 1] == 5


@pytest.mark.ours
def test_p25_backward_hooks_that_do_not_travel_are_warned_of():
    leaf = torch.ones(3, requires_grad=True)
    leaf.register_hook(lambda gradient: gradient)
    # A warning that a worker raises as an error is the error of its batch, so it arrives here.
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "backward hook")
        with pytest.raises(UserWarning, match="will not be serialized"):
            send([leaf])
