"""``reorder_window``: how far the sampler, the workers and finished batches may run ahead of the program."""

import functools
import random
import threading
import time

import pytest
import torch
from sample_data import FailingSampler, Held, Numbers, Shards
from support import (
    TORCH_MODE,
    DataLoader,
    epoch,
    from_engine,
    outcomes_of,
    values,
    wait_until,
)
from torch.utils.data import Sampler

if not TORCH_MODE:
    from rustloader.settings import option_values

pytestmark = [pytest.mark.ours, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

WINDOWS = [1, 2, 7, 64, "1MiB"]


class Naps(Numbers):
    """Sample i takes a random time that depends on i alone."""

    def __init__(self, n, seed):
        super().__init__(n)
        self.seed = seed

    def __getitem__(self, i):
        time.sleep(random.Random(f"{self.seed} {i}").expovariate(400))
        return torch.tensor(i)


class Sized(Held):
    """Sample i has `sizes[i % len(sizes)]` bytes; sample `at` waits for `file`."""

    def __init__(self, n, sizes, at=-1, file=""):
        super().__init__(n, at, file)
        self.sizes = sizes

    def __getitem__(self, i):
        super().__getitem__(i)
        return torch.full((self.sizes[i % len(self.sizes)] // 4,), i, dtype=torch.int32)


class Recorder(Sampler):
    """Counts the indices drawn, and the calls after the last one. `check` gets each index before it is yielded."""

    def __init__(self, n, check=lambda i: None):
        self.n, self.check = n, check
        self.drawn = self.ends = 0

    def __len__(self):
        return self.n

    def __iter__(self):
        self.drawn = self.ends = 0
        return self.Walk(self)

    class Walk:
        def __init__(self, sampler):
            self.sampler = sampler

        def __iter__(self):
            return self

        def __next__(self):
            sampler = self.sampler
            if sampler.drawn == sampler.n:
                sampler.ends += 1
                raise StopIteration
            sampler.check(sampler.drawn)
            sampler.drawn += 1
            return sampler.drawn - 1


def draws_stop_at(sampler, count):
    """True if `count` indices are drawn from the sampler, and then no more while no batch is taken."""
    if not wait_until(lambda: sampler.drawn >= count):
        return False
    time.sleep(0.3)
    return sampler.drawn == count


# Batches and their order


def test_a_window_is_a_number_or_a_size():
    assert [option_values.window(value) for value in (None, 7, "7", "1.5 kB")] == [
        (None, None),
        (7, None),
        (7, None),
        (None, 1500),
    ]


# How far ahead


def is_within(window, taken, i):
    # `next` draws for the place of the batch that it is about to return, too.
    assert i < len(taken) + 1 + window


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("window", [1, 2, 3, 7, 20])
def test_no_index_is_drawn_beyond_the_window(window, in_order):
    for seed in range(4):
        chance = random.Random(f"{window} {seed}")
        taken = []
        sampler = Recorder(50, functools.partial(is_within, window, taken))
        workers, prefetch = chance.randint(1, 3), chance.randint(1, 4)
        loader = DataLoader(
            Naps(50, seed),
            sampler=sampler,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=prefetch,
            reorder_window=window,
            in_order=in_order,
        )
        iterator = iter(loader)
        assert sampler.drawn == min(window, workers * prefetch)
        with from_engine(50):
            for batch in iterator:
                taken.append(batch)
                assert sampler.drawn <= min(50, len(taken) + window)
                time.sleep(chance.choice([0, 0, 0.002, 0.02]))
        assert (values(taken) if in_order else sorted(values(taken))) == list(range(50))


@pytest.mark.parametrize(
    "window, drawn", [(1, 1), (7, 7), (19, 19), (20, 20), (30, 30), ("1GiB", 39), (None, 20), (64, 39)]
)
def test_the_window_is_filled_while_an_older_batch_is_awaited(window, drawn, tmp_path):
    """At 39 draws, the stuck worker has every second task: the 20 that may be outstanding."""
    go, sampler = tmp_path / "go", Recorder(100)
    loader = DataLoader(
        Held(100, 0, go), sampler=sampler, batch_size=None, num_workers=2, prefetch_factor=10, reorder_window=window
    )
    iterator = iter(loader)
    assert sampler.drawn == min(drawn, 20)
    seen = []

    def watch():
        seen.append(draws_stop_at(sampler, drawn))
        go.touch()

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert next(iterator).item() == 0
    watcher.join()
    assert seen == [True], sampler.drawn
    assert values(iterator) == list(range(1, 100))


@pytest.mark.parametrize("window", [1, 7, 64])
def test_a_sampler_that_has_ended_is_not_asked_again(window):
    sampler = Recorder(20)
    loader = DataLoader(
        Numbers(20), sampler=sampler, batch_size=None, num_workers=2, reorder_window=window, persistent_workers=True
    )
    for _ in range(3):
        assert values(epoch(loader)) == list(range(20))
        assert (sampler.drawn, sampler.ends) == (20, 1)


# Bytes

BATCH = 100_000


@pytest.mark.parametrize("megabytes, batches", [("0.05MB", 1), ("0.95MB", 9), ("1MB", 9), ("1.15MB", 11)])
def test_the_bytes_of_finished_batches_stay_below_the_limit(megabytes, batches, tmp_path):
    go, sampler = tmp_path / "go", Recorder(60)
    loader = DataLoader(
        Sized(60, [BATCH], 0, go),
        sampler=sampler,
        batch_size=None,
        num_workers=2,
        prefetch_factor=10,
        reorder_window=megabytes,
        persistent_workers=True,
    )
    go.touch()
    epoch(loader)  # no size is known before the first batch
    go.unlink()
    iterator = iter(loader)
    limit = float(megabytes[:-2]) * 1e6
    # The stuck worker has every second task, so only the other half of the batches is finished.
    finished, held = batches // 2, []

    def watch():
        memory = iterator._core.memory
        wait_until(lambda: memory()[1] >= finished * BATCH)
        held.append(draws_stop_at(sampler, batches) and memory()[1])
        go.touch()

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert next(iterator)[0] == 0
    watcher.join()
    assert held[0] is not False, sampler.drawn
    assert finished * BATCH <= held[0] <= max(limit, BATCH) + (1 << 17)
    assert [batch[0].item() for batch in iterator] == list(range(1, 60))


# The sampler's errors


@pytest.mark.parametrize("window", WINDOWS)
def test_an_error_of_the_sampler_costs_no_batch(window):
    """It is raised by iter(), or by a call of next() at its place."""
    for at in range(9):
        loader = DataLoader(
            Numbers(9), sampler=FailingSampler(9, at), num_workers=2, batch_size=None, reorder_window=window
        )
        first = min(4, window) if isinstance(window, int) else 4
        if at < first:
            with pytest.raises(KeyError, match="sampler"):
                iter(loader)
            continue
        results = outcomes_of(loader, 11)
        assert [it[1] for it in results if it[0] == "value"] == [i for i in range(9) if i != at]
        assert [it for it in results if it[0] == "error"] == [("error", KeyError, "sampler")]
        assert results[-2:].count(("end",)) == 2 - (results[-2][0] == "error")


@pytest.mark.parametrize("window", [1, 3, 64])
def test_a_sampler_that_only_fails_ends_neither_the_calls_nor_the_batches(window):
    asked = 0

    def check(i):
        nonlocal asked
        asked += i >= 6
        if i >= 6:
            raise KeyError("no more")

    loader = DataLoader(
        Numbers(9), sampler=Recorder(9, check), num_workers=1, prefetch_factor=1, batch_size=None, reorder_window=window
    )
    results = outcomes_of(loader, 16)
    assert [it[1] for it in results if it[0] == "value"] == list(range(6))
    assert results[-4:] == [("error", KeyError, "no more")] * 4
    assert asked <= 12, "the sampler was asked again before its error was raised"


# Timeouts, deaths, ends


# The shared queue


def test_an_iterable_dataset_keeps_round_robin_and_the_log_says_so_once_per_loader(caplog):
    caplog.set_level("INFO", logger="rustloader")
    loader = DataLoader(Shards([4, 4]), num_workers=2, batch_size=None, dispatch="shared_queue", reorder_window=8)
    for _ in range(2):
        assert sorted(values(epoch(loader))) == [[w, i] for w in range(2) for i in range(4)]
    text = "dispatch='shared_queue' does not apply to an iterable dataset; its workers use round robin"
    assert [(it.levelname, it.getMessage()) for it in caplog.records] == [("INFO", text)]
    epoch(DataLoader(Shards([1]), num_workers=1, batch_size=None, dispatch="shared_queue"))
    epoch(DataLoader(Shards([1]), num_workers=1, batch_size=None, dispatch="round_robin"))
    assert len(caplog.records) == 2
