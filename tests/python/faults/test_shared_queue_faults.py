"""dispatch="shared_queue" with deaths: the loss of a task is named (tests/engine/queue.rs has the engine's part)."""

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
