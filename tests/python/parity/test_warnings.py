"""Warnings: same texts and categories as torch's, from the same module (P9, T28).

Most of torch's come from its own module; the one about a length comes from the caller of next(), but not in old
versions, which also lack some of the others.
"""

import functools
import gc
import inspect
import os
import pickle
import warnings

import pytest
import torch
from sample_data import Numbers, Shards
from support import BOTH, DataLoader

import rustloader
from rustloader import StatefulDataLoader

TorchIter = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
SAYS_NO_ACCELERATOR = "no accelerator is found" in inspect.getsource(torch.utils.data.dataloader)
NO_ACCELERATOR = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


TORCH_MODULE = torch.utils.data.dataloader.__name__


class Modules(list):
    """The pattern of a filter that matches every module, and records the modules."""

    def match(self, module):
        self.append(module)
        return True


def records_of(fn, cls):
    """(text, module, source) of all UserWarnings that fn(cls) emits."""
    modules = Modules()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filters.insert(0, ("always", None, UserWarning, modules, 0))
        warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)  # Python's own about forks
        fn(cls)
    return [(str(w.message), module, w.source) for w, module in zip(caught, modules, strict=True)]


def check(fn, count=None):
    """Both loaders emit the same warnings; `count` of them, if given."""
    expected, actual, stateful = (records_of(fn, cls) for cls in (*BOTH, StatefulDataLoader))
    with rustloader.installed():
        installed = records_of(fn, torch.utils.data.DataLoader)
    assert count is None or len(actual) == count
    assert actual == expected
    assert installed == expected
    assert stateful == expected
    return [record[:2] for record in actual]


@pytest.fixture
def one_core(monkeypatch):
    cores(monkeypatch, 1)


def cores(monkeypatch, count):
    """Sets the number of cores: newer versions of torch ask torch._utils, older ones os."""
    monkeypatch.setattr(torch._utils, "cpu_count", lambda: count, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))


@pytest.mark.parametrize(("persistent", "count"), [(False, 3), (True, 2)])
def test_p9_worker_count_is_warned_of_at_init_and_at_each_iterator(persistent, count, one_core):
    def fn(cls):
        loader = cls(Numbers(2), num_workers=2, persistent_workers=persistent)
        list(loader)
        list(loader)

    emitted = check(fn, count)
    assert all(text.startswith("This DataLoader will create 2 worker processes in total.") for text, _ in emitted)
    assert {module for _, module in emitted} == {TORCH_MODULE}


@pytest.mark.parametrize("workers", [0, 1])
@NO_ACCELERATOR
def test_p9_pin_memory_without_an_accelerator(workers):
    def fn(cls):
        loader = cls(Numbers(2), num_workers=workers, pin_memory=True)
        assert [b.tolist() for b in loader] == [[0], [1]]

    check(fn, 1 if SAYS_NO_ACCELERATOR else 0)


@NO_ACCELERATOR
@pytest.mark.skipif(not SAYS_NO_ACCELERATOR, reason="this torch pins for pin_memory_device whatever the machine has")
def test_p9_pin_memory_device_is_deprecated():
    def fn(cls):
        list(cls(Numbers(2), num_workers=1, pin_memory=True, pin_memory_device="cuda"))

    check(fn, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_p9_a_length_that_was_too_short(workers):
    dataset = Shards([3, 3], reported=2)

    def fn(cls):
        loader = cls(dataset, batch_size=None, num_workers=workers)
        assert len(loader) == 2
        list(loader)

    emitted = check(fn, 1 if workers == 0 else 4)
    assert "was reported to be 2(when accessing len(dataloader)), but 3 samples have been fetched. " in emitted[0][0]
    (base,) = TorchIter.__mro__[1:2]
    to_caller = "stacklevel=2" in inspect.getsource(base.__next__)
    assert {module for _, module in emitted} == {__name__ if to_caller else TORCH_MODULE}


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_p9_lengths_are_checked_in_batches_and_per_epoch(workers, batch_size, monkeypatch):
    """The length is requested in some epochs; what it returned applies from the next one on, in batches."""

    cores(monkeypatch, 64)
    dataset = Shards([5] * 3, reported=4)

    def fn(cls):
        more = dict(persistent_workers=True) if workers else {}
        loader = cls(dataset, batch_size=batch_size, num_workers=workers, **more)
        assert len(list(iter(loader))) > 0
        len(loader)
        for _ in range(2):
            for _ in loader:
                pass
        if workers:
            loader._iterator._shutdown_workers()

    batches = (5 if batch_size is None else 3) * max(workers, 1)
    emitted = check(fn, 2 * max(batches - 4, 0))
    for k, (text, _) in enumerate(emitted):
        assert f"but {5 + k % (batches - 4)} samples have been fetched. " in text
        assert ("For multiprocessing data-loading" in text) == (workers > 0)


def test_p9_a_length_that_nobody_asked_for_is_not_checked():
    check(lambda cls: list(cls(Shards([3, 3], reported=2), batch_size=None, num_workers=2)), 0)


class Unpicklable:
    """Cannot be pickled, because of the given error."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error("on purpose")


@pytest.mark.parametrize("error", [TypeError, AttributeError, pickle.PicklingError])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_p9_a_worker_that_cannot_be_pickled(error):
    def fn(cls):
        collate = functools.partial(max, Unpicklable(error))
        loader = cls(Numbers(2), num_workers=1, multiprocessing_context="spawn", collate_fn=collate)
        with pytest.raises(error, match="on purpose"):
            iter(loader)
        del loader
        gc.collect()

    expected, actual = (records_of(fn, cls) for cls in BOTH)
    # rustloader warns with every version of torch.
    assert len(actual) == 1 and expected in ([], actual)
    assert actual[0][0].startswith("Got pickle error when attempting to start a worker Process.")
    assert actual[0][1] == TORCH_MODULE


def test_t28_users_filter_by_torchs_module(one_core):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)  # Python's own about forks
        warnings.filterwarnings("ignore", module=r"torch\.utils\.data")
        assert len(list(DataLoader(Numbers(2), num_workers=2))) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module=r"torch\.utils\.data")
        with pytest.raises(UserWarning, match="This DataLoader will create"):
            DataLoader(Numbers(2), num_workers=2)
