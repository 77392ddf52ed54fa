"""Statistics of loaders that are not served by the engine alone, and of libraries' wrappers around a loader."""

import pytest
import torch
from sample_data import Numbers
from support import DataLoader, TorchDataLoader, rustloader
from torch.utils.data.datapipes.iter import IterableWrapper

pytestmark = pytest.mark.ours


# Torch's own iterators


def test_no_row_of_zeros_where_torchs_iterator_did_the_work():
    loader = DataLoader(Numbers(3))
    assert len(list(loader)) == 3
    iterator = iter(loader)
    next(iterator)
    of_loader, of_iterator = rustloader.stats(loader), rustloader.stats(iterator)
    assert str(of_loader) == f"no statistics: {of_loader.note}" and of_loader.note.startswith("with num_workers=0, ")
    assert str(of_iterator) == f"{of_loader}\n  torch's loop  1 batch so far"
    for stats in (of_loader, of_iterator):
        assert stats.as_dict()["note"] == stats.note and stats.as_dict(flat=True)["iterators"] == 0.0
        assert stats.verdict().kind == "unknown"


@pytest.mark.handover
def test_iterators_that_were_handed_over_are_named_in_every_form():
    loader = DataLoader(IterableWrapper(range(4)), num_workers=1)
    iterator = iter(loader)
    next(iterator)
    of_loader, of_iterator = rustloader.stats(loader), rustloader.stats(iterator)
    for stats in (of_loader, of_iterator):
        assert stats.note == stats.as_dict()["note"] == "torch's own loop made the batches: its dataset is a DataPipe"
        assert stats.as_dict()["fallbacks"] == [{"reason": "its dataset is a DataPipe", "count": 1}]
        assert str(stats).startswith(f"no statistics: {stats.note}\n") and "fetch" not in str(stats)
    assert (of_loader.batches, of_iterator.batches) == (0, 1)
    assert "\n  torch's loop  1 iterator: its dataset is a DataPipe" in str(of_loader)
    for stats in (of_loader, of_iterator):
        assert stats.verdict().kind == "unknown" and "DataPipe" in stats.verdict().sentence
    list(iterator)


@pytest.mark.handover
def test_figures_of_a_part_of_the_epochs_say_so(monkeypatch):
    loader = DataLoader(Numbers(30), num_workers=1)
    list(loader)
    assert rustloader.stats(loader).fallbacks == ()
    with monkeypatch.context() as patch:
        patch.setattr(torch.utils.data._utils.worker, "_worker_loop", own_worker_loop)
        list(loader), list(loader)
    stats = rustloader.stats(loader)
    assert (stats.batches, stats.iterators, stats.note) == (30, 1, "")
    (fallback,) = stats.fallbacks
    assert fallback.count == 2
    assert f"\n  torch's loop  2 iterators, not in these statistics: {fallback.reason}" in str(stats)
    verdict = stats.verdict()
    assert verdict.kind != "unknown"
    assert verdict.reason.endswith(f"not counted: 2 iterators on torch's own loop ({fallback.reason})")


WORKER_LOOP = torch.utils.data._utils.worker._worker_loop


def own_worker_loop(*args):
    WORKER_LOOP(*args)


# Wrappers


class Prepared(TorchDataLoader):
    """Like accelerate's: a loader around another one, which creates the iterators."""

    def __init__(self, loader):
        super().__init__(loader.dataset)
        self.base_dataloader = loader

    def __iter__(self):
        yield from self.base_dataloader


class Prefetching:
    """Like timm's and Fabric's: an iterable around a loader."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        self.iterator = iter(self.loader)
        yield from self.iterator


@pytest.mark.parametrize(
    "wrap",
    [Prepared, Prefetching, lambda loader: Prefetching(Prepared(loader)), lambda loader: Prepared(Prepared(loader))],
)
def test_the_figures_of_the_loader_inside(wrap):
    loader = wrap(DataLoader(Numbers(6), num_workers=2))
    before = rustloader.stats(loader)
    assert (before.num_workers, before.batches) == (2, 0) and before.note
    reported = []
    with rustloader.report(loader, reported.append):
        assert len(list(loader)) == 6
    for stats in (rustloader.stats(loader), *reported):
        assert (stats.num_workers, stats.batches, len(stats.workers), stats.note) == (2, 6, 2, "")


def test_a_loader_inside_a_loader_does_not_count():
    """It has figures of its own, and so has what it is fed from."""
    loader = DataLoader(Numbers(4), num_workers=1)
    loader.other = DataLoader(Numbers(6), num_workers=1)
    list(loader), list(loader.other)
    assert rustloader.stats(loader).batches == 4
    for kw in ({"dataset": loader}, {"sampler": loader}, {"batch_sampler": loader}):
        assert "num_workers=0" in rustloader.stats(DataLoader(**{"dataset": Numbers(4)} | kw)).note


def test_two_loaders_are_no_wrapped_one():
    pair = Prefetching(DataLoader(Numbers(4), num_workers=1))
    pair.second = DataLoader(Numbers(4), num_workers=1)
    with pytest.raises(TypeError, match="takes a DataLoader or its iterator, not an object of type Prefetching"):
        rustloader.stats(pair)
    pair.second = pair.loader
    assert rustloader.stats(pair).num_workers == 1


def test_a_ring_of_wrappers_has_an_end():
    one = Prepared(DataLoader(Numbers(4), num_workers=1))
    one.base_dataloader = Prepared(one)
    assert rustloader.stats(one).batches == 0
    one.base_dataloader = one
    assert rustloader.stats(one).batches == 0


def test_an_iterable_of_another_library_over_our_iterator():
    class FeedsTheIterator:
        """Like fastai's `_FakeLoader`: not a DataLoader, but with everything that the iterator reads."""

        _auto_collation, multiprocessing_context = True, None

        def __init__(self, loader):
            self.__dict__.update(vars(loader))
            self._index_sampler = loader._index_sampler

    class Loader:
        def __init__(self):
            self.fake = FeedsTheIterator(TorchDataLoader(Numbers(4), num_workers=1))

        def __iter__(self):
            yield from torch.utils.data.dataloader._MultiProcessingDataLoaderIter(self.fake)

    loader = Loader()
    with rustloader.installed():
        assert len(list(loader)) == 4
    assert rustloader.stats(loader).batches == 4


# The log


@pytest.mark.handover
def test_a_fallback_is_logged_once_per_loader_and_reason(monkeypatch, caplog):
    def lines():
        return [r.getMessage().partition("iterator: ")[2] for r in caplog.records if r.name == "rustloader"]

    loader, persistent = (DataLoader(Numbers(3), num_workers=1, persistent_workers=kept) for kept in (False, True))
    before = set(vars(loader))
    with monkeypatch.context() as patch:
        patch.setattr(torch.utils.data._utils.worker, "_worker_loop", own_worker_loop)
        for _ in range(3):
            list(loader)
        first = "torch.utils.data._utils.worker._worker_loop was replaced"
        assert lines() == [first]
        list(persistent), list(persistent)
        assert lines() == [first] * 2
        persistent._iterator._shutdown_workers()
    assert len(list(loader)) == 3
    iterator = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    with monkeypatch.context() as patch:
        patch.setattr(iterator, "_try_put_index", lambda self: TRY_PUT_INDEX(self))
        list(loader), list(loader)
    second = "_try_put_index of torch's own iterator was replaced"
    assert lines() == [first, first, second]
    assert {(fallback.reason, fallback.count) for fallback in rustloader.stats(loader).fallbacks} == {
        (first, 3),
        (second, 2),
    }
    # Nothing of this is stored in the loader.
    assert set(vars(loader)) == before


@pytest.mark.handover
def test_reasons_that_differ_in_numbers_alone_are_one(monkeypatch, caplog):
    from rustloader.iterator import fallback

    left = iter(range(1000, 2000))
    monkeypatch.setattr(fallback, "make_engine", lambda settings: (None, f"{next(left)} bytes are left"))
    loader = DataLoader(Numbers(3), num_workers=1)
    for _ in range(3):
        list(loader)
    assert [r.getMessage() for r in caplog.records] == [
        "a DataLoader runs on torch's own iterator: 1000 bytes are left"
    ]
    assert [(entry.reason, entry.count) for entry in rustloader.stats(loader).fallbacks] == [("1000 bytes are left", 3)]


TRY_PUT_INDEX = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_put_index


# Who used the cores


@pytest.mark.parametrize("persistent", [False, True])
def test_who_used_the_cores(persistent):
    loader = DataLoader(Numbers(64), batch_size=4, num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        list(loader)
        users = rustloader.stats(loader).core_users
        assert users is None or all(0 <= share <= 1 for share in (users.main, users.workers, users.others))
    if not persistent:  # what comes after the workers' end does not count
        assert rustloader.stats(loader).core_users == users


def test_the_cores_are_divided_among_main_workers_and_others(monkeypatch):
    """Of 2 cores, all processes use 18 s in 10 s: main 5 s, and each worker 1 s, half of it in its start."""
    from rustloader.metrics import cpu_time
    from rustloader.system import cores

    moments = [cpu_time._Moment(100.0, 1000.0, 7.0), cpu_time._Moment(110.0, 1018.0, 12.0)]
    monkeypatch.setattr(cpu_time._Moment, "now", lambda: moments.pop(0) if len(moments) > 1 else moments[0])
    monkeypatch.setattr(cores, "usable_cores", lambda: 2)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(cpu_time, "start_time", lambda pid: None)
    figures = [cpu_time.WorkTime(0.5, 0.0)] * 2
    monkeypatch.setattr(cpu_time.Workers, "times", lambda self: figures)
    totals = type("Totals", (), {"workers": [type("Worker", (), {"start_cpu": 0.5})] * 2})
    monkeypatch.setattr(cpu_time, "totals_of", lambda meters: totals)
    workers = cpu_time.Workers([1, 2], None)
    assert workers.core_users() == rustloader.CoreUsers(main=0.25, workers=0.1, others=0.55)
    figures[0] = cpu_time.NO_TIME
    assert workers.core_users() is None
    figures[0] = figures[1]
    moments[0] = moments[0]._replace(busy=None)
    assert workers.core_users() is None
