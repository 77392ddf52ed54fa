"""dispatch="shared_queue": any worker takes the next task; the batches are torch's, in torch's order."""

import gc
import itertools
import threading

import pytest
import torch
from sample_data import Failing, Images, Index, Numbers, Recorded, Shards, Slow, key_error, two_arguments, worker_id
from support import (
    POLLS,
    SOON,
    STARTED,
    DataLoader,
    TorchDataLoader,
    call_of,
    epoch,
    from_engine,
    gone,
    in_time,
    outcomes,
    outcomes_of,
    same,
    values,
    wait_until,
    within,
    worker_pids,
)

pytestmark = pytest.mark.ours

METHODS = ["fork", "forkserver", "spawn"]


def shared(dataset, workers=2, **kw):
    return DataLoader(dataset, num_workers=workers, dispatch="shared_queue", **kw)


def done(iterator):
    """Number of batches that each worker has sent."""
    return [iterator._core.worker_status(worker)["tasks_done"] for worker in range(iterator._num_workers)]


@pytest.mark.parametrize("window", [None, 1, 3, 32, "64KiB"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_batches_are_torchs_in_order(workers, window):
    expected = list(TorchDataLoader(Images(26), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1)))
    generator = torch.Generator().manual_seed(1)
    loader = shared(Images(26), workers, batch_size=4, shuffle=True, generator=generator, reorder_window=window)
    assert same(epoch(loader), expected)


@pytest.mark.parametrize("method", METHODS)
def test_workers_of_every_start_method_share_the_queue(method, tmp_path):
    dataset = Recorded(30, tmp_path / "sample", held=(0, 1, 2))
    with from_engine(30):
        iterator = iter(shared(dataset, 3, batch_size=None, multiprocessing_context=method))
        # Each worker holds one of these samples.
        assert wait_until(lambda: all(map(dataset.reached, dataset.held)), STARTED)
        for i in dataset.held:
            dataset.let_go(i)
        assert values(iterator) == list(range(30))
        assert min(done(iterator)) > 0, "a worker has produced no batch"


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_epochs_of_persistent_workers_have_each_sample_once(workers, in_order):
    loader = shared(
        Numbers(50), workers, batch_size=None, persistent_workers=True, in_order=in_order, prefetch_factor=3
    )
    pids = set()
    for end in (50, 7, 50, 1, 0, 50):
        samples = [batch.item() for batch in itertools.islice(loader, end)]
        pids.add(tuple(worker_pids(loader._iterator)))
        assert len(set(samples)) == end
        assert samples == list(range(end)) if in_order else set(samples) <= set(range(50))
    assert len(pids) == 1


@pytest.mark.parametrize("in_order", [True, False])
def test_what_no_worker_has_taken_of_an_abandoned_epoch_is_never_run(tmp_path, in_order):
    dataset = Recorded(40, tmp_path / "sample", held=(1, 2))
    options = {"batch_size": None, "persistent_workers": True, "prefetch_factor": 4, "in_order": in_order}
    loader = shared(dataset, **options)
    iterator = iter(loader)
    assert next(iterator).item() == 0
    assert wait_until(lambda: dataset.reached(1) and dataset.reached(2))
    assert iterator._tasks_outstanding == 8

    # The tasks are taken back before this thread waits for the workers.
    thread = threading.Thread(target=iter, args=(loader,))
    thread.start()
    assert wait_until(lambda: call_of(f"/proc/self/task/{thread.native_id}") in POLLS)
    dataset.let_go(1)
    dataset.let_go(2)
    thread.join(SOON)
    assert not thread.is_alive()
    samples = values(iterator)
    assert (samples if in_order else sorted(samples)) == list(range(40))
    assert sorted(dataset.made()) == sorted([0, 1, 2, *range(40)])


def test_a_slow_sample_holds_up_one_worker_alone(tmp_path):
    dataset = Recorded(40, tmp_path / "sample", held=(1,))
    iterator = iter(shared(dataset, prefetch_factor=4, batch_size=None, reorder_window=20))
    assert next(iterator).item() == 0
    # How many tasks were submitted depends on how many results had arrived by then.
    sent, outstanding = iterator._send_idx, iterator._tasks_outstanding
    # The main process is in its training step. The other worker completes all other submitted tasks.
    assert wait_until(lambda: dataset.reached(1) and sum(done(iterator)) == sent - 1)
    info = iterator._task_info
    holder = info.pop(1)[0]
    assert holder in (0, 1) and {worker for (worker,) in info.values()} == {1 - holder}
    assert (iterator._rcvd_idx, iterator._tasks_outstanding) == (1, outstanding), "nothing has been received"
    dataset.let_go(1)
    assert values(iterator) == list(range(1, 40))
    assert sorted(dataset.made()) == list(range(40))


def test_out_of_order_a_slow_sample_holds_up_no_batch(tmp_path):
    dataset = Recorded(200, tmp_path / "sample", held=(3,))
    iterator = iter(shared(dataset, batch_size=None, in_order=False))
    samples = [next(iterator).item() for _ in range(199)]
    assert sorted(samples) == [i for i in range(200) if i != 3]
    dataset.let_go(3)
    assert next(iterator).item() == 3
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("n", [0, 1, 2])
def test_an_epoch_may_be_shorter_than_the_number_of_workers(n, persistent):
    loader = shared(Numbers(n), 4, batch_size=None, persistent_workers=persistent, sampler=range(n))
    for _ in range(3):
        assert values(epoch(loader)) == list(range(n))


@pytest.mark.parametrize("size", [1, 4, 5, 1000])
def test_index_batches_of_every_length_arrive(size):
    sampler = torch.utils.data.BatchSampler(range(999, -1, -1), size, drop_last=False)
    expected = list(TorchDataLoader(Index(), batch_sampler=sampler))
    assert epoch(shared(Index(), 3, batch_sampler=sampler)) == expected


def test_index_batches_that_are_pickled_arrive():
    sampler = [{"keys": frozenset({i})} for i in range(20)]
    expected = list(TorchDataLoader(Index(), batch_size=None, sampler=sampler))
    assert epoch(shared(Index(), batch_size=None, sampler=sampler)) == expected


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_pinned(host, persistent, in_order):
    options = {"batch_size": 4, "persistent_workers": persistent, "in_order": in_order, "pin_memory": True}
    loader = shared(Images(26), **options)
    expected = list(TorchDataLoader(Images(26), batch_size=4))
    for _ in range(3):
        with from_engine(7):
            batches = list(loader)
        batches.sort(key=lambda batch: int(batch[1][0]))
        assert same(batches, expected)
        assert all(host.owns(part) for batch in batches for part in batch)
    del batches
    # An epoch is abandoned, with the batches that the thread has already pinned.
    next(iter(loader))
    if persistent:
        assert len(list(loader)) == 7
        loader._iterator._shutdown_workers()
    assert wait_until(lambda: gc.collect() is not None and not host.live), "pinned memory was not released"


def test_a_timeout_loses_nothing(tmp_path):
    dataset = Recorded(10, tmp_path / "sample", held=(2, 3))
    iterator = iter(shared(dataset, batch_size=None, timeout=0.2))
    results = [in_time(next, iterator) for _ in range(2)]
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.2 seconds"):
        next(iterator)
    dataset.let_go(3)
    dataset.let_go(2)
    results += [in_time(next, iterator) for _ in range(8)]
    assert [value for _, value in results] == list(range(10))


def without_worker(results):
    """Outcomes without the worker ID."""
    return [
        tuple(part.rpartition(" process ")[0] or part if isinstance(part, str) else part for part in o) for o in results
    ]


def test_errors_of_the_dataset_come_in_their_places():
    dataset = Failing(20, {3: key_error, 4: two_arguments, 19: key_error})
    options = {"num_workers": 3, "batch_size": None}
    loaders = DataLoader(dataset, dispatch="shared_queue", **options), TorchDataLoader(dataset, **options)
    results = [outcomes_of(loader, 22) for loader in loaders]
    assert without_worker(results[0]) == without_worker(results[1])
    assert [o[0] for o in results[0]].count("error") == 3


def fails_everywhere(worker):
    raise ValueError(f"worker {worker}")


def fails_in_one(worker):
    if worker == 1:
        raise ValueError("worker 1")


def test_an_error_of_every_workers_start_replaces_every_batch():
    results = outcomes(iter(shared(Numbers(9), batch_size=None, worker_init_fn=fails_everywhere)), 10)
    assert [o[0] for o in results] == ["error"] * 9 + ["end"]
    assert {o[2].rstrip("01.") for o in results[:9]} == {"Caught ValueError in DataLoader worker process "}


def test_an_error_of_one_workers_start_replaces_the_batches_that_it_takes():
    dataset = Slow(30, dict.fromkeys(range(30), 0.005))
    results = outcomes(iter(shared(dataset, batch_size=None, worker_init_fn=fails_in_one)), 31)
    assert results.pop() == ("end",)
    for i, result in enumerate(results):
        assert result == ("value", i) or result[2] == "Caught ValueError in DataLoader worker process 1."


class OwnWorker(Numbers):
    def __getitem__(self, i):
        return i, worker_id(), torch.utils.data.get_worker_info().num_workers


def test_a_sample_sees_the_worker_that_makes_it():
    samples = epoch(shared(OwnWorker(40), 3, batch_size=None))
    assert [i for i, _, _ in samples] == list(range(40))
    assert {worker for _, worker, _ in samples} <= {0, 1, 2} and {count for _, _, count in samples} == {3}


def test_a_shutdown_in_mid_epoch_leaves_no_worker(tmp_path):
    dataset = Recorded(100, tmp_path / "sample")
    iterator = iter(shared(dataset, batch_size=None, prefetch_factor=8))
    assert [next(iterator).item() for _ in range(3)] == [0, 1, 2]
    pids = worker_pids(iterator)
    with within(SOON):
        iterator._shutdown_workers()
    assert all(map(gone, pids))
    with pytest.raises(StopIteration):
        next(iterator)
    made = dataset.made()
    assert len(made) == len(set(made)) <= 19


def test_the_arena_serves_the_next_epoch():
    loader = shared(Images(8, (3, 256, 256)), batch_size=2)
    arenas = set()
    for _ in range(4):
        iterator = iter(loader)
        arenas.add(iterator._core.shipment()[0])
        batches = list(iterator)
        assert [batch[1].tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        del batches, iterator
    assert len(arenas) == 1


@pytest.mark.parametrize("option", [{}, {"dispatch": "shared_queue"}])
def test_only_engines_with_a_queue_have_one_in_their_arena(option):
    iterator = iter(DataLoader(Numbers(4), num_workers=2, batch_size=None, **option))
    assert iterator._core.shipment()[2][3] == bool(option)
    assert values(iterator) == [0, 1, 2, 3]


def test_an_iterable_dataset_keeps_its_workers_own_tasks():
    loader = shared(Shards([3, 3]), batch_size=None)
    assert epoch(loader)[0].tolist() == [0, 0] and not iter(loader)._core.shipment()[2][3]
