"""Real workers begin a resumed epoch as the WorkerStart in their job says, and send the snapshots that it promises."""

import functools
import itertools
import os
import signal
import threading
import time

import pytest
import torch
from resume_support import Logged, Tail, Workers, log_init, make
from sample_data import Failing, Numbers, as_list, untouched
from support import POLLS, STARTED, call_of, config_of, outcome, wait_until, within
from torch.utils.data import IterableDataset, _DatasetKind
from torch.utils.data._utils import fetch

from rustloader.iterator import fallback, session
from rustloader.workers import resuming, snapshots
from rustloader.workers.bootstrap import Job
from rustloader.workers.snapshots import SnapshotPolicy, WorkerStart

pytestmark = pytest.mark.ours


@pytest.fixture
def workers(tmp_path, monkeypatch):
    return Workers(tmp_path / "snapshots", monkeypatch)


# The order of the steps of a start


@pytest.mark.forks
def test_a_start_has_its_order_and_the_replay_is_not_collated(workers):
    workers.set(WorkerStart({"mark": 3}, {"i": 5}, replay=2))
    batches = list(make(Tail(14), worker_init_fn=log_init))
    assert [samples for samples, _ in batches] == [[9, 10], [11, 12], [13]]
    start = ["init", "load {'mark': 3}", "state", "iter", "load iterator {'i': 5}", "state"]
    assert batches[0][1] == [*start, 5, 6, 7, 8, 9, 10]
    # The snapshot is taken after the batch is made.
    assert batches[1][1] == [*start, 5, 6, 7, 8, 9, 10, "collate", "state", 11, 12]
    states = [(count, state.dataset_state, state.iterator_state, state.ended) for count, state, _ in workers.sent()]
    i = [(0, 5, False), (1, 11, False), (2, 13, False), (3, 14, True), (4, 14, True)]
    assert states == [(count, {"mark": 3}, {"i": i}, ended) for count, i, ended in i]


# Batches of a resumed epoch


def test_the_tasks_before_an_epoch():
    for workers, first_ordinal in itertools.product(range(1, 5), range(30)):
        for worker in range(workers):
            tasks = [ordinal - first_ordinal for ordinal in range(first_ordinal) if ordinal % workers == worker]
            for count in range(len(tasks)):
                assert resuming.earlier_tasks(count, worker, workers, first_ordinal) == tasks[len(tasks) - count :]
    # No task is before the first one of the epoch.
    assert resuming.earlier_tasks(3, 1, 2, 4) == [-4, -3, -1]


def test_a_job_goes_to_a_worker_without_the_starts_of_others():
    starts = [WorkerStart(replay=1), None, WorkerStart(replay=2)]
    job = Job(_DatasetKind.Map, True, None, False, 0, None, config_of(num_workers=3), starts=starts)
    assert [job.of_worker(worker).starts for worker in range(3)] == [
        [starts[0], None, None],
        [None, None, None],
        [None, None, starts[2]],
    ]
    assert job.starts is starts
    assert job.take_start(2) is starts[2] and job.starts is None
    assert job.of_worker(1) is job and job.take_start(1) is None


# Errors


@pytest.mark.parametrize("error", [KeyError, StopIteration])
def test_a_replay_drops_errors_of_a_map_style_dataset(error):
    """StopIteration is an ordinary error there, and does not end the replay."""
    fetcher, replayed = fetch._MapDatasetFetcher(Failing(4, {1: error}), False, as_list, False), []

    def fetch_again(index):
        replayed.append(index)
        return fetcher.fetch(index)

    resuming.replay(fetcher, [0, 1, 2], _DatasetKind.Map, fetch_again)
    assert replayed == [0, 1, 2]


def test_a_replay_ends_with_an_iterable_dataset():
    fetcher = fetch._IterableDatasetFetcher(iter([5, 6]), False, as_list, False)
    resuming.replay(fetcher, [None] * 4, _DatasetKind.Iterable)
    assert fetcher.ended


def test_a_stream_that_failed_goes_on_as_it_did(workers):
    class Broken(Tail):
        def __iter__(self):
            yield from range(3)
            raise KeyError("broken")

    def run():
        iterator = iter(make(Broken(9), 1, collate_fn=as_list))
        return [outcome(next, iterator)[0] for _ in range(3)]

    assert run() == ["value", "error", "end"]
    for replay, expected in [(1, ["error", "end", "end"]), (2, ["end"] * 3)]:
        workers.set(WorkerStart(replay=replay))
        assert run() == expected


@pytest.mark.forks
def test_a_fetcher_that_a_library_replaced_fetches_in_full(workers, monkeypatch):
    def foreign(self, indices):
        return self.collate_fn([self.dataset[i] for i in indices])

    class Marked(Logged, Numbers):
        pass

    monkeypatch.setattr(fetch._MapDatasetFetcher, "fetch", foreign)
    workers.set(WorkerStart(replay=[[0, 1], [2, 3]]))
    (samples, before), *_ = make(Marked(9), sampler=range(4, 8))
    assert torch.tensor(samples).tolist() == [4, 5] and before.count("collate") == 2


# Epochs, and the end


class Stuck(Numbers):
    def __getitem__(self, i):
        self.reached.touch()
        threading.Event().wait(0.01)
        return i


class StuckStream(Tail):
    def __iter__(self):
        while True:
            self.reached.touch()
            threading.Event().wait(0.01)
            yield 0


@pytest.mark.parametrize("batch_size", [10**6, None])
@pytest.mark.parametrize("cls", [Stuck, StuckStream])
def test_a_shutdown_ends_a_replay(workers, cls, batch_size, tmp_path):
    dataset = cls(9)
    dataset.reached = tmp_path / "reached"
    index = [0] * 10**6 if batch_size else 0
    workers.set(WorkerStart(replay=10**6 if cls is StuckStream else [index] * 1000))
    iterator = iter(make(dataset, collate_fn=untouched, batch_size=batch_size))
    assert wait_until(dataset.reached.exists)
    iterator._shutdown_workers()
    # A worker that does not end by itself is killed.
    assert [worker.exitcode for worker in iterator._workers] == [0]


# Snapshots


class Faulty(Logged, Failing):
    pass


class Unreadable:
    def __reduce__(self):
        return _raise, ()


def _raise():
    raise OSError("unreadable")


@pytest.mark.forks
def test_every_kind_of_answer_counts(workers):
    def unsendable(samples):
        return threading.Lock() if samples == [1] else samples

    batches = [[0], Unreadable(), [1], [2], [3]]
    dataset = Faulty(5, {2: KeyError})
    iterator = iter(make(dataset, batch_size=1, batch_sampler=batches, collate_fn=unsendable))
    kinds = [outcome(next, iterator)[0] for _ in range(6)]
    assert kinds == ["value", "error", "error", "error", "value", "end"]
    assert [count for count, _, _ in workers.sent()] == [0, 1, 2, 3, 4, 5]


@pytest.fixture
def engine(monkeypatch):
    """A function that gives workers their starts; their snapshots go to the engine."""
    make_engine = fallback.Engine
    monkeypatch.setattr(
        fallback, "Engine", lambda config, *rest, **kw: make_engine(config.changed(snapshots=True), *rest, **kw)
    )

    def begin(*starts):
        job = functools.partial(Job, snapshots=SnapshotPolicy(1, 0), starts=list(starts) or None)
        monkeypatch.setattr(session, "Job", job)

    begin()
    return begin


def snapshot(iterator, worker, answers):
    """(count, state or error, is_error)"""
    result = iterator._core.snapshot(worker, answers)
    content = snapshots.read_error(result.payload)[0] if result.is_error else snapshots.read(result.payload)
    return result.answers, content, result.is_error


class SlowState(Logged, IterableDataset):
    """Yields 0, 1, 2. Its state, the number of samples yielded, takes 50 ms."""

    def __iter__(self):
        for self.mark in (1, 2, 3):
            yield self.mark - 1

    def state_dict(self):
        time.sleep(0.05)
        return super().state_dict()


@pytest.mark.forks
def test_a_delivered_batch_has_its_snapshot_even_if_the_state_takes_long(engine):
    iterator = iter(make(SlowState(), batch_size=None, collate_fn=untouched))
    for sample in range(3):
        assert next(iterator) == sample
        count, state, _ = snapshot(iterator, 0, sample + 1)
        assert (count, state.dataset_state) == (sample + 1, {"mark": sample + 1})


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_cannot_change_the_state_it_was_given(engine, method):
    mark = torch.zeros(1000)
    engine(*[WorkerStart({"mark": mark})] * 2)
    iterator = iter(make(Marking(4), 2, batch_size=None, collate_fn=untouched, multiprocessing_context=method))
    assert list(iterator) == [1.0, 1.0, 2.0, 2.0]
    assert not mark.any() and not mark.is_shared()


@pytest.mark.forks
def test_state_may_be_large(engine):
    big = torch.arange(1 << 20)
    engine(WorkerStart({"mark": big}))
    iterator = iter(make(Tail(4), collate_fn=as_list))
    next(iterator)
    assert torch.equal(snapshot(iterator, 0, 1)[1].dataset_state["mark"], big)


class Marking(Logged, Numbers):
    """Each sample is the number of times that the worker has changed its mark."""

    def __getitem__(self, i):
        self.mark += 1
        return self.mark[0].item()


def test_the_end_of_a_dataset_without_batches_has_its_snapshot(engine):
    iterator = iter(make(Tail(2), persistent_workers=True, batch_size=None, collate_fn=untouched))
    assert list(iterator) == [0, 1]
    assert [snapshot(iterator, 0, answers)[1].ended for answers in (1, 2, 3)] == [False, False, True]


class Interrupted(Exception):
    pass


@pytest.mark.forks
def test_handler_that_raises_ends_wait_for_first_snapshots(engine, tmp_path):
    def handler(*_):
        raise Interrupted

    def interrupt():
        wait_until(lambda: call_of(f"/proc/self/task/{os.getpid()}") in POLLS)
        os.kill(os.getpid(), signal.SIGUSR1)

    def init(worker):
        assert worker == 0 or wait_until((tmp_path / "go").exists, STARTED)

    iterator = iter(make(Tail(2), 2, collate_fn=as_list, worker_init_fn=init))
    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        with pytest.raises(Interrupted), within(120):
            iterator._core.wait_started()
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    (tmp_path / "go").touch()
    assert iterator._core.wait_started()
    assert [place[0] for place in (snapshot(iterator, worker, 0) for worker in (0, 1))] == [0, 0]
    assert list(iterator) == [[0, 1], [0, 1]]
