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
    waits_in_next,
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


def test_made_in_main_and_used_in_a_thread():
    iterator = iter(DataLoader(Numbers(30), num_workers=2, batch_size=None))
    assert next(iterator).item() == 0
    assert in_thread(lambda: values(iterator)) == list(range(1, 30))
    assert all(map(gone, worker_pids(iterator)))


def test_a_thread_for_each_batch():
    iterator = iter(DataLoader(Numbers(12), num_workers=2, batch_size=None))
    assert [in_thread(next, iterator).item() for _ in range(12)] == list(range(12))
    assert outcome(in_thread, next, iterator) == ("end",)


def test_the_last_reference_goes_in_a_thread():
    box = [iter(DataLoader(Numbers(30), num_workers=2))]
    pids = worker_pids(box[0])
    in_thread(box.clear)
    assert wait_until(lambda: all(map(gone, pids)))


def test_many_threads_each_with_a_loader_of_its_own():
    results = {}

    def run(k):
        results[k] = [values(DataLoader(Numbers(20 + k), num_workers=1, batch_size=None)) for _ in range(3)]

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    assert results == {k: [list(range(20 + k))] * 3 for k in range(4)}


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


def test_a_signal_handler_runs_while_next_waits(on_signal, tmp_path):
    iterator = iter(DataLoader(Held(2, 0, tmp_path / "go"), num_workers=1, batch_size=None))
    on_signal(lambda *_: (tmp_path / "go").touch())
    thread = while_next_waits(os.kill, os.getpid(), signal.SIGUSR1)
    assert values(iterator) == [0, 1]
    thread.join()
    assert (tmp_path / "go").exists()


def test_an_error_in_a_signal_handler_leaves_next_and_loses_nothing(on_signal, tmp_path):
    iterator = iter(DataLoader(Held(3, 0, tmp_path / "go"), num_workers=1, batch_size=None))

    class Stop(Exception):
        pass

    def handler(*_):
        raise Stop

    on_signal(handler)
    with pytest.raises(Stop):
        thread = while_next_waits(os.kill, os.getpid(), signal.SIGUSR1)
        next(iterator)
    thread.join()
    (tmp_path / "go").touch()
    assert values(iterator) == [0, 1, 2]


class SlowAndHeld(Held):
    def __getitem__(self, i):
        time.sleep(0.01)
        return super().__getitem__(i)


@pytest.mark.ours
def test_many_signals_while_batches_come(on_signal, tmp_path):
    count = []

    def handler(*_):
        count.append(1)
        if len(count) == 20:
            (tmp_path / "go").touch()

    on_signal(handler)
    iterator = iter(DataLoader(SlowAndHeld(60, 30, tmp_path / "go"), num_workers=2, batch_size=None))
    done = threading.Event()

    def shoot():
        while not done.wait(0.002):
            os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=shoot)
    thread.start()
    assert values(iterator) == list(range(60))
    done.set()
    thread.join()
    assert len(count) >= 20


@pytest.mark.ours
def test_shutdown_from_a_signal_handler_wakes_next(on_signal, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.3)
    iterator = iter(DataLoader(Held(4, 0, tmp_path / "go"), num_workers=1, batch_size=None))
    pids = worker_pids(iterator)
    on_signal(lambda *_: iterator._shutdown_workers())
    thread = while_next_waits(os.kill, os.getpid(), signal.SIGUSR1)
    with pytest.raises(Exception) as caught:
        next(iterator)
    assert not isinstance(caught.value, StopIteration)
    thread.join()
    assert wait_until(lambda: all(map(gone, pids)))


@pytest.mark.ours
@pytest.mark.parametrize("persistent", [False, True])
def test_shutdown_from_another_thread_wakes_next(persistent, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.3)
    dataset = Held(4, 0, tmp_path / "go")
    loader = DataLoader(dataset, num_workers=1, batch_size=None, persistent_workers=persistent)
    iterator = iter(loader)
    pids = worker_pids(iterator)
    thread = while_next_waits(iterator._shutdown_workers)
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


def test_the_interpreter_runs_other_threads_while_next_waits(tmp_path):
    iterator = iter(DataLoader(Held(1, 0, tmp_path / "go"), num_workers=1, batch_size=None))
    ticks, done = [], threading.Event()

    def tick():
        assert waits_in_next()
        while not done.wait(0.02):
            ticks.append(1)
            if len(ticks) == 6:
                (tmp_path / "go").touch()

    thread = threading.Thread(target=tick)
    thread.start()
    next(iterator)
    done.set()
    thread.join()
    assert len(ticks) > 5
