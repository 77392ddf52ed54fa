"""Order, epochs, the sampler's calls, several iterators at once (P10 to P12, P15, P16, P18, P21)."""

import collections
import gc
import itertools
import time

import numpy as np
import pytest
import torch
from sample_data import EagerSampler, Held, LazySampler, Numbers, Slow, Value, WhoAmI, as_list
from support import (
    BOTH,
    TORCH_MODE,
    DataLoader,
    LoaderIter,
    TorchDataLoader,
    epoch,
    from_engine,
    gone,
    outcomes,
    run_script,
    values,
    wait_until,
    within,
    worker_pids,
)
from torch.utils.data import RandomSampler, SubsetRandomSampler, TensorDataset

KINDS = {
    "one by one": dict(),
    "batches": dict(batch_size=3),
    "drop_last": dict(batch_size=3, drop_last=True),
    "unbatched": dict(batch_size=None),
    "sampler": dict(sampler=[4, 2, 9], batch_size=2),
    "batch_sampler": dict(batch_sampler=[[1, 2, 3], [0], [5, 5]]),
    "collate_fn": dict(batch_size=4, collate_fn=as_list),
    "nothing": dict(sampler=[]),
}


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_p15_batches_come_in_order(kind, workers):
    expected = values(TorchDataLoader(Numbers(10), **KINDS[kind]))
    assert values(epoch(DataLoader(Numbers(10), num_workers=workers, **KINDS[kind]))) == expected


@pytest.mark.parametrize("prefetch", [1, 2, 7])
def test_p16_prefetch_factor(prefetch):
    for n in (0, 1, 2, prefetch, 2 * prefetch, 50):
        loader = DataLoader(Numbers(n), num_workers=2, prefetch_factor=prefetch, batch_size=None)
        assert values(epoch(loader)) == list(range(n))


def test_p15_order_holds_when_workers_are_not_equally_fast():
    dataset = Slow(12, {0: 0.2, 1: 0.05, 7: 0.1})
    assert values(epoch(DataLoader(dataset, num_workers=3, batch_size=None))) == list(range(12))


@pytest.mark.parametrize("persistent", [False, True])
def test_p15_batch_i_goes_to_worker_i_mod_n_in_each_epoch(persistent):
    loader = DataLoader(WhoAmI(7), num_workers=2, batch_size=None, persistent_workers=persistent)
    for _ in range(3):
        assert epoch(loader) == [[i, i % 2] for i in range(7)]


@pytest.mark.parametrize("persistent", [False, True])
def test_p15_out_of_order_loses_and_doubles_nothing(persistent, tmp_path):
    """Nor does a slow sample hold the others up: it comes when another one has."""
    go = tmp_path / "go"
    loader = DataLoader(Held(40, 0, go), num_workers=2, batch_size=None, in_order=False, persistent_workers=persistent)
    for _ in range(3):
        go.unlink(missing_ok=True)
        iterator = iter(loader)
        with from_engine(40):
            got = [next(iterator).item()]
            go.touch()
            got += values(iterator)
        assert sorted(got) == list(range(40))


@pytest.mark.parametrize("cls", BOTH)
def test_p15_out_of_order_passes_the_slow_worker_only_its_fair_share(cls, tmp_path):
    dataset = Held(30, 0, tmp_path / "go")
    iterator = iter(cls(dataset, num_workers=2, batch_size=None, in_order=False, prefetch_factor=3))
    # Worker 0 holds its three tasks, and no more, until its item returns.
    got = [next(iterator).item() for _ in range(27)]
    (tmp_path / "go").touch()
    assert sorted(got + values(iterator)) == list(range(30))


def test_p10_iter_gives_torchs_class():
    iterator = iter(DataLoader(Numbers(3), num_workers=1))
    assert isinstance(iterator, torch.utils.data.dataloader._MultiProcessingDataLoaderIter)
    assert isinstance(iterator, LoaderIter)
    assert type(iterator).__name__ == "_MultiProcessingDataLoaderIter"
    assert type(iter(DataLoader(Numbers(3)))) is torch.utils.data.dataloader._SingleProcessDataLoaderIter


def test_p10_workers_run_when_iter_returns():
    iterator = iter(DataLoader(Numbers(3), num_workers=2))
    assert len(iterator._workers) == 2
    assert all(w.is_alive() and w.daemon and w.exitcode is None for w in iterator._workers)
    assert iterator._workers_status == [True, True]
    del iterator


def test_p10_attributes_of_the_iterator():
    def seen(cls):
        torch.manual_seed(3)
        iterator = iter(cls(Numbers(9), num_workers=1, batch_size=2, drop_last=True, prefetch_factor=5, timeout=30))
        next(iterator)
        names = "_num_yielded _num_workers _prefetch_factor _persistent_workers _pin_memory _pin_memory_device "
        names += "_timeout _drop_last _auto_collation _dataset_kind _base_seed _in_order _world_size _rank "
        names += "_profile_name _IterableDataset_len_called _shutdown _worker_init_fn _collate_fn"
        return {name: getattr(iterator, name) for name in names.split()}

    theirs, ours = map(seen, BOTH)
    assert ours == theirs


def test_p11_persistent_workers_serve_every_epoch():
    loader = DataLoader(Numbers(6), num_workers=2, persistent_workers=True, batch_size=None)
    first = iter(loader)
    workers = first._workers
    pids = worker_pids(first)
    assert loader._iterator is first
    assert values(first) == list(range(6))
    assert all(w.is_alive() for w in workers)
    for _ in range(3):
        again = iter(loader)
        assert again is first and again._workers is workers and worker_pids(again) == pids
        assert values(again) == list(range(6))
        assert outcomes(again, 2) == [("end",)] * 2


@pytest.mark.parametrize("taken", [0, 1, 3, 6])
def test_p11_a_break_then_a_new_epoch(taken):
    loader = DataLoader(Numbers(6), num_workers=2, persistent_workers=True, batch_size=None)
    for _ in range(3):
        assert values(itertools.islice(loader, taken)) == list(range(taken))
        assert iter(loader) is loader._iterator
        assert values(epoch(loader)) == list(range(6))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("sampler", [LazySampler, EagerSampler])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_p12_t2_the_sampler_is_advanced_when_torch_does_it(sampler, workers, persistent):
    def trace(cls):
        log = []
        more = dict(persistent_workers=persistent, prefetch_factor=3) if workers else {}
        loader = cls(Numbers(20), sampler=sampler(9, log), batch_size=2, num_workers=workers, **more)
        for taken in (2, 9):
            log.append("epoch")
            iterator = iter(loader)
            log.append("started")
            for batch in itertools.islice(iterator, taken):
                log.append(("got", batch.tolist()))
            log.append("over")
        return log

    theirs, ours = map(trace, BOTH)
    assert ours == theirs


def test_p12_an_eager_iter_is_seen_twice_with_workers():
    for workers, count in ((0, 1), (1, 2)):
        log = []
        epoch(DataLoader(Numbers(20), sampler=EagerSampler(3, log), num_workers=workers, batch_size=None))
        assert log.count("iter") == count


def test_p12_the_cap_is_prefetch_times_workers():
    log = []
    iterator = iter(
        DataLoader(Numbers(99), sampler=LazySampler(99, log), num_workers=2, prefetch_factor=5, batch_size=None)
    )
    assert log[-1] == 9
    next(iterator)
    assert log[-1] == 10


def test_t3_samplers_that_are_changed_after_construction():
    loader = DataLoader(Numbers(9), num_workers=1, batch_size=3, shuffle=True)
    loader.batch_sampler.sampler = [1, 2, 3, 4]
    assert values(epoch(loader)) == [[1, 2, 3], [4]]
    loader.batch_sampler.batch_size = 2
    assert values(epoch(loader)) == [[1, 2], [3, 4]]


def test_p15_torchs_samplers_give_the_same_batches():
    dataset = Numbers(30)
    makers = [
        lambda: dict(shuffle=True),
        lambda: dict(shuffle=True, generator=torch.Generator().manual_seed(4)),
        lambda: dict(sampler=RandomSampler(dataset, replacement=True, num_samples=12)),
        lambda: dict(sampler=SubsetRandomSampler([3, 4, 5, 6])),
        lambda: dict(sampler=torch.utils.data.WeightedRandomSampler([0.1, 0.9, 0.5], 10)),
        lambda: dict(sampler=torch.utils.data.DistributedSampler(dataset, num_replicas=2, rank=1)),
        lambda: dict(batch_sampler=np.arange(6).reshape(2, 3)),
    ]
    for make in makers:
        torch.manual_seed(11)
        expected = [values(TorchDataLoader(dataset, **make())) for _ in range(2)]
        for persistent in (False, True):
            torch.manual_seed(11)
            loader = DataLoader(dataset, num_workers=2, persistent_workers=persistent, **make())
            got = values(epoch(loader))
            assert got == expected[0]


def test_p18_the_end_joins_the_workers_and_repeats():
    iterator = iter(DataLoader(Numbers(4), num_workers=2, batch_size=None))
    workers, pids = list(iterator._workers), worker_pids(iterator)
    assert [next(iterator).item() for _ in range(4)] == [0, 1, 2, 3]
    assert outcomes(iterator, 1) == [("end",)]
    assert not any(w.is_alive() for w in workers) and all(map(gone, pids))
    assert [w.exitcode for w in workers] == [0, 0]
    assert outcomes(iterator, 3) == [("end",)] * 3


def test_s1_the_last_reference_ends_the_workers():
    iterator = iter(DataLoader(Numbers(40), num_workers=2))
    next(iterator)
    pids = worker_pids(iterator)
    del iterator
    assert all(map(gone, pids))


@pytest.mark.ours
def test_s1_an_iterator_in_cyclic_garbage_ends_its_workers(monkeypatch):
    # The collector may clear the parts of a cycle in any order; torch's workers then each take this long to exit.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 60)
    loader = DataLoader(Numbers(40), num_workers=2, persistent_workers=True)
    loader.itself = loader
    pids = worker_pids(iter(loader))
    del loader
    with within(30):
        gc.collect()
        assert wait_until(lambda: all(map(gone, pids)), 30)


def test_p18_shutdown_is_idempotent_and_users_call_it():
    loader = DataLoader(Numbers(40), num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    pids = worker_pids(iterator)
    for _ in range(3):
        iterator._shutdown_workers()
    assert iterator._shutdown is True
    assert all(map(gone, pids))
    loader._iterator = None
    assert len(epoch(loader)) == 40


def test_ultralytics_terminates_workers_before_shutdown():
    iterator = iter(DataLoader(Numbers(40), num_workers=2))
    for w in iterator._workers:
        if w.is_alive():
            w.terminate()
    for w in iterator._workers:
        w.join()
    if TORCH_MODE:
        with pytest.raises(RuntimeError):  # from the handler of SIGCHLD, in whatever comes next
            while True:
                next(iterator)
    iterator._shutdown_workers()


def test_two_loaders_interleaved():
    a = iter(DataLoader(Numbers(20), num_workers=2, batch_size=None))
    b = iter(DataLoader(Numbers(20), num_workers=1, batch_size=2))
    pairs = [(x.item(), y.tolist()) for x, y in zip(a, b, strict=False)]
    assert pairs == [(i, [2 * i, 2 * i + 1]) for i in range(10)]


def test_two_iterators_of_one_loader_interleaved():
    loader = DataLoader(Numbers(8), num_workers=1, batch_size=None)
    with from_engine(16):
        pairs = [(a.item(), b.item()) for a, b in zip(loader, loader, strict=True)]
    assert pairs == [(i, i) for i in range(8)]


def test_many_loaders_at_once():
    iterators = [iter(DataLoader(Numbers(30), num_workers=1, batch_size=None)) for _ in range(6)]
    got = collections.defaultdict(list)
    for _ in range(30):
        for i, iterator in enumerate(iterators):
            got[i].append(next(iterator).item())
    assert all(got[i] == list(range(30)) for i in range(6))


def test_t1_without_persistent_workers_every_epoch_takes_a_new_snapshot():
    dataset = Value(4)
    loader = DataLoader(dataset, num_workers=2, batch_size=None)
    assert epoch(loader) == [0] * 4
    dataset.value = 7
    assert epoch(loader) == [7] * 4
    loader.collate_fn = str
    assert epoch(loader) == ["7"] * 4


def test_t1_persistent_workers_keep_their_snapshot():
    dataset = Value(4)
    loader = DataLoader(dataset, num_workers=2, batch_size=None, persistent_workers=True)
    assert epoch(loader) == [0] * 4
    dataset.value = 7
    loader.collate_fn = str
    assert epoch(loader) == [0] * 4


def test_p24_datasets_with_getitems():
    data = torch.arange(40).reshape(10, 4)
    subset = torch.utils.data.Subset(TensorDataset(data), [9, 1, 5])
    (batch,) = epoch(DataLoader(subset, batch_size=3, num_workers=1))
    assert batch[0].tolist() == data[[9, 1, 5]].tolist()


def test_p21_the_profilers_label():
    # In a process of its own: the profiler leaves a thread behind.
    status, out, err = run_script("""
        from sample_data import Numbers
        iterator = iter(DataLoader(Numbers(3), num_workers=1))
        with torch.autograd.profiler.profile() as profile:
            next(iterator)
        print(*{event.name for event in profile.function_events}, sep="\\n")
    """)
    assert status == 0, err
    assert "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__" in out.splitlines()


def test_a_sleeping_worker_is_woken_for_a_task():
    loader = DataLoader(Numbers(1), num_workers=1, batch_size=None, persistent_workers=True)
    list(loader)
    # Without the wake a worker finds a task at its own check, up to a second later.
    with within(15):
        for _ in range(30):
            time.sleep(0.02)
            assert list(loader) == [0]
