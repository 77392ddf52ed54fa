"""Restarts that fail, are interrupted or meet signal handlers, loaders that end while a slot is vacant, warnings."""

import contextlib
import errno
import os
import signal
import threading
from unittest import mock

import pytest
import torch
from restart_support import Deaths, Mortal, loader_of
from support import (
    STARTED,
    TORCH_MODE,
    DataLoader,
    children,
    gone,
    in_time,
    values,
    wait_until,
    within,
    worker_pids,
)

if not TORCH_MODE:
    from rustloader import LoaderTimeoutError, WorkerDiedError
    from rustloader.supervision import restarts
    from rustloader.workers import process

pytestmark = [pytest.mark.ours, pytest.mark.warns]

N = 24


# Starts that fail


def refusing(times, error):
    """Makes the next `times` starts of processes fail."""
    real, left = process.start, [times]

    def start(worker, name):
        if left[0]:
            left[0] -= 1
            raise error
        real(worker, name)

    return mock.patch.object(process, "start", start)


def test_a_start_that_is_always_refused_raises_the_death(tmp_path):
    iterator = iter(loader_of(Mortal(N, Deaths(tmp_path, {3: 1})), max_restarts=3))
    # The first call of next() may already find the death.
    with refusing(100, OSError(errno.ENOMEM, "no memory")), pytest.raises(WorkerDiedError) as caught:
        list(iterator)
    assert caught.value.index == [2, 3]
    assert "worker 1 could not be restarted: [Errno 12] no memory" in caught.value.__notes__[1]


# Signal handlers


class Late(Exception):
    pass


@pytest.fixture
def on_fork(monkeypatch):
    """Sends a signal after a fork, before the PID is known. Unless the signal is held back, its handler runs there."""
    fork = os.fork

    def begin(number, handler, after):
        pids = []

        def forked():
            pid = fork()
            if pid:
                pids.append(pid)
                if len(pids) == after:
                    os.kill(os.getpid(), number)
                    os.getpid()
            return pid

        monkeypatch.setattr(os, "fork", forked)
        before = signal.signal(number, handler)
        return lambda: signal.signal(number, before)

    return begin


@pytest.mark.forks
@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("dispatch", [None, "shared_queue"])
def test_a_handler_that_raises_during_a_restart_leaves_one_process_for_each_worker(tmp_path, on_fork, number, dispatch):
    def late(*_):
        raise Late

    others = set(children())
    undo = on_fork(number, late, after=3)
    try:
        iterator = iter(loader_of(Mortal(N, Deaths(tmp_path, {5: 1})), max_restarts=3, dispatch=dispatch))
        delivered, interrupted = [], 0
        with within(60):
            while True:
                try:
                    delivered.extend(sample[0] for sample in next(iterator))
                except Late:
                    interrupted += 1
                    assert {*children()} - others == {worker.pid for worker in iterator._workers}
                except StopIteration:
                    break
        assert interrupted == 1 and delivered == list(range(N))
    finally:
        undo()


def test_a_handler_may_call_next_during_a_restart(tmp_path, on_fork):
    delivered = []
    undo = on_fork(signal.SIGUSR1, lambda *_: delivered.extend(sample[0] for sample in next(iterator)), after=3)
    try:
        iterator = iter(loader_of(Mortal(N, Deaths(tmp_path, {5: 1})), max_restarts=3))
        with within(60):
            for batch in iterator:
                delivered.extend(sample[0] for sample in batch)
        assert sorted(delivered) == list(range(N))
    finally:
        undo()


# Ends


@pytest.mark.parametrize("end", ["shut down", "deleted", "goes on"])
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_a_loader_may_end_while_a_slot_is_vacant(tmp_path, persistent, end):
    loader = loader_of(Mortal(N, Deaths(tmp_path, {3: 1})), max_restarts=99, timeout=0.3, persistent_workers=persistent)
    iterator = iter(loader)
    dying = worker_pids(iterator)[1]
    with refusing(100, OSError(errno.EAGAIN, "none left")):
        # This call may already find the death.
        assert in_time(next, iterator)[0] == "value"
        assert wait_until(lambda: gone(dying))
        with pytest.raises(LoaderTimeoutError):
            next(iterator)
    with within(20):
        if end == "shut down":
            iterator._shutdown_workers()
        elif end == "goes on":
            delivered = []
            while len(delivered) < N // 2 - 1:
                with contextlib.suppress(LoaderTimeoutError):
                    delivered.append(next(iterator)[0][0])
            assert delivered == list(range(2, N, 2))
        del iterator, loader


def test_threads_share_an_iterator(tmp_path):
    deaths = Deaths(tmp_path, {3: 1, 8: 1, 13: 1, 19: 1})
    iterator, delivered = iter(loader_of(Mortal(N, deaths))), []

    def take():
        for batch in iterator:
            delivered.append([sample[0] for sample in batch])

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(STARTED)
    assert sorted(delivered) == [[2 * n, 2 * n + 1] for n in range(N // 2)]


# Warnings


@pytest.mark.forks
def test_a_fork_with_other_threads_is_warned_about_once(tmp_path, lines):
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        list(loader_of(Mortal(N, Deaths(tmp_path, {3: 1, 10: 1}))))
    finally:
        stop.set()
        thread.join()
    (line,) = lines("by forking")
    assert 'multiprocessing_context="forkserver"' in line and "other thread" in line


def test_a_clean_start_is_not_warned_about(tmp_path, lines):
    with mock.patch.object(restarts, "hazard_of_fork", lambda: "runs 1 other thread"):
        deaths = Deaths(tmp_path, {3: 1})
        assert len(list(loader_of(Mortal(N, deaths), multiprocessing_context="forkserver"))) == N // 2
    assert lines("was restarted") and not lines("by forking")


def test_a_loader_on_torchs_iterator_warns_that_the_options_have_no_effect(lines):
    class Foreign(torch.multiprocessing.get_context("fork").Process):
        def is_alive(self):
            return super().is_alive()

    context = torch.multiprocessing.get_context("fork")
    with mock.patch.object(type(context), "Process", Foreign):
        loader = DataLoader(
            range(4),
            num_workers=1,
            multiprocessing_context=context,
            max_restarts=2,
            on_error="skip",
        )
        for _ in range(2):
            assert len(values(loader)) == 4
        list(DataLoader(range(4), num_workers=1, multiprocessing_context=context))
    assert lines("no effect") == [
        "max_restarts, on_error of a DataLoader have no effect: it runs on torch's own iterator"
    ]
