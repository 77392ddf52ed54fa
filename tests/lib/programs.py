"""Short programs around a loader, which refusals.py runs under failpoints. Most return the texts of their errors."""

import contextlib
import gc
import json
import multiprocessing
import multiprocessing.util
import os
import re
import signal
import tempfile
import time
import types
from pathlib import Path

import numpy as np
import torch
from pinning_support import pinning
from sample_data import Dying, DyingOnce, Held, Images, Numbers
from support import DataLoader, gone, same, state_of, type_in_torch, wait_until, workers_report
from torch.utils.data import _utils, default_collate

import rustloader
from rustloader.supervision import stalls

# A batch of 4 images is too large for a message.
SIZE, BATCH = 24, 4
MB = 1 << 20
FOR_GOOD = "again, for good"
# The file in which workers report their system calls.
CALLS = None


class ReportCalls:
    """A worker_init_fn: at exit the worker reports how many calls of each kind it has made."""

    def __init__(self, file):
        self.file = file

    def __call__(self, _):
        multiprocessing.util.Finalize(None, self.report, exitpriority=1)

    def report(self):
        from rustloader import _core

        made = {kind: count for kind, count in _core._failpoint_calls().items() if count}
        # The main process may have ended, and its file is then gone.
        with contextlib.suppress(OSError), open(self.file, "a") as file:
            file.write(json.dumps(made) + "\n")


def loader(dataset, workers=2, **kw):
    return DataLoader(dataset, num_workers=workers, worker_init_fn=ReportCalls(CALLS) if CALLS else None, **kw)


def text_of(error):
    text = re.sub(r"pid \d+", "pid N", f"{type_in_torch(error).__name__}: {error}")
    # torch's text lacks the cause, which is in the notes.
    return " ".join([text, *error.__notes__]) if "Pin memory thread" in text else text


def walk(loader, expected, keep=True):
    """Runs one epoch. Returns (errors, batches). An error that a worker caught counts as its batch. A wrong, lost or
    duplicated batch is an error as well."""
    errors, batches, place = [], [], 0
    try:
        iterator = iter(loader)
    except Exception as error:
        return [f"iter: {text_of(error)}"], []
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except Exception as error:
            text = text_of(error)
            if "Caught " in text:
                place += 1
            elif errors and errors[-1] == text:
                return [*errors, FOR_GOOD], batches
            errors.append(text)
        else:
            if place >= len(expected) or not same(batch, expected[place]):
                return [*errors, f"batch {place} is wrong"], batches
            if keep:
                batches.append(batch)
            del batch
            place += 1
    if place != len(expected):
        errors.append(f"{place} of {len(expected)} batches came")
    return errors, batches


def image_batches(size=BATCH):
    return [default_collate([Images(SIZE)[i] for i in range(at, at + size)]) for at in range(0, SIZE, size)]


def plain():
    """One epoch with one worker."""
    return walk(loader(Images(SIZE), workers=1, batch_size=BATCH), image_batches())[0]


def twice(**kw):
    """Two epochs. The second epoch's workers are forked while the first epoch's batches are held."""
    expected = image_batches()
    images = loader(Images(SIZE), batch_size=BATCH, **kw)
    first, kept = walk(images, expected)
    second, _ = walk(images, expected)
    if not first and not all(map(same, kept, expected)):
        second.append("a kept batch has changed")
    return [*first, *second]


def shared():
    """Two epochs with a shared queue."""
    return twice(dispatch="shared_queue")


def warm():
    """Two epochs of larger batches with one worker. The second epoch reuses the first one's memory."""
    images, expected = loader(Images(SIZE), workers=1, batch_size=2 * BATCH), image_batches(2 * BATCH)
    return walk(images, expected, keep=False)[0] + walk(images, expected, keep=False)[0]


def persistent(**kw):
    """`twice` with persistent workers."""
    return twice(persistent_workers=True, **kw)


def spawned():
    """One epoch with a spawned worker."""
    images = loader(Images(SIZE), workers=1, batch_size=BATCH, multiprocessing_context="spawn")
    return walk(images, image_batches())[0]


def pinned_persistent():
    return pinned(persistent_workers=True)


def pinned(**kw):
    """`twice` with a pin thread and a fake host allocator."""
    with pinning() as host:
        errors = twice(pin_memory=True, **kw)
        # An error that is raised repeatedly is in a reference cycle with its frames.
        if not wait_until(lambda: gc.collect() is not None and not host.live):
            errors.append("pinned memory is not released")
    return errors


def doomed():
    """A worker is killed at sample 7 of 20."""
    return walk(loader(Dying(20, 7, signal.SIGKILL), batch_size=None), [torch.tensor(i) for i in range(20)])[0]


def restarted():
    """A worker is killed at sample 7 of 20, and restarted."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = DyingOnce(20, 7, signal.SIGKILL, f"{folder}/marker")
        return walk(loader(dataset, batch_size=None, max_restarts=3), [torch.tensor(i) for i in range(20)])[0]


def late():
    """A sample takes longer than the timeout, in two calls of next()."""
    _utils.MP_STATUS_CHECK_INTERVAL = 1.0
    iterator = iter(loader(Deaf(8, 60), workers=1, batch_size=None, timeout=0.2))
    errors = []
    for _ in range(2):
        try:
            next(iterator)
        except RuntimeError as error:
            errors.append(text_of(error))
    iterator._shutdown_workers()
    return errors


class Deaf(Numbers):
    """Each sample takes a fixed number of seconds, and its worker ignores SIGTERM."""

    def __init__(self, n, seconds):
        super().__init__(n)
        self.seconds = seconds

    def __getitem__(self, i):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            time.sleep(0.1)
        return torch.tensor(i)


def stubborn():
    """Workers do not exit on request, and ignore SIGTERM."""
    _utils.MP_STATUS_CHECK_INTERVAL = 1.0
    iterator = iter(loader(Deaf(4, 60), batch_size=None))
    pids = [worker.pid for worker in iterator._workers]
    if not workers_report(iterator, state="fetch"):
        return ["a worker does not begin"]
    iterator._shutdown_workers()
    return [] if wait_until(lambda: all(map(gone, pids))) else ["a worker has survived"]


def stopped(ends=False):
    """Each worker stops itself at some point (by a failpoint). After next() times out, either all continue, or, if
    `ends`, the iterator is shut down. Returns the most workers that were stopped together, or what is wrong."""
    expected, batches, most = image_batches(), [], 0
    _utils.MP_STATUS_CHECK_INTERVAL = 0.5
    iterator = iter(loader(Images(SIZE), batch_size=BATCH, timeout=0.4))
    pids = [worker.pid for worker in iterator._workers]
    while True:
        try:
            batches.append(next(iterator))
        except StopIteration:
            break
        except RuntimeError as error:
            if "timed out" not in str(error):
                return [text_of(error)]
            stopped_pids = [pid for pid in pids if state_of(pid) == "T"]
            most = max(most, len(stopped_pids))
            if stopped_pids and ends:
                break
            for pid in stopped_pids:
                os.kill(pid, signal.SIGCONT)
    iterator._shutdown_workers()
    if not all(map(gone, pids)):
        return ["a worker has survived"]
    if not all(map(same, batches, expected)) or (len(batches) != len(expected) and not (ends and most)):
        return [f"wrong batches: {len(batches)} came"]
    return [f"{most} stopped"]


def stopped_for_good():
    return stopped(ends=True)


def many():
    """More workers than the engine waits for with ppoll."""
    return walk(loader(Numbers(68), workers=34, batch_size=None), [torch.tensor(i) for i in range(68)])[0]


class Burst(Numbers):
    """A few samples of 1 MB, then many small ones."""

    def __getitem__(self, i):
        return torch.full((1_000_000 if i < 8 else 20_000,), i % 100, dtype=torch.uint8)


def stuck():
    """A sample lasts until a warning about it is logged. Returns the errors and the warnings."""
    lines = []

    def warning(text, *args):
        # On a busy machine a warning may correctly name another sample.
        if "the batch has index 1." in (line := text % args):
            lines.append(re.sub(r"pid \d+", "pid N", line))
            open(marker, "w").close()

    def patiently(iterator):
        """Waits for the sample only once the worker is in it: otherwise, a warning could name a worker that is idle."""
        yield next(iterator)
        assert wait_until(lambda: os.path.exists(f"{marker}.reached"))
        yield from iterator

    os.environ["RUSTLOADER_STALL_ITEM_SECONDS"] = "0.2"
    stalls.logger = types.SimpleNamespace(warning=warning)
    with tempfile.TemporaryDirectory() as folder:
        marker = f"{folder}/told"
        items = loader(Held(3, 1, marker), workers=1, batch_size=None)
        return walk(patiently(iter(items)), [torch.tensor(i) for i in range(3)])[0] + lines


def handled():
    """The main process has a handler for SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    return plain()


def burst():
    """A worker releases pages that it no longer needs."""
    samples = Burst(240)
    return walk(loader(samples, workers=1, batch_size=None), [samples[i] for i in range(240)], keep=False)[0]


class Forking(Numbers):
    """Each sample forks a child while a tensor of the dataset is in shared memory."""

    def __getitem__(self, i):
        self.held = default_collate([torch.full((5000,), float(i))])
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return self.held


def forking():
    expected = [torch.full((1, 5000), float(i)) for i in range(8)]
    return walk(loader(Forking(8), batch_size=None), expected)[0]


def shared_list():
    """A list shared through one memfd."""
    try:
        items = rustloader.share([torch.tensor(i) for i in range(8)])
    except Exception as error:
        return [text_of(error)]
    return walk(loader(items, batch_size=None), list(items))[0]


def cached():
    """Reads samples twice through a cache. Returns whether all are right, the hits, and why it is closed, if it is."""
    items = [torch.full((100_000,), n) for n in range(20)]
    data = rustloader.cache(items)
    right = all(torch.equal(data[n], items[n]) for _ in range(2) for n in range(20))
    return [right, data.usage().hits, data.table.closed]


def cached_file():
    """A cache in a file, on a file system without hard links."""
    from cached_rows import FileSystem

    from rustloader.caching import files

    files.os = FileSystem(has_links=False)
    items = [torch.tensor(i) for i in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            data = rustloader.cache(items, "1MiB", path=os.path.join(folder, "file"))
        except Exception as error:
            return [text_of(error)]
        return walk(loader(data, batch_size=None), items)[0]


def connected():
    """One epoch with a remote worker."""
    from remote_support import LoopbackContext

    with tempfile.TemporaryDirectory() as folder:
        context = LoopbackContext(Path(folder), server=multiprocessing.get_context("fork"))
        images = DataLoader(Images(SIZE), num_workers=1, batch_size=BATCH, multiprocessing_context=context)
        return walk(images, image_batches())[0]


class Parting(Numbers):
    """Each sample forks a child that reads an array to which the parent writes meanwhile."""

    def __getitem__(self, i):
        array = np.full(1 << 17, i)
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # torch's handler writes a line
            if CALLS:
                ReportCalls(CALLS).report()
            os._exit(int((array != i).any()))
        array += 1
        _, status = os.waitpid(pid, 0)
        if status != 0:
            raise RuntimeError(f"the child has ended with {status & 127}")
        return torch.from_numpy(array)


def parting():
    expected = [torch.full((1 << 17,), i + 1) for i in range(8)]
    return walk(loader(Parting(8), workers=1, batch_size=None), expected)[0]


class Wide(Numbers):
    """A sample is a tensor of one megabyte, which may be expanded from one byte."""

    def __init__(self, n, expanded):
        super().__init__(n)
        self.sample = torch.ones(1, dtype=torch.uint8).expand(MB) if expanded else torch.ones(MB, dtype=torch.uint8)

    def __getitem__(self, i):
        return self.sample


def wide(megabytes=(1, 50, 2, 50, 3), expanded=False, workers=1):
    """Loads batches of the given megabytes, by the fast path, or by torch's default_collate if `expanded`. Returns (the
    last lines of errors, the sizes)."""
    batches = loader(Wide(1, expanded), workers=workers, batch_sampler=[[0] * size for size in megabytes])
    iterator, errors, sizes = iter(batches), [], []
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return errors, sizes
        except MemoryError as error:
            errors.append(str(error).splitlines()[-1])
            continue
        assert batch.shape[1] == MB and bool((batch[:, ::4096] == 1).all())
        sizes.append(len(batch))


def wide_by_torchs_collate():
    return wide(expanded=True)


def pooled():
    """Returns the errors of an epoch, and how many arenas the pool holds for the loader's next iterator."""
    waiting = loader(Numbers(8), batch_size=None)
    errors, _ = walk(waiting, [torch.tensor(i) for i in range(8)])
    return errors, rustloader._core._trim_pool()


def growing():
    """Each index batch is larger than the previous one, so that the main process needs more memory for it."""
    sizes = [100 << n for n in range(8)]
    lengths = loader(Numbers(1), workers=1, batch_sampler=[[0] * size for size in sizes], collate_fn=len)
    return walk(lengths, sizes)[0]
