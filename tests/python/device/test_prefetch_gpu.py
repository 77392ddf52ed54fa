"""`prefetch_to_device` with a CUDA device (`make test-gpu`). Without one, all tests are skipped."""

import gc

import pytest
import torch
from prefetch_support import prefetch
from sample_data import Images
from support import DataLoader, TorchDataLoader, rustloader, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ours,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]

SHAPE = (3, 64, 64)


@pytest.fixture(scope="module", autouse=True)
def cuda():
    """Initializes CUDA, whose threads and descriptors then stay."""
    for index in range(torch.cuda.device_count()):
        torch.empty(1, pin_memory=True).to(f"cuda:{index}", non_blocking=True)
        torch.cuda.synchronize(index)


def loader_of(count, cls=DataLoader, **kw):
    return cls(Images(count, SHAPE), batch_size=8, **({"num_workers": 2, "pin_memory": True} | kw))


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_batches_are_on_the_device_and_right(depth, pinned):
    batches = prefetch(loader_of(80, pin_memory=pinned), depth=depth)
    expected = list(loader_of(80, TorchDataLoader, num_workers=0, pin_memory=False))
    for _ in range(2):
        got = list(batches)
        assert all(tensor.device == batches.device for batch in got for tensor in batch)
        assert same([[tensor.cpu() for tensor in batch] for batch in got], [list(batch) for batch in expected])


def test_memory_is_not_used_again_while_a_delayed_stream_reads_it():
    sums = []
    for images, labels in prefetch(loader_of(400)):
        torch.cuda._sleep(20_000_000)
        sums.append((images.sum(dtype=torch.float64), labels))
        del images
    torch.cuda.synchronize()
    dataset = Images(400, SHAPE)
    for total, labels in sums:
        expected = torch.stack([dataset.image(i) for i in labels.tolist()]).to("cuda").sum(dtype=torch.float64)
        assert total.item() == pytest.approx(expected.item(), rel=1e-12)


def test_a_loop_that_keeps_nothing_allocates_no_more_than_promised():
    batches = prefetch(loader_of(400), depth=2)
    batch_bytes = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for images, labels in batches:
        batch_bytes = images.nbytes + labels.nbytes
        del images, labels
        # The allocator rounds a batch up by less than 1 MiB.
        assert torch.cuda.memory_allocated() - before <= 5 * (batch_bytes + (1 << 20))
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_the_consumer_may_use_another_stream():
    stream, got = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        for _, labels in prefetch(loader_of(80)):
            torch.cuda._sleep(5_000_000)
            got.append(labels.clone())
    torch.cuda.synchronize()
    assert torch.cat(got).tolist() == list(range(80))


def test_kept_batches_stay_as_they_are():
    kept = [labels for _, labels in prefetch(loader_of(160))]
    for _ in prefetch(loader_of(160)):
        pass
    torch.cuda.synchronize()
    assert torch.cat(kept).tolist() == list(range(160))


def test_events_measure_the_copies():
    batches = prefetch(loader_of(80))
    for images, labels in batches:
        del images, labels
    transfers = rustloader.stats(batches).transfers
    assert transfers.batches == 10 and transfers.seconds > 0 and transfers.pageable == ""
    assert 0.0 <= transfers.overlapped_share <= 1.0


def test_a_capture_is_refused_and_loses_nothing():
    iterator = iter(prefetch(loader_of(16)))
    first, graph = next(iterator), torch.cuda.CUDAGraph()
    static = first[0].clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        static.add_(1)
        with pytest.raises(RuntimeError, match="while a graph is being captured"):
            next(iterator)
    _, labels = next(iterator)
    assert labels.tolist() == list(range(8, 16))


def test_the_device_is_that_of_the_thread():
    last = torch.cuda.device_count() - 1
    with torch.cuda.device(last):
        batches = prefetch(loader_of(16))
    assert batches.device == torch.device("cuda", last)
    assert all(images.device == batches.device for images, _ in batches)


def test_two_devices_at_a_time():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device; this needs two")
    both = [prefetch(loader_of(80), f"cuda:{index}") for index in range(2)]
    for pair in zip(*both, strict=True):
        assert [images.device.index for images, _ in pair] == [0, 1]
        assert len({tuple(labels.tolist()) for _, labels in pair}) == 1
