"""default_collate in a worker writes into the arena, and so does code that allocates as it does (P25, T20, T25)."""

import concurrent.futures
import copy

import pytest
import torch
from sample_data import Given, Images, worker_id
from support import BOTH, DataLoader, arena_bytes, epoch, outcomes_of, same
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils import collate as torch_collate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MB = 1 << 20
SIZES = pytest.mark.parametrize("n", [4, 20_000])


class Strange:
    """A type that default_collate does not know."""


@pytest.mark.ours
def test_collates_that_fail_lose_no_block():
    # Each takes 256 KiB of the arena before torch finds that the shapes differ.
    rows = [torch.zeros(32 * 1024), torch.zeros(32 * 1024 + 1)]
    samples = Given([*(rows * 1000), *([torch.ones(32 * 1024)] * 2)])
    iterator = iter(DataLoader(samples, batch_size=2, num_workers=1))
    early = 0
    for i in range(1000):
        with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size, but got"):
            next(iterator)
        if i == 20:
            early = arena_bytes()
    assert torch.equal(next(iterator), torch.ones(2, 32 * 1024))
    assert arena_bytes() < early + MB, f"{early / MB:.1f} MiB after 20, {arena_bytes() / MB:.1f} MiB after 1,000"
    assert arena_bytes() < 4 * MB


# Entries of the table of collate functions


def collate_strange(batch, *, collate_fn_map=None):
    return "strange", len(batch), worker_id()


def collate_to_sum(batch, *, collate_fn_map=None):
    return sum(batch)


TABLE = torch_collate.default_collate_fn_map
COPY = dict(TABLE)


@pytest.fixture
def table():
    before = dict(TABLE)
    yield TABLE
    TABLE.clear()
    TABLE.update(before)


def replace_in_worker(worker):
    TABLE[torch.Tensor] = collate_to_sum


@SIZES
@pytest.mark.forks
def test_entries_of_users(table, n):
    """For an own type; in the place of torch's, made by the worker or before it starts."""
    x = torch.ones(n)
    table[Strange] = collate_strange
    (got,) = epoch(DataLoader([{"s": Strange(), "x": x}] * 2, batch_size=2, num_workers=1))
    assert got["s"] == ("strange", 2, 0) and torch.equal(got["x"], torch.ones(2, n))
    for batch in epoch(DataLoader([x] * 4, batch_size=2, num_workers=2, worker_init_fn=replace_in_worker)):
        assert torch.equal(batch, torch.full((n,), 2.0))
    assert TABLE[torch.Tensor] is torch_collate.collate_tensor_fn
    table[torch.Tensor] = table[float] = collate_to_sum
    (got,) = epoch(DataLoader([(x, 1.5, 2)] * 3, batch_size=3, num_workers=1))
    assert torch.equal(got[0], torch.full((n,), 3.0)) and got[1] == 4.5 and got[2].tolist() == [2, 2, 2]


def own_map(batch):
    return torch_collate.collate(batch, collate_fn_map={Strange: collate_strange, **COPY})


def without_map(batch):
    return torch_collate.collate([{"x": sample} for sample in batch], collate_fn_map={torch.Tensor: collate_to_sum})


def on_top(batch):
    return {"first": default_collate(batch[:1]), "all": default_collate(batch), "n": len(batch)}


def by_hand(batch):
    return torch_collate.collate_tensor_fn(batch, collate_fn_map=COPY)


@SIZES
@pytest.mark.parametrize("collate_fn", [own_map, without_map, on_top, by_hand, default_collate])
def test_collate_functions_that_call_torchs(collate_fn, n):
    samples = Given([torch.full((n,), float(i)) for i in range(6)])
    expected, own = (list(cls(samples, batch_size=3, num_workers=2, collate_fn=collate_fn)) for cls in BOTH)
    assert same(own, expected) and len(own) == 2
    if collate_fn is on_top:
        assert own[1]["all"][:, 0].tolist() == [3, 4, 5] and own[1]["first"].shape == (1, n)


# Storages from _new_shared


class Graphs:
    """Collates like PyG: sizes differ, and each result is concatenated into one shared storage."""

    def __init__(self, typed):
        self.typed = typed

    def __call__(self, batch):
        return {key: self.concatenate([graph[key] for graph in batch], dim) for key, dim in (("x", 0), ("edges", 1))}

    def concatenate(self, parts, dim):
        first, out = parts[0], None
        if get_worker_info() is not None:
            count = sum(part.numel() for part in parts)
            if self.typed:
                storage = first._typed_storage()._new_shared(count, device=first.device)
            else:
                storage = first.untyped_storage()._new_shared(count * first.element_size(), device=first.device)
            shape = list(first.size())
            shape[dim] = sum(part.size(dim) for part in parts)
            out = first.new(storage).resize_(*shape)
        return torch.cat(parts, dim, out=out)


def graph(i, n):
    return {"x": torch.full((i + 1, n), float(i)), "edges": torch.full((2, (i + 1) * n), i, dtype=torch.int64)}


@SIZES
@pytest.mark.parametrize("typed", [True, False])
def test_collaters_like_pygs(typed, n):
    graphs = Given([graph(i, n) for i in range(8)])
    expected = list(DataLoader(graphs, batch_size=4, collate_fn=Graphs(typed)))
    got = epoch(DataLoader(graphs, batch_size=4, num_workers=2, collate_fn=Graphs(typed)))
    assert same(got, expected)
    got[0]["x"].zero_()
    assert torch.equal(got[1]["x"], expected[1]["x"])


class Reserves:
    """Stacks into a storage that it has allocated beforehand."""

    def __init__(self, share):
        self.share = share

    def __call__(self, batch):
        count = int(sum(x.numel() for x in batch) * self.share)
        out = batch[0].new(batch[0]._typed_storage()._new_shared(count)).resize_(len(batch), *batch[0].size())
        return torch.stack(batch, out=out)


@SIZES
@pytest.mark.parametrize("share", [0, 0.5, 1, 2.5])
def test_storages_that_are_too_small_or_larger_than_needed(share, n):
    samples = Given([torch.full((n,), float(i)) for i in range(4)])
    loaders = [cls(samples, batch_size=2, num_workers=1, collate_fn=Reserves(share)) for cls in BOTH]
    expected, own = (outcomes_of(loader, 3) for loader in loaders)
    assert own == expected
    assert [kind for kind, *_ in own] == ["error" if share < 1 else "value"] * 2 + ["end"]


class Partly:
    """Fills a part of a storage, and sends rows of it with views of the rows."""

    def __call__(self, batch):
        storage = torch.UntypedStorage._new_shared(4 * MB, device="cpu")
        whole = torch.empty(0).set_(storage)
        rows = [whole[i * 100_000 : i * 100_000 + x.numel()].copy_(x) for i, x in enumerate(batch)]
        return {"rows": rows, "head": rows[0][:5], "copy": copy.copy(rows[1])}


@SIZES
def test_views_of_a_shared_storage(n):
    samples = Given([torch.full((n,), float(i)) for i in range(6)])
    for k, got in enumerate(epoch(DataLoader(samples, batch_size=3, num_workers=2, collate_fn=Partly()))):
        assert [t.unique().tolist() for t in got["rows"]] == [[3.0 * k + i] for i in range(3)]
        got["rows"][0].fill_(-1)
        assert got["head"].tolist() == [-1] * min(5, n) and got["copy"].unique().tolist() == [3 * k + 1.0]


# Threads of a worker


class InThreads:
    """Collates in eight threads at the same time, and keeps some of the results."""

    executor = None

    kept = ()

    def __call__(self, batch):
        if self.executor is None:
            self.executor = concurrent.futures.ThreadPoolExecutor(8)
        jobs = [self.executor.submit(self.part, batch, k) for k in range(16)]
        parts = [job.result() for job in jobs]
        self.kept = [*self.kept[-20:], (parts[0], int(parts[0]["x"].sum()))]
        assert all(int(part["x"].sum()) == total for part, total in self.kept)
        return parts

    def part(self, batch, k):
        images = [(image + k, int(i)) for image, i in batch]
        return default_collate([{"x": image, "i": i, "f": i / 7, "a": image.numpy()[0]} for image, i in images])


@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 80, 80)], ids=["small", "large"])
def test_default_collate_in_threads_of_the_worker(shape):
    dataset = Images(40, shape)
    loader = DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=InThreads(), persistent_workers=True)
    for _ in range(2):
        kept = []
        for number, parts in enumerate(loader):
            expected = torch.stack([dataset.image(2 * number), dataset.image(2 * number + 1)])
            for k, part in enumerate(parts):
                assert torch.equal(part["x"], expected + k) and torch.equal(part["a"], expected[:, 0] + k)
                assert part["i"].tolist() == [2 * number, 2 * number + 1]
            kept.append((parts[number % 16], number))
            del parts
        for part, number in kept:
            assert torch.equal(part["x"][1], dataset.image(2 * number + 1) + number % 16)
        assert number == 19
