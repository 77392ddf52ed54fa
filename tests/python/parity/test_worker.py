"""What code in a worker sees: worker info, order of the start, index types (P22 to P26)."""

import dataclasses
import os
import threading

import numpy as np
import pytest
import sample_data as data
import torch
from sample_data import Given, Index, Numbers, Shards, WholeIndex, as_list
from support import BOTH, DataLoader, epoch, outcomes, outcomes_of
from torch.utils.data import Dataset, default_collate, get_worker_info

LOG = []


def note(worker_id):
    """A worker_init_fn that records what was done before it."""
    info = get_worker_info()
    LOG.append(("init", worker_id, info.id, info.seed == torch.initial_seed(), torch.get_num_threads()))
    with open(f"/proc/self/task/{threading.get_native_id()}/comm") as f:
        LOG.append(f.read().strip())


class Noted(Shards):
    def __iter__(self):
        LOG.append("iter")
        for _ in range(2):
            LOG.append("fetch")
            yield list(LOG)


@pytest.fixture
def two_threads():
    """A value in main that differs from the one that workers must have."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("persistent", [False, True])
def test_p22_order_of_a_workers_start(two_threads, persistent):
    LOG.clear()
    loader = DataLoader(
        Noted([2]),
        num_workers=1,
        batch_size=None,
        worker_init_fn=note,
        collate_fn=as_list,
        persistent_workers=persistent,
    )
    start = [("init", 0, 0, True, 1), "pt_data_worker", "iter", "fetch"]
    assert epoch(loader)[0] == start
    again = epoch(loader)[0]
    if persistent:
        assert again.count(start[0]) == 1, "worker_init_fn runs once a process"
        assert again.count("iter") == 2, "iter(dataset) runs at each epoch"
    else:
        assert again == start
    assert LOG == []


class Info(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        info = get_worker_info()
        assert info is torch.utils.data._utils.worker._worker_info
        with pytest.raises((dataclasses.FrozenInstanceError, RuntimeError, AttributeError)):
            info.id = 9
        return {
            "type": f"{type(info).__module__}.{type(info).__qualname__}",
            "id": info.id,
            "num_workers": info.num_workers,
            "seed": info.seed,
            "mine": info.dataset is self,
            "rng": getattr(info, "rng", None),
            "method": getattr(info, "worker_method", None),
            "threads": torch.get_num_threads(),
            "daemon": __import__("multiprocessing").current_process().daemon,
            "main thread": threading.current_thread() is threading.main_thread(),
        }


def test_p23_worker_info():
    def infos(cls):
        torch.manual_seed(1)
        return list(cls(Info(), num_workers=2, batch_size=None))

    theirs, ours = map(infos, BOTH)
    assert ours == theirs
    assert get_worker_info() is None
    assert [i["id"] for i in ours] == [0, 1, 0, 1]
    assert all(i["mine"] and i["threads"] == 1 and i["num_workers"] == 2 for i in ours)


def test_p23_worker_info_of_the_fork_is_not_mains():
    def inside(samples):
        return get_worker_info().id, os.getpid()

    iterator = iter(DataLoader(Numbers(4), num_workers=2, collate_fn=inside))
    pids = [w.pid for w in iterator._workers]
    assert list(iterator) == [(0, pids[0]), (1, pids[1])] * 2


@pytest.mark.parametrize("where", ["init_fn", "iter"])
def test_p22_an_error_before_the_first_task_comes_at_the_first_batch(where):
    def fail(worker_id):
        if worker_id == 1:
            raise KeyError("start")

    class Broken(Shards):
        def __iter__(self):
            fail(get_worker_info().id)
            return super().__iter__()

    def trace(cls):
        if where == "init_fn":
            loader = cls(Numbers(6), num_workers=2, batch_size=None, worker_init_fn=fail)
        else:
            loader = cls(Broken([3, 3]), num_workers=2, batch_size=None)
        return outcomes_of(loader, 3)

    theirs, ours = map(trace, BOTH)
    assert ours[:2] == theirs[:2]
    assert ours[1] == ("error", KeyError, "Caught KeyError in DataLoader worker process 1.")


@pytest.mark.ours
@pytest.mark.parametrize("persistent", [False, True])
def test_t24_the_error_of_worker_init_fn_is_repeated_at_each_of_the_workers_batches(persistent):
    def fail(worker_id):
        if worker_id == 1:
            raise KeyError("start")

    loader = DataLoader(Numbers(6), num_workers=2, batch_size=None, worker_init_fn=fail, persistent_workers=persistent)
    error = ("error", KeyError, "Caught KeyError in DataLoader worker process 1.")
    for _ in range(2):
        got = outcomes(iter(loader), 7)
        assert got == [("value", 0), error, ("value", 2), error, ("value", 4), error, ("end",)]


@pytest.mark.ours
def test_t24_an_error_of_iter_in_a_later_epoch_is_an_error_and_no_death():
    class Broken(Shards):
        epochs = 0

        def __iter__(self):
            self.epochs += 1
            if self.epochs == 2 and get_worker_info().id == 1:
                raise KeyError("second epoch")
            return super().__iter__()

    loader = DataLoader(Broken([2, 2]), num_workers=2, batch_size=None, persistent_workers=True)
    assert len(epoch(loader)) == 4
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 0]
    assert outcomes(iterator, 1) == [("error", KeyError, "Caught KeyError in DataLoader worker process 1.")]
    assert all(w.is_alive() for w in iterator._workers)
    iterator = iter(loader)
    assert [b.tolist() for b in iterator] == [[0, 0], [1, 0], [0, 1], [1, 1]]


INDICES = {
    "strings": ["a", "b"],
    "tuples": [(1, 2), ("x", None)],
    "numpy": list(np.arange(3)),
    "bools": [True, False],
    "tensors": list(torch.arange(3)),
    "floats": [1.5],
    "none": [None],
    "dicts": [{"k": [1, {2: 3}]}],
    "nested": [[1, [2, (3,)]]],
    "large": [2**80, "x" * 100_000],
    "slices": [slice(1, 2)],
    "bytes": [b"abc"],
    "arrays": [np.arange(4), np.zeros((2, 2))],
}


@pytest.mark.parametrize("kind", INDICES)
def test_t25_each_index_arrives_as_it_was_yielded(kind):
    loader = DataLoader(Index(), sampler=INDICES[kind], batch_size=None, num_workers=1)
    assert epoch(loader) == [[type(i).__name__, repr(i)] for i in INDICES[kind]]


BATCHES = {
    "lists": [[1, 2], [3]],
    "tuples": [(1, 2), (3,)],
    "ndarrays": np.arange(6).reshape(2, 3),
    "tensors": torch.arange(6).reshape(2, 3),
    "ranges": [range(3)],
    "large": [list(range(100_000)), list(range(5))],
    "int64": [[np.int64(3), True, 2**70]],
    "empty": [[1]],
}


@pytest.mark.parametrize("kind", BATCHES)
def test_t25_each_batch_of_indices_arrives_as_it_was_yielded(kind):
    for dataset in (WholeIndex(), Index()):
        expected = list(DataLoader(dataset, batch_sampler=BATCHES[kind], collate_fn=as_list))
        assert epoch(DataLoader(dataset, batch_sampler=BATCHES[kind], num_workers=2, collate_fn=as_list)) == expected


def test_p24_getitems_only_when_truthy():
    class Without(Index):
        __getitems__ = None

    assert epoch(DataLoader(Without(), batch_sampler=[[1, 2]], collate_fn=as_list, num_workers=1)) == [
        [("int", "1"), ("int", "2")]
    ]


def test_t25_default_collate_in_a_worker_has_torchs_quirks():
    mixed = Given([torch.zeros(2, dtype=torch.float32), torch.ones(2, dtype=torch.float64)])
    theirs, ours = (next(iter(cls(mixed, batch_size=2, num_workers=1))) for cls in BOTH)
    assert ours.dtype == theirs.dtype == torch.float32
    assert default_collate(list(mixed)).dtype == torch.float64
    for samples in (
        [torch.zeros(2, requires_grad=True)] * 2,
        [torch.zeros(2, dtype=torch.cfloat).conj()] * 2,
        [torch.zeros(2), torch.zeros(3)],
        [torch.zeros(2), 3],
        [{"a": 1}, {"b": 1}],
        [object(), object()],
    ):
        theirs, ours = (outcomes(iter(cls(Given(samples), batch_size=2, num_workers=1)), 2) for cls in BOTH)
        assert ours == theirs
        assert ours[0][0] == "error"


def test_t16_a_users_fetcher_is_used(monkeypatch):
    class Fetcher(torch.utils.data._utils.fetch._MapDatasetFetcher):
        def fetch(self, index):
            return "mine", super().fetch(index)

    monkeypatch.setattr(torch.utils.data._utils.fetch, "_MapDatasetFetcher", Fetcher)
    assert epoch(DataLoader(Numbers(2), num_workers=1)) == [
        ("mine", torch.tensor([0])),
        ("mine", torch.tensor([1])),
    ]


def test_t12_a_users_collate_map_is_used(monkeypatch):
    table = torch.utils.data._utils.collate.default_collate_fn_map
    monkeypatch.setitem(table, torch.Tensor, lambda batch, *, collate_fn_map=None: ("mine", len(batch)))
    assert epoch(DataLoader(Numbers(4), num_workers=1, batch_size=2)) == [("mine", 2)] * 2


def test_a_dataset_may_start_threads_and_forks():
    class Busy(Numbers):
        def __getitem__(self, i):
            threads = [threading.Thread(target=torch.zeros, args=(100,)) for _ in range(4)]
            [t.start() for t in threads]
            [t.join() for t in threads]
            pid = os.fork()
            if pid == 0:
                os._exit(i)
            return torch.tensor(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    assert [b.item() for b in epoch(DataLoader(Busy(6), num_workers=2, batch_size=None))] == list(range(6))


def test_the_main_process_dataset_is_untouched():
    dataset = data.NthDraw(6)
    assert epoch(DataLoader(dataset, num_workers=1, batch_size=None)) == list(range(6))
    assert dataset.made == 0


class Port:
    """Stands in for a worker's port: collates nothing itself, and counts."""

    asked = 0

    def stack(self, batch):
        self.asked += 1

    numbers = stack

    def storage(self, nbytes):
        return None


@pytest.mark.ours
def test_what_a_worker_changes_in_its_process_can_be_put_back():
    from rustloader.workers.context import WorkerContext

    table = torch.utils.data._utils.collate.default_collate_fn_map

    def state():
        return dict(vars(torch.UntypedStorage)), dict(table), get_worker_info()

    def floats(batch, **_):
        return "the program's"

    before, info, port = state(), object(), Port()
    context = WorkerContext()
    context.restore()
    assert state() == before
    try:
        context.install(port, info)
        assert get_worker_info() is info and state()[0] != before[0]
        assert default_collate([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2] and port.asked == 1
        assert default_collate([1, 2]).tolist() == [1, 2] and port.asked == 2
        table[float] = floats
        context.restore()
        # What the program has put in since then stays.
        assert table[float] is floats
    finally:
        table[float] = before[1][float]
        context.restore()
    assert state() == before
    assert default_collate([1, 2]).tolist() == [1, 2] and port.asked == 2
