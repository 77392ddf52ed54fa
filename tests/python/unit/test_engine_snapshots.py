"""`Port.send_snapshot`, `Engine.snapshot` and `Engine.wait_started`, through workers whose datasets send snapshots."""

import os
import signal
import sys
import threading
import time
from multiprocessing.reduction import ForkingPickler

import pytest
from pinning_support import pinning
from sample_data import untouched
from support import POLLS, DataLoader, call_of, in_thread, wait_until, waits_in_next, within, worker_pids
from torch.utils.data import Dataset, get_worker_info

import rustloader._core
import rustloader.iterator.fallback

pytestmark = pytest.mark.ours


@pytest.fixture(autouse=True)
def engines_with_snapshots(monkeypatch):
    def make(config, *args, **kw):
        return rustloader._core.Engine(config.changed(snapshots=True), *args, **kw)

    monkeypatch.setattr(rustloader.iterator.fallback, "Engine", make)


def port():
    """The port of this worker, which is a local variable of a caller."""
    frame = sys._getframe()
    while True:
        value = frame.f_locals.get("port")
        if type(value) is rustloader._core.Port:
            return value
        frame = frame.f_back


def worker_id():
    return get_worker_info().id


class FirstSnapshot:
    """A worker_init_fn that sends the first snapshot. Worker 1 first waits for the file `wait_for`, if there is one."""

    def __init__(self, wait_for=None, payload=b"first of %d", dies=None):
        self.wait_for, self.payload, self.dies = wait_for, payload, dies

    def __call__(self, worker):
        if worker == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        end = time.monotonic() + 240
        while self.wait_for is not None and worker == 1 and not os.path.exists(self.wait_for):
            assert time.monotonic() < end, "the file does not appear"
            time.sleep(0.01)
        assert port().send_snapshot(0, self.payload % worker, False)


class Sending(Dataset):
    """Sends a snapshot with each sample. With the sample `wrong`, the snapshot is an error."""

    def __init__(self, n, wrong=None, sample=None):
        self.n, self.wrong, self.sample, self.answers = n, wrong, sample, 0

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.answers += 1
        assert port().send_snapshot(self.answers, b"%d of %d" % (self.answers, worker_id()), i == self.wrong)
        return i if self.sample is None else self.sample


def loader_of(dataset, workers=2, **kw):
    kw = dict(worker_init_fn=FirstSnapshot()) | kw
    return DataLoader(dataset, num_workers=workers, batch_size=None, collate_fn=untouched, **kw)


def snapshot(core, worker, answers):
    """(answers, is_error, payload), or None."""
    result = core.snapshot(worker, answers)
    return result and (result.answers, result.is_error, result.payload)


def first_snapshots(iterator):
    return [snapshot(iterator._core, worker, 0) for worker in range(iterator._num_workers)]


FIRST = [(0, False, b"first of 0"), (0, False, b"first of 1")]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("dispatch", ["round_robin", "shared_queue"])
def test_each_position_has_the_snapshots_of_its_workers(method, dispatch):
    iterator = iter(loader_of(Sending(30), multiprocessing_context=method, dispatch=dispatch))
    core = iterator._core
    assert core.wait_started()
    assert first_snapshots(iterator) == FIRST
    for answers in range(1, 31):
        next(iterator)
        for back in range(min(answers, 8) + 1):
            for worker, count in enumerate(core.position(answers, back).per_worker):
                expected = (count, False, b"%d of %d" % (count, worker)) if count else FIRST[worker]
                assert snapshot(core, worker, count) == expected
    with pytest.raises(ValueError, match="there is no worker 2"):
        snapshot(core, 2, 0)
    pids = worker_pids(iterator)
    iterator._shutdown_workers()
    assert len(pids) == 2
    assert first_snapshots(iterator) == [None, None]
    assert core.position(30, 0).low == 30


def test_an_error_is_distinguished_from_a_snapshot():
    iterator = iter(loader_of(Sending(8, wrong=2)))
    for _ in range(4):
        next(iterator)
    assert snapshot(iterator._core, 0, 2) == (2, True, b"2 of 0")
    assert snapshot(iterator._core, 1, 2) == (2, False, b"2 of 1")
    iterator._shutdown_workers()


def test_snapshots_are_no_batches_in_the_figures():
    iterator = iter(loader_of(Sending(20)))
    assert list(iterator) == list(range(20))
    stats = rustloader.stats(iterator)
    assert stats.batches == 20
    assert sum(worker.tasks for worker in stats.workers) == 20


# Waiting for the first snapshots


def test_the_wait_for_the_first_snapshots_ends_with_the_last_of_them(tmp_path):
    iterator = iter(loader_of(Sending(4), worker_init_fn=FirstSnapshot(tmp_path / "go")))
    core, ended = iterator._core, threading.Event()
    waiting = threading.Thread(target=lambda: core.wait_started() and ended.set())
    waiting.start()
    assert wait_until(lambda: snapshot(core, 0, 0) is not None)
    assert not ended.wait(0.3)
    assert snapshot(core, 1, 0) is None
    (tmp_path / "go").touch()
    waiting.join(60)
    assert ended.is_set()
    assert first_snapshots(iterator) == FIRST
    assert list(iterator) == [0, 1, 2, 3]


def test_no_thread_waits_while_one_is_in_next(tmp_path):
    iterator = iter(loader_of(Sending(4), worker_init_fn=FirstSnapshot(tmp_path / "go")))
    core, results = iterator._core, []

    def handler(signum, frame):
        results.append(core.wait_started())
        (tmp_path / "go").touch()

    def ask():
        assert waits_in_next()
        results.append(core.wait_started())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    assert next(iterator) == 0
    thread = threading.Thread(target=ask)
    try:
        thread.start()
        assert next(iterator) == 1
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert results == [False, False]
    assert core.wait_started()
    assert list(iterator) == [2, 3]


class Interrupted(Exception):
    pass


def test_a_handler_that_raises_ends_the_wait(tmp_path):
    def handler(signum, frame):
        raise Interrupted

    def interrupt():
        wait_until(lambda: call_of(f"/proc/self/task/{os.getpid()}") in POLLS)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    iterator = iter(loader_of(Sending(4), worker_init_fn=FirstSnapshot(tmp_path / "go")))
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
    assert first_snapshots(iterator) == FIRST
    assert list(iterator) == [0, 1, 2, 3]


def test_a_worker_that_dies_before_its_first_snapshot_is_not_waited_for():
    iterator = iter(loader_of(Sending(4), worker_init_fn=FirstSnapshot(dies=1)))
    with within(120):
        assert iterator._core.wait_started()
    assert first_snapshots(iterator) == [FIRST[0], None]
    assert next(iterator) == 0
    with pytest.raises(RuntimeError, match="killed by signal"):
        next(iterator)
    # What the other worker has sent remains.
    assert snapshot(iterator._core, 0, 1) == (1, False, b"1 of 0")


def test_the_end_of_the_iterator_ends_the_wait(tmp_path):
    iterator = iter(loader_of(Sending(4), worker_init_fn=FirstSnapshot(tmp_path / "go")))
    timer = threading.Timer(0.3, iterator._shutdown_workers)
    timer.start()
    with within(120):
        iterator._core.wait_started()
    (tmp_path / "go").touch()
    timer.join()
    assert iterator._core.wait_started()


def test_an_engine_without_snapshots_waits_for_none(monkeypatch):
    monkeypatch.setattr(rustloader.iterator.fallback, "Engine", rustloader._core.Engine)
    iterator = iter(loader_of(list(range(4)), worker_init_fn=None))
    with within(60):
        assert iterator._core.wait_started()
    assert first_snapshots(iterator) == [None, None]
    assert list(iterator) == [0, 1, 2, 3]


class Tied:
    """Has a foreign reducer, so it must be unpickled while its worker lives."""


def test_results_that_wait_for_their_unpickling_do_not_hide_a_snapshot(tmp_path, monkeypatch):
    monkeypatch.setitem(ForkingPickler._extra_reducers, Tied, lambda it: (int, ("7",)))
    iterator = iter(loader_of(Sending(6, sample=Tied()), worker_init_fn=FirstSnapshot(tmp_path / "go")))
    # Both results of worker 0 are sent before the last snapshot.
    assert wait_until(lambda: iterator._core.worker_status(0)["tasks_done"] == 2)
    (tmp_path / "go").touch()
    with within(120):
        assert iterator._core.wait_started()
    assert first_snapshots(iterator) == FIRST
    assert list(iterator) == [7] * 6


# Epochs, pinning, memory


def test_each_epoch_of_persistent_workers_has_its_own_snapshots():
    class Epochs(Sending):
        def __getitem__(self, i):
            if i < 2:
                self.answers = 0
                port().send_snapshot(0, b"epoch %d" % worker_id(), False)
            return super().__getitem__(i)

    loader = loader_of(Epochs(9), persistent_workers=True)
    for epoch in range(3):
        iterator = iter(loader)
        core = iterator._core
        if epoch:
            assert core.wait_started()
            assert first_snapshots(iterator) == [(0, False, b"epoch 0"), (0, False, b"epoch 1")]
        for _ in range(9 if epoch == 1 else 4):
            next(iterator)
        count = core.position(9 if epoch == 1 else 4, 0).per_worker[0]
        assert snapshot(core, 0, count) == (count, False, b"%d of 0" % count)
    iterator._shutdown_workers()


def test_the_pin_thread_passes_snapshots_on():
    with pinning():
        iterator = iter(loader_of(Sending(20), pin_memory=True, prefetch_factor=4))
        core = iterator._core
        assert core.wait_started()
        assert first_snapshots(iterator) == FIRST
        for answers in range(1, 21):
            assert next(iterator) == answers - 1
            worker = (answers - 1) % 2
            count = core.position(answers, 0).per_worker[worker]
            assert snapshot(core, worker, count) == (count, False, b"%d of %d" % (count, worker))
        iterator._shutdown_workers()


def test_memory_of_old_snapshots_is_given_back():
    class Large(Sending):
        def __getitem__(self, i):
            self.answers += 1
            port().send_snapshot(self.answers, bytes(1 << 20), False)
            return i

    iterator = iter(loader_of(Large(100), 1))
    used = []
    for _ in iterator:
        used.append(iterator._core.memory()[1])
    # Nine that positions need, the one before them, and those of outstanding tasks.
    assert max(used) < 20 << 20
    assert in_thread(iterator._core.memory) == (0, 0)


def test_a_forked_child_is_refused():
    iterator = iter(loader_of(Sending(4)))
    assert iterator._core.wait_started()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for call in (lambda: snapshot(iterator._core, 0, 0), iterator._core.wait_started):
                try:
                    call()
                except RuntimeError as error:
                    os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        assert pipe.read().count("belongs to the process that this one was forked from") == 2
    os.waitpid(pid, 0)
    assert first_snapshots(iterator) == FIRST
    assert list(iterator) == [0, 1, 2, 3]
