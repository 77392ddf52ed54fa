"""What the tests share: the loader under test, comparisons, processes, scripts.

With RUSTLOADER_TEST_LOADER=torch in the environment the loader under test is torch's own. Every test that is
not marked `ours` passes in that mode too: it asks for what torch does, not for what we think torch does.
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

# The tests start thousands of workers; Python 3.14 would not fork them. `make test START_METHOD=forkserver` is its way.
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
# 2.6: fewer counters, no hint when a worker cannot be pickled, files in /dev/shm that are given no pages beforehand.
OLD_TORCH = "worker_idx" not in inspect.signature(LoaderIter._process_data).parameters
SCRIPTS = []
SERVER = Server()
# A file with the pids of all processes that the tests have started, directly or not. Each pytest-xdist worker has one.
STARTED_PIDS = os.environ.setdefault(
    f"RUSTLOADER_TEST_PIDS_{os.environ.get('PYTEST_XDIST_WORKER', 'main').upper()}",
    os.path.join(tempfile.gettempdir(), f"pids-{os.getpid()}"),
)
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = pathlib.Path(HERE).parents[1]
# What a script imports: this folder's modules, and the test that it is of.
SCRIPT_PATH = os.pathsep.join([HERE, *map(str, (ROOT / "tests" / "python").glob("*/"))])


def note_pid(pid):
    with contextlib.suppress(OSError), open(STARTED_PIDS, "a") as file:
        file.write(f"{pid}\n")


def noting_start(self, start=multiprocessing.process.BaseProcess.start):
    start(self)
    note_pid(self.pid)


note_pid(os.getpid())
multiprocessing.process.BaseProcess.start = noting_start


# Batches


def engine_batches():
    """Batches that the Rust engine has delivered in this process; None when torch's loader is under test."""
    return None if TORCH_MODE else rustloader.engine_batches()


@contextlib.contextmanager
def from_engine(count):
    """The body must get exactly `count` batches out of the Rust engine."""
    before = engine_batches()
    yield
    if not TORCH_MODE:
        assert engine_batches() - before == count


def epoch(loader):
    """One epoch as a list; every batch must come from the engine if the loader is rustloader's and has workers."""
    before = engine_batches()
    batches = list(loader)
    if not TORCH_MODE and isinstance(loader, rustloader.DataLoader) and loader.num_workers > 0:
        assert engine_batches() - before == len(batches), "a batch did not come from the engine"
    return batches


def send(*samples, workers=1, **kw):
    """The samples through workers, one by one, untouched by any collation."""
    kw.setdefault("batch_size", None)
    return epoch(DataLoader(Given(list(samples)), num_workers=workers, collate_fn=untouched, **kw))


def config_of(**values):
    """The settings of a loader with one worker, and some of them replaced."""
    from rustloader.settings.config import resolve

    return resolve(DataLoader(range(2), num_workers=1)).changed(**values)


def values(batches):
    """Tensors to plain lists, so that epochs can be compared and printed."""
    return [b.tolist() if isinstance(b, torch.Tensor) else b for b in batches]


def outcome(fn, *args):
    """What a call gives: ("value", v), ("end",) or ("error", type, first line of the text)."""
    try:
        value = fn(*args)
    except StopIteration:
        return ("end",)
    except Exception as e:
        return ("error", torchs_type(e), first_line(e))
    return ("value", value.tolist() if isinstance(value, torch.Tensor) else value)


def torchs_type(error):
    """The type of an error, or what torch raises in its place: rustloader's own errors are RuntimeErrors there."""
    kind = type(error)
    return RuntimeError if kind.__module__ == "rustloader" else kind


def outcomes(iterator, calls):
    """The outcomes of `calls` calls of next()."""
    return [outcome(next, iterator) for _ in range(calls)]


def outcomes_of(loader, calls):
    """The same for a new iterator, shut down at the end: torch's takes 5 s a worker as cyclic garbage."""
    iterator = iter(loader)
    result = outcomes(iterator, calls)
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
    return result


def first_line(error):
    """First line of an error's text, read from its argument: str() of a KeyError gives the repr."""
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
    """A fingerprint of the state of this process's generators (torch, random, numpy)."""
    return torch.get_rng_state().sum().item(), hash(random.getstate()), np.random.get_state()[1].sum().item()


def raw(tensor):
    """The bytes of a dense CPU tensor, whatever its dtype."""
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
    """A number that changes with the content."""
    return hash(raw(tensor.as_subclass(torch.Tensor)))


# Time, threads, processes


@contextlib.contextmanager
def within(seconds):
    """A liveness limit: about 20 times what is expected, never a claim of speed."""
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    assert took < seconds, f"took {took:.2f} s, limit {seconds} s"


# What is expected at once, or as soon as an interpreter has imported torch, on a machine that may be very busy.
SOON, STARTED = 30.0, 240.0


def wait_until(condition, seconds=SOON):
    """Polls; True as soon as the condition holds, False when the time is over."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


# The numbers of the system calls in which a thread waits for descriptors: poll, ppoll, select, pselect6, epoll_wait,
# epoll_pwait, epoll_pwait2.
POLLS = {"x86_64": {7, 271, 23, 270, 232, 281, 441}, "aarch64": {73, 72, 22, 441}}[os.uname().machine]
# In a futex a thread waits for a lock, and at times for the GIL: that does not mean that it waits for a batch, except
# in torch's loader, where the pin thread's queue has a lock.
FUTEX = {"x86_64": 202, "aarch64": 98}[os.uname().machine]
WAITS = POLLS | {FUTEX} if TORCH_MODE else POLLS


def waits_in_next(thread=None):
    """Waits until a thread, by default the main one, is in next() and asleep in the call that waits for a batch."""
    thread = thread or threading.main_thread()
    # Python 3.11 keeps the native_id of the parent in a forked child.
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
    """Calls fn as soon as the main thread is in a function, with that frame, and again while fn returns False; in a
    daemon thread."""

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
    """Calls a function as soon as the main thread waits in next(), in a thread of its own."""

    def run():
        if waits_in_next():
            fn(*args)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def workers_say(iterator, **words):
    """Waits until each worker reports this status."""

    def say():
        pages = [iterator._core.worker_status(worker) for worker in range(iterator._num_workers)]
        return all(page[name] == word for page in pages for name, word in words.items())

    return wait_until(say, STARTED)


def in_time(fn, *args, seconds=240):
    """The first outcome of a call that is not a timeout, which a busy machine may have at any time."""
    end = time.monotonic() + seconds
    while (got := outcome(fn, *args))[0] == "error" and "DataLoader timed out" in got[2]:
        assert time.monotonic() < end, "every call times out"
    return got


def in_thread(fn, *args, seconds=120.0):
    """Runs fn in a thread of its own that has ended when this returns; its result or its error."""
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
    """A process's state letter from /proc; "X" when it no longer exists."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0]
    return "X"


def gone(pid):
    """The process no longer exists, or is a zombie."""
    return state_of(pid) in "ZX"


def children_of(parent):
    """Pids of a process's children, the reaped ones excepted."""
    return {pid for pid, stat in all_processes() if int(stat[1]) == parent}


def children():
    """Those of this process, from the kernel's list where it keeps one: scanning all processes takes longer."""
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return children_of(os.getpid())
    found = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            found.update(map(int, file.read().split()))
    return found


def in_session(leader):
    """Pids of the processes that live in the session of a script."""
    return {pid for pid, stat in all_processes() if int(stat[3]) == leader and stat[0] not in "ZX"}


def all_processes():
    """Pid and the fields of /proc/PID/stat from the state on, of each process."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/stat") as f:
                stat = f.read().rpartition(")")[2].split()
            yield int(pid), stat


def tasks_named(name):
    """The /proc folders of the threads of this process that the kernel knows by this name."""
    for tid in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{tid}/comm") as f:
            if f.read().strip() == name:
                yield f"/proc/self/task/{tid}"


def threads_named(name):
    """Number of threads of this process that the kernel knows by this name."""
    return sum(1 for _ in tasks_named(name))


def sleeps(name):
    """Whether all threads of this name are in a system call that waits."""
    return all(call_of(task) in WAITS for task in tasks_named(name))


def call_of(task):
    """The number of the system call that a thread is in; -1 where there is none."""
    with contextlib.suppress(OSError), open(f"{task}/syscall") as f:
        call = f.read().split()[0]
        return int(call) if call.isdecimal() else -1
    return -1


def worker_pids(iterator):
    return [w.pid for w in iterator._workers]


HEAD = "import os, signal, sys, time\nimport torch\nfrom support import DataLoader, TORCH_MODE\n"


def start_script(source, file=None, head=HEAD, environment=None, fresh=None, cwd=None, **kw):
    """Starts a Python script in a session of its own, by `python -c` or out of a file. It sees `DataLoader`, the loader
    under test. It is forked from a process that has imported torch, unless it is to be `fresh`, as by default each is
    that comes out of a file, or has a head or an environment of its own."""
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
    """Waits for a script: (exit status, stdout, stderr). One that hangs is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        out, err = kill(process)
        raise AssertionError(f"the script did not end\nstdout: {out}\nstderr: {err}") from None
    return process.returncode, out, err


def kill(process):
    """Ends a script and everything it started, and returns its output."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()


def end_scripts():
    """Ends the scripts that a failed test has left."""
    while SCRIPTS:
        process = SCRIPTS.pop()
        if not process.stdout.closed:
            kill(process)


def run_script(source, seconds=STARTED, **kw):
    return finish(start_script(source, **kw), seconds)


# What may be left behind


def shared_memory_of(pids):
    """The files in /dev/shm whose names tell that these processes made them.

    A semaphore of multiprocessing has a random name, in which any number can stand.
    """
    pids = set(map(str, pids))
    named = [name for name in os.listdir("/dev/shm") if name.startswith("torch_") or "rustloader" in name]
    return [name for name in named if pids & set(name.replace("-", "_").split("_"))]


def open_files():
    """What each descriptor shows: {number: target}."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found


def mappings():
    """Lines of /proc/self/maps that belong to an arena."""
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
    """Whether a tensor lies in an arena; small ones are copied out. What torch's loader gives counts as such."""
    return TORCH_MODE or in_arena(tensor.data_ptr())


def arena_bytes():
    """Bytes of memory that all arenas known to this process hold."""
    total, seen = 0, set()
    for number, target in open_files().items():
        if "memfd:rustloader" in target:
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/self/fd/{number}")
                if status.st_ino not in seen:
                    seen.add(status.st_ino)
                    total += status.st_blocks * 512
    # The mappings whose descriptor is closed. smaps counts the pages of all mappings, which takes long.
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
    """Garbage collected, and the pool of idle arenas emptied."""
    gc.collect()
    if not TORCH_MODE:
        trim = getattr(rustloader._core, "_trim_pool", None)
        if trim is not None:
            trim()
