"""Signal handlers and collate_fn during restarts: no worker has two processes, no sample is wrongly blamed."""

import os
import signal

import pytest
from restart_support import Deaths, Mortal, loader_of
from sample_data import as_list
from support import TORCH_MODE, children, within

if not TORCH_MODE:
    import rustloader
    from rustloader import WorkerDiedError

pytestmark = [pytest.mark.ours, pytest.mark.warns]

N = 24


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


class DiesCollating:
    """A collate_fn that ends the first `times` workers that collate a particular batch."""

    def __init__(self, folder, times):
        self.folder, self.times = folder, times

    def __call__(self, samples):
        numbers = [sample[0] for sample in samples]
        if numbers[0] == 4 and len(os.listdir(self.folder)) < self.times:
            open(f"{self.folder}/{os.getpid()}", "w").close()
            os._exit(7)
        return as_list(numbers)


def collating(folder, times):
    return rustloader.DataLoader(
        Mortal(12), 4, num_workers=2, collate_fn=DiesCollating(str(folder), times), max_restarts=20, on_error="skip"
    )


def test_a_death_in_collate_fn_is_blamed_on_no_sample(tmp_path):
    loader = collating(tmp_path, 2)
    assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert rustloader.stats(loader).faults.failures == ()


def test_the_third_death_in_collate_fn_of_a_batch_is_final(tmp_path):
    loader = collating(tmp_path, 100)
    with within(60), pytest.raises(WorkerDiedError) as caught:
        list(loader)
    assert len(os.listdir(tmp_path)) == 3
    assert caught.value.__notes__[-1] == "The batch is not retried: 3 workers died while fetching it."
    assert rustloader.stats(loader).faults.failures == ()


class Bad(Mortal):
    """Sample 5 raises an exception, and every later sample ends its process."""

    def __getitem__(self, i):
        if i == 5:
            raise OSError("broken")
        if i > 5:
            os._exit(7)
        return super().__getitem__(i)


def test_a_replacement_that_kills_is_not_retried_forever():
    loader = rustloader.DataLoader(
        Bad(4000), sampler=[0, 1, 5], num_workers=1, collate_fn=as_list, max_restarts=50, on_error="replace"
    )
    with within(90), pytest.raises(WorkerDiedError) as caught:
        list(loader)
    assert caught.value.restarts <= 4
