"""Iterable datasets: shards, exhausted workers, partial batches, epochs (P15, P22, P24, T25)."""

import itertools
import os
import time

import pytest
import torch
from sample_data import Epochs, Shards, as_list
from support import BOTH, DataLoader, epoch, outcomes, outcomes_of, wait_until, worker_pids
from torch.utils.data import IterableDataset

LENGTHS = [(5,), (1, 6), (6, 1), (0, 4), (0, 0), (2, 0, 5)]
BATCHING = {
    "unbatched": dict(batch_size=None),
    "batches": dict(batch_size=2),
    "drop_last": dict(batch_size=2, drop_last=True),
    "collate_fn": dict(batch_size=3, collate_fn=as_list),
    "prefetch": dict(batch_size=None, prefetch_factor=1),
}


def plain(batches):
    return [b.tolist() if isinstance(b, torch.Tensor) else [x.tolist() for x in b] for b in batches]


@pytest.mark.parametrize(
    ("kind", "persistent"), [(kind, False) for kind in BATCHING] + [("unbatched", True), ("batches", True)]
)
def test_p15_uneven_shards_come_in_torchs_order(kind, persistent):
    for lengths in LENGTHS:

        def run(cls, lengths=lengths):
            loader = cls(Shards(lengths), num_workers=len(lengths), persistent_workers=persistent, **BATCHING[kind])
            return [plain(loader) for _ in range(2)]

        theirs, ours = map(run, BOTH)
        assert ours == theirs, lengths


@pytest.mark.parametrize("persistent", [False, True])
def test_p15_out_of_order_shards_lose_nothing(persistent):
    for lengths in LENGTHS:
        expected = sorted([w, i] for w, n in enumerate(lengths) for i in range(n))
        loader = DataLoader(
            Shards(lengths),
            num_workers=len(lengths),
            batch_size=None,
            in_order=False,
            persistent_workers=persistent,
        )
        for _ in range(2):
            assert sorted(plain(epoch(loader))) == expected, lengths


def test_p24_partial_batches_are_each_workers_own():
    loader = DataLoader(Shards([3, 2]), num_workers=2, batch_size=2)
    assert plain(epoch(loader)) == [[[0, 0], [0, 1]], [[1, 0], [1, 1]], [[0, 2]]]


def test_p22_every_persistent_epoch_iterates_the_dataset_again():
    loader = DataLoader(Epochs(), num_workers=2, batch_size=None, persistent_workers=True)
    for e in range(3):
        assert [tuple(s) for s in epoch(loader)] == [(w, e, i) for i in range(3) for w in range(2)]


@pytest.mark.parametrize("taken", [1, 2, 5])
def test_p11_a_break_in_a_persistent_epoch(taken):
    def run(cls):
        loader = cls(Epochs(), num_workers=2, batch_size=None, persistent_workers=True)
        return [list(itertools.islice(loader, taken)), list(itertools.islice(loader, taken)), list(loader)]

    theirs, ours = map(run, BOTH)
    assert ours == theirs


def test_t25_an_exhausted_worker_leaves_in_mid_epoch():
    iterator = iter(DataLoader(Shards([1, 20]), num_workers=2, batch_size=None))
    first, second = iterator._workers
    # A program may keep the list: it follows.
    kept = iterator._workers_status
    for _ in range(6):
        next(iterator)
    assert kept == iterator._workers_status == [False, True]
    assert wait_until(lambda: not first.is_alive())
    assert first.exitcode == 0 and second.is_alive()
    assert len(list(iterator)) == 15
    assert not second.is_alive()


def test_an_exhausted_persistent_worker_stays():
    loader = DataLoader(Shards([1, 9]), num_workers=2, batch_size=None, persistent_workers=True)
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)
    assert iterator._workers_status == [False, True]
    assert len(list(iterator)) == 4
    assert all(w.is_alive() for w in iterator._workers)
    assert iter(loader)._workers_status == [True, True]


class Breaking(IterableDataset):
    """Raises after two samples; a generator that has raised is exhausted."""

    def __iter__(self):
        yield torch.tensor(0)
        yield torch.tensor(1)
        raise KeyError("broken")


@pytest.mark.parametrize("persistent", [False, True])
def test_p17_an_error_in_the_stream(persistent):
    def run(cls):
        loader = cls(Breaking(), num_workers=2, batch_size=None, persistent_workers=persistent)
        result = [outcomes(iter(loader), 7) for _ in range(2)]
        if persistent:
            loader._iterator._shutdown_workers()
        return result

    theirs, ours = map(run, BOTH)
    assert ours == theirs
    assert [o[0] for o in ours[0]] == ["value"] * 4 + ["error"] * 2 + ["end"]


class Stumbling(IterableDataset):
    """A separate iterator: it raises at some samples, and continues when it is called again."""

    def __init__(self, n, errors):
        self.n, self.errors = n, errors

    def __iter__(self):
        self.i = -1
        return self

    def __next__(self):
        self.i += 1
        if self.i >= self.n:
            raise StopIteration
        if self.i in self.errors:
            raise self.errors[self.i](f"at {self.i}")
        return self.i


@pytest.mark.parametrize(("workers", "batch_size"), [(1, None), (2, None), (1, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("persistent", [False, True])
def test_p17_a_stream_goes_on_after_an_error(workers, batch_size, persistent):
    """The samples that a batch had before its error are lost, as in torch."""

    def run(cls):
        dataset = Stumbling(9, {2: KeyError, 5: ValueError, 8: OSError})
        loader = cls(dataset, num_workers=workers, batch_size=batch_size, persistent_workers=persistent)
        result = [outcomes_of(loader, 12 * workers) if not persistent else outcomes(iter(loader), 12 * workers)]
        if persistent:
            result.append(outcomes(iter(loader), 12 * workers))
            loader._iterator._shutdown_workers()
        return result

    theirs, ours = map(run, BOTH)
    assert ours == theirs
    kinds = [o[0] for o in ours[0]]
    assert kinds.count("error") >= 2 * workers and kinds[-1] == "end"


def test_p15_exhausted_workers_are_passed_over_among_many():
    """Most of the workers have nothing, or little; the others' batches come in order, and the epoch ends."""
    lengths = [0, 3, 0, 0, 12, 1, 0]
    for persistent in (False, True):
        loader = DataLoader(
            Shards(lengths), num_workers=len(lengths), batch_size=None, persistent_workers=persistent, prefetch_factor=3
        )
        for _ in range(2):
            got = plain(epoch(loader))
            assert sorted(got) == sorted([w, i] for w, n in enumerate(lengths) for i in range(n))
            for w, n in enumerate(lengths):
                assert [i for who, i in got if who == w] == list(range(n))


class Growing(IterableDataset):
    """Longer by one sample at each iter(); the length is what it was at the start."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return 4

    def __iter__(self):
        self.n += 1
        return iter(range(self.n - 1))


@pytest.mark.parametrize("batch_size", [None, 2])
def test_p22_a_persistent_dataset_keeps_what_it_has_become(batch_size):
    def run(cls):
        loader = cls(Growing(2), num_workers=2, batch_size=batch_size, persistent_workers=True)
        found = [[b.tolist() if isinstance(b, torch.Tensor) else b for b in loader] for _ in range(3)]
        found.append(list(itertools.islice(map(str, loader), 1)))
        found.append(list(map(str, loader)))
        loader._iterator._shutdown_workers()
        return found

    theirs, ours = map(run, BOTH)
    assert ours == theirs


def test_an_endless_dataset():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(itertools.count())

    def run(cls):
        return list(itertools.islice(cls(Endless(), num_workers=2, batch_size=4), 10))

    theirs, ours = map(run, BOTH)
    assert [b.tolist() for b in ours] == [b.tolist() for b in theirs]


def test_a_chain_of_iterables():
    def run(cls):
        return plain(cls(Shards([2, 2]) + Shards([1, 3]), num_workers=2, batch_size=2))

    theirs, ours = map(run, BOTH)
    assert ours == theirs


def test_without_workers():
    theirs, ours = (plain(cls(Shards([5]), batch_size=2)) for cls in BOTH)
    assert ours == theirs == [[[0, 0], [0, 1]], [[0, 2], [0, 3]], [[0, 4]]]


def test_s1_a_workers_cleanup_code_gets_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 60)

    class WithCleanup(IterableDataset):
        def __iter__(self):
            try:
                yield from range(100)
            finally:
                time.sleep(0.3)
                (tmp_path / str(os.getpid())).touch()

    iterator = iter(DataLoader(WithCleanup(), num_workers=2, batch_size=None))
    pids = worker_pids(iterator)
    assert [next(iterator) for _ in range(2)] == [0, 0]
    del iterator
    assert all((tmp_path / str(pid)).exists() for pid in pids)
