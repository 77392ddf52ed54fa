"""Settings for a test process, applied at import, and checks for what it leaves behind."""

import contextlib
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import time
from collections import Counter
from multiprocessing import forkserver

import torch
from refusals import RUNNER
from support import SERVER, STARTED_PIDS, TORCH_MODE, children, mappings, open_files, trim_pool

# The clock of files may be some milliseconds late.
IMPORTED = time.time() - 1
# Otherwise some test would start an intra-op thread pool, which would then stay.
torch.set_num_threads(1)
# Workers of a fork server then start without importing these modules, which takes a second.
multiprocessing.set_forkserver_preload(["torch", "numpy"] if TORCH_MODE else ["torch", "numpy", "rustloader"])
# On a busy machine a worker may start so slowly that it causes a warning. test_stall.py sets its own limits.
os.environ.update(RUSTLOADER_STALL_START_SECONDS="600", RUSTLOADER_STALL_ITEM_SECONDS="600")
# A worker may also be slow to report its stack.
os.environ["RUSTLOADER_STALL_STACK_SECONDS"] = "120"
# A shell without job control starts background jobs with SIGINT ignored, and programs under test inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def helpers():
    """Returns pids and descriptors that last as long as the process: multiprocessing's, and the tests' own."""
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
    named = []
    for tid in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{tid}/comm") as f:
            name = f.read().strip()
            if name != "jemalloc_bg_thd":  # pyarrow's allocator starts and ends these at any time
                named.append((int(tid), name))
    return named


def is_new(name):
    """Whether a file in /dev/shm was written after this module was imported. The pid of an older file may be reused."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(f"/dev/shm/{name}").st_mtime >= IMPORTED
    return False


def shared_memory_files():
    """Returns the names of files in /dev/shm that the tests have created. torch's names contain the creator's pid."""
    names = os.listdir("/dev/shm")
    torch_files = [name for name in names if name.startswith("torch_")]
    pids = set()
    if torch_files:
        with open(STARTED_PIDS) as file:
            pids = set(file.read().split())
    torch_files = [name for name in torch_files if name.split("_")[1] in pids and is_new(name)]
    return [name for name in names if "rustloader" in name] + torch_files


def state():
    pids, files = helpers()
    held = {
        "children": list(children() - pids),
        "mappings": mappings(),
        "shared memory files": shared_memory_files(),
    }
    if not TORCH_MODE:  # torch's loader leaks descriptors, and a thread if indices are tensors
        held["threads"] = threads()
        held["descriptors"] = [
            target for n, target in open_files().items() if n not in files and not target.startswith("/proc/")
        ]
    return held


def left(before, now):
    """Returns what exists now but not before: {kind: things}."""
    leftovers = {kind: Counter(now[kind]) - Counter(before[kind]) for kind in before}
    # Descriptors and mappings may be replaced by others; only a higher count is a leak.
    return {
        kind: list(things)
        for kind, things in leftovers.items()
        if things and len(now[kind]) > (len(before[kind]) if kind in ("descriptors", "mappings") else 0)
    }


def left_after(before, seconds):
    """Returns {} as soon as nothing is left behind, or `left(before, now)` after `seconds`, with the pool trimmed."""
    end = time.monotonic() + seconds
    while True:
        trim_pool()
        leftovers = left(before, state())
        if not leftovers or time.monotonic() > end:
            return leftovers
        time.sleep(0.02)
