"""What programs replace in torch's own modules takes effect, whenever rustloader is imported (T12, T15, T16)."""

import itertools

import pytest
import torch
from parity_table import drain, rows
from sample_data import Numbers, Shards, as_list
from support import DataLoader, TorchDataLoader, epoch, from_engine, run_script, values
from torch.utils.data import _utils
from torch.utils.data import dataloader as torch_dataloader

TorchIter = torch_dataloader._MultiProcessingDataLoaderIter


def recorded(function, calls):
    """A wrapper of a function that records each call."""

    def wrapper(*args, **kw):
        calls.append(function.__name__)
        return function(*args, **kw)

    return wrapper


def served(loader):
    """The batches of a loader, which torch's iterator must serve."""
    with from_engine(0):
        return values(list(loader))


def doubling():
    """A class of its own for each test: install() warns of those that it finds."""

    class Doubling(TorchIter):
        def __next__(self):
            return 2 * super().__next__()

    return Doubling


HOOKS = "_next_data _try_put_index _process_data _get_data _try_get_data _reset _shutdown_workers __init__".split()
# Owner, attribute, a function that returns its replacement, factor of the batches, text in the log.
REPLACED = {
    **{name: (TorchIter, name, recorded, 1, f"{name} of torch's own iterator was replaced") for name in HOOKS},
    "next": (torch_dataloader._BaseDataLoaderIter, "__next__", recorded, 1, ""),
    "loader": (TorchDataLoader, "_get_iterator", lambda *_: lambda it: doubling()(it), 2, "_get_iterator was replaced"),
    "module": (torch_dataloader, TorchIter.__name__, lambda *_: doubling(), 2, f"{TorchIter.__name__} was replaced"),
}


@pytest.mark.ours
@pytest.mark.handover
@pytest.mark.parametrize("name", REPLACED)
def test_t15_a_method_replaced_in_torchs_iterator_takes_effect(name, monkeypatch, caplog):
    owner, attribute, replacement, factor, text = REPLACED[name]
    calls = []
    monkeypatch.setattr(owner, attribute, replacement(getattr(owner, attribute), calls))
    assert served(DataLoader(Numbers(5), num_workers=2, batch_size=None)) == [factor * i for i in range(5)]
    assert (attribute in calls or factor == 2) and text in caplog.text
    monkeypatch.undo()
    assert values(epoch(DataLoader(Numbers(5), num_workers=2, batch_size=None))) == list(range(5))


@pytest.mark.ours
@pytest.mark.forks
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


# Fetchers: the loader stays on the engine, which looks torch's parts up in their modules when a worker starts.

FETCHERS = {Numbers: "_MapDatasetFetcher", Shards: "_IterableDatasetFetcher"}


def fetcher_class(patch, name):
    class Fetcher(getattr(_utils.fetch, name)):
        def fetch(self, index):
            return type(index), self.collate_fn is as_list, super().fetch(index)

    patch.setattr(_utils.fetch, name, Fetcher)


def fetcher_class_with_another_collate_fn(patch, name):
    class Fetcher(getattr(_utils.fetch, name)):
        def __init__(self, dataset, auto_collation, collate_fn, drop_last):
            super().__init__(dataset, auto_collation, lambda samples: (collate_fn is as_list, samples), drop_last)

    patch.setattr(_utils.fetch, name, Fetcher)


def fetch(patch, name):
    cls = getattr(_utils.fetch, name)

    def fetch(self, index, real=cls.fetch):
        return type(index), self.collate_fn is as_list, real(self, index)

    patch.setattr(cls, "fetch", fetch)


def create_fetcher(patch, name):
    class Fetcher:
        def __init__(self, kind, dataset, auto_collation, collate_fn, drop_last):
            self.collate_fn = collate_fn

        def fetch(self, index):
            return type(index), self.collate_fn is as_list, index[:1]

    patch.setattr(torch_dataloader._DatasetKind, "create_fetcher", Fetcher)


@pytest.mark.forks
@rows(
    replace=[fetcher_class, fetcher_class_with_another_collate_fn, fetch, create_fetcher],
    dataset=[Numbers, Shards],
)
def test_t16_a_replaced_fetcher_takes_effect(DataLoader, replace, dataset, patch):
    replace(patch, FETCHERS[dataset])
    loader = DataLoader(dataset(4 if dataset is Numbers else [4]), num_workers=1, batch_size=2, collate_fn=as_list)
    for batch in itertools.islice(drain(loader), 2):
        assert True in batch
        yield batch


def base_class(patch, calls):
    for name in ("__init__", "_reset", "_next_index"):
        base = torch_dataloader._BaseDataLoaderIter
        patch.setattr(base, name, recorded(getattr(base, name), calls))


def loader_class(patch, calls):
    for name in ("__iter__", "__len__", "check_worker_number_rationality"):
        patch.setattr(TorchDataLoader, name, recorded(getattr(TorchDataLoader, name), calls))


def default_collate(patch, calls):
    patch.setattr(_utils.collate, "default_collate", lambda samples: ("mine", len(samples)))


def collate_map(patch, calls):
    def collate(batch, *, collate_fn_map=None):
        return "mine", len(batch)

    patch.setitem(_utils.collate.default_collate_fn_map, torch.Tensor, collate)


@pytest.mark.forks
@rows(replace=[base_class, loader_class, default_collate, collate_map])
def test_t12_what_is_replaced_in_torchs_modules_takes_effect(DataLoader, replace, patch):
    calls = []
    replace(patch, calls)
    loader = DataLoader(Numbers(4), num_workers=1, batch_size=2)
    seen = [len(loader), *drain(loader)]
    assert calls or seen[1] == ("mine", 2)
    yield from seen
    yield calls


def mine(sample):
    return torch.utils.data.get_worker_info().mine


@rows()
def test_t12_a_replaced_worker_info_class_is_used(DataLoader, patch):
    class Info(_utils.worker.WorkerInfo):
        mine = True

    patch.setattr(_utils.worker, "WorkerInfo", Info)
    yield from drain(DataLoader(Numbers(2), num_workers=1, batch_size=None, collate_fn=mine))


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
