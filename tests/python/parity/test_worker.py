"""What code in a worker sees: worker info, order of the start (P22 to P24)."""

import dataclasses
import os
import threading

import pytest
import torch
from parity_table import Raised, drain, epochs, rows, take
from sample_data import Index, NthDraw, Numbers, Shards, as_list
from support import DataLoader, epoch, outcomes, worker_pids
from torch.utils.data import default_collate, get_worker_info

LOG = []


def note(worker_id):
    """A worker_init_fn that logs its call, the worker's settings, and the name of its thread."""
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


@rows(persistent=[False, True])
def test_p22_order_of_a_workers_start(DataLoader, persistent):
    LOG.clear()
    settings = dict(num_workers=1, batch_size=None, worker_init_fn=note, collate_fn=as_list)
    torch.set_num_threads(2)  # not the value that workers must have
    try:
        seen = [*epochs(DataLoader(Noted([2]), persistent_workers=persistent, **settings))]
    finally:
        torch.set_num_threads(1)
    assert seen[0] == [("init", 0, 0, True, 1), "pt_data_worker", "iter", "fetch"]
    yield from seen
    yield LOG


class Info(Numbers):
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
            "pid": os.getpid(),
        }


@rows()
def test_p23_worker_info(DataLoader):
    iterator = iter(DataLoader(Info(4), num_workers=2, batch_size=None))
    pids = worker_pids(iterator)
    for sample in take(iterator, 4):
        assert sample.pop("pid") == pids[sample["id"]] and sample["mine"] and sample["threads"] == 1
        yield sample
    yield get_worker_info()


def fail(worker_id):
    if worker_id == 1:
        raise KeyError("start")


class BrokenIter(Shards):
    def __iter__(self):
        fail(get_worker_info().id)
        return super().__iter__()


START_ERRORS = {"init_fn": (Numbers(6), fail), "iter": (BrokenIter([3, 3]), None)}


@rows(where=START_ERRORS)
def test_p22_an_error_before_the_first_task_comes_at_the_first_batch(DataLoader, where):
    dataset, init = where
    seen = [*take(iter(DataLoader(dataset, num_workers=2, batch_size=None, worker_init_fn=init)), 2)]
    assert isinstance(seen[1], Raised)
    yield from seen


@pytest.mark.ours
@pytest.mark.parametrize("persistent", [False, True])
def test_t24_the_error_of_worker_init_fn_is_repeated_at_each_of_the_workers_batches(persistent):
    loader = DataLoader(Numbers(6), num_workers=2, batch_size=None, worker_init_fn=fail, persistent_workers=persistent)
    error = ("error", KeyError, "Caught KeyError in DataLoader worker process 1.")
    for _ in range(2):
        results = outcomes(iter(loader), 7)
        assert results == [("value", 0), error, ("value", 2), error, ("value", 4), error, ("end",)]


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


class WithoutGetitems(Index):
    __getitems__ = None


class Busy(Numbers):
    """Starts threads and forks."""

    def __getitem__(self, i):
        threads = [threading.Thread(target=torch.zeros, args=(100,)) for _ in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        pid = os.fork()
        if pid == 0:
            os._exit(i)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


DATASETS = {"p24 getitems only when truthy": WithoutGetitems, "busy": lambda: Busy(6), "counts": lambda: NthDraw(6)}


@rows(dataset=DATASETS)
def test_p24_what_a_dataset_has_and_does(DataLoader, dataset):
    dataset = dataset()
    yield from drain(DataLoader(dataset, batch_sampler=[[0, 1], [2]], num_workers=1, collate_fn=as_list))
    yield vars(dataset)


class Port:
    """A stand-in for a worker's port that collates nothing, and counts the calls."""

    calls = 0

    def stack(self, batch):
        self.calls += 1

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
        assert default_collate([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2] and port.calls == 1
        assert default_collate([1, 2]).tolist() == [1, 2] and port.calls == 2
        table[float] = floats
        context.restore()
        # An entry that the program has set since then stays.
        assert table[float] is floats
    finally:
        table[float] = before[1][float]
        context.restore()
    assert state() == before
    assert default_collate([1, 2]).tolist() == [1, 2] and port.calls == 2
