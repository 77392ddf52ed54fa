"""Patterns of use: what users do with a loader. One function for each value of the dimension `pattern`."""

import copy
import pickle
import random
import threading

import torch

from . import parts


def full_epochs(s, loader):
    for _ in range(s.program.epochs):
        s.epoch(loader)


def draws_between_epochs(s, loader):
    """The program draws numbers between epochs: as many as other loaders' iterators do, or some of another kind."""
    draws = random.Random(s.program.seed)
    for _ in range(s.program.epochs):
        s.epoch(loader)
        if draws.random() < 0.1:
            torch.rand(2)
        for _ in range(s.program.take % 4):
            torch.empty((), dtype=torch.int64).random_()


def dropped_at_once(s, loader):
    """The last reference to the iterator is dropped in mid-epoch."""
    for _ in range(s.program.epochs):
        iterator = s.open(loader)
        if iterator is None:
            return
        s.take(iterator, s.program.take)
        workers = list(getattr(iterator, "_workers", []))
        s.iterators.clear()
        del iterator
        s.after("dropped", [w.is_alive() for w in workers])
    s.iterators.append(loader._iterator)
    loader._iterator = None


def left_early(s, loader):
    """Each loop is left early while its iterator is kept; a full epoch follows."""
    for _ in range(s.program.epochs):
        iterator = s.open(loader)
        if iterator is None:
            return
        s.take(iterator, s.program.take)
        if not s.program.persistent:
            s.close(iterator)
    if s.program.sampler != "infinite":
        s.epoch(loader)


def again_in_mid_epoch(s, loader):
    """iter() is called while an iterator is in mid-epoch; that iterator is then asked for more."""
    first = s.open(loader)
    if first is None:
        return
    s.take(first, s.program.take)
    second = s.open(loader)
    s.take(second, s.program.take + 1)
    s.take(first, 2)
    if s.program.sampler != "infinite":
        s.drain(second)


def two_iterators(s, loader):
    a, b = s.open(loader), s.open(loader)
    if a is None or b is None:
        return
    for _ in range(s.program.take + 4):
        s.take(a, 1)
        s.take(b, 2)


def nested_loops(s, loader):
    outer = s.open(loader)
    if outer is None:
        return
    for _ in range(2):
        s.take(outer, 1)
        inner = s.open(loader)
        s.take(inner, s.program.take)
        if inner is not outer:
            s.close(inner)


def attributes(s, loader):
    """Attributes are changed between epochs. Each outcome is recorded: guarded attributes raise."""
    s.epoch(loader)
    p = s.program
    change(s, loader, "collate_fn", parts.OtherCollate(p, s.note))
    s.epoch(loader)
    change(s, loader, "worker_init_fn", parts.Init(p, s.note) if p.num_workers else None)
    if p.num_workers:
        change(s, loader, "num_workers", p.num_workers % 3 + 1)
        change(s, loader, "prefetch_factor", 3)
        change(s, loader, "in_order", True)
        change(s, loader, "timeout", 80)
        change(s, loader, "multiprocessing_context", s.context(by_name=True))
    change(s, loader, "generator", s.generator)
    change(s, loader, "pin_memory", False)
    s.epoch(loader)
    change(s, loader, "persistent_workers", not p.persistent)


def change(s, loader, name, value):
    s.attempt(f"set {name}", setattr, loader, name, value)


def guarded(s, loader):
    for name, value in [
        ("batch_size", 3),
        ("dataset", None),
        ("sampler", []),
        ("batch_sampler", []),
        ("drop_last", True),
    ]:
        change(s, loader, name, value)
    loader._DataLoader__initialized = False
    loader.drop_last = loader.drop_last
    loader._DataLoader__initialized = True
    change(s, loader, "something_of_the_users", 5)
    full_epochs(s, loader)
    s.look_at_loader(loader)


def dataset_changed(s, loader):
    for epoch in range(s.program.epochs):
        s.epoch(loader)
        s.dataset.shift += 10 + epoch
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch + 1)


def sampler_changed(s, loader):
    """The sampler's parts are changed before the second epoch, as libraries do."""
    s.epoch(loader)
    inner = getattr(loader.sampler, "inner", None)
    if hasattr(inner, "set_epoch"):
        inner.set_epoch(5)
    if hasattr(inner, "shift"):
        inner.shift = 3
    if hasattr(loader.batch_sampler, "sampler") and s.program.is_map:
        loader.batch_sampler.sampler = list(range(s.program.size))[::-1]
        loader.batch_sampler.batch_size = 2
    s.epoch(loader)


def pickled(s, loader, how="pickled"):
    """The loader is copied before its first epoch, and again in the middle of it."""
    for when in range(2):
        kind, other = s.attempt(how, DUPLICATE[how], loader)
        if kind == "value":
            s.look_at_loader(other)
            s.epoch(other)
        if when == 0:
            iterator = s.open(loader)
            if iterator is None:
                return
            s.take(iterator, s.program.take)
            s.attempt("pickle an iterator", pickle.dumps, iterator)
    s.drain(iterator)


def copied(s, loader):
    pickled(s, loader, "copied")


def deep_copied(s, loader):
    pickled(s, loader, "deep copied")


def shut_down(s, loader):
    """An iterator's workers are shut down in mid-epoch and the iterator is dropped, as libraries do."""
    for _ in range(s.program.epochs):
        iterator = s.open(loader)
        if iterator is None:
            return
        s.take(iterator, s.program.take)
        for _ in range(2):
            s.close(iterator)
        loader._iterator = None


def subclass(s, loader):
    """The loader's class has an __iter__ that is a generator around that of its base class."""
    full_epochs(s, loader)


def in_a_thread(s, loader):
    """All epochs run in a user's thread, which ends before the program does."""
    errors = []

    def body():
        s.note.main_thread = threading.get_ident()
        try:
            full_epochs(s, loader)
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    s.note.main_thread = threading.get_ident()
    for e in errors:
        raise e


def iterator_class(s, loader):
    """Iterators are created from their class, as libraries do."""
    for _ in range(s.program.epochs):
        iterator = s.open(loader, s.iterator_class)
        if iterator is not None:
            s.drain(iterator)
            s.close(iterator)


DUPLICATE = {"pickled": lambda x: pickle.loads(pickle.dumps(x)), "copied": copy.copy, "deep copied": copy.deepcopy}

PATTERNS = {
    "full epochs": full_epochs,
    "draws between epochs": draws_between_epochs,
    "break": left_early,
    "again in mid-epoch": again_in_mid_epoch,
    "two iterators": two_iterators,
    "nested loops": nested_loops,
    "attributes": attributes,
    "dataset changed": dataset_changed,
    "sampler changed": sampler_changed,
    "pickled": pickled,
    "copied": copied,
    "deep copied": deep_copied,
    "guarded": guarded,
    "dropped at once": dropped_at_once,
    "shut down": shut_down,
    "subclass": subclass,
    "in a thread": in_a_thread,
    "iterator class": iterator_class,
}
