"""Loaders that fall back to torch's iterator, and subclasses that do not (T15, T16)."""

import errno
import functools
import itertools
import logging

import pytest
import torch
from sample_data import Draws, EagerSampler, LazySampler, Numbers
from support import (
    DataLoader,
    LoaderIter,
    TorchDataLoader,
    engine_batches,
    from_engine,
    values,
)
from torch.utils.data import _utils
from torch.utils.data import dataloader as torch_dataloader

import rustloader
from rustloader.settings.config import resolve

pytestmark = [pytest.mark.ours, pytest.mark.handover]

TorchIter = torch_dataloader._MultiProcessingDataLoaderIter


def fallback_batches(caplog, loader, iterator_class=None):
    """The batches of a loader that must fall back to torch's iterator, with one log line."""
    caplog.clear()
    before = engine_batches()
    with caplog.at_level(logging.WARNING, logger="rustloader"):
        iterator = iter(loader) if iterator_class is None else iterator_class(loader)
        assert isinstance(iterator, TorchIter) and isinstance(iterator, LoaderIter)
        assert type(iterator).__name__ == (
            "_MultiProcessingDataLoaderIter" if iterator_class is None else iterator_class.__name__
        )
        batches = values(iterator)
    lines = [r for r in caplog.records if r.name.split(".")[0] == "rustloader"]
    assert len(lines) == 1 and lines[0].levelno == logging.WARNING, caplog.text
    assert engine_batches() == before, "the engine served a batch"
    assert iterator.engine_batches == 0
    return batches


def test_settings_beyond_the_engines_limits_are_handed_over():
    def reason(workers, prefetch_factor):
        loader = DataLoader(range(2), num_workers=workers, prefetch_factor=prefetch_factor)
        engine, reason = rustloader.iterator.fallback.make_engine(resolve(loader))
        assert engine is None
        return reason

    for workers, prefetch_factor in [(2, 1 << 24), (1, 1 << 40), (65537, 1)]:
        text = reason(workers, prefetch_factor)
        assert text.startswith("its settings are beyond the engine's limits: num_workers="), text
        assert "65536 workers" in text and "use a smaller num_workers or prefetch_factor" in text
    assert reason(1, 1 << 70).startswith("its settings are beyond the engine's limits: ")


def test_a_fallback_names_the_call_that_failed(monkeypatch, caplog):
    def full(*args, **kw):
        raise OSError(errno.EMFILE, "eventfd failed: Too many open files")

    monkeypatch.setattr(rustloader.iterator.fallback, "Engine", full)
    loader = DataLoader(Numbers(4), num_workers=2, batch_size=None)
    with from_engine(0):
        assert values(loader) == values(loader) == [0, 1, 2, 3]
    reason = "cannot create the engine: [Errno 24] eventfd failed: Too many open files"
    assert [record.getMessage() for record in caplog.records] == [
        f"a DataLoader runs on torch's own iterator: {reason}"
    ]
    assert [tuple(vars(it).values()) for it in rustloader.stats(loader).fallbacks] == [(reason, 2)]


def subclass(hook, calls):
    """An iterator class that overrides one method and calls the original."""

    def method(self, *args, **kw):
        calls.append(hook)
        return getattr(LoaderIter, hook)(self, *args, **kw)

    return type("Mine", (LoaderIter,), {hook: method})


@pytest.mark.parametrize(
    ("hook", "count"),
    [(it, 5) for it in ("_try_put_index", "_process_data", "_get_data", "_try_get_data")]
    + [("_mark_worker_as_unavailable", 2)],
)
def test_t15_hooks_that_cannot_be_kept_run_on_torchs_loop(caplog, hook, count):
    calls = []
    cls = type("Youngest", (subclass(hook, calls),), {})
    assert fallback_batches(caplog, DataLoader(Numbers(5), num_workers=2, batch_size=None), cls) == list(range(5))
    assert len(calls) >= count


@pytest.mark.parametrize("hook", ["_next_data", "_next_index", "_reset", "_shutdown_workers"])
def test_t15_hooks_that_are_kept_run_on_the_engine(caplog, hook):
    calls = []
    iterator = subclass(hook, calls)(DataLoader(Numbers(5), num_workers=2, batch_size=None))
    with from_engine(5):
        assert values(iterator) == list(range(5))
    expected = {"_next_data": 6, "_next_index": 6, "_reset": 1, "_shutdown_workers": 1}
    assert len(calls) >= expected[hook]
    assert not caplog.records


def test_t15_a_subclass_that_numbers_its_batches():
    class WithIndex(LoaderIter):
        def _next_data(self):
            return self._num_yielded, super()._next_data()

    iterator = WithIndex(DataLoader(Numbers(4), num_workers=1, batch_size=None))
    with from_engine(4):
        assert [(i, x.item()) for i, x in iterator] == [(i, i) for i in range(4)]


def test_t15_a_subclass_that_changes_indices():
    class Backwards(LoaderIter):
        def _next_index(self):
            return 9 - super()._next_index()

    with from_engine(4):
        assert values(Backwards(DataLoader(Numbers(10), sampler=range(4), num_workers=2, batch_size=None))) == [
            9,
            8,
            7,
            6,
        ]


def test_t15_a_class_that_only_calls_the_base():
    class Threads(LoaderIter):
        """Workers of its own, not processes."""

        def __init__(self, loader):
            torch_dataloader._BaseDataLoaderIter.__init__(self, loader)
            self.fetcher = torch_dataloader._DatasetKind.create_fetcher(
                self._dataset_kind, self._dataset, self._auto_collation, self._collate_fn, self._drop_last
            )

        def _next_data(self):
            return self.fetcher.fetch(self._next_index())

        def _shutdown_workers(self):
            pass

    assert values(Threads(DataLoader(Numbers(3), num_workers=1, batch_size=None))) == [0, 1, 2]


def refused(*args, **kw):
    raise OSError(errno.EPERM, "memfd_create failed")


FALLBACKS = {
    "worker loop": lambda patch: patch.setattr(
        _utils.worker, "_worker_loop", functools.partial(_utils.worker._worker_loop)
    ),
    "method": lambda patch: patch.setattr(TorchIter, "_get_data", lambda self, real=TorchIter._get_data: real(self)),
    "processes": lambda patch: patch.setattr(
        torch.multiprocessing, "Process", lambda real=torch.multiprocessing.Process, **kw: real(**kw)
    ),
    "no memory": lambda patch: patch.setattr(rustloader.iterator.fallback, "Engine", refused),
    "subclass": lambda patch: None,
}


@pytest.mark.parametrize(("sampler", "persistent"), [(LazySampler, False), (EagerSampler, True)])
@pytest.mark.parametrize("reason", FALLBACKS)
@pytest.mark.forks
def test_every_handover_draws_and_asks_the_sampler_as_torch_does(reason, sampler, persistent, monkeypatch, caplog):
    class Mine(LoaderIter):
        def _process_data(self, *args):
            return super()._process_data(*args)

    def trace(cls, iterator_class=None):
        torch.manual_seed(5)
        log = []
        loader = cls(
            Draws(9), sampler=sampler(9, log, draw=True), num_workers=2, batch_size=2, persistent_workers=persistent
        )
        if iterator_class is not None:
            loader._get_iterator = lambda: iterator_class(loader)
        for taken in (2, 9, 9):
            for batch in itertools.islice(loader, taken):
                log.append({name: value.tolist() for name, value in batch.items()})
                log.append(torch.get_rng_state().sum().item())
        log.append(torch.rand(()).item())
        if persistent:
            loader._iterator._shutdown_workers()
        return log

    expected = trace(TorchDataLoader)
    FALLBACKS[reason](monkeypatch)
    with from_engine(0):
        assert trace(DataLoader, Mine if reason == "subclass" else None) == expected
    assert len(caplog.records) == 1


class Bare:
    """A program's own fetcher, which has none of the attributes of torch's."""

    __slots__ = ("dataset_of_its_own",)

    def __init__(self, dataset):
        self.dataset_of_its_own = dataset

    def fetch(self, indices):
        return [self.dataset_of_its_own[i] for i in indices]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.forks
def test_a_fetcher_of_the_program_is_left_alone(workers, stateful, on_error, monkeypatch):
    kind = torch_dataloader._DatasetKind
    monkeypatch.setattr(kind, "create_fetcher", staticmethod(lambda _, dataset, *rest: Bare(dataset)))
    cls = rustloader.StatefulDataLoader if stateful else DataLoader
    loader = cls(range(6), batch_size=4, num_workers=workers, on_error=on_error)
    assert list(loader) == [[0, 1, 2, 3], [4, 5]]
