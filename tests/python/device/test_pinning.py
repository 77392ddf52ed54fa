"""pin_memory=True: what arrives, in which memory, and which thread pins it (T6 to T8)."""

import importlib
import itertools

import pytest
import torch
from pinning_support import pinning, thread_name
from sample_data import Images, Numbers
from support import (
    TORCH_MODE,
    DataLoader,
    TorchDataLoader,
    arena_bytes,
    epoch,
    from_engine,
    same,
    threads_named,
    values,
)
from torch.utils.data import _utils

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
THREAD = "pt_data_pin" if TORCH_MODE else "rl_pin"
MB = 1 << 20


class PinReport:
    """Pinning it returns the name and the state of the thread that pins."""

    def pin_memory(self):
        return thread_name(), torch.get_num_threads(), torch.accelerator.current_device_index()


def collate_report(samples):
    return PinReport()


class Fields(Numbers):
    """Samples with two images and several small values."""

    def __getitem__(self, i):
        large = {name: torch.full((64, 64), float(i + k)) for k, name in enumerate("ab")}
        return large | {"label": i, "weight": torch.tensor(i / 2), "box": torch.arange(4) + i, "id": f"{i}"}


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_pinned_and_right(host, persistent, in_order):
    options = {"batch_size": 4, "num_workers": 2, "persistent_workers": persistent, "in_order": in_order}
    loader = DataLoader(Images(26), pin_memory=True, **options)
    expected = list(TorchDataLoader(Images(26), batch_size=4))
    for _ in range(3):
        with from_engine(7):
            got = list(loader)
        if not in_order:
            got.sort(key=lambda batch: int(batch[1][0]))
        assert same(got, expected)
        assert all(host.owns(x) and host.owns(y) for x, y in got)
    del got
    if persistent:
        loader._iterator._shutdown_workers()
    assert not host.live, "pinned memory was not freed"
    assert host.reused > 0, "no block was reused"


def test_only_small_tensors_share_a_storage(host):
    (batch,) = epoch(DataLoader(Fields(8), batch_size=8, num_workers=1, pin_memory=True))
    large = [batch[name].untyped_storage() for name in "ab"]
    small = [batch[name].untyped_storage() for name in ("label", "weight", "box")]
    assert [storage.nbytes() for storage in large] == [8 * 64 * 64 * 4] * 2
    assert all(storage.nbytes() < 16 * 1024 for storage in small)
    assert len({storage.data_ptr() for storage in large + small}) == (5 if TORCH_MODE else 3)
    ends = sorted((batch[name].data_ptr(), batch[name].nbytes) for name in batch if name != "id")
    assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(ends)), "tensors overlap"
    kept = batch["label"]
    del batch, large
    assert sum(memory.size for _, memory in host.live.values()) < 16 * 1024, "a label kept images pinned"
    assert torch.equal(kept, torch.arange(8))


def test_a_tensor_is_no_view_and_can_be_written_to(host):
    (batch,) = epoch(DataLoader(Fields(4), batch_size=4, num_workers=1, pin_memory=True))
    for name in ("a", "label"):
        tensor = batch[name]
        before = {other: batch[other].clone() for other in batch if other not in (name, "id")}
        assert tensor._base is None and not tensor.requires_grad
        tensor.detach_().add_(1)
        assert all(torch.equal(batch[other], before[other]) for other in before)


def test_t6_t7_the_thread_sets_its_device_and_takes_one_core(host):
    torch.accelerator.set_device_index(3)
    torch.set_num_threads(2)
    try:
        got = list(DataLoader(Numbers(4), num_workers=2, pin_memory=True, collate_fn=collate_report))
        assert torch.get_num_threads() == 2, "the calling thread's number of threads changed"
    finally:
        torch.set_num_threads(1)
    device = 3 if (THREAD, 3) in host.accelerator.set_by else 0  # torch 2.6 sets it only for devices that it knows
    assert TORCH_MODE or device == 3
    assert got == [(THREAD, 1, device)] * 4
    assert torch.accelerator.current_device_index() == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_without_an_accelerator_nothing_is_pinned_and_there_is_no_thread(workers):
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    iterator = iter(DataLoader(Numbers(3), num_workers=workers, pin_memory=True))
    batch = next(iterator)
    assert not hasattr(iterator, "_pin_memory_thread") and threads_named(THREAD) == 0
    assert batch.tolist() == [0] and not batch.is_pinned()
    assert values(iterator) == [[1], [2]]


def test_without_workers_torch_pins_in_the_calling_thread(host):
    batches = list(DataLoader(Images(4), batch_size=2, pin_memory=True))
    assert all(host.owns(x) and host.owns(y) for x, y in batches)
    assert host.threads == {thread_name()}


@pytest.mark.ours
@pytest.mark.parametrize("plain", [True, False])
def test_the_arena_is_given_back_at_once_whoever_keeps_the_batches(host, plain):
    collate_fn = None if plain else as_set
    loader = DataLoader(Images(120, (3, 256, 256)), batch_size=2, num_workers=2, pin_memory=True, collate_fn=collate_fn)
    kept, before = [], arena_bytes()
    for batch in loader:
        kept.append(batch)
    assert len(kept) == 60
    # 60 batches of 0.4 MB are kept. 4 were outstanding, and each worker keeps memory for its next ones.
    assert arena_bytes() - before < 8 * MB


def as_set(samples):
    return [torch.stack([x for x, _ in samples]), {0}]


@pytest.mark.parametrize("plain", [True, False])
def test_t8_a_copy_to_the_device_reads_what_was_delivered_however_early_the_batch_is_dropped(host, plain):
    dataset = Images(160, (3, 64, 64))
    collate_fn = None if plain else as_set
    loader = DataLoader(dataset, batch_size=4, num_workers=2, pin_memory=True, collate_fn=collate_fn)
    uses = []
    for k, batch in enumerate(loader):
        uses += [host.use(tensor) for tensor in batch if isinstance(tensor, torch.Tensor)]
        assert torch.equal(batch[0][3], dataset.image(4 * k + 3))
        del batch
        if k % 3 == 0:
            while len(uses) > 6:
                uses.pop(0).done()
    for use in uses:
        use.done()
    assert not host.live and not host.waiting


@pytest.mark.ours
def test_a_slow_allocator_does_not_let_a_worker_overwrite_what_is_still_to_be_copied():
    """The memory of the second tensor arrives late. The first one's block must not return to the worker before that."""
    with pinning(delay=0.01) as host:
        loader = DataLoader(Fields(160), batch_size=4, num_workers=1, pin_memory=True, prefetch_factor=4)
        for k, batch in enumerate(loader):
            for j, name in enumerate("ab"):
                expected = (torch.arange(4.0) + 4 * k + j).reshape(4, 1, 1).expand(4, 64, 64)
                assert torch.equal(batch[name], expected), f"batch {k}"
        assert host.threads <= {THREAD, thread_name()}


@pytest.mark.ours
def test_t12_a_function_that_was_replaced_before_rustloader_was_imported_is_called():
    from rustloader.device import pinning as device_pinning

    original = _utils.pin_memory.pin_memory
    try:
        _utils.pin_memory.pin_memory = lambda data, device=None: "theirs"
        importlib.reload(device_pinning)
        with pinning():
            assert epoch(DataLoader(Numbers(1), num_workers=1, pin_memory=True)) == ["theirs"]
    finally:
        _utils.pin_memory.pin_memory = original
        importlib.reload(device_pinning)
