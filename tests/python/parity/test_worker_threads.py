"""`worker_threads`: several threads of a worker make the samples of a batch."""

import gc
import logging
import os
import sys
import threading
import time
import weakref

import pytest
import sample_data as data
import torch
from sample_data import Failing, Numbers, as_list, worker_id
from support import (
    SOON,
    DataLoader,
    TorchDataLoader,
    gone,
    rustloader,
    values,
    wait_until,
    within,
    worker_pids,
)
from torch.utils.data import Subset
from torch.utils.data._utils import fetch

import rustloader.supervision.stalls
from rustloader.fetch.threads import Pool, ThreadedDataset

pytestmark = [
    pytest.mark.ours,
    pytest.mark.filterwarnings("ignore:.*multi-thread:DeprecationWarning"),
    # pytest warns about the SystemExit of `Quit`.
    pytest.mark.filterwarnings(
        "ignore:Exception in thread rustloader-sample:pytest.PytestUnhandledThreadExceptionWarning"
    ),
]


def notes(caplog):
    return [it.getMessage() for it in caplog.records if it.name == "rustloader" and it.levelno == logging.INFO]


class Meeting(Numbers):
    """Each sample waits until `size` threads make one. Sample i is (i, its thread's name, is that a daemon?)."""

    def __init__(self, n, size):
        super().__init__(n)
        self.size, self.barrier = size, None

    def __getitem__(self, i):
        self.barrier.wait(SOON)
        thread = threading.current_thread()
        return int(i), thread.name, thread.daemon


def bring_barrier(_):
    """A worker_init_fn: barriers cannot be pickled."""
    dataset = torch.utils.data.get_worker_info().dataset
    dataset.barrier = threading.Barrier(dataset.size)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_threads_make_samples_at_the_same_time_and_stay_for_later_batches(method):
    settings = dict(batch_size=6, num_workers=1, worker_threads=3, collate_fn=as_list, worker_init_fn=bring_barrier)
    loader = DataLoader(Meeting(12, 3), **settings, multiprocessing_context=method, persistent_workers=True)
    batches = [batch for _ in range(2) for batch in loader]
    assert [[i for i, _, _ in batch] for batch in batches] == [list(range(6)), list(range(6, 12))] * 2
    threads = {(name, daemon) for batch in batches for _, name, daemon in batch}
    assert threads == {(f"rustloader-sample-{number}", True) for number in range(3)}


class Who(Numbers):
    """Each sample is (is this the main thread?, worker, number of torch's threads)."""

    def __getitem__(self, i):
        return threading.current_thread() is threading.main_thread(), worker_id(), torch.get_num_threads()


def test_workers_are_as_torchs_in_the_threads():
    batches = list(DataLoader(Who(12), batch_size=2, num_workers=2, worker_threads=2, collate_fn=as_list))
    assert batches == [[(False, number % 2, 1)] * 2 for number in range(6)]


class Names(Numbers):
    """Each sample is the names of the process's threads."""

    def __getitem__(self, i):
        return sorted(it.name for it in threading.enumerate())


@pytest.mark.parametrize(
    "kw", [dict(num_workers=2), dict(num_workers=2, worker_threads=1), dict(worker_threads=3)], ids=str
)
def test_without_the_option_or_without_workers_there_is_no_thread(kw):
    if "num_workers" in kw:
        assert not any(
            "rustloader" in name for (names,) in DataLoader(Names(4), collate_fn=as_list, **kw) for name in names
        )
    assert all(of_main for ((of_main, *_),) in DataLoader(Who(4), collate_fn=as_list, **kw))


class Count(Numbers):
    """Each sample is the number of threads."""

    def __getitem__(self, i):
        return threading.active_count()


def test_there_are_no_more_threads_than_samples_in_a_batch():
    batches = list(DataLoader(Count(10), batch_size=3, num_workers=1, worker_threads=10**9, collate_fn=as_list))
    assert max(max(batch) for batch in batches) <= 3 + 2  # plus the main thread and the watchdog's


@pytest.mark.parametrize("dataset", [Subset(Who(9), range(6)), Subset(Subset(Who(9), range(8)), range(6))])
def test_samples_of_a_subset_are_made_by_threads(dataset):
    (batch,) = DataLoader(dataset, batch_size=6, num_workers=1, worker_threads=2, collate_fn=as_list)
    assert batch == [(False, 0, 1)] * 6


# Where threads cannot help


class WholeBatches(Who):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


@pytest.mark.parametrize(
    ("dataset", "kw", "reason"),
    [
        (WholeBatches(4), {}, "the __getitems__ of WholeBatches makes a whole batch"),
        (Who(4), dict(batch_size=None), "with batch_size=None a batch is one sample"),
    ],
)
@pytest.mark.parametrize("persistent", [False, True])
def test_where_they_cannot_help_the_loader_says_so_once(dataset, kw, reason, persistent, caplog):
    caplog.set_level(logging.INFO, "rustloader")
    settings = dict(num_workers=1, worker_threads=8, collate_fn=lambda it: it, persistent_workers=persistent) | kw
    loader = DataLoader(dataset, **settings)
    for _ in range(2):
        for batch in loader:
            (of_main, *_), *_ = batch if kw == {} else [batch]
            assert of_main
    assert notes(caplog) == [f"a DataLoader: worker_threads=8 has no effect: {reason}"]


def test_a_fetcher_that_a_library_replaced_is_left_alone(monkeypatch, caplog):
    def foreign(self, indices):
        return self.collate_fn([self.dataset[i] for i in indices])

    caplog.set_level(logging.INFO, "rustloader")
    monkeypatch.setattr(fetch._MapDatasetFetcher, "fetch", foreign)
    batches = list(DataLoader(Who(4), num_workers=1, worker_threads=2, collate_fn=as_list))
    assert len(batches) == 4 and all(of_main for ((of_main, *_),) in batches)
    assert len(notes(caplog)) == 1 and "torch's fetcher was replaced" in notes(caplog)[0]


def test_an_iterable_dataset_is_refused_where_the_loader_asks_for_threads(caplog):
    caplog.set_level(logging.INFO, "rustloader")
    with pytest.raises(ValueError, match="worker_threads needs a map-style dataset, got 4"):
        iter(DataLoader(data.Shards([3]), num_workers=1, worker_threads=4))
    assert len(list(DataLoader(data.Shards([3]), num_workers=1, worker_threads=1, collate_fn=as_list))) == 3
    with rustloader.installed(worker_threads=4):
        loader = TorchDataLoader(data.Shards([3]), num_workers=1)
        assert [len(list(loader)) for _ in range(2)] == [3, 3]
        assert len(list(TorchDataLoader(Who(3), num_workers=1, collate_fn=as_list))) == 3
    assert notes(caplog)[-1:] == [
        "a DataLoader: worker_threads=4 has no effect: the samples of an iterable dataset come one after another"
    ]
    assert len([note for note in notes(caplog) if "no effect" in note]) == 1


class Quit:
    """Ends a thread of a pool, when it is queued instead of a batch. In a worker, threads end with the process."""

    def work(self):
        raise SystemExit


@pytest.fixture
def pool():
    """A function that creates pools in this process."""
    pools = []

    def make(size, check=lambda: None):
        pools.append(Pool(size, check, lambda: None))
        return pools[-1]

    before = set(threading.enumerate())
    yield make
    for it in pools:
        for _ in range(it._started):
            it._batches.put(Quit())
    for thread in set(threading.enumerate()) - before:
        thread.join()


# Errors


class Marked(Numbers):
    """Samples create files when they begin and when they end. Samples 1 and 4 fail, 4 first."""

    failing = None

    def __init__(self, n, folder):
        super().__init__(n)
        self.folder = folder

    def seen(self, what):
        return sorted(int(name.split()[1]) for name in os.listdir(self.folder) if name.startswith(what))

    def wait_for(self, what, count):
        assert wait_until(lambda: len(self.seen(what)) >= count)

    def error_is_kept(self):
        """Whether the thread of sample 4 is idle again: the pool then has its error."""
        return self.failing is not None and sys._current_frames()[self.failing].f_code.co_name == "_serve"

    def __getitem__(self, i):
        (self.folder / f"begun {i}").touch()
        self.make(i)
        (self.folder / f"ended {i}").touch()
        return torch.tensor(i)

    def make(self, i):
        self.wait_for("begun", 5)
        if i == 4:
            self.failing = threading.get_ident()
            raise KeyError("the second error")
        assert wait_until(self.error_is_kept)
        # Time for threads to begin samples that they must not begin.
        time.sleep(0.3)
        if i == 1:
            raise ValueError("the first error")


def test_the_first_error_by_order_wins_and_the_samples_that_were_begun_are_awaited(tmp_path):
    iterator = iter(DataLoader(Marked(20, tmp_path), batch_size=20, num_workers=1, worker_threads=5))
    with pytest.raises(ValueError) as caught:
        next(iterator)
    dataset = iterator._dataset
    assert dataset.seen("begun") == [0, 1, 2, 3, 4] and dataset.seen("ended") == [0, 2, 3]
    lines = str(caught.value).splitlines()
    assert lines[0] == "Caught ValueError in DataLoader worker process 0."
    assert lines[1] == "Original Traceback (most recent call last):"
    assert any("fetch.py" in line and "in fetch" in line for line in lines)
    assert any("test_worker_threads.py" in line and "in make" in line for line in lines)
    assert lines[-1] == "ValueError: the first error"
    with pytest.raises(StopIteration):
        next(iterator)


class BadIndices(list):
    """An index batch whose iteration fails after its first two indices."""

    def __iter__(self):
        yield from list.__iter__(self[:2])
        raise OSError("no more indices")


@pytest.mark.parametrize(("fails", "error"), [({}, OSError), ({1: data.key_error}, KeyError)])
def test_an_error_of_the_indices_comes_after_those_of_the_samples_before(fails, error, pool):
    with pytest.raises(error):
        ThreadedDataset(Failing(9, fails), pool(3), None).__getitems__(BadIndices([0, 1, 2]))


@pytest.mark.forks
def test_sys_exit_in_a_sample_ends_the_worker_as_in_torch():
    def trace(cls, **kw):
        iterator = iter(cls(Failing(4, {1: lambda: SystemExit(3)}), batch_size=2, num_workers=1, **kw))
        with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.*exited unexpectedly") as caught:
            next(iterator)
        return type(caught.value.__cause__)

    trace(TorchDataLoader)
    trace(DataLoader, worker_threads=2)


LIVE = weakref.WeakSet()


class Live:
    """A sample."""

    def __init__(self):
        LIVE.add(self)


class LiveSamples(Numbers):
    """Sample 5 fails."""

    def __getitem__(self, i):
        sample = Live()
        if i == 5:
            raise ValueError("sample 5 is bad")
        return sample


def count_live(samples):
    """A collate_fn."""
    return len(LIVE)


def test_threads_keep_no_sample_and_no_error():
    loader = DataLoader(
        LiveSamples(16),
        batch_size=4,
        num_workers=1,
        worker_threads=4,
        collate_fn=count_live,
        worker_init_fn=lambda _: gc.disable(),
    )
    iterator = iter(loader)
    assert next(iterator) == 4
    with pytest.raises(ValueError, match="sample 5 is bad"):
        next(iterator)
    assert list(iterator) == [4, 4]


# The end


class StuckSamples(Numbers):
    """Samples create files when they begin, and do not end before there is a file `go`."""

    def __init__(self, n, folder):
        super().__init__(n)
        self.folder = folder

    def begun(self):
        return len(list(self.folder.glob("begun *")))

    def __getitem__(self, i):
        self.wait_in_sample(i)
        return torch.tensor(i)

    def wait_in_sample(self, i):
        (self.folder / f"begun {i}").touch()
        end = time.monotonic() + 240
        while not (self.folder / "go").exists():
            assert time.monotonic() < end, "it was not released in time"
            time.sleep(0.01)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_shutdown_does_not_wait_for_stuck_samples(method, tmp_path, monkeypatch):
    # The worker must end without a signal.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 200.0)
    settings = dict(batch_size=10, num_workers=1, worker_threads=3, multiprocessing_context=method)
    iterator = iter(DataLoader(StuckSamples(10, tmp_path), **settings))
    [worker] = iterator._workers
    [pid] = worker_pids(iterator)
    assert wait_until(lambda: iterator._dataset.begun() == 3, 240)
    with within(60):
        iterator._shutdown_workers()
    assert gone(pid)
    if method == "fork":
        assert worker.exitcode == 0, "a signal ended the worker"
    assert iterator._dataset.begun() == 3


@pytest.mark.warns
def test_a_stall_warning_has_the_stacks_of_the_threads(tmp_path, monkeypatch):
    monkeypatch.setenv("RUSTLOADER_STALL_ITEM_SECONDS", "0.5")
    warnings = []

    def warning(text, *args):
        warnings.append(text % args)
        (tmp_path / "go").touch()

    monkeypatch.setattr(rustloader.supervision.stalls.logger, "warning", warning)
    loader = DataLoader(StuckSamples(4, tmp_path), batch_size=4, num_workers=1, worker_threads=2)
    iterator = iter(loader)
    assert wait_until(lambda: iterator._dataset.begun() == 2)
    assert values(iterator) == [[0, 1, 2, 3]]
    assert warnings[0].count("in wait_in_sample") == 2 and "in _serve" in warnings[0]


# The pool


@pytest.mark.warns
def test_a_worker_that_may_start_few_threads_uses_those(monkeypatch, caplog, pool):
    may_start = [2]
    start = threading.Thread.start

    def refuse(self):
        if not may_start[0]:
            raise RuntimeError("can't start new thread")
        may_start[0] -= 1
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    dataset = ThreadedDataset(Numbers(9), pool(4), None)
    for _ in range(2):
        assert values(dataset.__getitems__(range(9))) == list(range(9))
    (text,) = [it.getMessage() for it in caplog.records if it.levelno == logging.WARNING]
    assert text == "worker_threads=4: a worker uses only 2, because can't start new thread"
    with pytest.raises(RuntimeError, match="can't start"):
        ThreadedDataset(Numbers(9), pool(4), None).__getitems__(range(9))
