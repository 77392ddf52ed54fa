"""Stuck workers are reported once, with the stack of their code."""

import ctypes
import functools
import os
import re
import signal
import threading
import time

import pytest
import torch
from sample_data import Numbers, Slow
from support import STARTED, DataLoader, gone, values, wait_until, within, worker_pids
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


@pytest.fixture
def limits(monkeypatch):
    """Sets the limits of a start and of an item, in seconds."""

    def set_limits(start, item):
        monkeypatch.setenv("RUSTLOADER_STALL_START_SECONDS", str(start))
        monkeypatch.setenv("RUSTLOADER_STALL_ITEM_SECONDS", str(item))

    return set_limits


class Stuck(Numbers):
    """Some items create a file when they begin, and last until a warning names them, plus `more` seconds; `acts` are
    called at their item before that."""

    def __init__(self, n, items, folder, more=0.0, acts=()):
        super().__init__(n)
        self.items, self.folder, self.more, self.acts = items, folder, more, dict(acts)

    def __getitem__(self, i):
        if i in self.acts:
            self.acts[i]()
        if i in self.items:
            (self.folder / f"at {i}").touch()
            self.last(i)
        return torch.tensor(i)

    def last(self, i):
        assert wait_until((self.folder / f"warned {i}").exists, 240)
        time.sleep(self.more)

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


@pytest.mark.forks
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
    iterator = iter(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=method))
    for i in range(6):
        if i in dataset.items:
            # Otherwise a slow worker could be reported while it has not yet begun the batch.
            dataset.wait_for(i)
        assert next(iterator) == i
    for index in (1, 4):
        text = warning_about(warnings, index)
        text_of_item = rf"has been working on one batch for [\d.]+ s \(state: fetch\); the batch has index {index}\. "
        assert re.match(head(r"\d+") + text_of_item, text), text
        assert "RUSTLOADER_STALL_ITEM_SECONDS" in text
        assert re.search(r"test_stall\.py\", line \d+ in last\n", text), text
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


class KeepsTheGil(Stuck):
    """Item 1 reads from an empty pipe in a C call that does not release the GIL."""

    def __init__(self, folder, pipe):
        super().__init__(4, [1], folder)
        self.pipe = pipe

    def last(self, i):
        assert ctypes.PyDLL(None).read(self.pipe, ctypes.create_string_buffer(1), 1) == 1


@pytest.mark.forks
def test_a_c_call_that_keeps_the_gil_is_named_and_not_disturbed(warnings, limits, tmp_path):
    limits(0, 0.3)
    reader, writer = os.pipe()
    dataset = KeepsTheGil(tmp_path, reader)
    iterator = iter(DataLoader(dataset, batch_size=None, num_workers=1))

    def release():
        wait_until(lambda: any("the batch has index 1." in text for text in warnings), 240)
        os.write(writer, b"x")

    thread = threading.Thread(target=release)
    thread.start()
    assert next(iterator) == 0
    dataset.wait_for(1)
    assert values(iterator) == [1, 2, 3]
    thread.join()
    os.close(reader)
    os.close(writer)
    text = warning_about(warnings, 1)
    assert re.search(r"the batch has index 1\..*test_stall\.py\", line \d+ in last\n", text, re.S), text


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


def install_handler(folder):
    signal.signal(SIGNAL, lambda *_: (folder / "called").touch())
    time.sleep(0.06)


def remove_handler():
    signal.signal(SIGNAL, signal.SIG_DFL)


def reuse_descriptors(folder):
    """Closes all descriptors and opens files that reuse their numbers."""
    os.closerange(3, 200)
    reuse_descriptors.files = [open(folder / f"file {n}", "w") for n in range(60)]


OWN_HANDLER = rf"Stack unavailable: it has its own handler for signal {SIGNAL} \(SIGRTMIN\+13\)\.$"
NO_STACK = {
    "handler of main": OWN_HANDLER,
    "handler of worker_init_fn": OWN_HANDLER,
    "handler of an item": OWN_HANDLER,
    "removed handler": rf"it has removed the handler for signal {SIGNAL} \(SIGRTMIN\+13\)\.$",
    "reused descriptors": "the file for its stack cannot be read.*now names another file",
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.forks) if "main" in c else c for c in NO_STACK])
def test_changed_handlers_and_descriptors_are_named_and_left_alone(warnings, limits, tmp_path, case):
    """Handlers of the user are never called, workers without a handler not killed, files not written to."""
    limits(0, 0.3)
    install = functools.partial(install_handler, tmp_path)
    acts = {
        "handler of an item": {1: install},
        "removed handler": {2: remove_handler},
        "reused descriptors": {0: functools.partial(reuse_descriptors, tmp_path)},
    }
    dataset = Stuck(4, [2], tmp_path, acts=acts.get(case, ()))
    start = (lambda _: install()) if case == "handler of worker_init_fn" else None
    before = signal.getsignal(SIGNAL)
    try:
        if case == "handler of main":
            install()
        iterator = iter(DataLoader(dataset, batch_size=None, num_workers=1, prefetch_factor=3, worker_init_fn=start))
        # Until item 2 is reached, no stall check runs: during item 1 the handler could still be called.
        dataset.wait_for(2)
        assert values(iterator) == [0, 1, 2, 3]
    finally:
        signal.signal(SIGNAL, before)
    assert re.search(NO_STACK[case], warning_about(warnings, 2))
    assert not (tmp_path / "called").exists()
    sizes = [file.stat().st_size for file in tmp_path.glob("file *")]
    assert sizes == [0] * (60 if case == "reused descriptors" else 0)


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
