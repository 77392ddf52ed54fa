"""Stuck workers are reported once, with the stack of their code."""

import ctypes
import os
import re
import signal
import threading
import time

import pytest
import torch
from sample_data import Numbers, Slow, worker_id
from support import STARTED, DataLoader, gone, state_of, values, wait_until, within, worker_pids
from torch.utils.data import IterableDataset

import rustloader.supervision.stalls

pytestmark = [
    pytest.mark.ours,
    pytest.mark.warns,
    pytest.mark.filterwarnings("ignore:.*multi-thread:DeprecationWarning"),
]

SIGNAL = signal.SIGRTMIN + 13
LOCK = threading.Lock()


@pytest.fixture
def warnings(monkeypatch, tmp_path):
    """The warnings of the loader. Each warning that names a batch creates a file."""
    lines = []

    def warning(text, *args):
        lines.append(text % args)
        if named := re.search(r"the batch has index (\d+)\.", lines[-1]):
            (tmp_path / f"warned {named[1]}").touch()

    monkeypatch.setattr(rustloader.supervision.stalls.logger, "warning", warning)
    return lines


def warning_about(warnings, index):
    """The one warning about this batch. On a busy machine there may also be warnings about others."""
    [text] = [text for text in warnings if f"the batch has index {index}." in text]
    return text


def take_all(loader):
    """The batches of a loader. Before a batch that gets stuck is requested, its worker must be in it: otherwise a slow
    worker would be reported while it has not yet begun the batch."""
    iterator, batches = iter(loader), []
    for i in range(len(loader.dataset)):
        if i in loader.dataset.items:
            loader.dataset.wait_for(i)
        batches.append(int(next(iterator)))
    assert list(iterator) == []
    return batches


@pytest.fixture
def limits(monkeypatch):
    """Sets the limits of a start and of an item, in seconds."""

    def set_limits(start, item):
        monkeypatch.setenv("RUSTLOADER_STALL_START_SECONDS", str(start))
        monkeypatch.setenv("RUSTLOADER_STALL_ITEM_SECONDS", str(item))

    return set_limits


class Stuck(Numbers):
    """Some items create a file when they begin, and last until a warning names them, plus `more` seconds."""

    def __init__(self, n, items, folder, more=0.0):
        super().__init__(n)
        self.items, self.folder, self.more = items, folder, more

    def __getitem__(self, i):
        if i in self.items:
            self.begins(i)
            assert wait_until((self.folder / f"warned {i}").exists, 240)
            time.sleep(self.more)
        return torch.tensor(i)

    def begins(self, i):
        (self.folder / f"at {i}").touch()

    def wait_for(self, i):
        assert wait_until((self.folder / f"at {i}").exists, STARTED)


def head(pid):
    return rf"DataLoader worker 0 \(pid {pid}\) "


class WaitsForLock:
    """A worker_init_fn."""

    def __init__(self, file):
        self.file = file

    def __call__(self, _):
        self.wait_for_lock()

    def wait_for_lock(self):
        self.file.touch()
        LOCK.acquire()


def test_a_lock_held_across_a_fork_is_named(warnings, limits, monkeypatch, tmp_path):
    limits(0.3, 0)
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    with LOCK:
        start = WaitsForLock(tmp_path / "started")
        loader = DataLoader(Numbers(4), batch_size=2, num_workers=1, worker_init_fn=start, timeout=1.5)
        iterator = iter(loader)
        [pid] = worker_pids(iterator)
        assert wait_until(start.file.exists, 30)
        with within(20), pytest.raises(RuntimeError, match="timed out"):
            next(iterator)
        iterator._shutdown_workers()
    assert gone(pid)
    [text] = warnings
    text_of_start = r"has not produced its first batch after [\d.]+ s; the batch has index \[0, 1\]\. "
    assert re.match(head(pid) + text_of_start, text), text
    assert "A lock that another thread held at the fork" in text and "RUSTLOADER_STALL_START_SECONDS" in text
    assert re.search(r"Its stack:\n.*most recent call first.*test_stall\.py\", line \d+ in wait_for_lock\n", text, re.S)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_an_item_that_sleeps_is_named_once(warnings, limits, tmp_path, method):
    limits(0, 0.3)
    dataset = Stuck(6, [1, 4], tmp_path, more=0.8)
    assert take_all(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=method)) == [*range(6)]
    for index in (1, 4):
        text = warning_about(warnings, index)
        text_of_item = rf"has been working on one batch for [\d.]+ s \(state: fetch\); the batch has index {index}\. "
        assert re.match(head(r"\d+") + text_of_item, text), text
        assert "RUSTLOADER_STALL_ITEM_SECONDS" in text
        assert re.search(r"test_stall\.py\", line \d+ in __getitem__\n", text), text
        assert re.search(r"fetch\.py\", line \d+ in fetch$", text) and "in loop" not in text, text


RECORDED = """\
Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3/threading.py", line 320 in wait
  File "/usr/lib/python3/threading.py", line 975 in run

Current thread 0x00007f2 (most recent call first):
  File "/home/me/data.py", line 12 in load
  File "/home/me/data.py", line 9 in __getitem__
  File "/env/torch/utils/data/_utils/fetch.py", line 54 in <listcomp>
  File "/env/torch/utils/data/_utils/fetch.py", line 54 in fetch
"""
CALLERS = """\
  File "/env/rustloader/fetch/step.py", line 90 in fetch
  File "/env/rustloader/workers/main.py", line 240 in loop
  File "/home/me/train.py", line 3 in <module>
"""


def test_a_stack_ends_at_the_fetcher():
    shown = rustloader.supervision.stalls.up_to_fetcher
    assert shown(f"{RECORDED}{CALLERS}\nExtension modules: numpy") == f"{RECORDED}\nExtension modules: numpy"
    assert shown(CALLERS + RECORDED) == (CALLERS + RECORDED).rstrip("\n")


def test_of_workers_that_share_a_queue_the_one_that_holds_the_item_is_named(warnings, limits, tmp_path):
    limits(0, 0.3)
    dataset = Stuck(6, [3], tmp_path)
    iterator = iter(DataLoader(dataset, batch_size=None, num_workers=2, dispatch="shared_queue"))
    pids = worker_pids(iterator)
    # Wait here, not in next(): there, a worker that has not yet taken item 3 could be named.
    dataset.wait_for(3)
    holder = iterator._task_info[3][0]
    assert [int(batch) for batch in iterator] == [0, 1, 2, 3, 4, 5]
    text = warning_about(warnings, 3)
    assert text.startswith(f"DataLoader worker {holder} (pid {pids[holder]}) has been working on one batch for "), text
    assert re.search(r"test_stall\.py\", line \d+ in __getitem__\n", text), text


class KeepsTheGil(Stuck):
    """Item 1 reads from an empty pipe in a C call that does not release the GIL."""

    def __init__(self, folder, pipe):
        super().__init__(4, [1], folder)
        self.pipe = pipe

    def __getitem__(self, i):
        if i == 1:
            self.begins(i)
            assert ctypes.PyDLL(None).read(self.pipe, ctypes.create_string_buffer(1), 1) == 1
        return torch.tensor(i)


def test_a_c_call_that_keeps_the_gil_is_named_and_not_disturbed(warnings, limits, tmp_path):
    limits(0, 0.3)
    reader, writer = os.pipe()
    loader = DataLoader(KeepsTheGil(tmp_path, reader), batch_size=None, num_workers=1)

    def release():
        wait_until(lambda: any("the batch has index 1." in text for text in warnings), 240)
        os.write(writer, b"x")

    thread = threading.Thread(target=release)
    thread.start()
    assert take_all(loader) == list(range(4))
    thread.join()
    os.close(reader)
    os.close(writer)
    text = warning_about(warnings, 1)
    assert re.search(r"the batch has index 1\..*test_stall\.py\", line \d+ in __getitem__\n", text, re.S), text


def test_a_limit_of_zero_disables_the_warning(warnings, limits):
    limits(0, 0)

    def slow_start(_):
        time.sleep(0.5)

    loader = DataLoader(Slow(2, {0: 0.7}), batch_size=None, num_workers=1, worker_init_fn=slow_start)
    assert values(loader) == [0, 1]
    assert warnings == []


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_limit_that_is_no_number_is_an_error(limits, text):
    limits(30, text)
    with pytest.raises(
        ValueError, match=f"^RUSTLOADER_STALL_ITEM_SECONDS must be a number of seconds, 0 or more, got '{text}'; "
    ):
        iter(DataLoader(Numbers(2), num_workers=1))


class Epochs(IterableDataset):
    """The second epoch does not begin until a warning names it."""

    epoch = 0

    def __init__(self, folder):
        self.folder = folder

    def __iter__(self):
        self.epoch += 1
        if self.epoch == 2:
            (self.folder / "begins").touch()
            assert wait_until((self.folder / "warned").exists, 240)
        return iter(range(3))


def test_the_start_of_a_later_epoch_is_named(limits, monkeypatch, tmp_path):
    limits(0.3, 0)
    warnings = []

    def warning(text, *args):
        # A slow machine may have exceeded the limit earlier.
        if "in __iter__" in (line := text % args):
            warnings.append(line)
            (tmp_path / "warned").touch()

    monkeypatch.setattr(rustloader.supervision.stalls.logger, "warning", warning)
    loader = DataLoader(Epochs(tmp_path), batch_size=None, num_workers=1, persistent_workers=True)
    assert list(loader) == [0, 1, 2]
    iterator = iter(loader)
    # Otherwise the worker could be named before it is in `__iter__`, and only once.
    assert wait_until((tmp_path / "begins").exists, STARTED)
    assert [list(iterator), list(loader)] == [[0, 1, 2]] * 2
    [text] = warnings
    assert re.search(
        r"has not produced its first batch after [\d.]+ s.*test_stall\.py\", line \d+ in __iter__\n", text, re.S
    )


class Own(Stuck):
    """Has its own handler, which writes to a file: from main, from the start, or from just before the stuck item."""

    def __init__(self, when, folder):
        super().__init__(4, [2], folder)
        self.when, self.file = when, folder / "file"

    def install(self):
        signal.signal(SIGNAL, lambda *_: self.file.write_text("called"))

    def __getitem__(self, i):
        if i == 1 and self.when == "item":
            self.install()
            time.sleep(0.06)
        return super().__getitem__(i)


@pytest.mark.parametrize("when", ["main", "start", "item"])
def test_a_users_handler_is_never_called(warnings, limits, tmp_path, when):
    limits(0, 0.3)
    dataset = Own(when, tmp_path)
    before = signal.getsignal(SIGNAL)
    try:
        if when == "main":
            dataset.install()
        start = (lambda _: dataset.install()) if when == "start" else None
        loader = DataLoader(dataset, batch_size=None, num_workers=1, prefetch_factor=3, worker_init_fn=start)
        iterator = iter(loader)
        # Until item 2 is reached, no stall check runs: during item 1 the handler could still be called.
        dataset.wait_for(2)
        assert values(iterator) == [0, 1, 2, 3]
    finally:
        signal.signal(signal.SIGRTMIN + 13, before)
    text = warning_about(warnings, 2)
    assert text.endswith(f"Stack unavailable: it has its own handler for signal {SIGNAL} (SIGRTMIN+13).")
    assert not dataset.file.exists()


class RemovesHandler(Stuck):
    """Removes the handler in the stuck item itself."""

    def __getitem__(self, i):
        if i == 1:
            signal.signal(SIGNAL, signal.SIG_DFL)
        return super().__getitem__(i)


def test_a_worker_whose_handler_is_gone_is_not_killed(warnings, limits, tmp_path):
    limits(0, 0.3)
    assert take_all(DataLoader(RemovesHandler(3, [1], tmp_path), batch_size=None, num_workers=1)) == [0, 1, 2]
    text = warning_about(warnings, 1)
    assert text.endswith(f"it has removed the handler for signal {SIGNAL} (SIGRTMIN+13).")


class ClosesAll(Stuck):
    """Closes all descriptors and opens files that reuse their numbers."""

    def __init__(self, folder):
        super().__init__(3, [1], folder)

    def __getitem__(self, i):
        if i == 0:
            os.closerange(3, 200)
            self.files = [open(self.folder / f"file {worker_id()}-{n}", "w") for n in range(60)]
        return super().__getitem__(i)


def test_no_stack_is_written_to_a_file_that_reuses_the_descriptor(warnings, limits, tmp_path):
    limits(0, 0.3)
    assert take_all(DataLoader(ClosesAll(tmp_path), batch_size=None, num_workers=1)) == [0, 1, 2]
    text = warning_about(warnings, 1)
    assert "the file for its stack cannot be read" in text and "now names another file" in text
    assert [file.stat().st_size for file in tmp_path.glob("file *")] == [0] * 60


def test_a_stopped_worker_is_named_without_a_stack(warnings, limits, monkeypatch, tmp_path):
    limits(0, 0.3)
    monkeypatch.setenv("RUSTLOADER_STALL_STACK_SECONDS", "1")
    dataset = Stuck(4, [1], tmp_path)
    iterator = iter(DataLoader(dataset, batch_size=None, num_workers=1))
    assert next(iterator) == 0
    [pid] = worker_pids(iterator)
    dataset.wait_for(1)
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: state_of(pid) == "T")

    def resume():
        wait_until((tmp_path / "warned 1").exists, 240)
        os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=resume)
    thread.start()
    assert values(iterator) == [1, 2, 3]
    thread.join()
    text = warning_about(warnings, 1)
    assert re.match(head(pid) + r"has been working on one batch for .*; the batch has index 1\. .*", text)
    assert "Stack unavailable: it did not answer within 1 s: it is stopped" in text


def test_waiting_for_the_user_is_no_stall(warnings, limits):
    """A worker with nothing to do is not stuck, nor is one whose results wait to be received."""
    limits(0.3, 0.3)
    iterator = iter(DataLoader(Slow(6, {5: 0.1}), batch_size=None, num_workers=2, prefetch_factor=1))

    def done():
        return sum(iterator._core.worker_status(worker)["tasks_done"] for worker in range(2))

    for i in range(6):
        assert next(iterator) == i
        if i == 0:
            warnings.clear()  # a busy machine may have started the workers late
        # All tasks sent are done: the workers wait for the user, not for a busy machine.
        sent = min(6, i + 3)
        assert wait_until(lambda sent=sent: done() == sent)
        time.sleep(0.35)
    assert warnings == []
