"""`Port.send_snapshot`, `Engine.snapshot` and `Engine.wait_started`, through workers whose datasets send snapshots."""

import os
import signal
import sys
import threading
import time

import pytest
from sample_data import untouched
from support import POLLS, DataLoader, call_of, wait_until, within, worker_pids
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

    def __init__(self, wait_for=None):
        self.wait_for = wait_for

    def __call__(self, worker):
        end = time.monotonic() + 240
        while self.wait_for is not None and worker == 1 and not os.path.exists(self.wait_for):
            assert time.monotonic() < end, "the file does not appear"
            time.sleep(0.01)
        assert port().send_snapshot(0, b"first of %d" % worker, False)


class Sending(Dataset):
    """Sends a snapshot with each sample."""

    def __init__(self, n):
        self.n, self.answers = n, 0

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.answers += 1
        assert port().send_snapshot(self.answers, b"%d of %d" % (self.answers, worker_id()), False)
        return i


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


# Waiting for the first snapshots


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


def test_a_forked_child_is_refused():
    iterator = iter(loader_of(Sending(4)))
    assert iterator._core.wait_started()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            core = iterator._core
            for call in (lambda: snapshot(core, 0, 0), core.wait_started, lambda: core.position(0, 0)):
                try:
                    call()
                except RuntimeError as error:
                    os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        assert pipe.read().count("belongs to the process that this one was forked from") == 3
    os.waitpid(pid, 0)
    assert first_snapshots(iterator) == FIRST
    assert list(iterator) == [0, 1, 2, 3]
