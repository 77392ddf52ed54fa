"""dispatch="shared_queue" with deaths, signals and random programs: a task is delivered once, or its loss is named."""

import os
import signal

import pytest
from sample_data import Dying, Recorded
from support import (
    SOON,
    DataLoader,
    gone,
    outcomes,
    values,
    wait_until,
    within,
    worker_pids,
)

pytestmark = pytest.mark.ours

KILLED = "DataLoader worker (pid {}) is killed by signal: Killed. "


def shared(dataset, workers=2, **kw):
    return DataLoader(dataset, num_workers=workers, dispatch="shared_queue", **kw)


def lasting_error(iterator):
    """The error of `next`, which each later call repeats."""
    with within(SOON), pytest.raises(RuntimeError) as caught:
        next(iterator)
    with pytest.raises(RuntimeError) as repeated:
        next(iterator)
    assert str(repeated.value) == str(caught.value)
    return caught.value


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_death_names_the_task_that_the_worker_held(workers):
    iterator = iter(shared(Dying(20, 7, signal.SIGKILL), workers, batch_size=None))
    pids = worker_pids(iterator)
    assert [next(iterator).item() for _ in range(7)] == list(range(7)), "complete batches come first"
    error = lasting_error(iterator)
    assert str(error) == KILLED.format(pids[error.worker_id])
    assert error.__notes__ == [f"Worker {error.worker_id} was assigned the batch with index 7."]
    assert wait_until(lambda: all(map(gone, pids)))


def test_tasks_of_other_workers_and_waiting_tasks_are_completed(tmp_path):
    dataset = Recorded(40, tmp_path / "sample", held=(0, 1))
    iterator = iter(shared(dataset, 3, batch_size=None, prefetch_factor=2))
    assert wait_until(lambda: dataset.reached(0) and dataset.reached(1))
    info = iterator._task_info
    victim = info[1][0]
    assert victim != info[0][0]
    os.kill(worker_pids(iterator)[victim], signal.SIGKILL)
    # The third worker completes the other four; then sample 0 is released.
    assert wait_until(lambda: sorted(dataset.made()) == list(range(6)))
    dataset.let_go(0)
    assert next(iterator).item() == 0
    error = lasting_error(iterator)
    assert (error.worker_id, error.index) == (victim, 1)
    completed = dataset.made()
    assert len(completed) == len(set(completed)) and set(range(6)) <= set(completed)


def test_out_of_order_every_batch_but_the_lost_one_comes_first(tmp_path):
    dataset = Recorded(40, tmp_path / "sample", held=(2,))
    iterator = iter(shared(dataset, 2, batch_size=None, in_order=False, prefetch_factor=3))
    delivered = [next(iterator).item() for _ in range(12)]
    assert wait_until(lambda: dataset.reached(2)) and 2 not in delivered and len(set(delivered)) == 12
    victim = iterator._task_info[2][0]
    os.kill(worker_pids(iterator)[victim], signal.SIGKILL)
    rest = outcomes(iterator, 40)
    delivered += [o[1] for o in rest if o[0] == "value"]
    assert 2 not in delivered and len(set(delivered)) == len(delivered) >= 12
    assert rest[-1][0] == "error" and "is killed by signal: Killed" in rest[-1][2]


@pytest.mark.parametrize("at", ["start", "work", "idle"])
def test_the_death_of_all_workers_is_an_error_and_no_hang(at, tmp_path):
    dataset = Recorded(40, tmp_path / "sample", held=(2, 3) if at == "work" else ())
    iterator = iter(shared(dataset, 2, batch_size=None, persistent_workers=True))
    if at == "work":
        assert [next(iterator).item() for _ in range(2)] == [0, 1]
        assert wait_until(lambda: dataset.reached(2) and dataset.reached(3))
    elif at == "idle":
        assert wait_until(lambda: len(dataset.made()) == 4)
    for pid in worker_pids(iterator):
        os.kill(pid, signal.SIGKILL)
    with within(SOON):
        results = outcomes(iterator, 45)
    assert [o[0] for o in results].count("value") <= 4 and results[-1][0] == "error"
    assert "is killed by signal: Killed" in results[-1][2]


def test_a_death_while_a_new_epoch_begins_is_named(tmp_path):
    dataset = Recorded(40, tmp_path / "sample", held=(1, 2))
    loader = shared(dataset, batch_size=None, persistent_workers=True, prefetch_factor=4)
    iterator = iter(loader)
    assert next(iterator).item() == 0 and wait_until(lambda: dataset.reached(1) and dataset.reached(2))
    # It holds a task of the epoch that is abandoned.
    os.kill(worker_pids(iterator)[0], signal.SIGKILL)
    with within(SOON), pytest.raises(RuntimeError, match="is killed by signal: Killed"):
        iter(loader)
    dataset.let_go(1)
    dataset.let_go(2)
    assert values(loader) == list(range(40))
