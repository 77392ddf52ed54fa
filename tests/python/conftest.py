"""Rules for every test: nothing is left behind, nothing is handed over to torch in silence."""

import gc
import logging
import multiprocessing.resource_tracker
import os
import time
from multiprocessing import forkserver

import pytest
import torch
from support import TORCH_MODE, children, end_scripts, mappings, open_files, trim_pool

# A pool of intra-op threads would start at some test or other, and stay.
torch.set_num_threads(1)
# Each test collects garbage twice: what was imported before need not be walked.
gc.freeze()


def pytest_configure(config):
    config.addinivalue_line("markers", "ours: a promise of ours that torch's loader does not make")
    config.addinivalue_line(
        "markers", "handover: this test hands loaders over to torch's iterator on purpose"
    )
    config.addinivalue_line("filterwarnings", "ignore:This DataLoader will create:UserWarning")


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
        try:
            with open(f"/proc/self/task/{tid}/comm") as f:
                found.append((int(tid), f.read().strip()))
        except OSError:
            pass
    return dict(found)


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
    return {
        "children": children() - pids,
        "descriptors": sorted(
            t for n, t in open_files().items() if n not in files and not t.startswith("/proc/")
        ),
        "threads": {}
        if TORCH_MODE
        else threads(),  # torch's hand out descriptors for as long as the process lives
        "mappings": mappings(),
        "shared memory files": {f for f in os.listdir("/dev/shm") if not foreign(f)},
    }


def left(before, now):
    """What there is now and was not before."""
    over = {}
    for kind in before:
        if kind in ("descriptors", "mappings"):
            if len(now[kind]) > len(before[kind]):
                old = list(before[kind])
                over[kind] = [x for x in now[kind] if not (x in old and (old.remove(x) or True))]
        elif set(now[kind]) - set(before[kind]):
            over[kind] = [
                (k, now[kind][k]) if isinstance(now[kind], dict) else k
                for k in now[kind]
                if k not in before[kind]
            ]
    return over


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """Descriptors, threads, children, mappings and shared memory files are what they were before the test."""
    trim_pool()
    before = state()
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
