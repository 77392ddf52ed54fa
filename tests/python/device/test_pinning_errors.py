"""Pinning that fails, stalls or ends: allocator, users' types, workers, thread (P17, P19, P20, S6)."""

import gc
import os
import signal
import threading
import time

import pytest
import torch
from pinning_support import thread_name
from sample_data import Given, Numbers, two_arguments
from support import (
    BOTH,
    DataLoader,
    gone,
    outcome,
    outcomes,
    outcomes_of,
    wait_until,
    waits_in_next,
    within,
    worker_pids,
)
from torch.utils.data import _utils

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
THREAD_EXITED = ("error", RuntimeError, "Pin memory thread exited unexpectedly")


class Sized(Numbers):
    """Sample i has 5000 + i elements, so that its allocation is known by its size."""

    def __getitem__(self, i):
        return torch.full((5000 + i,), i)

    @staticmethod
    def nbytes(i):
        return 8 * (5000 + i)


class Act:
    """A sample that runs an action when it is pinned: its entry in `acts` of the process that pins it."""

    acts = {}  # noqa: RUF012

    def __init__(self, i):
        self.i = i

    def pin_memory(self):
        self.acts.get(self.i, lambda: None)()
        return self.i


class Acts(Numbers):
    def __getitem__(self, i):
        return Act(i)


@pytest.fixture
def acts():
    yield Act.acts
    Act.acts.clear()


def loader_of(dataset, cls=DataLoader, **kw):
    """With one worker, batches reach the pin thread in order."""
    return cls(dataset, **({"batch_size": None, "num_workers": 1, "pin_memory": True} | kw))


def raising(error):
    def act():
        raise error

    return act


def test_p17_an_error_of_the_allocator_stands_in_the_place_of_its_batch(host):
    torch.accelerator.set_device_index(2)
    host.fail = {Sized.nbytes(3): RuntimeError("no pinned memory"), Sized.nbytes(4): MemoryError()}
    iterator = iter(loader_of(Sized(7)))
    answers = outcomes(iterator, 8)
    assert [kind for kind, *_ in answers] == ["value"] * 3 + ["error"] * 2 + ["value"] * 2 + ["end"]
    assert answers[3][1:] == (RuntimeError, "Caught RuntimeError in pin memory thread for device 2.")
    assert answers[4][1:] == (MemoryError, "Caught MemoryError in pin memory thread for device 2.")
    assert not host.live


def test_p17_errors_of_users_types_are_those_of_torch(host, acts):
    errors = [ValueError("two\nlines"), KeyError("key"), two_arguments(), StopIteration(), OSError(2, "x")]
    acts.update({2 * i + 1: raising(error) for i, error in enumerate(errors)})
    answers, expected = (outcomes_of(loader_of(Acts(11), cls), 13) for cls in reversed(BOTH))
    assert answers == expected
    assert [k for k, answer in enumerate(answers) if answer[0] != "value"] == [1, 3, 5, 7, 9, 11, 12]
    assert "in pin memory thread for device 0." in answers[1][2]
    with pytest.raises(ValueError, match=r"(?s)Original Traceback.*self\.acts\.get.*ValueError: two\nlines"):
        list(loader_of(Acts(2)))


class Sour:
    """Cannot be unpickled in the main process."""

    def __reduce__(self):
        return sour, (os.getpid(),)


def sour(pid):
    if os.getpid() != pid:
        raise ValueError("it has gone off")


@pytest.mark.ours
@pytest.mark.forks
def test_a_batch_that_cannot_be_unpickled_is_an_error_in_its_place(host):
    """It kills the pin thread of torch's loader."""
    answers = outcomes(iter(loader_of(Given([1, Sour(), 3]))), 4)
    text = "Caught ValueError in pin memory thread for device 0."
    assert answers == [("value", 1), ("error", ValueError, text), ("value", 3), ("end",)]


@pytest.mark.ours
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_the_end_of_the_thread_is_an_error_for_good(host, acts, error):
    """torch leaves the workers waiting for their next task."""
    acts[4] = raising(error)
    loader = loader_of(Acts(20), persistent_workers=True)
    iterator = iter(loader)
    pids = worker_pids(iterator)
    assert outcomes(iterator, 4) == [("value", i) for i in range(4)], "batches that were ready must come first"
    assert outcomes(iterator, 3) == [THREAD_EXITED] * 3
    with pytest.raises(RuntimeError) as caught:
        next(iterator)
    assert type(error).__name__ in caught.value.__notes__[0]
    iterator._pin_memory_thread.join(60)
    assert not iterator._pin_memory_thread.is_alive()
    assert wait_until(lambda: all(map(gone, pids)))
    acts.clear()
    assert list(loader) == list(range(20)), "the next epoch must have new workers and a new thread"
    loader._iterator._shutdown_workers()


@pytest.mark.ours
def test_a_thread_that_cannot_begin_is_named(host, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: raising(RuntimeError("no such device"))())
    iterator = iter(loader_of(Numbers(4)))
    with pytest.raises(RuntimeError, match="Pin memory thread exited unexpectedly") as caught:
        next(iterator)
    assert "no such device" in caught.value.__notes__[0]


@pytest.mark.ours
def test_p20_a_death_is_seen_although_the_thread_is_busy(host, acts):
    """The worker dies while the thread pins; the batches that it had sent still come first."""
    all_sent, dead = threading.Event(), []

    def act():
        os.kill(pids[0], signal.SIGKILL)
        dead.append(wait_until(lambda: gone(pids[0])))
        time.sleep(0.5)

    acts[0], acts[2] = lambda: all_sent.wait(60), act
    iterator = iter(loader_of(Acts(30), prefetch_factor=6))
    pids = worker_pids(iterator)
    assert wait_until(lambda: iterator._core.worker_status(0)["tasks_done"] == 6)
    all_sent.set()
    *got, last = outcomes(iterator, 12)
    count = [kind for kind, *_ in got].count("value")
    assert count >= 6 and got[:count] == [("value", i) for i in range(count)] and dead == [True]
    assert {x for x in got[count:]} | {last} == {last} and "is killed by signal" in last[2]


def test_p19_a_late_thread_is_a_timeout_and_nothing_is_lost(host, acts):
    go = threading.Event()
    acts[1] = lambda: go.wait(60)
    iterator = iter(loader_of(Acts(4), timeout=0.5))
    timed_out = ("error", RuntimeError, "DataLoader timed out after 0.5 seconds")
    assert wait_until(lambda: outcome(next, iterator) == ("value", 0), 60)
    answers = [outcome(next, iterator)]
    go.set()
    while answers[-1] != ("end",):
        answers.append(outcome(next, iterator))
    assert answers[0] == timed_out
    assert [x for x in answers if x != timed_out] == [("value", 1), ("value", 2), ("value", 3), ("end",)]


def test_ctrl_c_while_next_waits_for_the_thread_loses_nothing(host, acts):
    release = threading.Event()
    acts[1] = lambda: release.wait(60)
    iterator = iter(loader_of(Acts(4)))
    assert next(iterator) == 0
    thread = threading.Thread(target=lambda: waits_in_next() and os.kill(os.getpid(), signal.SIGINT))
    with within(50), pytest.raises(KeyboardInterrupt):
        thread.start()
        next(iterator)
    thread.join()
    release.set()
    assert list(iterator) == [1, 2, 3]


@pytest.mark.ours
def test_an_iterator_that_is_collected_on_its_own_pin_thread_ends(host, acts):
    """The collector runs on any thread that allocates; the pin thread cannot join itself."""
    dropped, collected = threading.Event(), []

    def act():
        dropped.wait(60)
        start = time.monotonic()
        gc.collect()
        collected.append((thread_name(), time.monotonic() - start))

    acts[1] = act
    iterator = iter(loader_of(Acts(9)))
    pids, thread = worker_pids(iterator), iterator._pin_memory_thread
    assert next(iterator) == 0
    holder = [iterator]
    holder.append(holder)
    gc.disable()
    try:
        del iterator, holder
        dropped.set()
        assert wait_until(lambda: collected)
    finally:
        gc.enable()
    assert all(map(gone, pids))
    assert collected[0][0] == "rl_pin"
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.ours
def test_a_stuck_type_does_not_hold_up_the_shutdown(host, acts, monkeypatch):
    """torch's shutdown joins its thread without a timeout."""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
    stuck, release = threading.Event(), threading.Event()
    acts[0] = lambda: stuck.set() or release.wait()
    iterator = iter(loader_of(Acts(9)))
    pids, thread = worker_pids(iterator), iterator._pin_memory_thread
    assert stuck.wait(60)
    with within(10):
        iterator._shutdown_workers()
    assert all(map(gone, pids)) and thread.is_alive()
    assert outcome(next, iterator) == ("end",)
    del iterator
    release.set()
    thread.join(60)
    assert not thread.is_alive()
