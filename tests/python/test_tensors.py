"""Tensors beyond the plain ones, aliasing, and what a delivered tensor can do (P25, T5)."""

import io

import numpy as np
import pytest
import torch
from sample_data import Given, Images, Labelled, Record
from support import DataLoader, epoch, outcomes, raw_storage, same

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def send(*samples, workers=1):
    return epoch(DataLoader(Given(list(samples)), num_workers=workers, batch_size=None, collate_fn=lambda x: x))


def labelled(n):
    tensor = torch.arange(float(n)).as_subclass(Labelled)
    tensor.label = {"name": "x", "also": torch.ones(3)}
    return tensor


@pytest.mark.parametrize("n", [4, 100_000])
def test_p25_subclasses_keep_their_attributes(n):
    (got,) = send({"t": labelled(n)})
    got = got["t"]
    assert type(got) is Labelled and torch.equal(got.as_subclass(torch.Tensor), torch.arange(float(n)))
    assert got.label["name"] == "x" and torch.equal(got.label["also"], torch.ones(3))


@pytest.mark.parametrize("n", [4, 100_000])
def test_p25_parameters_and_leaves_that_require_grad(n):
    parameter = torch.nn.Parameter(torch.arange(float(n)))
    frozen = torch.nn.Parameter(torch.arange(n), requires_grad=False)
    leaf = torch.arange(float(n), requires_grad=True)
    for sent, got in zip([parameter, frozen, leaf], send(parameter, frozen, leaf), strict=True):
        assert type(got) is type(sent)
        assert got.requires_grad == sent.requires_grad and got.is_leaf and got.grad is None
        assert torch.equal(got, sent)


def test_p25_sparse_layouts():
    dense = torch.tensor([[0.0, 1, 0], [2, 0, 3], [0, 0, 0]])
    tensors = [dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse().coalesce()]
    for sent, got in zip(tensors, send(*tensors), strict=True):
        assert got.layout == sent.layout and got.shape == sent.shape
        assert torch.equal(got.to_dense(), dense)


def test_p25_nested_tensors():
    parts = [torch.arange(6.0).reshape(2, 3), torch.arange(12.0).reshape(4, 3)]
    for layout in (torch.strided, torch.jagged):
        (got,) = send(torch.nested.nested_tensor(parts, layout=layout))
        assert got.is_nested and got.layout == layout
        assert all(torch.equal(a, b) for a, b in zip(got.unbind(), parts, strict=True))


def test_p25_storages_arrive():
    tensor = torch.arange(10)
    (got,) = send(tensor.untyped_storage())
    assert raw_storage(got) == raw_storage(tensor.untyped_storage())


@pytest.mark.ours
def test_p25_conj_and_neg_views_arrive_resolved():
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    got = send(tensor.conj(), tensor.conj().imag)
    assert torch.equal(got[0], torch.tensor([1 - 2j, 3 + 1j])) and not got[0].is_conj()
    assert torch.equal(got[1], torch.tensor([-2.0, 1.0])) and not got[1].is_neg()


@pytest.mark.ours
def test_p25_quantized_tensors_arrive_right_or_as_an_error():
    try:
        tensor = torch.quantize_per_tensor(torch.arange(5.0), 0.5, 3, torch.quint8)
    except (AttributeError, RuntimeError):
        pytest.skip("this torch has no quantized tensors")
    loader = DataLoader(Given([tensor, torch.tensor(1)]), num_workers=1, batch_size=None, collate_fn=lambda x: x)
    iterator = iter(loader)
    try:
        got = next(iterator)
    except Exception as e:
        assert "worker" in str(e)
    else:
        assert torch.equal(got.dequantize(), torch.arange(5.0))
    assert next(iterator).item() == 1


@pytest.mark.ours
def test_p25_an_mkldnn_tensor_is_an_error():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no mkldnn")
    loader = DataLoader(
        Given([torch.rand(3).to_mkldnn(), torch.tensor(1)]),
        num_workers=1,
        batch_size=None,
        collate_fn=lambda x: x,
    )
    got = outcomes(iter(loader), 3)
    assert got[0][0] == "error" and got[1:] == [("value", 1), ("end",)]


@pytest.mark.ours
def test_p25_a_tensor_with_a_history_is_an_error():
    loader = DataLoader(
        Given([torch.ones(3, requires_grad=True) * 2, torch.tensor(1)]),
        num_workers=1,
        batch_size=None,
        collate_fn=lambda x: x,
    )
    got = outcomes(iter(loader), 3)
    assert got[0][0] == "error" and got[1:] == [("value", 1), ("end",)]


@pytest.mark.parametrize("n", [8, 100_000])
def test_t5_identity_and_aliasing_within_a_batch(n):
    base = torch.arange(n)
    sent = {
        "a": base,
        "same": base,
        "head": base[: n // 2],
        "tail": base[n // 4 :],
        "other": base.clone(),
        "record": Record("r", base),
    }
    (got,) = send(sent)
    assert got["a"] is got["same"] is got["record"].data and got["a"] is not got["other"]
    assert all(torch.equal(got[k], sent[k]) for k in sent if k != "record")
    got["a"].fill_(7)
    assert set(got["head"].tolist()) == set(got["tail"].tolist()) == {7}
    assert torch.equal(got["other"], torch.arange(n))
    got["tail"].zero_()
    assert got["a"][-1] == 0 and got["a"][0] == 7


def test_t5_views_without_a_common_element_arrive_right():
    base = torch.arange(100_000).reshape(1000, 100)
    sent = {"row": base[3], "column": base[:, 3], "grid": base[::2, ::2], "rest": base[1::2, 1::2]}
    (got,) = send(sent)
    for key in sent:
        assert torch.equal(got[key], sent[key])


@pytest.mark.parametrize("big", [False, True])
def test_p25_dense_layouts_keep_their_strides(big):
    n = 40 if big else 2
    base = torch.arange(n * 3 * n * n, dtype=torch.float32).reshape(n, 3, n, n)
    sent = [
        base,
        base.permute(3, 1, 0, 2),
        base.to(memory_format=torch.channels_last),
        base.transpose(0, 3),
        base[:1].expand(5, 3, n, n),
        torch.tensor(1.0).expand(4, 4),
        base.unsqueeze(0),
        base.reshape(-1)[5:],
    ]
    for s, g in zip(sent, send(*sent), strict=True):
        assert g.stride() == s.stride() and torch.equal(s, g)


@pytest.mark.parametrize("n", [10, 200_000])
def test_delivered_tensors_are_ordinary_tensors(n):
    (got,) = send({"x": torch.arange(float(n)), "y": torch.arange(n)})
    x, y = got["x"], got["y"]
    assert x._base is None and x.is_leaf
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


@pytest.mark.parametrize("n", [10, 200_000])
def test_the_file_of_a_delivered_tensor_is_as_small_as_the_tensor(n):
    (got,) = send({"x": torch.arange(n), "y": torch.zeros(100_000)})
    file = io.BytesIO()
    torch.save(got["x"], file)
    assert file.tell() < 8 * n + 4096
    file.seek(0)
    assert torch.equal(torch.load(file), torch.arange(n))
    assert got["x"].untyped_storage().nbytes() == 8 * n


def test_a_few_rows_of_a_large_tensor():
    base = torch.arange(4_000_000).reshape(1000, 4000)
    sent = {"rows": base[10:14], "row": base[500], "column": base[:, 7]}
    (got,) = send(sent)
    assert all(torch.equal(got[k], sent[k]) for k in sent)


@pytest.mark.ours
def test_10_000_leaves_in_one_batch():
    sent = [{"i": torch.tensor(i), "v": torch.arange(i % 5)} for i in range(5000)]
    (got,) = send(sent)
    assert same(got, sent)
    (got,) = epoch(
        DataLoader(Given([{f"k{i}": torch.tensor(float(i)) for i in range(10_000)}] * 2), batch_size=2, num_workers=1)
    )
    assert [t.tolist() for t in got.values()] == [[float(i)] * 2 for i in range(10_000)]


@pytest.mark.ours
def test_t24_one_tensor_delivered_twice_is_two_tensors():
    shared = torch.arange(100_000).share_memory_()
    first, second = send(shared, shared)
    first.fill_(0)
    assert torch.equal(second, torch.arange(100_000))


def test_batches_are_independent():
    loader = DataLoader(Images(12, (3, 50, 50)), batch_size=2, num_workers=2)
    batches = [x for x, _ in epoch(loader)]
    copies = [x.clone() for x in batches]
    for i, x in enumerate(batches):
        x.fill_(i)
        assert all(torch.equal(batches[j], copies[j]) for j in range(i + 1, 6))


def test_a_numpy_view_keeps_the_memory():
    (got,) = send(torch.arange(100_000))
    view = got[5:].numpy()
    del got
    assert int(view[0]) == 5 and int(view.sum()) == sum(range(5, 100_000))
    assert isinstance(view, np.ndarray)
