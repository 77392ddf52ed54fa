"""Iterators used from several threads and from signal handlers (T21)."""

import itertools
import os
import signal
import threading
import time

import pytest
import torch
from sample_data import Held, Images, Numbers
from support import (
    DataLoader,
    from_engine,
    gone,
    in_thread,
    outcome,
    outcomes,
    values,
    wait_until,
    while_next_waits,
    worker_pids,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


@pytest.fixture
def on_signal():
    """Sets a handler for SIGUSR1 for the duration of a test."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


def test_t21_the_thread_that_made_the_iterator_has_ended():
    iterator = in_thread(lambda: iter(DataLoader(Numbers(60), num_workers=2, batch_size=None)))
    time.sleep(0.3)
    assert all(w.is_alive() for w in iterator._workers)
    with from_engine(60):
        assert values(iterator) == list(range(60))


def test_t21_persistent_workers_of_a_thread_that_has_ended():
    loader = DataLoader(Numbers(8), num_workers=2, batch_size=None, persistent_workers=True)
    assert in_thread(values, loader) == list(range(8))
    for _ in range(2):
        assert values(loader) == list(range(8))
        assert in_thread(values, loader) == list(range(8))


def test_a_thread_for_each_batch():
    iterator = iter(DataLoader(Numbers(12), num_workers=2, batch_size=None))
    assert [in_thread(next, iterator).item() for _ in range(12)] == list(range(12))
    assert outcome(in_thread, next, iterator) == ("end",)


@pytest.mark.ours
@pytest.mark.parametrize("in_order", [True, False])
def test_two_threads_in_one_next_get_every_batch_once(in_order):
    dataset = Images(200, (3, 30, 30))
    iterator = iter(DataLoader(dataset, num_workers=2, batch_size=1, in_order=in_order))
    taken = [[] for _ in range(3)]
    wrong = []

    def take(own):
        try:
            for x, i in iterator:
                own.append(int(i))
                if not torch.equal(x[0], dataset.image(int(i))):
                    wrong.append(int(i))
        except RuntimeError as error:
            wrong.append(error)

    threads = [threading.Thread(target=take, args=(own,)) for own in taken]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    assert not any(t.is_alive() for t in threads)
    assert sorted(itertools.chain(*taken)) == list(range(200)) and wrong == []
    if in_order:
        assert all(own == sorted(own) for own in taken)


@pytest.mark.ours
def test_all_threads_in_next_at_the_end_get_stop_iteration():
    ends = []

    def take(iterator):
        ends.append(outcome(list, iterator))

    for _ in range(20):  # in most rounds no thread is waiting when the epoch ends
        iterator = iter(DataLoader(Numbers(2), num_workers=1, batch_size=1))
        threads = [threading.Thread(target=take, args=(iterator,)) for _ in range(8)]
        [t.start() for t in threads]
        [t.join(60) for t in threads]
        assert [end[0] for end in ends] == ["value"] * 8 and sum(len(end[1]) for end in ends) == 2, ends
        ends.clear()


@pytest.mark.ours
def test_a_signal_handler_that_enters_next_again_gets_an_error(on_signal, tmp_path):
    iterator = iter(DataLoader(Held(4, 0, tmp_path / "go"), num_workers=1, batch_size=None))
    seen = []

    def handler(*_):
        seen.append(outcome(next, iterator))
        (tmp_path / "go").touch()

    on_signal(handler)
    thread = while_next_waits(os.kill, os.getpid(), signal.SIGUSR1)
    assert next(iterator).item() == 0
    thread.join()
    assert [(o[0], o[1]) for o in seen] == [("error", RuntimeError)]
    assert values(iterator) == [1, 2, 3]


@pytest.mark.ours
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("where", ["thread", "handler"])
def test_shutdown_wakes_next(where, persistent, on_signal, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.3)
    dataset = Held(4, 0, tmp_path / "go")
    loader = DataLoader(dataset, num_workers=1, batch_size=None, persistent_workers=persistent)
    iterator = iter(loader)
    pids = worker_pids(iterator)
    on_signal(lambda *_: iterator._shutdown_workers())
    by_signal = os.kill, os.getpid(), signal.SIGUSR1
    thread = while_next_waits(*(by_signal if where == "handler" else [iterator._shutdown_workers]))
    with pytest.raises(Exception) as caught:
        next(iterator)
    assert not isinstance(caught.value, StopIteration)
    thread.join()
    assert wait_until(lambda: all(map(gone, pids)))
    assert outcomes(iterator, 2)[0][0] in ("error", "end")


@pytest.mark.ours
def test_t23_no_thread_in_main_without_pinning():
    before = {thread.ident for thread in threading.enumerate()}, set(os.listdir("/proc/self/task"))
    iterator = iter(DataLoader(Numbers(9), num_workers=2))
    next(iterator)
    assert {thread.ident for thread in threading.enumerate()} <= before[0]
    assert set(os.listdir("/proc/self/task")) <= before[1]
