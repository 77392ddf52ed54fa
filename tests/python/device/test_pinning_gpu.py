"""Pinning with a CUDA device: streams that read pinned memory, ranks, CUDA tensors from workers (`make test-gpu`)."""

import time

import pytest
import torch
from pinning_support import thread_name
from sample_data import Given, Images, Numbers, OnDevice
from support import DataLoader, TorchDataLoader, from_engine, outcomes_of, run_script, same, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ours,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def cuda():
    """Initializes CUDA, whose threads and descriptors then stay."""
    for index in range(torch.cuda.device_count()):
        torch.empty(1, pin_memory=True).to(f"cuda:{index}", non_blocking=True)
        torch.cuda.synchronize(index)


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
    from collections import OrderedDict

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


def test_t6_a_rank_makes_no_context_on_the_first_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device; this needs two")
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
