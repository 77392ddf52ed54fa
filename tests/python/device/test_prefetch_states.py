"""States and `stats` through `prefetch_to_device`, and what it logs, on a device without hardware (`standin.py`)."""

import dataclasses
import gc
import logging
import typing

import pytest
import torch
import typing_extensions
from prefetch_support import prefetch, tensors
from sample_data import Failing, Images, Numbers
from support import DataLoader, TorchDataLoader, rustloader, values

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.metrics import transfers

# None makes the device the CPU.
STREAMS_OF = "rustloader.device.prefetch.loader.streams_of"


def stateful(**kw):
    options = {"batch_size": 4, "num_workers": 2, "shuffle": True, "generator": torch.Generator().manual_seed(3)}
    return rustloader.StatefulDataLoader(Numbers(40), **(options | kw))


def rest_of(device, batches):
    got = [batch for batch in batches]
    device.run_all()
    return values(got)


# Raised without a prefetcher, too: a state taken after the last batch, before the end, resumes an empty epoch.
@pytest.mark.filterwarnings("ignore:an epoch of 0 batches")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("depth, on_cpu", [(1, False), (3, False), (8, False), (2, True)])
@pytest.mark.parametrize("taken", [0, 1, 5, 9, 10])
@pytest.mark.parametrize("breaks_off", [False, True])
def test_state_counts_the_batches_that_the_program_got(device, monkeypatch, workers, depth, on_cpu, taken, breaks_off):
    if on_cpu:
        monkeypatch.setattr(STREAMS_OF, lambda asked: None)
    expected = values(stateful(num_workers=workers))
    batches = prefetch(stateful(num_workers=workers), depth=depth)
    iterator = iter(batches)
    got = [next(iterator) for _ in range(taken)]
    if breaks_off:
        del iterator
    state = batches.state_dict()
    device.run_all()
    assert values(got) == expected[:taken]
    resumed = prefetch(stateful(num_workers=workers), depth=depth)
    resumed.load_state_dict(state)
    assert rest_of(device, resumed) == expected[taken:]
    # The next epoch is whole: it does not contain what was ahead.
    assert len(rest_of(device, resumed)) == 10


def test_a_finished_epoch_is_finished_and_one_batch_before_it_is_not(device):
    batches = prefetch(stateful())
    for k, _ in enumerate(batches):
        last = batches.state_dict()
        assert last["_iterator_finished"] is False, k
    assert batches.state_dict()["_iterator_finished"] is True
    device.run_all()


def test_a_loader_without_a_state_has_none_here(device):
    loader = TorchDataLoader(Numbers(4))
    batches = prefetch(loader)
    assert not hasattr(batches, "state_dict") and not hasattr(batches, "load_state_dict")
    # Lightning calls set_epoch on these.
    assert batches.sampler is loader.sampler and batches.batch_sampler is loader.batch_sampler
    assert batches.batch_size == 1 and isinstance(batches.dataset, Numbers)
    with pytest.raises(AttributeError):
        _ = batches.no_such_name


def test_a_state_that_cannot_go_back_says_so(device):
    class Other(list):
        def state_dict(self):
            return {"place": 1}

        def load_state_dict(self, state):
            pass

    batches = prefetch(Other(tensors(5)))
    assert batches.state_dict() == {"place": 1}
    iterator = iter(batches)
    next(iterator)
    next(iterator)
    with pytest.raises(TypeError, match=r"state_dict\(\) of .*Other cannot go back by the 1 batches"):
        batches.state_dict()
    device.run_all()


@pytest.mark.parametrize("module", [typing, typing_extensions])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_protocols_see_the_state(device, monkeypatch, module, on_cpu):
    """They look attributes up without `__getattr__`: in `typing` since Python 3.12."""

    @module.runtime_checkable
    class Stateful(module.Protocol):
        def state_dict(self): ...

        def load_state_dict(self, state_dict): ...

    if on_cpu:
        monkeypatch.setattr(STREAMS_OF, lambda asked: None)
    assert isinstance(prefetch(stateful()), Stateful)
    assert not isinstance(prefetch(TorchDataLoader(Numbers(4))), Stateful)


def test_a_depth_that_states_cannot_go_back_is_refused_at_once(device):
    with pytest.raises(ValueError, match="depth must be 8 or less over a StatefulDataLoader, got 9"):
        prefetch(stateful(), depth=9)
    prefetch(tensors(1), depth=9)


class Stepping(torch.utils.data.IterableDataset):
    """Raises once, at item `at`; has a state."""

    def __init__(self, at, has_failed=False):
        self.place, self.at, self.has_failed = 0, at, has_failed

    def __iter__(self):
        while self.place < 24:
            self.place += 1
            if self.place == self.at and not self.has_failed:
                self.has_failed = True
                raise KeyError(self.at)
            yield self.place

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_state_before_an_error_that_is_ahead_has_its_batch_still_to_come(device, workers, depth):
    """The loader has raised the error, and counts its batch; the program has not seen it."""

    def make(errors=()):
        data = Failing(24, dict.fromkeys(errors, KeyError))
        return prefetch(rustloader.StatefulDataLoader(data, batch_size=2, num_workers=workers), depth=depth)

    expected = rest_of(device, make())
    batches = make([9])
    iterator, got = iter(batches), []
    # Batch 4 fails. Its error is ahead from batch 4 - depth on.
    for delivered in range(4):
        state = batches.state_dict()
        resumed = make()
        resumed.load_state_dict(state)
        assert rest_of(device, resumed) == expected[delivered:]
        got.append(next(iterator))
    before = batches.state_dict()
    with pytest.raises(KeyError):
        next(iterator)
    after = batches.state_dict()
    for state, rest in (before, expected[4:]), (after, expected[5:]):
        resumed = make()
        resumed.load_state_dict(state)
        assert rest_of(device, resumed) == rest
    assert rest_of(device, [*got, *iterator]) == expected[:4] + expected[5:]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_before_an_error_that_is_ahead_is_that_of_the_dataset_before_it(device, workers):
    def make(at=None):
        return prefetch(rustloader.StatefulDataLoader(Stepping(at), batch_size=2, num_workers=workers), depth=2)

    expected = rest_of(device, make())
    batches = make(7)
    iterator = iter(batches)
    got = [next(iterator) for _ in range(3)]
    state = batches.state_dict()
    with pytest.raises(KeyError):
        next(iterator)
    resumed = make()
    resumed.load_state_dict(state)
    device.run_all()
    assert values(got) == expected[:3] and rest_of(device, resumed) == expected[3:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_within_next_counts_the_batch_that_is_about_to_come(device, workers):
    """As a signal handler may take it. At the largest depth, 9 batches are ahead."""
    expected, states = values(stateful(num_workers=workers, batch_size=2)), []
    batches = prefetch(stateful(num_workers=workers, batch_size=2), depth=8)
    iterator = iter(batches)
    for _ in range(9):
        next(iterator)
    lend = batches._lane.lend

    def lend_and_save(copied):
        lend(copied)
        states.append(batches.state_dict())

    batches._lane.lend = lend_and_save
    next(iterator)
    resumed = prefetch(stateful(num_workers=workers, batch_size=2))
    resumed.load_state_dict(states[0])
    del iterator
    device.run_all()
    assert rest_of(device, resumed) == expected[9:]


# Statistics


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


# Log messages


def test_pageable_batches_are_logged_once_per_loader(device, caplog):
    device.pinned = False
    loader = DataLoader(Images(8), batch_size=2, num_workers=1)
    with caplog.at_level(logging.INFO, "rustloader"):
        for _ in range(2):
            for _ in prefetch(loader):
                pass
    lines = [record.getMessage() for record in caplog.records if "prefetch_to_device" in record.getMessage()]
    assert lines == [
        "prefetch_to_device: batches are copied from pageable memory, which delays the program: set pin_memory=True "
        "in the loader"
    ]
