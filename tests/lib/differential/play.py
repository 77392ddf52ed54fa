"""Runs a program with one of the loaders and records everything that can be observed."""

import contextlib
import inspect
import logging
import random
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.utils.data
from remote_support import LoopbackContext
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data import get_worker_info

import rustloader
import rustloader.iterator.core

from . import actors, describe, parts, patterns, recorder, samplers
from .program import ELSEWHERE

LOADERS = {"torch": torch.utils.data.DataLoader, "rustloader": rustloader.DataLoader}
ITERATORS = {
    "torch": torch_dataloader._MultiProcessingDataLoaderIter,
    "rustloader": rustloader.iterator.core._MultiProcessingDataLoaderIter,
}

# Batches after which an endless epoch is cut off.
LIMIT = 60

# Old versions of torch do not count each worker's tasks.
BY_WORKER = "worker_idx" in inspect.signature(torch_dataloader._MultiProcessingDataLoaderIter._process_data).parameters

# The last event of each record.
KEPT = "kept batches are unchanged"


class Remote(LoopbackContext):
    """Runs workers as on other machines. Reports the start method of torch's context, so that the records match."""

    _name = "forkserver"

    def __reduce__(self):
        return Remote, (self.folder,)


class Session:
    """A run of a program: creates loaders and iterators, and records the outcome of each step."""

    def __init__(self, program, which, folder):
        self.program, self.which, self.folder = program, which, folder
        self.note = recorder.make(folder)
        self.cls = LOADERS[which]
        self.options = program.options if which == "rustloader" else {}
        if self.options and program.given == "install":
            # install() leaves torch's class as it is for loaders without workers.
            self.cls = LOADERS["torch" if program.num_workers else "rustloader"]
            rustloader.install(**self.options)
            self.options = {}
        self.iterator_class = ITERATORS[which] if program.num_workers else torch_dataloader._SingleProcessDataLoaderIter
        self.iterators = []
        self.caught = []
        self.handed_over = []
        self.delivered = self.batches = 0
        self.engine_before = rustloader.engine_batches()
        self.kept, self.raised = [], None
        torch.manual_seed(program.seed), random.seed(program.seed + 1), np.random.seed(program.seed % 2**32)
        self.generator = torch.Generator().manual_seed(program.seed + 2) if program.generator else None
        self.dataset = parts.dataset(program, self.note)
        if program.cache and which == "rustloader":
            self.dataset = rustloader.cache(self.dataset, memory="64MiB")
        if program.pattern == "subclass":
            self.cls = type("Mine", (self.cls,), {"__iter__": self.own_iter(self.cls)})

    @staticmethod
    def own_iter(base):
        def __iter__(loader):
            yield from base.__iter__(loader)

        return __iter__

    # --- Recording

    def after(self, *event):
        """Records a step, then what it changed: warnings and random generators."""
        self.note(*event)
        while self.caught:
            w = self.caught.pop(0)
            # torch's loader has threads when it forks, rustloader has none (T23 in docs/parity.md).
            if not (w.category is DeprecationWarning and "multi-threaded" in str(w.message)):
                self.note("warning", *describe.warning(w))
        self.note("rng", *recorder.rng(self.generator))

    def attempt(self, name, function, *args, of=None):
        """Calls the function, records the outcome, and returns (kind, value)."""
        try:
            value = function(*args)
        except StopIteration as e:
            kind, value, description = "end", None, describe.error(e) if e.args else []
        except Exception as e:
            kind, value, description = "error", None, describe.error(e)
            self.raised = type(e)
            # The frames of a traceback hold iterators.
            e.__traceback__ = None
        else:
            kind, description = "value", None
        if kind == "value" and name == "next":
            description = describe.value(value)
        self.after(name, *([] if of is None else [self.number(of)]), kind, description)
        return kind, value

    def number(self, iterator):
        return [it is iterator for it in self.iterators].index(True)

    # --- Steps

    def context(self, by_name):
        """The context of the workers; for rustloader, it may be one of workers on other machines."""
        method = self.program.start_method
        if method == "ray" and self.which == "rustloader":
            return actors.context()
        if method == "remote" and self.which == "rustloader":
            return Remote(Path(self.folder).parent)  # next to the recorded calls
        method = "forkserver" if method in ELSEWHERE else method
        return method if by_name else torch.multiprocessing.get_context(method)

    def loader(self):
        p = self.program
        more = {}
        if p.num_workers:
            more = dict(prefetch_factor=p.prefetch_factor, persistent_workers=p.persistent, in_order=p.in_order)
            if p.context != "none" or p.start_method != "fork":
                more["multiprocessing_context"] = self.context(by_name=p.context == "name")
        if p.batch_size != 1:
            more["batch_size"] = p.batch_size
        more.update(samplers.sampler(p, self.note, self.dataset, self.generator))
        more.update(parts.collate(p, self.note))
        more.update(parts.init(p, self.note))
        more.update(self.options)
        kind, loader = self.attempt(
            "loader",
            lambda: self.cls(
                self.dataset,
                num_workers=p.num_workers,
                drop_last=p.drop_last,
                timeout=p.timeout,
                generator=self.generator,
                pin_memory=p.pin_memory,
                **more,
            ),
        )
        if kind == "value":
            self.look_at_loader(loader)
            if p.length_asked:
                self.length(loader)
        return loader

    def length(self, of):
        try:
            result = len(of)
        except Exception as e:
            result = describe.error(e)
            e.__traceback__ = None
        self.after("len", result)

    def open(self, loader, make=iter):
        recorder.generation += 1
        kind, iterator = self.attempt("iter", make, loader)
        if kind == "value":
            self.iterators.append(iterator)
            self.note("opened", self.number(iterator), recorder.generation)
            self.look_at_iterator(iterator, loader)
            self.counters(iterator)
            if self.program.length_asked and hasattr(iterator, "__len__"):
                self.length(iterator)
        return iterator

    def next(self, iterator):
        kind, value = self.attempt("next", next, iterator, of=iterator)
        self.counters(iterator)
        if kind == "value":
            self.keep(value)
        if self.which == "rustloader" and self.program.num_workers > 0:
            # A warning that is raised as an error discards the batch, as in torch.
            self.delivered += kind == "value" or (kind == "error" and self.raised is UserWarning)
        return kind, value

    def keep(self, batch):
        """Keeps every third batch until the end of the program, and writes to the tensors of the others."""
        self.batches += 1
        if self.batches % 3 == 0:
            self.kept.append((batch, describe.value(batch)))
            return
        for tensor in describe.tensors(batch):
            with contextlib.suppress(RuntimeError):  # overlapping elements
                tensor.detach().fill_(1)

    def take(self, iterator, count):
        """Calls next() up to `count` times, until the end."""
        for _ in range(count):
            if self.next(iterator)[0] == "end":
                return

    def drain(self, iterator):
        """Calls next() to the end, and beyond it."""
        # A StopIteration raised by a dataset looks like the end; a program raises at most three.
        ends, enough = 0, 4 if self.program.error == "StopIteration" else 3
        for _ in range(LIMIT if self.program.is_endless else 2000):
            ends = ends + 1 if self.next(iterator)[0] == "end" else 0
            if ends == enough:
                break
        else:
            self.note("limit")
            return
        self.alive(iterator)
        self.look_at_iterator(iterator)

    def epoch(self, loader):
        iterator = self.open(loader)
        if iterator is not None:
            self.drain(iterator)
        return iterator

    def close(self, iterator):
        """Ends the workers, as dropping the last reference would."""
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
            self.alive(iterator)
        self.after("closed", get_worker_info() is None)

    # --- Inspecting

    def alive(self, iterator):
        workers = getattr(iterator, "_workers", [])
        self.note("alive", [w.is_alive() for w in workers])

    def look_at_loader(self, loader):
        self.note("the loader has", *describe.loader(loader))

    def look_at_iterator(self, iterator, loader=None):
        self.note("the iterator has", *describe.iterator(iterator, loader))
        status = getattr(iterator, "_workers_status", None)
        if status is not None:
            self.note("status", [type(s).__name__ for s in status], list(status))
        if loader is not None:
            workers = getattr(iterator, "_workers", [])
            names = [[w.name, type(w).__name__] for w in workers] if self.program.start_method not in ELSEWHERE else []
            self.note("workers", names, [[w.daemon, w.is_alive()] for w in workers])

    def counters(self, iterator):
        """torch's counters, except those that depend on timing."""
        p = self.program
        if p.is_ordered and p.is_map and hasattr(iterator, "_send_idx") and not iterator._shutdown:
            tasks = sorted((task, info[0]) for task, info in iterator._task_info.items())
            by_worker = list(iterator._workers_num_tasks) if BY_WORKER else []
            self.note("counters", iterator._send_idx, iterator._rcvd_idx, by_worker, tasks)

    def record(self):
        self.note(KEPT, [describe.value(batch) == was for batch, was in self.kept])
        own = [it for it in self.iterators if isinstance(it, rustloader.iterator.core._MultiProcessingDataLoaderIter)]
        return {
            "main": self.note.events,
            "workers": recorder.workers(self.note.folder),
            "handed over": [*self.handed_over, *(["an iterator"] if any(it._core is None for it in own) else [])],
            "missing": self.delivered - (rustloader.engine_batches() - self.engine_before),
        }


@contextlib.contextmanager
def watched(session):
    """Collects warnings and rustloader's log lines in the session."""

    class Collect(logging.Handler):
        def emit(self, line):
            text = line.getMessage()
            if not text.startswith("cache(): samples at indices of type"):
                session.handed_over.append(text)

    handler = Collect(logging.WARNING)
    logging.getLogger("rustloader").addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if session.program.warnings_raise:
            warnings.filterwarnings("error", message="Length of IterableDataset")
        session.caught = caught
        yield
    logging.getLogger("rustloader").removeHandler(handler)


def play(program, which, folder):
    """Runs a program and returns the record."""
    if program.start_method == "ray" and which == "rustloader" and program.num_workers:
        actors.connect()
    # Each worker must still have one thread.
    torch.set_num_threads(2)
    # The fork server imports torch once, not each of its workers.
    torch.multiprocessing.set_forkserver_preload(["rustloader.workers.main", parts.__name__])
    session = Session(program, which, folder)
    with watched(session):
        session.after("start")
        loader = session.loader()
        if loader is not None:
            patterns.PATTERNS[program.pattern](session, loader)
        # Collected as cyclic garbage, torch's iterators would take 5 s per worker to end.
        seen = []
        for iterator in [*session.iterators, getattr(loader, "_iterator", None)]:
            if not any(iterator is other for other in seen):
                seen.append(iterator)
                session.close(iterator)
        return session.record()
