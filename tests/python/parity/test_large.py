"""Large batches, many leaves, deep nesting, long index batches, sizes that vary (P25, T25)."""

import numpy as np
import pytest
import torch
from orders import Sums
from parity_table import Raised, drain, rows
from sample_data import Given, Numbers, Record, untouched
from support import DataLoader, arena_bytes, epoch, outcomes

GB = 1 << 30
MB = 1 << 20


def needs(gigabytes):
    with open("/proc/meminfo") as f:
        available = next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    if available < gigabytes * GB:
        pytest.skip(f"needs {gigabytes} GB of memory, {available / GB:.1f} are available")


class Huge(Numbers):
    """One sample of `n` bytes: the last is 2, the others are 0 or 1, but for a stretch in the middle of a tensor."""

    def __init__(self, n, kind):
        super().__init__(1)
        self.size, self.kind = n, kind

    def __getitem__(self, i):
        if self.kind == "tensor":
            tensor = torch.empty(self.size, dtype=torch.uint8)  # untouched pages take no memory
            tensor[:100], tensor[-1], tensor[self.middle()] = 1, 2, torch.arange(250, dtype=torch.uint8)
            return tensor
        content = b"\2".rjust(self.size, b"\1")
        return content if self.kind == "bytes" else Record("x", content)

    def middle(self):
        return slice(self.size // 2 - 100, self.size // 2 + 150)


@pytest.mark.alone  # `needs` reads the free memory at the start
@pytest.mark.timeout(400)
def test_a_tensor_of_3_gb():
    needs(8)
    dataset = Huge(3 * GB, "tensor")
    (tensor,) = epoch(DataLoader(dataset, batch_size=None, num_workers=1))
    assert tensor.shape == (3 * GB,) and tensor.dtype == torch.uint8
    assert tensor[:100].tolist() == [1] * 100 and tensor[-1] == 2
    assert tensor[dataset.middle()].tolist() == list(range(250))


@pytest.mark.alone
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["bytes", "dataclass"])
def test_a_bytes_object_of_2_3_gb(kind):
    needs(14)
    size = 23 * GB // 10
    (received,) = epoch(DataLoader(Huge(size, kind), batch_size=None, num_workers=1))
    if kind == "dataclass":
        assert type(received) is Record and received.name == "x"
        received = received.data
    assert type(received) is bytes and len(received) == size
    assert received[:1000] == b"\1" * 1000 and received[-1000:] == b"\1" * 999 + b"\2"
    assert received[size // 2 : size // 2 + 1000] == b"\1" * 1000


@pytest.mark.ours  # torch sends a descriptor for each
@pytest.mark.parametrize("kind", ["list", "dict"])
@pytest.mark.forks
def test_100_000_tensors_in_one_batch(kind):
    tensors = [torch.full((3,), i) for i in range(100_000)]
    batch = tensors if kind == "list" else {f"key {i}": x for i, x in enumerate(tensors)}
    (received,) = epoch(DataLoader(Given([batch]), batch_size=None, num_workers=1, collate_fn=untouched))
    assert type(received) is type(batch) and len(received) == 100_000
    if kind == "dict":
        assert list(received) == list(batch)
        received = list(received.values())
    assert torch.equal(torch.stack(received), torch.stack(tensors))


def nested(depth, group):
    """A 1 inside `depth` nested containers."""
    value = 1
    for _ in range(depth):
        value = {"k": value} if group is dict else group([value])
    return value


def depth_of(value):
    depth = 0
    while value != 1:
        value, depth = value["k"] if type(value) is dict else value[0], depth + 1
    return depth


class Nested(Numbers):
    """Sample i is nested `depths[i]` deep."""

    def __init__(self, depths, group):
        super().__init__(len(depths))
        self.depths, self.group = depths, group

    def __getitem__(self, i):
        return nested(self.depths[i], self.group)


@rows(group=[list, tuple, dict])
def test_nesting_is_delivered_or_an_error_of_its_batch_as_from_torch(DataLoader, group):
    loader = DataLoader(Nested([3, 100, 1000, 64, 100_000, 65], group), batch_size=None, num_workers=1)
    seen = [batch if isinstance(batch, Raised) else depth_of(batch) for batch in drain(loader)]
    assert seen[:2] == [3, 100] and seen[3] == 64 and seen[5] == 65
    yield from seen


@pytest.mark.ours  # torch hangs
@pytest.mark.parametrize("group", [list, tuple, dict])
def test_nesting_that_no_collate_function_looks_into_is_an_error_when_it_cannot_be_sent(group):
    depths = [63, 64, 65, 100, 100_000, 3]
    loader = DataLoader(Nested(depths, group), batch_size=None, num_workers=1, collate_fn=untouched)
    results = outcomes(iter(loader), 7)
    assert [depth_of(o[1]) for o in results if o[0] == "value"] == [63, 64, 65, 100, 3]
    assert results[4][:2] == ("error", RecursionError) and results[6] == ("end",)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_t25_index_batches_of_a_million(method):
    n = 1_000_000
    batches = [list(range(n)), tuple(range(n)), np.arange(n), range(n), [2**40] * n]
    loader = DataLoader(Sums(n), batch_sampler=batches, num_workers=1, collate_fn=tuple, multiprocessing_context=method)
    total = n * (n - 1) // 2
    expected = [(name, n, total) for name in ("list", "tuple", "ndarray", "range")]
    assert epoch(loader) == [*expected, ("list", n, 2**40 * n)]


class OfSizes(Numbers):
    """Sample i has a given number of bytes, all of one value."""

    def __init__(self, sizes):
        super().__init__(len(sizes))
        self.sizes = sizes

    def __getitem__(self, i):
        return torch.full((self.sizes[i],), i % 251, dtype=torch.uint8)


def memory_at_each_step(sizes):
    """The size of the arena in bytes at each batch of an epoch with two workers."""
    arena_sizes = []
    for i, x in enumerate(DataLoader(OfSizes(sizes), batch_size=None, num_workers=2)):
        assert len(x) == sizes[i] and x[0] == x[-1] == i % 251
        arena_sizes.append(arena_bytes())
    return arena_sizes


@pytest.mark.ours
def test_sizes_that_vary_a_thousandfold_take_little_more_than_the_batches_under_way():
    generator = torch.Generator().manual_seed(3)
    sizes = (20_000 * 1000 ** torch.rand(400, generator=generator)).long().tolist()
    # The delivered batch, and 2 x 2 prefetched ones: what torch holds.
    under_way = max(sum(sizes[i : i + 5]) for i in range(len(sizes)))
    assert max(memory_at_each_step(sizes)) < 2.5 * under_way + 4 * MB


@pytest.mark.ours
def test_the_memory_of_a_burst_is_given_back():
    sizes = [20_000] * 20 + [20_000_000] * 8 + [20_000] * 400
    memory = memory_at_each_step(sizes)
    # Each of the two workers has held at least one block.
    assert max(memory) > 30 * MB and memory[-1] < 8 * MB
