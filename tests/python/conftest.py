"""Rules for every test: nothing is left behind, nothing is handed over to torch in silence."""

import contextlib
import gc
import logging
import multiprocessing
import multiprocessing.resource_tracker
import os
import sys
import time
from collections import Counter
from multiprocessing import forkserver

import pytest
import torch
from support import TORCH_MODE, children, end_scripts, mappings, open_files, trim_pool

# A pool of intra-op threads would start at some test or other, and stay.
torch.set_num_threads(1)
# Under forkserver a worker then starts in a fraction of the second that the import takes.
multiprocessing.set_forkserver_preload(["torch", "numpy"] if TORCH_MODE else ["torch", "numpy", "rustloader"])
# Each test collects garbage twice: what was imported before need not be walked.
gc.freeze()


def pytest_configure(config):
    config.addinivalue_line("markers", "ours: a promise of ours that torch's loader does not make")
    config.addinivalue_line("markers", "handover: this test hands loaders over to torch's iterator on purpose")
    config.addinivalue_line("filterwarnings", "ignore:This DataLoader will create:UserWarning")


def pytest_unconfigure(config):
    gc.unfreeze()  # libraries look at the interpreter's exit whether all is collected


def pytest_collection_modifyitems(config, items):
    skip = pytest.mark.skip(reason="a promise of ours; torch's loader is under test")
    for item in items:
        if TORCH_MODE and item.get_closest_marker("ours"):
            item.add_marker(skip)
        if config.pluginmanager.hasplugin("timeout") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(90))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.passed = report.passed
    return report


def helpers():
    """Processes and descriptors of multiprocessing that serve the whole process, for good."""
    tracker, server = multiprocessing.resource_tracker._resource_tracker, forkserver._forkserver
    pids = {tracker._pid, server._forkserver_pid}
    files = {tracker._fd, server._forkserver_alive_fd}
    return pids, files


def threads():
    found = []
    for tid in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{tid}/comm") as f:
            found.append((int(tid), f.read().strip()))
    return found


def foreign(name):
    """A file in /dev/shm that is none of ours, or belongs to a live process outside this tree."""
    if "rustloader" in name:
        return False
    if not name.startswith("torch_"):
        return True
    pid = name.split("_")[1]
    return pid.isdigit() and os.path.exists(f"/proc/{pid}") and int(pid) not in children() | {os.getpid()}


def state():
    pids, files = helpers()
    found = {
        "children": list(children() - pids),
        "mappings": mappings(),
        "shared memory files": [f for f in os.listdir("/dev/shm") if not foreign(f)],
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


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """Descriptors, threads, children, mappings and shared memory files are what they were before the test."""
    trim_pool()
    before, imported = state(), len(sys.modules)
    yield
    end_scripts()
    gc.collect()
    if not getattr(request.node, "passed", False):
        return  # its frames are kept by the report, and with them its iterators
    end = time.monotonic() + 5
    while True:
        trim_pool()
        over = left(before, state())
        if not over or time.monotonic() > end:
            break
        time.sleep(0.05)
    assert not over, f"left behind: {over}"
    if len(sys.modules) > imported:
        gc.freeze()  # as above


@pytest.fixture(autouse=True)
def no_silent_handover(request):
    """A loader that torch's iterator serves would pass for our work; only a `handover` test may have one."""
    lines = []

    class Collect(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler = Collect(logging.WARNING)
    logging.getLogger("rustloader").addHandler(handler)
    yield
    logging.getLogger("rustloader").removeHandler(handler)
    if not request.node.get_closest_marker("handover"):
        assert not lines, lines
