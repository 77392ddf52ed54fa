"""What delivered tensors can do, and what sending them costs; `parity/test_roundtrip.py` has their values (P25, T5)."""

import io
import warnings

import pytest
import torch
from roundtrip.cases import CASES, SIDES
from sample_data import Images, Labelled, Numbers, Record, untouched
from support import DataLoader, arena_bytes, epoch, is_leased, open_files, send

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MB = 1 << 20


@pytest.mark.parametrize("n", [10, 200_000])
def test_delivered_tensors_are_ordinary_tensors(n):
    (got,) = send({"x": torch.arange(float(n)), "y": torch.arange(n), "z": torch.zeros(100_000)})
    x, y = got["x"], got["y"]
    assert x._base is None and x.is_leaf
    file = io.BytesIO()
    torch.save(y, file)
    assert file.tell() < 8 * n + 4096 and y.untyped_storage().nbytes() == 8 * n
    file.seek(0)
    assert torch.equal(torch.load(file), torch.arange(n))
    assert x.add_(1)[0] == 1 and x.mul_(2)[1] == 4
    y[:] = 3
    assert y.sum().item() == 3 * n
    assert x.detach_() is x
    x.requires_grad_(True)
    (x * 2).sum().backward()
    assert torch.equal(x.grad, torch.full((n,), 2.0))
    with torch.no_grad():
        x.set_(torch.zeros(3))
    assert x.tolist() == [0, 0, 0]
    array = y.numpy()
    array[0] = 9
    assert y[0] == 9 and array.flags.writeable
    assert torch.from_dlpack(y).data_ptr() == y.data_ptr()
    y.share_memory_()
    assert y[0] == 9


@pytest.mark.ours
def test_t24_one_tensor_delivered_twice_is_two_tensors():
    shared = torch.arange(100_000).share_memory_()
    first, second = send(shared, shared)
    first.fill_(0)
    assert torch.equal(second, torch.arange(100_000))


def test_batches_are_independent():
    loader = DataLoader(Images(12, (3, 80, 80)), batch_size=2, num_workers=2)
    batches = [x for x, _ in epoch(loader)]
    assert all(map(is_leased, batches))
    copies = [x.clone() for x in batches]
    for i, x in enumerate(batches):
        x.fill_(i)
        assert all(torch.equal(batches[j], copies[j]) for j in range(i + 1, 6))


REDUCED = [name for name in CASES if name.startswith("reduced: ")]
WRONG_IN_TORCH = [name for name in REDUCED if name.startswith(("reduced: q", "reduced: conj", "reduced: neg"))]


@pytest.mark.ours
@pytest.mark.forks
@pytest.mark.parametrize("n", SIDES)
def test_p25_lazy_and_quantized_tensors_arrive_right(n):
    """torch's reducers lose the conjugation, the sign and the quantizer."""
    samples = [CASES[name](n) for name in WRONG_IN_TORCH]
    for name, (sent, _), (got, again) in zip(WRONG_IN_TORCH, samples, send(*samples), strict=True):
        assert got is again and (type(got), got.requires_grad) == (type(sent), sent.requires_grad), name
        if sent.is_quantized:
            assert got.qscheme() == sent.qscheme() and torch.equal(got.int_repr(), sent.int_repr()), name
            assert torch.equal(got.dequantize(), sent.dequantize()), name
        else:
            assert not got.is_conj() and not got.is_neg(), name
            assert torch.equal(got.detach(), sent.detach().resolve_conj().resolve_neg()), name


class EachKind(Numbers):
    """Sample i is a value that torch's reducers pickle, and the number of descriptors that the worker has."""

    def __getitem__(self, i):
        return CASES[REDUCED[i // 2]](SIDES[i % 2]), len(open_files())


@pytest.mark.ours
def test_p25_no_kind_takes_a_descriptor():
    iterator = iter(
        DataLoader(EachKind(2 * len(REDUCED)), num_workers=1, batch_size=None, collate_fn=untouched, prefetch_factor=4)
    )
    kept = [next(iterator)]
    before = len(open_files())
    for sample in iterator:
        kept.append(sample)
        assert len(open_files()) <= before
    assert {count for _, count in kept} == {kept[0][1]}


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


@pytest.mark.ours
def test_p25_backward_hooks_that_do_not_travel_are_warned_of():
    leaf = torch.ones(3, requires_grad=True)
    leaf.register_hook(lambda gradient: gradient)
    # A warning that a worker raises as an error is the error of its batch, so it arrives here.
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "backward hook")
        with pytest.raises(UserWarning, match="will not be serialized"):
            send([leaf])
