"""Runs a program with one of the loaders and gives the record of everything that can be observed."""

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
from torch.utils.data import dataloader as torchs
from torch.utils.data import get_worker_info

import rustloader
import rustloader.iterator.core

from . import actors, describe, parts, patterns, recorder, samplers
from .program import ELSEWHERE

LOADERS = {"torch": torch.utils.data.DataLoader, "ours": rustloader.DataLoader}
ITERATORS = {
    "torch": torchs._MultiProcessingDataLoaderIter,
    "ours": rustloader.iterator.core._MultiProcessingDataLoaderIter,
}

# Batches after which an endless epoch is cut off.
LIMIT = 60

# Old versions of torch do not count each worker's tasks.
BY_WORKER = "worker_idx" in inspect.signature(torchs._MultiProcessingDataLoaderIter._process_data).parameters

# The last event of each record.
KEPT = "kept batches are what they were"


class Remote(LoopbackContext):
    """Workers as on other machines. It looks like torch's context to those who compare them."""

    _name = "forkserver"

    def __reduce__(self):
        return Remote, (self.folder,)


class Session:
    """A run of a program: makes loaders and iterators, and notes what each step gives."""

    def __init__(self, program, which, folder):
        self.program, self.which, self.folder = program, which, folder
        self.note = recorder.make(folder)
        self.cls = LOADERS[which]
        self.options = program.options if which == "ours" else {}
        if self.options and program.given == "install":
            # Without workers torch's class stays torch's.
            self.cls = LOADERS["torch" if program.num_workers else "ours"]
            rustloader.install(**self.options)
            self.options = {}
        self.iterator_class = ITERATORS[which] if program.num_workers else torchs._SingleProcessDataLoaderIter
        self.iterators = []
        self.caught = []
        self.handed_over = []
        self.delivered = self.batches = 0
        self.engine_before = rustloader.engine_batches()
        self.kept, self.raised = [], None
        torch.manual_seed(program.seed), random.seed(program.seed + 1), np.random.seed(program.seed % 2**32)
        self.generator = torch.Generator().manual_seed(program.seed + 2) if program.generator else None
        self.dataset = parts.dataset(program, self.note)
        if program.cache and which == "ours":
            self.dataset = rustloader.cache(self.dataset, memory="64MiB")
        if program.pattern == "subclass":
            self.cls = type("Mine", (self.cls,), {"__iter__": self.own_iter(self.cls)})

    @staticmethod
    def own_iter(base):
        def __iter__(loader):
            yield from base.__iter__(loader)

        return __iter__

    # --- noting

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
        """Calls, notes the outcome, and gives (kind, value)."""
        try:
            value = function(*args)
        except StopIteration as e:
            kind, value, told = "end", None, describe.error(e) if e.args else []
        except Exception as e:
            kind, value, told = "error", None, describe.error(e)
            self.raised = type(e)
            # Its frames hold iterators.
            e.__traceback__ = None
        else:
            kind, told = "value", None
        if kind == "value" and name == "next":
            told = describe.value(value)
        self.after(name, *([] if of is None else [self.number(of)]), kind, told)
        return kind, value

    def number(self, iterator):
        return [it is iterator for it in self.iterators].index(True)

    # --- steps

    def context(self, by_name):
        """The context of workers; ours may be one of workers on other machines."""
        method = self.program.start_method
        if method == "ray" and self.which == "ours":
            return actors.context()
        if method == "remote" and self.which == "ours":
            return Remote(Path(self.folder).parent)  # beside the records of calls
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
        kind, made = self.attempt(
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
            self.look_at_loader(made)
            if p.length_asked:
                self.length(made)
        return made

    def length(self, of):
        try:
            found = len(of)
        except Exception as e:
            found = describe.error(e)
            e.__traceback__ = None
        self.after("len", found)

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
        if self.which == "ours" and self.program.num_workers > 0:
            # A warning that is raised takes the batch with it, as in torch.
            self.delivered += kind == "value" or (kind == "error" and self.raised is UserWarning)
        return kind, value

    def keep(self, batch):
        """Keeps every third batch to the end of the program, and writes into the tensors of the others."""
        self.batches += 1
        if self.batches % 3 == 0:
            self.kept.append((batch, describe.value(batch)))
            return
        for tensor in describe.tensors(batch):
            with contextlib.suppress(RuntimeError):  # elements that lie on one another
                tensor.detach().fill_(1)

    def take(self, iterator, count):
        """Calls next() up to `count` times, until the end."""
        for _ in range(count):
            if self.next(iterator)[0] == "end":
                return

    def drain(self, iterator):
        """Calls next to the end, and beyond it."""
        # A StopIteration that a dataset raises looks like the end; a program has three at most.
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
        """Ends the workers, as the last reference would."""
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
            self.alive(iterator)
        self.after("closed", get_worker_info() is None)

    # --- looking

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
    """Warnings and our log lines go to the session."""

    class Collect(logging.Handler):
        def emit(self, line):
            session.handed_over.append(line.getMessage())

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
    """The record of a program's run."""
    if program.start_method == "ray" and which == "ours" and program.num_workers:
        actors.connect()
    # Workers are to have one all the same.
    torch.set_num_threads(2)
    # The fork server imports torch once, not each of its workers.
    torch.multiprocessing.set_forkserver_preload(["rustloader.workers.main", parts.__name__])
    session = Session(program, which, folder)
    with watched(session):
        session.after("start")
        loader = session.loader()
        if loader is not None:
            patterns.PATTERNS[program.pattern](session, loader)
        # As cyclic garbage torch's workers would take 5 s each.
        seen = []
        for iterator in [*session.iterators, getattr(loader, "_iterator", None)]:
            if not any(iterator is other for other in seen):
                seen.append(iterator)
                session.close(iterator)
        return session.record()
