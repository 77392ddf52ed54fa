"""Settings of a process that tests, made at import, and checks of what it leaves behind."""

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

# A pool of intra-op threads would start at some test or other, and stay.
torch.set_num_threads(1)
# Under forkserver a worker then starts in a fraction of the second that the import takes.
multiprocessing.set_forkserver_preload(["torch", "numpy"] if TORCH_MODE else ["torch", "numpy", "rustloader"])
# A busy machine may start a worker so slowly that it would be warned of; test_stall.py sets limits of its own.
os.environ.update(RUSTLOADER_STALL_START_SECONDS="600", RUSTLOADER_STALL_ITEM_SECONDS="600")
# A worker that is asked for its stack may also be slow to answer.
os.environ["RUSTLOADER_STALL_STACK_SECONDS"] = "120"
# A shell without job control has what it starts in the background ignore Ctrl-C, and programs under test inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
