"""Records the calls that a loader makes: in memory in the main process, in a file of its own in each worker."""

import json
import multiprocessing
import os
import random
import threading
import zlib

import numpy as np
import torch
from torch.utils.data import get_worker_info

# Counts the calls of iter(loader) in main. A worker belongs to the call that started it.
generation = 0


def crc(data):
    return zlib.crc32(data)


def rng(generator=None):
    """The states of all random generators, as numbers that change with them."""
    states = [
        crc(torch.get_rng_state().numpy().tobytes()),
        crc(repr(random.getstate()).encode()),
        crc(np.random.get_state()[1].tobytes() + repr(np.random.get_state()[2:]).encode()),
    ]
    if generator is not None:
        states.append(crc(generator.get_state().numpy().tobytes()))
    return states


def about(info):
    """What a worker reports about itself."""
    with open("/proc/self/comm") as f:
        name = f.read().strip()
    if info is None:
        return [name]
    facts = [info.id, info.num_workers, info.seed, type(info.dataset).__name__]
    # Only newer versions of torch have these.
    facts += [repr(getattr(info, name, None)) for name in ("rng", "worker_method")]
    process = multiprocessing.current_process()
    facts += [torch.initial_seed(), torch.get_num_threads(), name]
    return [*facts, type(process).__name__, process.name, process.daemon]


class Recorder:
    """Records events: lists of plain values. Datasets, samplers and functions share one, and are pickled with it."""

    def __init__(self, folder):
        self.folder = folder
        self.main = os.getpid()
        # Where the program runs; the loader makes all of its calls there.
        self.main_thread = threading.get_ident()
        self.events = []
        self._file = None
        # The threads of a worker write to one file.
        self._lock = threading.Lock()

    def __call__(self, *event):
        if os.getpid() == self.main:
            if threading.get_ident() != self.main_thread:
                event = ("in another thread", *event)
            self.events.append(list(event))
            return
        with self._lock:
            self._open()
        self._write(*event)

    def _open(self):
        if self._file is None or self._file[0] != os.getpid():
            info = get_worker_info()
            name = f"{generation}-{'unknown' if info is None else info.id}-{os.getpid()}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = (os.getpid(), os.open(os.path.join(self.folder, name), flags, 0o600))
            self._write("worker", about(info), [])

    def _write(self, *event):
        os.write(self._file[1], json.dumps(event).encode() + b"\n")

    # Copies in the same process write to the same list.
    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return _same_or_new, (self.folder, self.main, generation)


_recorders = {}


def make(folder):
    """Creates the recorder of this process."""
    _recorders[folder] = Recorder(folder)
    return _recorders[folder]


def _same_or_new(folder, main, started):
    global generation
    if folder not in _recorders:
        generation = started
        _recorders[folder] = recorder = Recorder(folder)
        recorder.main = main
    return _recorders[folder]


def workers(folder):
    """What the workers wrote: {"generation-worker": events}."""
    events = {}
    for name in sorted(os.listdir(folder)):
        started, worker, _pid = name.split("-")
        with open(os.path.join(folder, name)) as f:
            # The last line of a worker that was killed may be incomplete.
            lines = [json.loads(line) for line in f if line.endswith("\n")]
        events.setdefault(f"{started}-{worker}", []).extend(lines)
    return events
