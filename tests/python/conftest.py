"""Rules for every test: it leaves nothing behind, and no loader falls back to torch silently."""

import contextlib
import gc
import logging
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import sys
import time
from collections import Counter
from multiprocessing import forkserver
from unittest import mock

import pytest
import torch
from pinning_support import pinning
from refusals import RUNNER
from support import SERVER, STARTED_PIDS, TORCH_MODE, children, end_scripts, mappings, open_files, trim_pool

if not TORCH_MODE:
    from rustloader.system import limited_log

# A pool of intra-op threads would start at some test or other, and stay.
torch.set_num_threads(1)
# Under forkserver a worker then starts in a fraction of the second that the import takes.
multiprocessing.set_forkserver_preload(["torch", "numpy"] if TORCH_MODE else ["torch", "numpy", "rustloader"])
# Each test collects garbage twice: what was imported before need not be walked.
gc.freeze()
# A busy machine may start a worker so slowly that it would be warned of; test_stall.py sets limits of its own.
os.environ.update(RUSTLOADER_STALL_START_SECONDS="600", RUSTLOADER_STALL_ITEM_SECONDS="600")
# A worker that is asked for its stack may also be slow to answer.
os.environ["RUSTLOADER_STALL_STACK_SECONDS"] = "120"
# A shell without job control has what it starts in the background ignore Ctrl-C, and programs under test inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


pytest_plugins = ["lanes"]

CRASHED = pytest.StashKey[bool]()


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # pytest-xdist's workers have a thread for what they are sent
        config.addinivalue_line("filterwarnings", "ignore:.*multi-threaded.*:DeprecationWarning")


def pytest_unconfigure(config):
    SERVER.close()
    RUNNER.close()
    with contextlib.suppress(FileNotFoundError):
        os.remove(STARTED_PIDS)
    gc.unfreeze()  # some libraries check at the interpreter's exit whether everything was collected


def pytest_collection_modifyitems(config, items):
    skip = pytest.mark.skip(reason="rustloader's own guarantee; torch's loader is under test")
    for item in items:
        if TORCH_MODE and item.get_closest_marker("ours"):
            item.add_marker(skip)


def pytest_collection_finish():
    gc.freeze()  # as above: the test modules


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    if error:
        node.config.stash[CRASHED] = True


def pytest_sessionfinish(session):
    """A crashed worker of pytest-xdist is a crash of the run: more than a failed test, which is tried again alone."""
    if session.config.stash.get(CRASHED, False):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.passed = report.passed
    return report


def helpers():
    """Processes and descriptors that last as long as the process: multiprocessing's, and the tests' own."""
    tracker, server = multiprocessing.resource_tracker._resource_tracker, forkserver._forkserver
    pids = {tracker._pid, server._forkserver_pid}
    files = {tracker._fd, server._forkserver_alive_fd}
    if SERVER.process is not None:
        pids.add(SERVER.process.pid)
        files.add(SERVER.channel.fileno())
    if RUNNER.process is not None:
        pids.add(RUNNER.process.pid)
        files |= RUNNER.files()
    return pids, files


def threads():
    found = []
    for tid in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{tid}/comm") as f:
            name = f.read().strip()
            if name != "jemalloc_bg_thd":  # pyarrow's allocator starts and ends these when it likes
                found.append((int(tid), name))
    return found


def shared_memory_files():
    """The files in /dev/shm that the tests have made: those of torch's have the pid of their maker in their name."""
    names = os.listdir("/dev/shm")
    torchs = [name for name in names if name.startswith("torch_")]
    ours = set()
    if torchs:
        with open(STARTED_PIDS) as file:
            ours = set(file.read().split())
    return [name for name in names if "rustloader" in name] + [name for name in torchs if name.split("_")[1] in ours]


def state():
    pids, files = helpers()
    found = {
        "children": list(children() - pids),
        "mappings": mappings(),
        "shared memory files": shared_memory_files(),
    }
    if not TORCH_MODE:  # torch's loader loses descriptors and keeps a thread when indices are tensors
        found["threads"] = threads()
        found["descriptors"] = [
            target for n, target in open_files().items() if n not in files and not target.startswith("/proc/")
        ]
    return found


def left(before, now):
    """What there is now and was not before: {kind: things}."""
    over = {kind: Counter(now[kind]) - Counter(before[kind]) for kind in before}
    # A descriptor may have been replaced by another one; more of them is a loss.
    return {
        kind: list(things)
        for kind, things in over.items()
        if things and len(now[kind]) > (len(before[kind]) if kind in ("descriptors", "mappings") else 0)
    }


def left_after(before, seconds):
    """What remains of `left(before, now)` after `seconds`, with the pool emptied; {} as soon as nothing does."""
    end = time.monotonic() + seconds
    while True:
        trim_pool()
        over = left(before, state())
        if not over or time.monotonic() > end:
            return over
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """Descriptors, threads, children, mappings and shared memory files are what they were before the test."""
    trim_pool()
    before, imported = state(), len(sys.modules)
    # All of them: one that an ended process has left is no fault of a test that starts a process with the same pid.
    before["shared memory files"] = os.listdir("/dev/shm")
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("lib") == "torchdata":
        del before["shared memory files"]  # a worker of torch's that is ended within a batch may leave its file
    yield
    end_scripts()
    gc.collect()
    if not getattr(request.node, "passed", False):
        return  # its frames are kept by the report, and with them its iterators
    over = left_after(before, 20)
    assert not over, f"left behind: {over}"
    if len(sys.modules) > imported:
        gc.freeze()  # as above


@pytest.fixture
def host():
    """torch believes in an accelerator; its pinned memory comes from this fake."""
    with pinning() as host:
        yield host


@pytest.fixture
def lines(caplog):
    """The lines of the log with a text. The limited log begins anew in each test (`no_silent_handover`)."""
    caplog.set_level(logging.INFO, "rustloader")
    return lambda text: [record.getMessage() for record in caplog.records if text in record.getMessage()]


@pytest.fixture(autouse=True)
def no_silent_handover(request):
    """Fails a test whose loader falls back to torch's iterator, unless the test is marked `handover`."""
    lines = []

    class Collect(logging.Handler):
        def emit(self, record):
            # `on_error` says so of each sample.
            if "has failed and was" not in record.msg and "messages about faults" not in record.msg:
                lines.append(record.getMessage())

    if not TORCH_MODE:
        # The process's limited log begins anew.
        limited_log.faults.__init__(logging.getLogger("rustloader"))
    handler = Collect(logging.WARNING)
    logging.getLogger("rustloader").addHandler(handler)
    yield
    logging.getLogger("rustloader").removeHandler(handler)
    if not any(map(request.node.get_closest_marker, ("handover", "warns"))):
        assert not lines, lines


@pytest.fixture
def device():
    """A device without hardware that every `prefetch_to_device` copies to (standin.py)."""
    from standin import StandIn

    device = StandIn()
    with mock.patch("rustloader.device.prefetch.loader.streams_of", lambda asked: device):
        yield device
