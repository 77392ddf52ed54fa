"""Tensors beyond the plain ones, aliasing, and what a delivered tensor can do (P25, T5)."""

import io

import numpy as np
import pytest
import torch
from sample_data import Given, Images, Labelled, Record
from support import DataLoader, epoch, is_leased, raw_storage, same, send

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def labelled(n):
    tensor = torch.arange(float(n)).as_subclass(Labelled)
    tensor.label = {"name": "x", "also": torch.ones(3)}
    return tensor


def test_p25_storages_arrive():
    tensor = torch.arange(10)
    (got,) = send(tensor.untyped_storage())
    assert raw_storage(got) == raw_storage(tensor.untyped_storage())


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


@pytest.mark.parametrize("size", [1 << 10, 50_000])
def test_t5_a_long_text_that_comes_again_arrives_once(size):
    text, data = "x" * size, b"y" * size
    (got,) = send({"a": text, "b": [text, (data, text)], text: data})
    assert got == {"a": text, "b": [text, (data, text)], text: data}
    assert got["a"] is got["b"][0] is got["b"][1][1] and got["b"][1][0] is got[text]
    assert [*got][-1] is got["a"]


def test_t5_tensors_as_keys():
    key = torch.ones(2)
    (got,) = send({key: 1, (key, 2): key, "a": [key]})
    first, second, _ = got
    assert got["a"][0] is first is second[0] is got[second] and got[first] == 1 and torch.equal(first, key)


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
@pytest.mark.forks
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
    loader = DataLoader(Images(12, (3, 80, 80)), batch_size=2, num_workers=2)
    batches = [x for x, _ in epoch(loader)]
    assert all(map(is_leased, batches))
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


# Views that share an element share one storage; identity; a few rows of a large storage. Through real workers.

ALIASES = {
    "split": lambda x: list(x.split(3)),
    "unbind": lambda x: list(x.unbind(1)),
    "halves": lambda x: [x[::2], x[1::2]],
    "expanded": lambda x: [x[:1].expand(5, x.size(1)), x[0]],
    "channels_last": lambda x: [x.view(2, 2, -1, 2).to(memory_format=torch.channels_last), x],
    "slice": lambda x: [x, x[2:4]],
    "columns": lambda x: [x[:, 0], x[:, 1]],
    "dtypes": lambda x: [x, x.view(torch.int32), x.view(torch.uint8)],
    "windows": lambda x: [x.view(-1).unfold(0, 4, 2), x[:2]],
}


@pytest.mark.parametrize("n", [8, 200])
@pytest.mark.parametrize("make", ALIASES.values(), ids=ALIASES)
@pytest.mark.parametrize("wrap", [list, lambda views: Record("views", views)], ids=["plain", "pickled"])
def test_t5_writes_are_seen_through_every_view(make, n, wrap):
    sent = make(torch.arange(float(n * n)).reshape(n, n))
    (got,) = send(wrap(sent))
    got = got if isinstance(got, list) else got.data
    for g, s in zip(got, sent, strict=True):
        assert torch.equal(g, s) and g._base is None and g.dtype == s.dtype
    for g, s in zip(got, sent, strict=True):
        if g.dtype == torch.float32:
            g[(0,) * g.dim()] = s[(0,) * s.dim()] = -3
            assert all(torch.equal(a, b) for a, b in zip(got, sent, strict=True))


@pytest.mark.parametrize("n", [10, 50_000])
def test_t5_identity_of_every_kind(n):
    for twice in ([1, "a"], {"k": 1}, (1, "a"), torch.arange(n), np.arange(n), Record("r", torch.ones(n))):
        got = send([twice, {"again": twice}, (twice,)])[0]
        assert got[0] is got[1]["again"] is got[2][0] and type(got[0]) is type(twice)


@pytest.mark.parametrize("n", [10, 50_000])
def test_t5_parameters_share_memory(n):
    base = torch.arange(float(n))
    parameter, leaf = torch.nn.Parameter(base), base[n // 2 :].clone().requires_grad_()
    sent = {
        "p": parameter,
        "data": base[3:],
        "leaf": leaf,
        "same": parameter,
        "frozen": torch.nn.Parameter(base, False),
    }
    (got,) = send(sent)
    assert got["p"] is got["same"] and type(got["p"]) is torch.nn.Parameter and got["p"].requires_grad
    assert type(got["leaf"]) is torch.Tensor and got["leaf"].requires_grad and got["leaf"].is_leaf
    assert type(got["frozen"]) is torch.nn.Parameter and not got["frozen"].requires_grad
    got["data"].fill_(-1)
    assert got["p"].tolist() == got["frozen"].tolist() == [0, 1, 2] + [-1] * (n - 3)
    assert torch.equal(got["leaf"], leaf)


@pytest.mark.parametrize("n", [10, 50_000])
def test_t5_arrays_and_tensors_over_the_same_memory(n):
    array = np.arange(n)
    tensor = torch.from_numpy(array)
    for sent in ([array, tensor, tensor[2:], array[::-1]], Record("r", [array, tensor, tensor[2:], array[::-1]])):
        got = send(sent)[0]
        a, t, tail, reverse = got if isinstance(got, list) else got.data
        assert a.flags.writeable and a.tolist() == t.tolist() == reverse[::-1].tolist()
        t.fill_(-1)
        a[0] = 5
        assert set(tail.tolist()) == {-1} and a[1] == 1 and reverse[-1] == 0


def with_its_slices(samples):
    batch = torch.utils.data.default_collate(samples)
    return {"image": batch, "first": batch[:1], "column": batch[:, 0]}


@pytest.mark.parametrize("side", [4, 100])
def test_a_collated_batch_beside_its_slice(side):
    samples = [torch.full((3, side, side), float(i)) for i in range(16)]
    kept = epoch(DataLoader(Given(samples), batch_size=4, num_workers=2, collate_fn=with_its_slices))
    for i, batch in enumerate(kept):
        assert batch["image"].untyped_storage().nbytes() == 4 * 3 * side * side * 4
        assert torch.equal(batch["image"], torch.stack(samples[4 * i : 4 * i + 4]))
        batch["image"].add_(100)
        assert batch["first"].unique().tolist() == [100 + 4 * i]
        assert batch["column"].unique().tolist() == [100.0 + 4 * i + k for k in range(4)]


def test_groups_outlive_the_workers_part_by_part():
    base = torch.arange(100_000)
    kept = [(got[1], got[2].data) for got in send(*[[base, base[i:], Record("r", base[:-5])] for i in range(6)])]
    for i, (tail, head) in enumerate(kept):
        assert torch.equal(tail, base[i:]) and torch.equal(head, base[:-5])
        head.fill_(i)
        assert tail[0] == i and all(int(t[0]) == j + 1 for j, (t, _) in enumerate(kept[i + 1 :], i))


@pytest.mark.ours
@pytest.mark.parametrize("n", [40, 100_000])
def test_a_storage_amidst_the_memory_of_others_arrives_alone(n):
    memory = bytearray(range(40)) + bytes(n - 40)
    outer, inner = (
        torch.frombuffer(memory, dtype=torch.uint8),
        torch.frombuffer(memory, dtype=torch.uint8, offset=8, count=16),
    )
    (got,) = send([outer, inner.untyped_storage()])
    assert torch.equal(got[0], outer)
    assert got[1].nbytes() == 16 and list(got[1]) == list(range(8, 24))


def test_unaligned_views_in_shared_memory_arrive():
    raw = torch.arange(64, dtype=torch.uint8)
    sent = [raw[1:], raw[4:8].view(torch.float32)]
    (got,) = send(sent)
    assert all(torch.equal(a, b) for a, b in zip(got, sent, strict=True))
    got[0].zero_()
    assert got[1].item() == 0


@pytest.mark.parametrize("n", [4, 100_000])
def test_subclasses_alias_plain_tensors(n):
    tensor = labelled(n)
    plain = tensor.as_subclass(torch.Tensor)
    (got,) = send([tensor, plain[1:], tensor])
    assert got[0] is got[2] and type(got[0]) is Labelled
    got[1].fill_(-1)
    assert got[0].tolist() == [0] + [-1] * (n - 1)
