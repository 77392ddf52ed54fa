"""Pitfalls that have caused bugs, and that no other file covers (T19 to T27)."""

import multiprocessing
import os
import socket

import pytest
import torch
from parity_table import drain, rows
from sample_data import Given, Numbers, untouched
from support import (
    BOTH,
    DataLoader,
    TorchDataLoader,
    epoch,
    in_arena,
    outcome,
    run_script,
    values,
)
from torch.utils.data import IterableDataset, default_collate


def test_t19_a_short_batch_behind_a_long_one_shows_nothing_of_it():
    """Reused memory has older bytes after the batch, so no storage may be larger than its tensor."""
    sizes = [100_000, 20_000, 60_000, 5, 99_999, 4096]
    samples = [torch.full((n,), float(n)) for n in sizes * 8]
    for batch, n in zip(DataLoader(Given(samples), num_workers=1, batch_size=None), sizes * 8, strict=True):
        whole = torch.empty(0).set_(batch.untyped_storage())
        assert whole.shape == (n,) and bool((whole == n).all())
        batch.fill_(-1)


@pytest.mark.ours
@pytest.mark.parametrize(
    "sample",
    [torch.zeros(300, 40), [torch.zeros(70, 100)], {"x": torch.zeros(5000, dtype=torch.float64)}],
    ids=["tensor", "list", "dict"],
)
@pytest.mark.forks
def test_t20_default_collate_writes_straight_into_the_arena(sample):
    def collate(samples):
        batch = default_collate(samples)
        tensor = batch if isinstance(batch, torch.Tensor) else next(iter(getattr(batch, "values", batch.__iter__)()))
        return batch, in_arena(tensor.data_ptr())

    for _, inside in epoch(DataLoader([sample] * 6, num_workers=2, batch_size=2, collate_fn=collate)):
        assert inside
    assert not in_arena(torch.zeros(70, 100).data_ptr())


class Descriptors(IterableDataset):
    """Its samples are descriptors, which a pickle alone cannot hold."""

    def __iter__(self):
        kept = []
        for i in range(4):
            near, far = multiprocessing.Pipe()
            near.send(i)
            kept.append(near)
            left, right = socket.socketpair()
            left.send(b"%d" % i)
            kept.append(left)
            yield far, right


@rows()
def test_t27_descriptors_arrive_while_their_worker_lives(DataLoader):
    """Also those of the last batches, whose worker has no more tasks."""
    received = []
    for pipe, end in drain(iter(DataLoader(Descriptors(), num_workers=2, batch_size=None, collate_fn=untouched)), 8):
        with pipe, end:
            received.append((pipe.recv(), end.recv(10)))
    yield sorted(received)


@pytest.mark.ours
def test_p20_open_files_do_not_run_out():
    """torch raises `Too many open files. Communication with the workers is no longer possible.`"""
    status, out, err = run_script("""
        import resource
        from sample_data import Images
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
        kept = list(DataLoader(Images(200, (1, 4, 4)), num_workers=1, batch_size=None, collate_fn=list))
        kept += list(DataLoader(Images(200, (3, 100, 100)), num_workers=1, batch_size=None, collate_fn=list))
        print(len(kept), len(os.listdir("/proc/self/fd")) < 40)
    """)
    assert (status, out) == (0, "400 True\n"), err


@pytest.mark.ours
def test_p25_delivered_memory_is_not_torchs_shared_memory():
    """An intended difference: no file in /dev/shm. `share_memory_` works, and a forked child sees the batch."""
    (batch,) = epoch(DataLoader(Given([torch.zeros(50_000)] * 2), num_workers=1, batch_size=2))
    assert not batch.is_shared() and not batch.untyped_storage().resizable()
    context = torch.multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(float(batch.add(1).sum())))
    child.start()
    assert queue.get() == 100_000.0
    child.join()
    assert batch.share_memory_().is_shared()


@pytest.mark.ours
@pytest.mark.parametrize("count, seen", [(16, 0.0), (4095, 0.0), (4096, 1.0), (100_000, 1.0)])
def test_p25_writes_of_a_forked_child_reach_the_parent_from_16_kib_on(count, seen):
    """As docs/compatibility.md says. With torch's loader they always do."""
    (batch,) = epoch(DataLoader(Given([torch.zeros(count)]), num_workers=1, batch_size=None))
    pid = os.fork()
    if pid == 0:
        batch.fill_(1.0)
        os._exit(0)
    os.waitpid(pid, 0)
    assert batch[0] == seen


class InheritsMain(Numbers):
    """Its samples are the value that a test sets on the class, which a spawned worker imports again."""

    written = False

    def __getitem__(self, i):
        return self.written


@pytest.mark.forks
def test_table_a_start_method_set_after_the_construction_counts(monkeypatch):
    monkeypatch.setattr(InheritsMain, "written", True)
    loader = DataLoader(InheritsMain(1), num_workers=1, batch_size=None)
    assert epoch(loader) == [True]
    before = torch.multiprocessing.get_start_method()
    torch.multiprocessing.set_start_method("spawn", force=True)
    try:
        assert epoch(loader) == [False]
    finally:
        torch.multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("timeout", [float("nan"), -1, 1e5, True, float("inf"), 1e300])
def test_p19_odd_timeouts_are_none_or_long(timeout):
    for cls in BOTH:
        loader = cls(Numbers(4), num_workers=1, batch_size=None)
        loader.timeout = timeout
        iterator, results = iter(loader), []
        if cls is TorchDataLoader and timeout > 1e6:  # torch's queue cannot convert it
            assert outcome(next, iterator)[1] is OverflowError
            iterator._shutdown_workers()
            continue
        while len(results) < 4:
            result = outcome(next, iterator)
            # True is one second, which a busy machine may take.
            if result != ("error", RuntimeError, "DataLoader timed out after True seconds"):
                results.append(result)
        assert results == [("value", i) for i in range(4)]
        assert outcome(next, iterator) == ("end",)


@pytest.mark.ours
def test_a_persistent_loader_that_was_shut_down_starts_new_workers():
    """With torch, it raises ValueError, as its queue is closed."""
    loader = DataLoader(Numbers(5), num_workers=2, batch_size=None, persistent_workers=True)
    for _ in range(3):
        assert values(epoch(loader)) == list(range(5))
        loader._iterator._shutdown_workers()
