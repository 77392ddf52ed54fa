"""stall_timeout: a worker that spends longer on one batch is killed, and counts as dead."""

import ctypes
import functools
import os
import pickle
import re
import signal
import threading
import time
import types

import pytest
from resume_support import Workers
from sample_data import Numbers, Slow, untouched
from support import STARTED, DataLoader, gone, values, wait_until, within, worker_pids
from torch.utils.data import IterableDataset

import rustloader
from rustloader.supervision import stalls
from rustloader.workers.snapshots import WorkerStart

pytestmark = [
    pytest.mark.ours,
    pytest.mark.warns,
    pytest.mark.filterwarnings("ignore:.*multi-thread:DeprecationWarning"),
]

# Seconds: a limit that only stuck batches exceed, and the time of a stuck batch.
LIMIT, LONG = 2.0, 600


# Part of each warning about a worker that was killed.
KILLED = "It was killed: stall_timeout is"


def keep_the_gil():
    # Signals do not interrupt the call.
    reader, _ = os.pipe()
    ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)


def match_without_end():
    # The engine of regular expressions keeps the GIL.
    re.match(r"(a*)*b", "a" * 40)


def wait_for_a_lock():
    lock = threading.Lock()
    with lock:
        lock.acquire(timeout=LONG)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep():
    time.sleep(LONG)


def block_all_signals():
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    sleep()


class Stuck(Numbers):
    """At one sample, writes the time to a file and calls a function that gets stuck."""

    def __init__(self, file, function, n=8, at=3):
        super().__init__(n)
        self.file, self.function, self.at = file, function, at

    def __getitem__(self, i):
        if i == self.at:
            self.get_stuck()
        return super().__getitem__(i)

    def get_stuck(self):
        self.file.write_text(str(time.monotonic()))
        self.function()

    def began(self):
        return float(self.file.read_text())


def stalled_error(iterator):
    with within(STARTED), pytest.raises(rustloader.WorkerStalledError) as caught:
        next(iterator)
    return caught.value


@pytest.mark.parametrize("way", [keep_the_gil, match_without_end, wait_for_a_lock, stop, block_all_signals])
def test_a_stuck_worker_is_killed_and_its_batch_raises(lines, tmp_path, way):
    dataset = Stuck(tmp_path / "began", way)
    iterator = iter(DataLoader(dataset, batch_size=None, num_workers=2, stall_timeout=LIMIT))
    pids = worker_pids(iterator)
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
    error = stalled_error(iterator)
    took = time.monotonic() - dataset.began()
    # The kill takes 0.3 s more than the limit, unless the machine is busy.
    assert LIMIT <= took < LIMIT + 30
    text = (
        "DataLoader worker 1 took longer than stall_timeout for one batch and was killed; the log has its stack, and "
        f"a larger stall_timeout allows slower batches. DataLoader worker (pid {pids[1]}) is killed by signal: Killed. "
    )
    assert str(error) == text
    assert (error.worker_id, error.pid, error.exitcode, error.index) == (1, pids[1], -signal.SIGKILL, 3)
    assert error.__notes__ == ["Worker 1 was assigned the batch with index 3."]
    again = stalled_error(iterator)
    copied = pickle.loads(pickle.dumps(error))
    assert str(again) == str(copied) == text
    assert type(copied) is rustloader.WorkerStalledError and (copied.worker_id, copied.index) == (1, 3)
    assert all(wait_until(functools.partial(gone, pid)) for pid in pids)
    [line] = lines(KILLED)
    what = rf"DataLoader worker 1 \(pid {pids[1]}\) has been working on one batch for [\d.]+ s \(state: fetch\); "
    assert re.match(what + rf"the batch has index 3\. It was killed: stall_timeout is {LIMIT:.0f} s\. ", line), line


def test_the_log_has_the_stack(lines, caplog, tmp_path):
    """Before the kill, the stack is awaited for 0.2 s, in which a busy machine may not write it."""

    def has_stack():
        caplog.clear()
        dataset = Stuck(tmp_path / "began", keep_the_gil, n=1, at=0)
        stalled_error(iter(DataLoader(dataset, batch_size=None, num_workers=1, stall_timeout=0.5)))
        [line] = lines(KILLED)
        stack = re.search(r"Its stack:\n.*most recent call first.*in keep_the_gil\n.*in get_stuck\n", line, re.S)
        # A slow worker may not be in keep_the_gil yet: its stack is then another one.
        assert "Its stack:\n" in line or "Stack unavailable: it did not answer within 0.2 s" in line
        return stack

    assert wait_until(has_stack, 120)


@pytest.mark.parametrize(
    "way, seconds, reason",
    [
        (stop, "0.2", "it did not answer within 0.2 s: it is stopped"),
        (sleep, "0", "RUSTLOADER_STALL_STACK_SECONDS is 0."),
    ],
)
def test_the_log_says_why_it_has_no_stack(lines, monkeypatch, tmp_path, way, seconds, reason):
    monkeypatch.setenv("RUSTLOADER_STALL_STACK_SECONDS", seconds)
    stalled_error(iter(DataLoader(Stuck(tmp_path / "b", way, 1, 0), num_workers=1, stall_timeout=LIMIT)))
    [line] = lines(KILLED)
    assert f"Stack unavailable: {reason}" in line


def test_a_worker_stuck_in_an_abandoned_epoch_does_not_stop_the_next_one(lines, tmp_path):
    dataset = Stuck(tmp_path / "began", sleep, n=4, at=1)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True, stall_timeout=LIMIT)
    assert int(next(iter(loader))) == 0
    assert wait_until(dataset.file.exists)
    with within(STARTED), pytest.raises(rustloader.WorkerStalledError) as caught:
        iter(loader)
    assert caught.value.worker_id == 1 and len(lines(KILLED)) == 1


class StuckInCollate:
    def __call__(self, samples):
        if 3 in map(int, samples):
            sleep()
        return samples


def test_a_worker_that_is_stuck_in_collate_fn_is_killed(lines):
    options = dict(num_workers=1, batch_size=2, collate_fn=StuckInCollate(), stall_timeout=LIMIT)
    iterator = iter(DataLoader(Numbers(4), **options))
    assert values(next(iterator)) == [0, 1]
    assert stalled_error(iterator).index == [2, 3]
    assert "(state: collate)" in lines(KILLED)[0]


def test_a_stopped_worker_that_does_not_take_its_task_is_killed(lines):
    options = dict(batch_size=None, num_workers=1, persistent_workers=True, stall_timeout=LIMIT)
    loader = DataLoader(Numbers(2), **options)
    iterator = iter(loader)
    assert values(iterator) == [0, 1]
    [pid] = worker_pids(iterator)
    assert wait_until(lambda: iterator._core.worker_status(0)["state"] == "idle")
    os.kill(pid, signal.SIGSTOP)
    with within(STARTED), pytest.raises(rustloader.WorkerStalledError):
        iter(loader)


# Replays


class SlowStart:
    """A worker_init_fn."""

    def __call__(self, _):
        time.sleep(2 * LIMIT)


class SlowIter(IterableDataset):
    def __iter__(self):
        time.sleep(2 * LIMIT)
        return iter(range(2))


# Each takes longer than the limit, but no single batch does.
LEFT_ALONE = {
    "a start": (lambda: Numbers(2), dict(worker_init_fn=SlowStart())),
    "the start of a later epoch": (SlowIter, dict(persistent_workers=True)),
}


@pytest.mark.parametrize("what", LEFT_ALONE)
def test_no_worker_is_killed_for(what, lines):
    dataset, options = LEFT_ALONE[what]
    loader = DataLoader(dataset(), batch_size=None, num_workers=1, stall_timeout=LIMIT, **options)
    assert [values(loader) for _ in range(2)] == [[0, 1]] * 2 and lines(KILLED) == []


class SlowStream(IterableDataset):
    def __iter__(self):
        for i in range(12):
            time.sleep(0.3)
            yield i


@pytest.fixture
def workers(tmp_path, monkeypatch):
    return Workers(tmp_path / "snapshots", monkeypatch)


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_a_replay_is_not_one_batch(lines, workers, kind):
    options = dict(batch_size=None, num_workers=1, collate_fn=untouched, stall_timeout=LIMIT)
    if kind == "map":
        workers.set(WorkerStart(replay=[*range(10)]), first_ordinal=10)
        dataset, expected = Slow(12, dict.fromkeys(range(12), 0.3)), [*range(12)]
    else:
        workers.set(WorkerStart(replay=10))
        dataset, expected = SlowStream(), [10, 11]
    assert values(DataLoader(dataset, **options)) == expected
    assert lines(KILLED) == []


class StuckStream(IterableDataset):
    def __iter__(self):
        yield from range(2)
        sleep()


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_a_batch_of_a_replay_has_its_limit(lines, workers, kind, tmp_path):
    if kind == "map":
        workers.set(WorkerStart(replay=[0, 3]), first_ordinal=2)
        dataset = Stuck(tmp_path / "began", sleep)
    else:
        workers.set(WorkerStart(replay=4))
        dataset = StuckStream()
    stalled_error(iter(DataLoader(dataset, batch_size=None, num_workers=1, stall_timeout=LIMIT)))
    [line] = lines(KILLED)
    assert f"(state: {'starting' if kind == 'map' else 'fetch'})" in line


# Restarts


class StuckOnce(Numbers):
    """Gets stuck once at each of some samples."""

    def __init__(self, folder, at, function=sleep, n=8):
        super().__init__(n)
        self.folder, self.at, self.function = folder, at, function

    def __getitem__(self, i):
        get_stuck_once(self.folder, i, self.at, self.function)
        return super().__getitem__(i)


def get_stuck_once(folder, i, at, function=sleep):
    if i in at and not (folder / str(i)).exists():
        (folder / str(i)).touch()
        function()


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(multiprocessing_context="forkserver"),
        dict(dispatch="shared_queue"),
        dict(persistent_workers=True),
        dict(num_workers=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", [sleep, keep_the_gil, stop])
def test_a_stuck_worker_is_replaced_and_no_batch_is_lost(lines, tmp_path, way, options):
    options = dict(num_workers=2, batch_size=None, stall_timeout=LIMIT, max_restarts=2) | options
    loader = DataLoader(StuckOnce(tmp_path, (2, 5), way), **options)
    with within(STARTED):
        assert values(loader) == [*range(8)]
    faults = rustloader.stats(loader).faults
    assert (faults.restarts, faults.stalls, faults.out_of_memory) == (2, 2, 0)
    assert len(lines(KILLED)) == 2 and len(faults.deaths) == 2
    assert all("stall_timeout" in line for line in faults.deaths)
    if options.get("persistent_workers"):
        assert values(loader) == [*range(8)] and len(lines(KILLED)) == 2


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_batch_that_is_always_too_slow_costs_three_workers_wherever_they_get_stuck(lines, tmp_path, on_error):
    dataset = StuckOnce(tmp_path, range(4))
    options = dict(num_workers=1, batch_size=4, stall_timeout=0.5, max_restarts=100, on_error=on_error)
    loader = DataLoader(dataset, **options)
    error = stalled_error(iter(loader))
    assert (error.restarts, error.index, len(lines(KILLED))) == (2, [0, 1, 2, 3], 3)
    assert error.__notes__[-1] == "The batch is not retried: 3 workers died while fetching it."
    assert rustloader.stats(loader).faults.skipped == 0


# The error, the log, the option


def test_a_log_that_raises_does_not_save_the_worker(monkeypatch, tmp_path):
    class Interrupted(Exception):
        pass

    def raises(*_):
        raise Interrupted

    monkeypatch.setattr(stalls, "fault_log", types.SimpleNamespace(warning=raises))
    iterator = iter(DataLoader(Stuck(tmp_path / "began", sleep, 2, 0), num_workers=1, stall_timeout=0.5))
    with within(STARTED), pytest.raises(Interrupted):
        next(iterator)
    assert stalled_error(iterator).worker_id == 0


def test_a_worker_that_cannot_be_killed_has_its_own_text(lines):
    stalls.warn(1, 7, False, 12.0, "fetch", [3], None, "why", (10.0, False))
    assert lines("stall_timeout") == [
        "DataLoader worker 1 (pid 7) has been working on one batch for 12 s (state: fetch); the batch has index [3]. "
        "stall_timeout is 10 s, but this process kills only its own descendants. "
        "Stack unavailable: why."
    ]
