"""SIGTERM to the whole process group, as when a job is preempted: main handles it, the workers keep working."""

import os
import signal
import subprocess
import time

import pytest
import torch
from sample_data import Numbers, Slow
from support import DataLoader, finish, gone, start_script, wait_until, within, worker_pids, workers_report

from rustloader.workers import group

pytestmark = pytest.mark.ours

KILLED = "is killed by signal: Terminated"


@pytest.fixture
def patient(monkeypatch):
    """A worker that received a SIGTERM gives the others as long to receive theirs as a busy machine may need."""
    monkeypatch.setenv("RUSTLOADER_SIGTERM_SECONDS", "100")


@pytest.fixture(autouse=True)
def handled():
    """Installs a SIGTERM handler in this process; yields the list of the signals that it received."""
    numbers = []
    before = signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def terminate(*pids):
    """Sends SIGTERM from a process other than main."""
    subprocess.run(["kill", "-TERM", *map(str, pids)], check=True)


def batches(iterator, count):
    """Takes `count` batches; returns their numbers."""
    return [int(next(iterator)) for _ in range(count)]


def served(workers, n=10**6, **kw):
    """An iterator over numbers, and its workers' PIDs. A batch of each worker is delivered."""
    iterator = iter(DataLoader(Numbers(n), batch_size=None, num_workers=workers, **kw))
    assert batches(iterator, workers) == list(range(workers))
    return iterator, worker_pids(iterator)


def batches_for(iterator, seconds):
    """Takes batches for `seconds`; returns their numbers."""
    numbers, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        numbers.append(int(next(iterator)))
        time.sleep(0.02)
    return numbers


TRAINING = """
    from sample_data import Numbers
    # Stall warnings of a slow machine are out of scope here.
    os.environ["RUSTLOADER_STALL_START_SECONDS"] = "0"
    signals = []
    signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
    iterator = iter(DataLoader(Numbers(10**6), batch_size=None, num_workers=2, multiprocessing_context="METHOD"))
    last = 10**6
    for count, batch in enumerate(iterator):
        assert batch == count
        if count == 2:
            print("ready", flush=True)
        time.sleep(0.01)
        # All have received it and keep working.
        if signals and {iterator._core.worker_status(worker)["terminated"] for worker in range(2)} == {"group"}:
            last = min(last, count + 10)
        if count == last:
            break
    print("saved", len(signals))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_training_loop_can_save_its_checkpoint(method, patient):
    process = start_script(TRAINING.replace("METHOD", method))
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGTERM)
    assert finish(process, 240) == (0, "saved 1\n", "")


def test_a_signal_to_all_workers_is_survived_and_a_second_one_is_not(handled, patient):
    iterator, pids = served(2)
    terminate(*pids)
    assert workers_report(iterator, terminated="group")
    assert batches(iterator, 40) == list(range(2, 42))
    assert not any(map(gone, pids))
    terminate(pids[1])
    with within(20), pytest.raises(RuntimeError, match=rf"\(pid {pids[1]}\) {KILLED}"):
        batches_for(iterator, 40)
    assert handled == []


class EndsItself(Numbers):
    """Sends itself a SIGTERM at item 1; creates a file if it survives."""

    def __init__(self, n, file):
        super().__init__(n)
        self.file = file

    def __getitem__(self, i):
        if i == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            self.file.touch()
        return i


def test_a_worker_that_signals_itself_ends_at_once(tmp_path):
    iterator = iter(DataLoader(EndsItself(8, tmp_path / "lives"), batch_size=None, num_workers=1))
    assert int(next(iterator)) == 0
    with within(20), pytest.raises(RuntimeError, match=KILLED):
        next(iterator)
    assert not (tmp_path / "lives").exists()


def test_shutdown_ends_workers_as_usual(monkeypatch, patient):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    monkeypatch.setattr(group, "KILL_AFTER", 25)
    iterator = iter(DataLoader(Slow(4, {0: 60, 1: 60}), batch_size=None, num_workers=2))
    assert workers_report(iterator, state="fetch")
    terminate(*worker_pids(iterator))
    # A SIGTERM that is still pending would merge with main's.
    assert workers_report(iterator, terminated="group")
    iterator._shutdown_workers()
    # Neither by SIGKILL nor by the death 30 s after the first signal.
    assert [worker.exitcode for worker in iterator._workers] == [0, 0]


def test_a_users_handler_in_a_worker_is_called(tmp_path):
    def start(_):
        signal.signal(signal.SIGTERM, lambda *_: (tmp_path / "called").touch())

    iterator, pids = served(1, worker_init_fn=start)
    terminate(*pids)
    assert wait_until((tmp_path / "called").exists)
    assert batches(iterator, 20) == list(range(1, 21))


class Forking(Numbers):
    """Item 1 is the wait status of a forked child that received a SIGTERM."""

    def __getitem__(self, i):
        if i != 1:
            return i
        if (pid := os.fork()) == 0:
            time.sleep(60)
        os.kill(pid, signal.SIGTERM)
        return os.waitpid(pid, 0)[1]


def test_a_sigterm_ends_a_child_of_a_worker():
    loader = DataLoader(Forking(3), batch_size=None, num_workers=1)
    with within(55):
        assert list(loader) == [0, signal.SIGTERM, 2]


def test_without_a_handler_nothing_changes(handled):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    iterator, pids = served(2)
    terminate(*pids)
    # With a handler they would keep working for 30 s.
    with within(25), pytest.raises(RuntimeError, match=KILLED):
        batches_for(iterator, 40)
