"""`stats` of a loader whose batches `prefetch_to_device` copies, on a device without hardware (`standin.py`)."""

import dataclasses
import gc

import pytest
import torch
from prefetch_support import prefetch, tensors
from sample_data import Images
from support import DataLoader, TorchDataLoader, rustloader

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.metrics import transfers


@dataclasses.dataclass
class Sample:
    x: torch.Tensor


def test_a_stream_that_has_nothing_else_to_do_waits_for_each_copy(device):
    batches = prefetch(tensors(3), depth=1)
    for batch in batches:
        # First the program's stream runs, until it waits for the copy; then the copy runs, which takes 1 s.
        device.run(device.default)
        device.run_all()
        del batch
    counts = rustloader.stats(batches).transfers
    assert counts == rustloader.TransferStats(
        batches=3, bytes=3 * 32, seconds=3.0, waited_seconds=counts.waited_seconds
    )
    # The copy of the third batch was done before it was delivered.
    assert counts.waited_seconds == 2.0 and counts.overlapped_share == pytest.approx(1 / 3)


def test_a_stream_that_is_busy_waits_for_no_copy(device):
    assert rustloader.TransferStats(batches=3, bytes=9).overlapped_share is None
    batches = prefetch(tensors(4))
    for batch in batches:
        device.run(device.streams[1])
        device.read(batch, lambda values: setattr(device, "time", device.time + 10))
        del batch
    device.run_all()
    counts = rustloader.stats(batches).transfers
    assert (counts.batches, counts.seconds, counts.waited_seconds, counts.overlapped_share) == (4, 4.0, 0.0, 1.0)


def test_only_copies_that_are_done_and_delivered_count(device):
    batches = prefetch(tensors(6), depth=3)
    iterator = iter(batches)
    for _ in range(3):
        next(iterator)
    assert rustloader.stats(batches).transfers == rustloader.TransferStats()
    device.run_all()
    next(iterator)
    assert rustloader.stats(batches).transfers.batches == 3
    assert device.copies > 4
    del iterator
    assert rustloader.stats(batches).transfers.batches == 4
    # The next loop finds that the abandoned copies are done. Its own first batch counts.
    device.run_all()
    next(iter(batches))
    assert rustloader.stats(batches).transfers.batches == 5


def test_a_loader_counts_the_copies_of_all_its_prefetchers(device):
    loader = DataLoader(Images(8), batch_size=2, num_workers=1)
    nbytes = 0
    for _ in range(2):
        batches = prefetch(loader)
        for batch in batches:
            nbytes += sum(tensor.nbytes for tensor in batch)
            del batch
    of_loader, of_batches = rustloader.stats(loader), rustloader.stats(batches)
    # The estimate contains the machine's free memory, which changes between two calls.
    assert dataclasses.replace(of_batches, cache_estimate=of_loader.cache_estimate) == of_loader
    assert of_batches.cache_estimate is not None and of_loader.batches == 8
    assert of_loader.transfers.batches == 8 and of_loader.transfers.bytes == nbytes
    assert of_loader.as_dict()["transfers"]["batches"] == 8
    assert of_loader.as_dict(flat=True)["transfers_waited_seconds"] >= 0.0
    assert rustloader.stats(DataLoader(Images(8))).transfers == rustloader.TransferStats()


@pytest.mark.parametrize("make", [lambda: tensors(3), lambda: TorchDataLoader(Images(3))], ids=["list", "torch"])
def test_copies_count_for_what_the_engine_does_not_serve(device, make):
    batches = prefetch(make())
    for batch in batches:
        del batch
    stats = rustloader.stats(batches)
    assert stats.transfers.batches == 3 and stats.note and "to the device 3 batches" in str(stats)


def test_counts_go_with_their_loader(device):
    gc.collect()
    before = len(transfers._transfers._entries)
    batches = prefetch(DataLoader(Images(4), num_workers=1))
    for batch in batches:
        del batch
    assert len(transfers._transfers._entries) == before + 2
    del batches
    gc.collect()
    assert len(transfers._transfers._entries) == before


def test_the_verdict_names_a_type_that_is_not_pinned(device):
    device.pinned = False

    loader = DataLoader(Images(40), batch_size=1, num_workers=1, collate_fn=lambda samples: Sample(samples[0][0]))
    loader.pin_memory = True
    for batch in prefetch(loader):
        del batch
    stats = rustloader.stats(loader)
    assert "a batch of type Sample is not pinned: it has no pin_memory()" in stats.transfers.pageable
    assert "a batch of type Sample is not pinned: it has no pin_memory()" in str(stats.verdict())
    # The copies are the bottleneck: nothing else takes a second per batch.
    assert dataclasses.replace(stats, turnaround_seconds=1.0).verdict().kind == "device"
