"""What programs replace in torch's own modules takes effect, whenever rustloader is imported (T12, T15, T16)."""

import pytest
import torch
from sample_data import Numbers, Shards, as_list
from support import BOTH, DataLoader, epoch, from_engine, run_script, values
from torch.utils.data import _utils
from torch.utils.data import dataloader as torch_dataloader

TorchIter = torch_dataloader._MultiProcessingDataLoaderIter


def kept(function, calls):
    """The same function, with a note of each call."""

    def wrapper(*args, **kw):
        calls.append(function.__name__)
        return function(*args, **kw)

    return wrapper


def served(loader):
    """An epoch of a loader that has to be torch's iterator's work."""
    with from_engine(0):
        return values(list(loader))


HOOKS = "_next_data _try_put_index _process_data _get_data _try_get_data _reset _shutdown_workers __init__".split()


@pytest.mark.ours
@pytest.mark.handover
@pytest.mark.parametrize("name", HOOKS)
def test_t15_a_method_replaced_in_torchs_iterator_takes_effect(name, monkeypatch, caplog):
    calls = []
    monkeypatch.setattr(TorchIter, name, kept(getattr(TorchIter, name), calls))
    assert served(DataLoader(Numbers(5), num_workers=2, batch_size=None)) == list(range(5))
    assert name in calls
    assert f"{name} of torch's own iterator was replaced" in caplog.text
    monkeypatch.undo()
    assert values(epoch(DataLoader(Numbers(5), num_workers=2, batch_size=None))) == list(range(5))


@pytest.mark.ours
@pytest.mark.handover
def test_t12_next_replaced_in_torchs_base_class_takes_effect(monkeypatch):
    calls = []
    base = torch_dataloader._BaseDataLoaderIter
    monkeypatch.setattr(base, "__next__", kept(base.__next__, calls))
    assert served(DataLoader(Numbers(4), num_workers=1, batch_size=None)) == list(range(4))
    assert len(calls) == 5


def test_t12_what_the_engine_asks_of_torchs_base_class_may_be_replaced(monkeypatch):
    calls = []
    base = torch_dataloader._BaseDataLoaderIter
    for name in ("__init__", "_reset", "_next_index"):
        monkeypatch.setattr(base, name, kept(getattr(base, name), calls))
    assert values(epoch(DataLoader(Numbers(4), num_workers=1, batch_size=None))) == list(range(4))
    assert [calls.count(name) for name in ("__init__", "_reset", "_next_index")] == [1, 1, 6]


def test_t12_iter_and_len_of_torchs_loader_may_be_replaced(monkeypatch):
    calls = []
    torchs = torch.utils.data.DataLoader
    for name in ("__iter__", "__len__", "check_worker_number_rationality"):
        monkeypatch.setattr(torchs, name, kept(getattr(torchs, name), calls))
    loader = DataLoader(Numbers(4), num_workers=1, batch_size=None)
    assert len(loader) == 4 and values(epoch(loader)) == list(range(4))
    assert sorted(set(calls)) == ["__iter__", "__len__", "check_worker_number_rationality"]


@pytest.mark.ours
@pytest.mark.handover
def test_t12_get_iterator_replaced_in_torchs_loader_takes_effect(monkeypatch, caplog):
    class Doubling(TorchIter):
        def __next__(self):
            return 2 * super().__next__()

    monkeypatch.setattr(torch.utils.data.DataLoader, "_get_iterator", lambda self: Doubling(self))
    assert served(DataLoader(Numbers(4), num_workers=2, batch_size=None)) == [0, 2, 4, 6]
    assert "DataLoader._get_iterator of torch was replaced" in caplog.text


@pytest.mark.ours
@pytest.mark.handover
def test_t15_another_iterator_in_torchs_module_takes_effect(monkeypatch, caplog):
    class Doubling(TorchIter):
        def _next_data(self):
            return 2 * super()._next_data()

    monkeypatch.setattr(torch_dataloader, "_MultiProcessingDataLoaderIter", Doubling)
    assert served(DataLoader(Numbers(4), num_workers=2, batch_size=None)) == [0, 2, 4, 6]
    assert "_MultiProcessingDataLoaderIter was replaced" in caplog.text


@pytest.mark.ours
def test_t16_what_was_replaced_before_rustloader_was_imported_takes_effect():
    status, out, err = run_script("""
        from torch.utils.data import dataloader
        from torch.utils.data._utils import worker
        Iter = dataloader._MultiProcessingDataLoaderIter

        class Numbers(torch.utils.data.Dataset):
            add = 0
            def __len__(self):
                return 3
            def __getitem__(self, i):
                return self.add + i

        def loop(*args, real=worker._worker_loop):
            Numbers.add = 100
            real(*args)

        class Mine(Iter):
            def _next_data(self):
                return 100 + super()._next_data()

        for module, name, value in [
            (worker, "_worker_loop", loop),
            (Iter, "_next_data", lambda self, real=Iter._next_data: 100 + real(self)),
            (dataloader, "_MultiProcessingDataLoaderIter", Mine),
        ]:
            for imported in [m for m in sys.modules if m.startswith("rustloader")]:
                del sys.modules[imported]
            before = getattr(module, name)
            setattr(module, name, value)
            import rustloader
            print(list(rustloader.DataLoader(Numbers(), num_workers=1, batch_size=None)), rustloader.engine_batches())
            setattr(module, name, before)
    """)
    assert (status, out) == (0, "[100, 101, 102] 0\n" * 3), err


# Fetchers: the engine stays, and torch's pieces are asked through their modules at the worker's start.


@pytest.mark.parametrize("dataset", [Numbers(4), Shards([4])], ids=["map", "iterable"])
def test_t16_a_replaced_fetcher_class_takes_effect(dataset, monkeypatch):
    name = "_MapDatasetFetcher" if isinstance(dataset, Numbers) else "_IterableDatasetFetcher"
    torchs = getattr(_utils.fetch, name)

    class Fetcher(torchs):
        def fetch(self, index):
            return type(index), self.collate_fn is as_list, super().fetch(index)

    monkeypatch.setattr(_utils.fetch, name, Fetcher)
    got = epoch(DataLoader(dataset, num_workers=1, batch_size=2, collate_fn=as_list))
    assert [batch[:2] for batch in got] == [(list, True)] * 2


def test_t16_a_replaced_fetcher_class_is_made_with_the_users_collate_fn(monkeypatch):
    class Fetcher(_utils.fetch._MapDatasetFetcher):
        def __init__(self, dataset, auto_collation, collate_fn, drop_last):
            super().__init__(dataset, auto_collation, lambda samples: (collate_fn is as_list, samples), drop_last)

    monkeypatch.setattr(_utils.fetch, "_MapDatasetFetcher", Fetcher)
    got = epoch(DataLoader(Numbers(4), num_workers=1, batch_size=2, collate_fn=as_list))
    assert got == [(True, [0, 1]), (True, [2, 3])]


@pytest.mark.parametrize("dataset", [Numbers(4), Shards([4])], ids=["map", "iterable"])
def test_t16_a_replaced_fetch_takes_effect(dataset, monkeypatch):
    name = "_MapDatasetFetcher" if isinstance(dataset, Numbers) else "_IterableDatasetFetcher"
    torchs = getattr(_utils.fetch, name)

    def fetch(self, index, real=torchs.fetch):
        return type(index), self.collate_fn is as_list, real(self, index)

    monkeypatch.setattr(torchs, "fetch", fetch)
    got = epoch(DataLoader(dataset, num_workers=1, batch_size=2, collate_fn=as_list))
    assert [batch[:2] for batch in got] == [(list, True)] * 2


def test_t16_a_replaced_create_fetcher_takes_effect(monkeypatch):
    class Fetcher:
        def __init__(self, kind, dataset, auto_collation, collate_fn, drop_last):
            self.collate_fn = collate_fn

        def fetch(self, index):
            return type(index), self.collate_fn is as_list, index[:1]

    monkeypatch.setattr(torch_dataloader._DatasetKind, "create_fetcher", Fetcher)
    got = epoch(DataLoader(Numbers(4), num_workers=1, batch_size=2, collate_fn=as_list))
    assert got == [(list, True, [0]), (list, True, [2])]


def test_t12_a_replaced_default_collate_is_the_default(monkeypatch):
    monkeypatch.setattr(_utils.collate, "default_collate", lambda samples: ("mine", len(samples)))
    assert epoch(DataLoader(Numbers(4), num_workers=1, batch_size=2)) == [("mine", 2)] * 2


def test_t12_a_replaced_worker_info_class_is_used(monkeypatch):
    class Info(_utils.worker.WorkerInfo):
        mine = True

    monkeypatch.setattr(_utils.worker, "WorkerInfo", Info)
    loader = DataLoader(
        Numbers(2), num_workers=1, batch_size=None, collate_fn=lambda x: torch.utils.data.get_worker_info().mine
    )
    assert epoch(loader) == [True, True]


@pytest.mark.ours
def test_t12_torchs_modules_are_left_as_they_were():
    before = dict(_utils.collate.default_collate_fn_map), torch.UntypedStorage._new_shared.__func__
    loops = _utils.worker._worker_loop, torch_dataloader._MultiProcessingDataLoaderIter, torch.utils.data.DataLoader
    assert len(epoch(DataLoader(Numbers(4), num_workers=2))) == 4
    assert before == (dict(_utils.collate.default_collate_fn_map), torch.UntypedStorage._new_shared.__func__)
    assert loops == (_utils.worker._worker_loop, TorchIter, torch.utils.data.DataLoader)


def test_t12_an_iterator_of_torchdatas_kind_runs_untouched():
    """A subclass of torch's base iterator that is unrelated to rustloader's."""

    class Stateful(torch_dataloader._BaseDataLoaderIter):
        def _next_data(self):
            return self._next_index()

    for cls in BOTH:
        assert list(Stateful(cls(Numbers(3), num_workers=2, batch_size=2))) == [[0, 1], [2]]


@pytest.mark.ours
@pytest.mark.parametrize("name", ["_try_put_index", "_process_data", "_get_data", "_try_get_data"])
def test_t15_a_method_replaced_after_install_takes_effect(name):
    """torch's module then has our class under the name that the program writes to."""
    status, out, err = run_script(f"""
        import rustloader, torch.utils.data.dataloader as torchs
        rustloader.install()
        cls = torchs._MultiProcessingDataLoaderIter
        before, calls = getattr(cls, {name!r}), []
        def replaced(self, *args, **kw):
            calls.append(1)
            return before(self, *args, **kw)
        cls.{name} = replaced
        print([int(x) for x in torchs.DataLoader(range(4), num_workers=1)], len(calls) > 3)
    """)
    assert (status, out) == (0, "[0, 1, 2, 3] True\n"), err
    assert f"{name} of the iterator was replaced" in err
