"""Shared by the tests: the loader under test, comparisons, processes, scripts.

With RUSTLOADER_TEST_LOADER=torch in the environment, the loader under test is torch's own. Every test that is not
marked `ours` passes in that mode too: it expects what torch does, not what we believe torch does.
"""

import contextlib
import dataclasses
import gc
import inspect
import multiprocessing.process
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import numpy as np
import torch
import torch.utils.data
from sample_data import Given, untouched
from script_server import Server

# The tests start thousands of workers, so they fork, which is not Python 3.14's default: `make test
# START_METHOD=forkserver` tests that.
START_METHOD = os.environ.get("RUSTLOADER_TEST_START_METHOD") or "fork"
torch.multiprocessing.set_start_method(START_METHOD, force=True)

TORCH_MODE = os.environ.get("RUSTLOADER_TEST_LOADER") == "torch"
TorchDataLoader = torch.utils.data.DataLoader

if TORCH_MODE:
    rustloader = None
    DataLoader = TorchDataLoader
    LoaderIter = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
else:
    import rustloader
    import rustloader.iterator.core

    DataLoader = rustloader.DataLoader
    LoaderIter = rustloader.iterator.core._MultiProcessingDataLoaderIter

BOTH = [TorchDataLoader, DataLoader]
# torch 2.6 has fewer counters, no hint if a worker cannot be pickled, and does not preallocate its files in /dev/shm.
OLD_TORCH = "worker_idx" not in inspect.signature(LoaderIter._process_data).parameters
SCRIPTS = []
SERVER = Server()
# A file with the pids of all processes that the tests start, directly or not. Each pytest-xdist worker has its own.
STARTED_PIDS = os.environ.setdefault(
    f"RUSTLOADER_TEST_PIDS_{os.environ.get('PYTEST_XDIST_WORKER', 'main').upper()}",
    os.path.join(tempfile.gettempdir(), f"pids-{os.getpid()}"),
)
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = pathlib.Path(HERE).parents[1]
# Scripts import this folder's modules, and the test files.
SCRIPT_PATH = os.pathsep.join([HERE, *map(str, (ROOT / "tests" / "python").glob("*/"))])


def note_pid(pid):
    with contextlib.suppress(OSError), open(STARTED_PIDS, "a") as file:
        file.write(f"{pid}\n")


def start_and_note_pid(self, start=multiprocessing.process.BaseProcess.start):
    start(self)
    note_pid(self.pid)


note_pid(os.getpid())
multiprocessing.process.BaseProcess.start = start_and_note_pid


# Batches


def engine_batches():
    """Returns how many batches the engine has delivered in this process, or None if torch's loader is under test."""
    return None if TORCH_MODE else rustloader.engine_batches()


@contextlib.contextmanager
def from_engine(count):
    """Asserts that the body gets exactly `count` batches from the engine."""
    before = engine_batches()
    yield
    if not TORCH_MODE:
        assert engine_batches() - before == count


def epoch(loader):
    """Returns one epoch as a list. If the loader is rustloader's and has workers, every batch must come from the
    engine."""
    before = engine_batches()
    batches = list(loader)
    if not TORCH_MODE and isinstance(loader, rustloader.DataLoader) and loader.num_workers > 0:
        assert engine_batches() - before == len(batches), "a batch did not come from the engine"
    return batches


def send(*samples, workers=1, **kw):
    """Returns the samples after a trip through workers, one by one, without collation."""
    kw.setdefault("batch_size", None)
    return epoch(DataLoader(Given(list(samples)), num_workers=workers, collate_fn=untouched, **kw))


def config_of(**values):
    """Returns the settings of a loader with one worker, with `values` replaced."""
    from rustloader.settings.config import resolve

    return resolve(DataLoader(range(2), num_workers=1)).changed(**values)


def values(batches):
    """Converts tensors to plain lists, so that epochs can be compared and printed."""
    return [b.tolist() if isinstance(b, torch.Tensor) else b for b in batches]


def outcome(fn, *args):
    """Returns the outcome of a call: ("value", v), ("end",) or ("error", type, first line of the text)."""
    try:
        value = fn(*args)
    except StopIteration:
        return ("end",)
    except Exception as e:
        return ("error", type_in_torch(e), first_line(e))
    return ("value", value.tolist() if isinstance(value, torch.Tensor) else value)


def type_in_torch(error):
    """Returns the type that torch raises for an error: RuntimeError for rustloader's own types, else the same type."""
    cls = type(error)
    return RuntimeError if cls.__module__ == "rustloader" else cls


def outcomes(iterator, calls):
    """Returns the outcomes of `calls` calls of next()."""
    return [outcome(next, iterator) for _ in range(calls)]


def outcomes_of(loader, calls):
    """Returns the outcomes of a new iterator, and shuts it down: as cyclic garbage, torch's takes 5 s per worker."""
    iterator = iter(loader)
    result = outcomes(iterator, calls)
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
    return result


def first_line(error):
    """Returns the first line of an error's text, from its argument: str() of a KeyError is its argument's repr."""
    text = str(error.args[0]) if error.args else str(error)
    return text.splitlines()[0] if text else ""


def same(a, b):
    """Deep equality: types, dtypes, shapes, strides, NaN for NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return same_tensor(a, b)
    if isinstance(a, np.ndarray):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.flags.f_contiguous == b.flags.f_contiguous
            and (a.tobytes() == b.tobytes() if a.dtype != object else a.tolist() == b.tolist())
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b or (a != a and b != b)


def rng_states():
    """Returns a fingerprint of the states of this process's generators (torch, random, numpy)."""
    return torch.get_rng_state().sum().item(), hash(random.getstate()), np.random.get_state()[1].sum().item()


def raw(tensor):
    """Returns the bytes of a dense CPU tensor of any dtype."""
    return raw_storage(tensor.detach().contiguous().reshape(-1).untyped_storage())


def raw_storage(storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def same_tensor(a, b):
    if (a.layout, a.dtype, a.shape, a.requires_grad) != (b.layout, b.dtype, b.shape, b.requires_grad):
        return False
    if a.layout != torch.strided:
        return same_tensor(a.detach().to_dense(), b.detach().to_dense())
    return a.stride() == b.stride() and raw(a.detach().clone()) == raw(b.detach().clone())


def digest(tensor):
    """Returns a hash of the content."""
    return hash(raw(tensor.as_subclass(torch.Tensor)))


# Time, threads, processes


@contextlib.contextmanager
def within(seconds):
    """Fails if the body takes longer. This checks liveness, not speed: limits are about 20 times the expected time."""
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    assert took < seconds, f"took {took:.2f} s, limit {seconds} s"


# Limits for things that happen immediately, or once an interpreter has imported torch, on a machine that may be very
# busy.
SOON, STARTED = 30.0, 240.0


def wait_until(condition, seconds=SOON):
    """Polls. Returns True as soon as the condition holds, or False after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


# The numbers of the system calls that wait for descriptors: poll, ppoll, select, pselect6, epoll_wait, epoll_pwait,
# epoll_pwait2.
POLLS = {"x86_64": {7, 271, 23, 270, 232, 281, 441}, "aarch64": {73, 72, 22, 441}}[os.uname().machine]
# A thread in a futex waits for a lock, perhaps the GIL. Only in torch's loader can that mean that it waits for a batch,
# because the pin thread's queue has a lock.
FUTEX = {"x86_64": 202, "aarch64": 98}[os.uname().machine]
WAITS = POLLS | {FUTEX} if TORCH_MODE else POLLS


def waits_in_next(thread=None):
    """Waits until a thread, by default the main thread, sleeps in the system call in which next() waits for a batch."""
    thread = thread or threading.main_thread()
    # In a forked child, Python 3.11 keeps the parent's native_id.
    number = os.getpid() if thread is threading.main_thread() else thread.native_id

    def waits():
        frame = sys._current_frames().get(thread.ident)
        while frame is not None and frame.f_code.co_name != "__next__":
            frame = frame.f_back
        return frame is not None and call_of(f"/proc/self/task/{number}") in WAITS

    def keeps_waiting():
        for _ in range(5):
            time.sleep(0.01)
            if not waits():
                return False
        return True

    return wait_until(keeps_waiting if TORCH_MODE else waits, STARTED)


def while_main_is_in(function, fn):
    """Calls fn with the frame once the main thread is in `function`, and again while fn returns False. Runs in a daemon
    thread, which it returns."""

    def run():
        while True:
            frame = sys._current_frames().get(threading.main_thread().ident)
            while frame is not None and frame.f_code is not function.__code__:
                frame = frame.f_back
            if frame is not None and fn(frame) is not False:
                return
            time.sleep(0.01)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def while_next_waits(fn, *args):
    """Calls fn in a new thread as soon as the main thread waits in next(). Returns the thread."""

    def run():
        if waits_in_next():
            fn(*args)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def workers_report(iterator, **status):
    """Waits until each worker's status has these values."""

    def have_reported():
        pages = [iterator._core.worker_status(worker) for worker in range(iterator._num_workers)]
        return all(page[name] == value for page in pages for name, value in status.items())

    return wait_until(have_reported, STARTED)


def in_time(fn, *args, seconds=240):
    """Repeats a call until it does not time out, and returns its outcome. On a busy machine any call may time out."""
    end = time.monotonic() + seconds
    while (last := outcome(fn, *args))[0] == "error" and "DataLoader timed out" in last[2]:
        assert time.monotonic() < end, "every call times out"
    return last


def in_thread(fn, *args, seconds=120.0):
    """Runs fn in a new thread and waits for its end. Returns its result or raises its error."""
    box = []

    def body():
        try:
            box.append((fn(*args), None))
        except BaseException as e:
            box.append((None, e))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "the thread did not end"
    value, error = box[0]
    if error is not None:
        raise error
    return value


def state_of(pid):
    """Returns a process's state letter from /proc, or "X" if it no longer exists."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0]
    return "X"


def gone(pid):
    """Whether the process no longer exists, or is a zombie."""
    return state_of(pid) in "ZX"


def children_of(parent):
    """Returns the pids of a process's children that have not been reaped."""
    return {pid for pid, stat in all_processes() if int(stat[1]) == parent}


def children():
    """Returns the pids of this process's children, from the kernel's list if it has one: scanning /proc is slower."""
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return children_of(os.getpid())
    pids = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            pids.update(map(int, file.read().split()))
    return pids


def in_session(leader):
    """Returns the pids of the live processes in a script's session."""
    return {pid for pid, stat in all_processes() if int(stat[3]) == leader and stat[0] not in "ZX"}


def all_processes():
    """Yields each process's pid, and the fields of its /proc/PID/stat from the state on."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/stat") as f:
                stat = f.read().rpartition(")")[2].split()
            yield int(pid), stat


def tasks_named(name):
    """Yields the /proc folders of this process's threads with this name in the kernel."""
    for tid in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{tid}/comm") as f:
            if f.read().strip() == name:
                yield f"/proc/self/task/{tid}"


def threads_named(name):
    """Returns the number of this process's threads with this name in the kernel."""
    return sum(1 for _ in tasks_named(name))


def sleeps(name):
    """Whether all threads with this name are in a system call that waits."""
    return all(call_of(task) in WAITS for task in tasks_named(name))


def call_of(task):
    """Returns the number of the system call that a thread is in, or -1."""
    with contextlib.suppress(OSError), open(f"{task}/syscall") as f:
        call = f.read().split()[0]
        return int(call) if call.isdecimal() else -1
    return -1


def worker_pids(iterator):
    return [w.pid for w in iterator._workers]


HEAD = "import os, signal, sys, time\nimport torch\nfrom support import DataLoader, TORCH_MODE\n"


def start_script(source, file=None, head=HEAD, environment=None, fresh=None, cwd=None, **kw):
    """Starts a Python script in its own session, like `python -c`, or from a file. In it, `DataLoader` is the loader
    under test. If `fresh`, it runs in a new interpreter, else in a fork of a process that has imported torch. By
    default it is fresh if it has a file, or its own head or environment."""
    path = os.pathsep.join([SCRIPT_PATH, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = dict(os.environ, PYTHONPATH=path)
    env.update(environment or {})
    source = head + textwrap.dedent(source)
    if file is not None:
        file.write_text(source)
    if fresh is None:
        fresh = bool(file or head is not HEAD or environment or kw)
    if not fresh:
        SCRIPTS.append(SERVER.start(source, env, file, cwd))
        return SCRIPTS[-1]
    process = subprocess.Popen(
        [sys.executable, "-c", source] if file is None else [sys.executable, str(file)],
        env=env,
        cwd=cwd,
        start_new_session=True,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **kw,
    )
    SCRIPTS.append(process)
    return process


def finish(process, seconds=STARTED):
    """Waits for a script. Returns (exit status, stdout, stderr). A script that hangs is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        out, err = kill(process)
        raise AssertionError(f"the script did not end\nstdout: {out}\nstderr: {err}") from None
    return process.returncode, out, err


def kill(process):
    """Kills a script and everything in its process group. Returns its output."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()


def end_scripts():
    """Kills the scripts that a failed test has left behind."""
    while SCRIPTS:
        process = SCRIPTS.pop()
        if not process.stdout.closed:
            kill(process)


def run_script(source, seconds=STARTED, **kw):
    return finish(start_script(source, **kw), seconds)


# Things that may be left behind


def shared_memory_of(pids):
    """Returns the files in /dev/shm whose names show that these processes created them.

    Semaphores of multiprocessing are ignored: their names are random and may contain any number.
    """
    pids = set(map(str, pids))
    named = [name for name in os.listdir("/dev/shm") if name.startswith("torch_") or "rustloader" in name]
    return [name for name in named if pids & set(name.replace("-", "_").split("_"))]


def open_files():
    """Returns {descriptor: target} of this process."""
    targets = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            targets[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return targets


def mappings():
    """Returns the lines of /proc/self/maps that belong to arenas."""
    with open("/proc/self/maps") as f:
        return [line for line in f if "memfd:rustloader" in line]


def in_arena(address):
    """Whether an address of this process lies in an arena."""
    with open("/proc/self/maps") as f:
        for line in f:
            start, end = (int(n, 16) for n in line.split()[0].split("-"))
            if start <= address < end:
                return "memfd:rustloader" in line
    return False


def is_leased(tensor):
    """Whether a tensor lies in an arena, as all but small tensors do. Always true of torch's loader."""
    return TORCH_MODE or in_arena(tensor.data_ptr())


def arena_bytes():
    """Returns the bytes of memory that all arenas known to this process hold."""
    total, seen = 0, set()
    for number, target in open_files().items():
        if "memfd:rustloader" in target:
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/self/fd/{number}")
                if status.st_ino not in seen:
                    seen.add(status.st_ino)
                    total += status.st_blocks * 512
    # Count mappings whose descriptor is closed. Only if there are any, since smaps counts all pages, which is slow.
    if {int(line.split()[4]) for line in mappings()} <= seen:
        return total
    inode = None
    with open("/proc/self/smaps") as f:
        for line in f:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                inode = int(line.split()[4]) if "memfd:rustloader" in line else None
            elif line.startswith("Rss:") and inode is not None and inode not in seen:
                total += int(line.split()[1]) * 1024
    return total


def trim_pool():
    """Collects garbage, and empties the pool of idle arenas."""
    gc.collect()
    if not TORCH_MODE:
        trim = getattr(rustloader._core, "_trim_pool", None)
        if trim is not None:
            trim()
