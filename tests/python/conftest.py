"""Rules for every test: it leaves nothing behind, and no loader falls back to torch silently."""

import contextlib
import gc
import logging
import os
import sys
from unittest import mock

import pytest
from pinning_support import pinning
from refusals import RUNNER
from rules import left_after, state
from support import SERVER, START_METHOD, STARTED_PIDS, TORCH_MODE, end_scripts, trim_pool

if not TORCH_MODE:
    from rustloader.system import limited_log

# Each test collects garbage twice: what was imported before need not be walked.
gc.freeze()

pytest_plugins = ["lanes"]


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
        if START_METHOD != "fork" and item.get_closest_marker("forks"):
            item.add_marker(pytest.mark.skip(reason="about forked workers, or what they inherit"))


def pytest_collection_finish():
    gc.freeze()  # as above: the test modules


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.passed = report.passed
    return report


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
            if "failed and was" not in record.msg and "messages about faults" not in record.msg:
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
