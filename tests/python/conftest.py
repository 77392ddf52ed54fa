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

# Each test collects garbage twice; objects that were imported earlier need not be traversed.
gc.freeze()

pytest_plugins = ["lanes"]


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # pytest-xdist's workers receive their work in a thread
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
    gc.freeze()  # as above, now with the test modules


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.passed = report.passed
    return report


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """No test leaves behind descriptors, threads, children, mappings or shared memory files."""
    trim_pool()
    before, imported = state(), len(sys.modules)
    # Includes the files of other processes: if a pid is reused, an old file may look like one of this test's.
    before["shared memory files"] = os.listdir("/dev/shm")
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("lib") == "torchdata":
        del before["shared memory files"]  # a torch worker that is killed mid-batch may leave its file
    yield
    end_scripts()
    gc.collect()
    if not getattr(request.node, "passed", False):
        return  # the report keeps the test's frames, and so its iterators
    leftovers = left_after(before, 20)
    assert not leftovers, f"left behind: {leftovers}"
    if len(sys.modules) > imported:
        gc.freeze()  # as above


@pytest.fixture
def host():
    """Makes torch believe that there is an accelerator. The value is the fake that provides its pinned memory."""
    with pinning() as host:
        yield host


@pytest.fixture
def lines(caplog):
    """A function that returns the log lines that contain a text. `no_silent_handover` resets the limited log."""
    caplog.set_level(logging.INFO, "rustloader")
    return lambda text: [record.getMessage() for record in caplog.records if text in record.getMessage()]


@pytest.fixture(autouse=True)
def no_silent_handover(request):
    """Fails a test whose loader falls back to torch's iterator, unless the test is marked `handover`."""
    lines = []

    class Collect(logging.Handler):
        def emit(self, record):
            # `on_error` logs these for each sample.
            if "failed and was" not in record.msg and "messages about faults" not in record.msg:
                lines.append(record.getMessage())

    if not TORCH_MODE:
        # Reset the process's limited log.
        limited_log.faults.__init__(logging.getLogger("rustloader"))
    handler = Collect(logging.WARNING)
    logging.getLogger("rustloader").addHandler(handler)
    yield
    logging.getLogger("rustloader").removeHandler(handler)
    if not any(map(request.node.get_closest_marker, ("handover", "warns"))):
        assert not lines, lines


@pytest.fixture
def device():
    """A stand-in without hardware, to which every `prefetch_to_device` copies (standin.py)."""
    from standin import StandIn

    device = StandIn()
    with mock.patch("rustloader.device.prefetch.loader.streams_of", lambda asked: device):
        yield device
