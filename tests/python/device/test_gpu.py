"""Pinning and `prefetch_to_device` with a CUDA device (`make test-gpu`). Without one, all tests are skipped."""

import gc
import time
from collections import OrderedDict

import pytest
import torch
from pinning_support import thread_name
from prefetch_support import prefetch
from sample_data import Given, Images, Numbers, OnDevice
from support import DataLoader, TorchDataLoader, from_engine, outcomes_of, run_script, rustloader, same, values

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


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this needs two CUDA devices")


# Pinning


class PinReport:
    def pin_memory(self):
        return thread_name(), torch.cuda.current_device()


def collate_report(samples):
    return PinReport()


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_pinned_and_right(persistent):
    options = {"batch_size": 4, "num_workers": 2, "persistent_workers": persistent}
    loader = DataLoader(Images(50), pin_memory=True, **options)
    expected = list(TorchDataLoader(Images(50), batch_size=4))
    for _ in range(3):
        with from_engine(13):
            got = list(loader)
        assert same(got, expected)
        assert all(x.is_pinned() and y.is_pinned() for x, y in got)
    if persistent:
        loader._iterator._shutdown_workers()


@pytest.mark.parametrize("plain", [True, False])
def test_t8_what_a_stream_still_reads_is_not_overwritten(plain):
    """The copies wait behind a slow kernel, each batch is dropped at once, and the loader keeps running."""
    dataset = Images(640, (3, 64, 64))
    collate_fn = None if plain else as_dict
    loader = DataLoader(dataset, batch_size=8, num_workers=4, pin_memory=True, collate_fn=collate_fn)
    streams = [torch.cuda.Stream() for _ in range(3)]
    copies = []
    for k, batch in enumerate(loader):
        with torch.cuda.stream(streams[k % 3]):
            torch.cuda._sleep(20_000_000)
            images, labels = batch.values() if isinstance(batch, dict) else batch
            copies.append((images.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True)))
        del batch, images, labels
    torch.cuda.synchronize()
    assert len(copies) == 80
    for k, (images, labels) in enumerate(copies):
        assert labels.tolist() == list(range(8 * k, 8 * k + 8))
        assert torch.equal(images.cpu(), torch.stack([dataset.image(i) for i in labels.tolist()])), f"batch {k}"


def as_dict(samples):
    # A subclass of dict: it is pickled, and pinned by torch's function.
    images, labels = zip(*samples, strict=True)
    return OrderedDict(images=torch.stack(images), labels=torch.tensor(labels))


def test_pinned_memory_can_be_kept_after_everything_else_has_ended():
    dataset = Images(40, (3, 100, 100))
    kept = [x for x, _ in DataLoader(dataset, batch_size=4, num_workers=2, pin_memory=True)]
    for x, _ in DataLoader(dataset, batch_size=4, num_workers=2, pin_memory=True):
        x.zero_()
    assert all(torch.equal(x[1], dataset.image(4 * k + 1)) and x.is_pinned() for k, x in enumerate(kept))


def test_t6_the_thread_works_on_the_device_of_its_maker():
    last = torch.cuda.device_count() - 1
    with torch.cuda.device(last):
        loader = DataLoader(Numbers(4), num_workers=2, pin_memory=True, collate_fn=collate_report)
        assert list(loader) == [("rl_pin", last)] * 4


@needs_two
def test_t6_a_rank_makes_no_context_on_the_first_device():
    status, out, err = run_script("""
    from sample_data import Images
    torch.cuda.set_device(1)
    for x, y in DataLoader(Images(40), batch_size=4, num_workers=2, pin_memory=True):
        x.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    print(torch._C._cuda_hasPrimaryContext(0), torch._C._cuda_hasPrimaryContext(1))
    """)
    assert (status, out) == (0, "False True\n"), err


def test_persistent_workers_over_many_epochs_and_breaks():
    loader = DataLoader(Images(64), batch_size=4, num_workers=2, pin_memory=True, persistent_workers=True)
    for taken in (16, 3, 0, 16, 7):
        for k, (_, (x, y)) in enumerate(zip(range(taken), loader, strict=False)):
            assert y.tolist() == list(range(4 * k, 4 * k + 4))
            x.to("cuda", non_blocking=True)
    loader._iterator._shutdown_workers()


class Growing:
    """Each tensor is larger than any block that the allocator has cached, and takes a while."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        time.sleep(0.05)
        return torch.full((1 << (20 + i),), i, dtype=torch.uint8)


def test_t31_a_graph_is_captured_while_the_thread_allocates():
    """In torch's loader the capture fails, and so does the pin thread."""
    iterator = iter(DataLoader(Growing(), batch_size=None, num_workers=2, prefetch_factor=4, pin_memory=True))
    next(iterator)
    static, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.add_(1)
        time.sleep(0.5)
    graph.replay()
    assert static.tolist() == [1] * 4
    assert [int(batch[-1]) for batch in iterator if batch.is_pinned()] == list(range(1, 8))


def test_cuda_tensors_from_spawned_workers():
    options = {"batch_size": None, "num_workers": 1, "multiprocessing_context": "spawn"}
    batches = [x.clone() for x in DataLoader(OnDevice(6), **options)]
    assert all(x.is_cuda for x in batches) and values(batches) == [[i] * 100 for i in range(6)]
    # torch cannot pin them: each batch is an error.
    answers, expected = (
        outcomes_of(cls(OnDevice(2), pin_memory=True, **options), 3) for cls in (DataLoader, TorchDataLoader)
    )
    assert answers == expected and [kind for kind, *_ in answers] == ["error", "error", "end"]


@pytest.mark.parametrize("persistent", [False, True])
def test_the_interpreter_exits_with_a_live_iterator(persistent):
    status, _, err = run_script(f"""
    from sample_data import Images
    loader = DataLoader(Images(400), batch_size=4, num_workers=2, pin_memory=True, persistent_workers={persistent})
    kept = [(x.to("cuda", non_blocking=True), y) for (x, y), _ in zip(loader, range(5))]
    another = iter(loader)
    next(another)
    """)
    assert (status, err) == (0, "")


def test_errors_name_the_device():
    index = torch.cuda.current_device()
    loader = DataLoader(Given([torch.ones(3), Refusing()]), batch_size=None, num_workers=1, pin_memory=True)
    iterator = iter(loader)
    assert next(iterator).is_pinned()
    with pytest.raises(ValueError, match=f"Caught ValueError in pin memory thread for device {index}."):
        next(iterator)


class Refusing:
    def pin_memory(self):
        raise ValueError("no")


# Prefetching


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


@needs_two
def test_two_devices_at_a_time():
    both = [prefetch(loader_of(80), f"cuda:{index}") for index in range(2)]
    for pair in zip(*both, strict=True):
        assert [images.device.index for images, _ in pair] == [0, 1]
        assert len({tuple(labels.tolist()) for _, labels in pair}) == 1
