"""Iterable datasets: shards, exhausted workers, partial batches, epochs (P15, P22, P24, T25)."""

import itertools

import torch
from parity_table import drain, epochs, rows, take
from sample_data import Epochs, Shards, as_list
from support import wait_until
from torch.utils.data import IterableDataset

LENGTHS = [(5,), (1, 6), (6, 1), (3, 2), (0, 4), (0, 0), (2, 0, 5)]
BATCHING = {
    "unbatched": dict(batch_size=None),
    "batches": dict(batch_size=2),
    "drop_last": dict(batch_size=2, drop_last=True),
    "collate_fn": dict(batch_size=3, collate_fn=as_list),
    "prefetch": dict(batch_size=None, prefetch_factor=1),
}
BOOLS = [False, True]


@rows(lengths=LENGTHS, batching=BATCHING, persistent=BOOLS, pairs=True)
def test_p15_p24_uneven_shards_come_in_torchs_order(DataLoader, lengths, batching, persistent):
    workers = len(lengths)
    yield from epochs(DataLoader(Shards(lengths), num_workers=workers, persistent_workers=persistent, **batching))


@rows(taken=[1, 2, 5, 99])
def test_p11_p22_every_persistent_epoch_iterates_the_dataset_again(DataLoader, taken):
    loader = DataLoader(Epochs(), num_workers=2, batch_size=None, persistent_workers=True)
    for limit in (taken, taken, 99):
        yield from drain(iter(loader), limit)


@rows()
def test_t25_an_exhausted_worker_leaves_in_mid_epoch(DataLoader):
    iterator = iter(DataLoader(Shards([1, 20]), num_workers=2, batch_size=None))
    first, second = iterator._workers
    kept = iterator._workers_status  # A program may keep the list: it is updated in place.
    yield from take(iterator, 6)
    assert kept == iterator._workers_status == [False, True]
    assert wait_until(lambda: not first.is_alive())
    yield first.exitcode, second.is_alive()
    yield from drain(iterator)
    yield second.is_alive()


@rows()
def test_an_exhausted_persistent_worker_stays(DataLoader):
    loader = DataLoader(Shards([1, 9]), num_workers=2, batch_size=None, persistent_workers=True)
    iterator = iter(loader)
    yield from take(iterator, 6)
    assert iterator._workers_status == [False, True]
    yield from drain(iterator)
    yield iterator
    yield iter(loader)


class Breaking(IterableDataset):
    """Raises after two samples; a generator that has raised is exhausted."""

    def __iter__(self):
        yield torch.tensor(0)
        yield torch.tensor(1)
        raise KeyError("broken")


STUMBLES = {2: KeyError, 5: ValueError, 8: OSError}


class Stumbling(IterableDataset):
    """Its own iterator: it raises at some samples, and continues with the next call."""

    def __iter__(self):
        self.i = -1
        return self

    def __next__(self):
        self.i += 1
        if self.i >= 9:
            raise StopIteration
        if error := STUMBLES.get(self.i):
            raise error(f"at {self.i}")
        return self.i


@rows(dataset=[Breaking, Stumbling], workers=[1, 2, 3], batch_size=[None, 2, 3], persistent=BOOLS, pairs=True)
def test_p17_a_stream_goes_on_after_an_error(DataLoader, dataset, workers, batch_size, persistent):
    """The samples that a batch had before its error are lost, as in torch."""
    loader = DataLoader(dataset(), num_workers=workers, batch_size=batch_size, persistent_workers=persistent)
    yield from epochs(loader)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(itertools.count())


class Nested(IterableDataset):
    def __iter__(self):
        return iter(torch.utils.data.DataLoader(range(3), batch_size=None))


DATASETS = {
    "endless": Endless,
    "a chain": lambda: Shards([2, 2]) + Shards([1, 3]),
    "a loader without workers": Nested,
}


@rows(dataset=DATASETS, workers=[0, 2])
def test_other_iterables(DataLoader, dataset, workers):
    yield from drain(iter(DataLoader(dataset(), num_workers=workers, batch_size=2)), 10)
