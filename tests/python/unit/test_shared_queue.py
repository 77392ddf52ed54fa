"""dispatch="shared_queue": any worker takes the next task; the batches are torch's, in torch's order."""

import itertools
import threading

import pytest
import torch
from sample_data import Images, Index, Numbers, Recorded, Slow
from support import (
    POLLS,
    SOON,
    STARTED,
    DataLoader,
    TorchDataLoader,
    call_of,
    epoch,
    from_engine,
    outcomes,
    same,
    values,
    wait_until,
    worker_pids,
)

pytestmark = pytest.mark.ours

METHODS = ["fork", "forkserver", "spawn"]


def shared(dataset, workers=2, **kw):
    return DataLoader(dataset, num_workers=workers, dispatch="shared_queue", **kw)


def done(iterator):
    """Number of batches that each worker has sent."""
    return [iterator._core.worker_status(worker)["tasks_done"] for worker in range(iterator._num_workers)]


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


# Index batches of every length, and such as must be pickled.
INDICES = [torch.utils.data.BatchSampler(range(999, -1, -1), size, drop_last=False) for size in (1, 5, 1000)]
INDICES.append([[{"keys": frozenset({i})}] for i in range(20)])


@pytest.mark.parametrize("sampler", INDICES, ids=["1", "5", "1000", "pickled"])
def test_index_batches_arrive(sampler):
    expected = list(TorchDataLoader(Index(), batch_sampler=sampler))
    assert epoch(shared(Index(), 3, batch_sampler=sampler)) == expected


@pytest.mark.parametrize("in_order", [True, False])
def test_batches_are_pinned(host, in_order):
    loader = shared(Images(26), batch_size=4, persistent_workers=True, in_order=in_order, pin_memory=True)
    expected = list(TorchDataLoader(Images(26), batch_size=4))
    for _ in range(2):
        batches = sorted(loader, key=lambda batch: int(batch[1][0]))
        assert same(batches, expected) and all(host.owns(part) for batch in batches for part in batch)
        next(iter(loader))  # this epoch is abandoned, with the batches that are already pinned


def fails_in_one(worker):
    if worker == 1:
        raise ValueError("worker 1")


def test_an_error_of_one_workers_start_replaces_the_batches_that_it_takes():
    dataset = Slow(30, dict.fromkeys(range(30), 0.005))
    results = outcomes(iter(shared(dataset, batch_size=None, worker_init_fn=fails_in_one)), 31)
    assert results.pop() == ("end",)
    for i, result in enumerate(results):
        assert result == ("value", i) or result[2] == "Caught ValueError in DataLoader worker process 1."
