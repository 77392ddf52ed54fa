"""The snapshots that real workers send: what they count, and the effect of errors."""

import functools
import os
import threading
import time

import pytest
import torch
from resume_support import Faulty, Logged, Tail, Workers, bad_init, make
from sample_data import Numbers, as_list, untouched
from support import outcome
from torch.utils.data import IterableDataset

from rustloader.iterator import fallback, session
from rustloader.workers import snapshots
from rustloader.workers.bootstrap import Job
from rustloader.workers.snapshots import SnapshotPolicy, WorkerStart

pytestmark = pytest.mark.ours


@pytest.fixture
def workers(tmp_path, monkeypatch):
    return Workers(tmp_path / "snapshots", monkeypatch)


class Unreadable:
    def __reduce__(self):
        return _raise, ()


def _raise():
    raise OSError("unreadable")


@pytest.mark.forks
def test_every_kind_of_answer_counts(workers):
    def unsendable(samples):
        return threading.Lock() if samples[0][0] == 1 else samples

    batches = [[0], Unreadable(), [1], [2], [3]]
    iterator = iter(make(Faulty(5), batch_size=1, batch_sampler=batches, collate_fn=unsendable, seed_by="batch"))
    kinds = [outcome(next, iterator)[0] for _ in range(6)]
    assert kinds == ["value", "error", "error", "error", "value", "end"]
    assert [count for count, _, _ in workers.sent()] == [0, 1, 2, 3, 4, 5]


class NoIterator(Logged, IterableDataset):
    def __iter__(self):
        raise KeyError("iter")


class NoLoading(Logged, Numbers):
    def __init__(self, n):
        Logged.__init__(self)
        Numbers.__init__(self, n)

    def load_state_dict(self, state):
        raise KeyError("load")


class NoIteratorState(Tail):
    def __iter__(self):
        iterator = super().__iter__()
        iterator.load_state_dict = iterator.missing = lambda state: self.missing
        return iterator


BROKEN = {
    "init": (lambda: Numbers(4), dict(worker_init_fn=bad_init)),
    "iter": (NoIterator, {}),
    "load": (lambda: NoLoading(4), {}),
    "iterator": (lambda: NoIteratorState(4), {}),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.forks
def test_an_error_of_the_start_is_the_first_snapshot(workers, case):
    make_dataset, kw = BROKEN[case]
    workers.set(WorkerStart({"mark": 1}, {"i": 1}, replay=2 if case.startswith("iter") else [[0], [1]]))
    loader = make(make_dataset(), persistent_workers=True, collate_fn=as_list, **kw)
    iterator = iter(loader)
    kind = AttributeError if case == "iterator" else KeyError
    assert [outcome(next, iterator)[:2] for _ in range(2)] == [("error", kind)] * 2
    ((count, error, is_error),) = workers.sent()
    assert (count, is_error, error.exc_type) == (0, True, kind)
    assert error.where == "in DataLoader worker process 0" and error.exc_type.__name__ in error.exc_msg
    # The next epoch begins as usual.
    results = [outcome(next, iter(loader))[0], workers.sent()[1][2]]
    assert results == (["value", False] if case in ("load", "iterator") else ["error", True])


# Through the engine


@pytest.fixture
def engine(monkeypatch):
    """Gives workers a start; their snapshots go to the engine."""
    original = fallback.Engine
    monkeypatch.setattr(
        fallback, "Engine", lambda config, *rest, **kw: original(config.changed(snapshots=True), *rest, **kw)
    )

    def begin(*starts, every=1, first_ordinal=0):
        policy = SnapshotPolicy(every, first_ordinal)
        job = functools.partial(Job, snapshots=policy, starts=list(starts) or None)
        monkeypatch.setattr(session, "Job", job)

    begin()
    return begin


def snapshot(iterator, worker, answers):
    """(count, state or error, is_error)"""
    result = iterator._core.snapshot(worker, answers)
    content = snapshots.read_error(result.payload)[0] if result.is_error else snapshots.read(result.payload)
    return result.answers, content, result.is_error


def place(iterator, worker, answers):
    """The number of answers before the snapshot, and the place of the iterator in it."""
    count, state, is_error = snapshot(iterator, worker, answers)
    assert not is_error
    return count, state.iterator_state["i"]


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
def test_a_worker_cannot_change_the_state_that_it_was_given(engine, method):
    mark = torch.zeros(1000)
    engine(*[WorkerStart({"mark": mark})] * 2)
    iterator = iter(make(Marking(4), 2, batch_size=None, collate_fn=untouched, multiprocessing_context=method))
    assert list(iterator) == [1.0, 1.0, 2.0, 2.0]
    assert not mark.any() and not mark.is_shared()


class Marking(Logged, Numbers):
    """Each sample is the number of times that the worker has changed its mark."""

    def __init__(self, n):
        Logged.__init__(self)
        Numbers.__init__(self, n)

    def __getitem__(self, i):
        self.mark += 1
        return self.mark[0].item()


class Arriving:
    """Logs the ID of each process that unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return arrive, (self.path,)


def arrive(path):
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    return torch.zeros(1)


def test_a_worker_is_sent_its_own_state_alone(engine, tmp_path):
    paths = [tmp_path / "0", tmp_path / "1"]
    engine(*[WorkerStart({"mark": Arriving(path)}) for path in paths])
    loader = make(Marking(2), 2, batch_size=None, collate_fn=untouched, multiprocessing_context="spawn")
    iterator = iter(loader)
    pids = [f"{worker.pid}\n" for worker in iterator._workers]
    assert list(iterator) == [1.0, 1.0]
    assert [path.read_text() for path in paths] == pids


def test_the_end_of_a_dataset_without_batches_has_its_snapshot(engine):
    iterator = iter(make(Tail(2), persistent_workers=True, batch_size=None, collate_fn=untouched))
    assert list(iterator) == [0, 1]
    assert [snapshot(iterator, 0, answers)[1].ended for answers in (1, 2, 3)] == [False, False, True]


def test_a_state_may_be_large(engine):
    big = torch.arange(1 << 20)
    engine(WorkerStart({"mark": big}))
    iterator = iter(make(Tail(4), collate_fn=as_list))
    next(iterator)
    _, state, _ = snapshot(iterator, 0, 1)
    assert torch.equal(state.dataset_state["mark"], big)
