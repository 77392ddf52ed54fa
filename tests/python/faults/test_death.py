"""Workers that die, and shutdowns that must not hang (P20, P26, T11). After each test, the fixture
`nothing_left_behind` looks for processes, mappings, descriptors and files."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import time

import pytest
import torch
from sample_data import Dying, DyingOnce, Numbers, Slow, as_list, worker_id
from support import DataLoader, gone, rustloader, values, wait_until, within, worker_pids

pytestmark = pytest.mark.ours

LOST = "Details are lost due to multiprocessing. Rerunning with num_workers=0 may give better error trace."
WAYS = {
    "SIGKILL": (signal.SIGKILL, "DataLoader worker (pid {}) is killed by signal: Killed. "),
    "SIGSEGV": (signal.SIGSEGV, "DataLoader worker (pid {}) is killed by signal: Segmentation fault. "),
    "SIGTERM": (signal.SIGTERM, "DataLoader worker (pid {}) is killed by signal: Terminated. "),
    "SIGBUS": (signal.SIGBUS, "DataLoader worker (pid {}) is killed by signal: Bus error. "),
    "exit 0": (0, "DataLoader worker (pid(s) {}) exited unexpectedly"),
    "exit 3": (3, "DataLoader worker (pid {}) exited unexpectedly with exit code 3. " + LOST),
}


def text_of(way, pid):
    return WAYS[way][1].format(pid)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_p20_a_dead_worker_is_an_error_at_once_and_for_good(way, persistent):
    loader = DataLoader(Dying(20, 7, WAYS[way][0]), num_workers=2, batch_size=None, persistent_workers=persistent)
    iterator = iter(loader)
    pids = worker_pids(iterator)
    assert [next(iterator).item() for _ in range(7)] == list(range(7)), "complete batches come first"
    errors = []
    for _ in range(3):
        with within(10), pytest.raises(rustloader.WorkerDiedError) as caught:
            next(iterator)
        errors.append(caught.value)
    assert len(set(map(id, errors))) == 3
    text, exitcode = str(errors[0]), -WAYS[way][0] if way.startswith("SIG") else WAYS[way][0]
    assert text.startswith(text_of(way, pids[1])) and ("shared memory" in text) == (way == "SIGBUS")
    for error in (*errors, pickle.loads(pickle.dumps(errors[0]))):
        assert type(error) is rustloader.WorkerDiedError and str(error) == text
        assert (error.worker_id, error.pid, error.exitcode, error.index, error.restarts) == (1, pids[1], exitcode, 7, 0)
        assert error.__notes__ == ["Worker 1 was assigned the batch with index 7."]
    assert wait_until(lambda: all(map(gone, pids))), "the other workers are retired"


# The signals that torch's handlers report.
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE], ids=lambda number: number.name)
@pytest.mark.forks
def test_p22_torchs_handlers_report_the_signal_in_the_worker(number, capfd):
    with within(20), pytest.raises(RuntimeError, match="killed by signal"):
        list(DataLoader(Dying(3, 0, number), num_workers=1, batch_size=None))
    assert "ERROR: Unexpected " in capfd.readouterr().err


def test_a_persistent_loader_reports_a_death_that_was_detected_but_not_raised(tmp_path):
    """The epoch is abandoned while batches from before the death are still undelivered."""
    dataset = DyingOnce(40, 7, signal.SIGKILL, str(tmp_path / "died"))
    loader = DataLoader(dataset, num_workers=2, batch_size=None, persistent_workers=True)
    iterator = iter(loader)
    victim = iterator._workers[1].pid
    assert [next(iterator).item() for _ in range(4)] == list(range(4))
    assert wait_until(lambda: gone(victim))
    # While batches are ready, `next` checks for deaths only now and then.
    time.sleep(0.2)
    assert next(iterator).item() == 4
    with within(20), pytest.raises(RuntimeError, match=rf"\(pid {victim}\) is killed by signal: Killed"):
        iter(loader)
    assert values(loader) == list(range(40))


def test_a_worker_whose_process_object_was_closed():
    iterator = iter(DataLoader(Slow(4, {1: 60}), num_workers=2, batch_size=None))
    next(iterator)
    assert wait_until(lambda: iterator._core.worker_status(1)["state"] == "fetch")
    process = iterator._workers[1]
    pid = process.pid
    process.kill()
    process.join()
    process.close()
    with within(10), pytest.raises(RuntimeError, match=rf"DataLoader worker \(pid(\(s\))? {pid}\) "):
        list(iterator)
    iterator._shutdown_workers()


def test_t13_a_death_is_not_raised_in_the_users_own_code():
    iterator = iter(DataLoader(Numbers(50), num_workers=2, batch_size=None))
    next(iterator)
    handler = signal.getsignal(signal.SIGCHLD)
    os.kill(worker_pids(iterator)[0], signal.SIGKILL)
    total = 0
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        total += 1
    assert total > 0 and signal.getsignal(signal.SIGCHLD) is handler
    with pytest.raises(RuntimeError, match="is killed by signal: Killed"):
        list(iterator)


def reap(*_):
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize("disposition", [signal.SIG_IGN, reap], ids=["ignored", "reaped"])
def test_s7_sigchld_belongs_to_the_user(disposition):
    before = signal.signal(signal.SIGCHLD, disposition)
    others = set(multiprocessing.process._children)
    try:
        loader = DataLoader(Numbers(6), num_workers=2, batch_size=None)
        for _ in range(2):
            with within(10):
                assert values(loader) == list(range(6))
        iterator = iter(DataLoader(Dying(6, 3, signal.SIGKILL), num_workers=2, batch_size=None))
        with within(10), pytest.raises(RuntimeError, match="DataLoader worker"):
            list(iterator)
        iterator._shutdown_workers()
    finally:
        signal.signal(signal.SIGCHLD, before)
        # multiprocessing by itself keeps the process objects of children that other code has reaped.
        kept = multiprocessing.process._children - others
        multiprocessing.process._children.difference_update(kept)
    assert not kept


def test_p26_a_keyboard_interrupt_in_a_worker_is_a_death_without_a_traceback(capfd):
    def interrupt(samples):
        if worker_id() == 0:
            raise KeyboardInterrupt
        return samples

    iterator = iter(DataLoader(Numbers(6), num_workers=1, collate_fn=interrupt))
    with within(20), pytest.raises(RuntimeError, match="DataLoader worker"):
        next(iterator)
    assert "Traceback" not in capfd.readouterr().err


def stubborn(_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def test_t11_shutdown_keeps_its_deadline_whatever_a_worker_does(monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    loader = DataLoader(Slow(8, {2: 60, 3: 60}), num_workers=2, batch_size=None, worker_init_fn=stubborn)
    iterator = iter(loader)
    assert [next(iterator).item() for _ in range(2)] == [0, 1]
    pids = worker_pids(iterator)
    with within(10):
        iterator._shutdown_workers()
    assert all(map(gone, pids))


@pytest.mark.parametrize(("interval", "seconds"), [(0.2, 60), (60, 7)])
def test_t11_workers_have_as_long_to_exit_as_torchs_do(interval, seconds, monkeypatch, tmp_path):
    begun, finished = tmp_path / "begun", tmp_path / "finished"

    def slow_at_1(i):
        if i == 1:
            begun.touch()
            time.sleep(seconds)
            finished.touch()
        return i

    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", interval)
    iterator = iter(DataLoader(range(2), num_workers=1, batch_size=None, collate_fn=slow_at_1))
    assert next(iterator) == 0 and wait_until(begun.exists)
    iterator._shutdown_workers()
    assert finished.exists() == (seconds < interval)


def test_shutdown_stops_between_samples(monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 60)
    # A batch of 2,000 samples of 50 ms each: 100 s.
    dataset = Slow(2000, dict.fromkeys(range(2000), 0.05))
    iterator = iter(DataLoader(dataset, num_workers=1, batch_size=2000, collate_fn=as_list))
    assert wait_until(lambda: iterator._core.worker_status(0)["state"] == "fetch")
    with within(20):
        iterator._shutdown_workers()
    assert iterator._workers[0].exitcode == 0, "it exited by itself"
