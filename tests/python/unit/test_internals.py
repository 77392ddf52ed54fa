"""The internals of a live iterator that programs use besides its interface (T15, and iterator/README.md)."""

import contextlib
import copy
import itertools

import pytest
import torch
from copied_shutdown import copied_shutdown
from sample_data import Numbers
from support import (
    OLD_TORCH,
    DataLoader,
    LoaderIter,
    gone,
    outcome,
    rustloader,
    values,
    wait_until,
    within,
    worker_pids,
)
from torch.utils.data import dataloader as torch_dataloader

COUNTERS = "_send_idx _rcvd_idx _tasks_outstanding _workers_num_tasks _workers_status".split()


def counters(iterator):
    # Old versions of torch do not count a worker's tasks.
    names = [name for name in COUNTERS if not (OLD_TORCH and name == "_workers_num_tasks")]
    result = {name: copy.copy(getattr(iterator, name)) for name in names}
    # The number of results that have arrived depends on timing; the tasks that are not delivered yet do not.
    result.pop("_tasks_outstanding")
    result["tasks"] = {task: info[0] for task, info in iterator._task_info.items()}
    return result


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_table_counters_are_torchs_at_every_step(workers, persistent):
    def steps(cls):
        loader = cls(Numbers(11), batch_size=2, num_workers=workers, persistent_workers=persistent)
        result = []
        for _ in range(2):
            iterator = iter(loader)
            result.append(counters(iterator))
            for batch in iterator:
                result.append((batch.tolist(), counters(iterator)))
            result.append(counters(iterator))
        iterator._shutdown_workers()
        return result

    assert steps(DataLoader) == steps(torch.utils.data.DataLoader)


def test_tasks_outstanding_are_those_without_a_result():
    iterator = iter(DataLoader(Numbers(20), num_workers=2, prefetch_factor=3))
    assert 0 <= iterator._tasks_outstanding <= 6
    next(iterator)
    assert 0 <= iterator._tasks_outstanding <= 6
    values(iterator)
    assert iterator._tasks_outstanding == 0


def test_the_cycle_stands_where_the_next_task_goes():
    iterator = iter(DataLoader(Numbers(20), num_workers=3, prefetch_factor=1))
    next(iterator)
    assert list(itertools.islice(iterator._worker_queue_idx_cycle, 4)) == [1, 2, 0, 1]
    iterator._shutdown_workers()


def test_what_is_not_there_is_an_attribute_error():
    iterator = iter(DataLoader(Numbers(3), num_workers=1))
    for name in ("_pin_memory_thread", "_pin_memory_thread_done_event", "nonsense"):
        assert not hasattr(iterator, name)
    with pytest.raises(AttributeError, match="'_MultiProcessingDataLoaderIter' object has no attribute 'nonsense'"):
        _ = iterator.nonsense
    iterator._shutdown_workers()


@pytest.mark.ours
@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_that_has_ended_leaves_the_workers_of_the_next_one_alone(persistent):
    """The next iterator may use the same shared memory."""
    old = iter(DataLoader(Numbers(6), num_workers=2, persistent_workers=persistent))
    done, queues = old._workers_done_event, old._index_queues
    assert len(list(old)) == 6
    old._shutdown_workers()
    new = iter(DataLoader(Numbers(60), num_workers=2))
    batches = [next(new)]
    done.set()
    for number, queue in enumerate(queues):
        queue.put(None)
        old._mark_worker_as_unavailable(number, shutdown=True)
    assert outcome(next, old) == ("end",)
    with contextlib.suppress(RuntimeError):
        old._engine().begin([None, None], lambda: 1, True, b"")
    assert values(batches + list(new)) == [[i] for i in range(60)]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("taken", [0, 3, 30])
def test_table_a_copied_shutdown_routine_ends_the_workers(persistent, taken):
    loader = DataLoader(Numbers(30), num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    for _ in range(taken):
        next(iterator)
    with within(20):
        copied_shutdown(iterator)
    assert [w.exitcode for w in iterator._workers] == [0, 0]
    assert iterator._workers_status == [False, False]
    iterator._shutdown_workers()
    copied_shutdown(iterator)


@pytest.mark.ours
def test_the_event_alone_ends_the_workers():
    iterator = iter(DataLoader(Numbers(20), num_workers=2))
    event = iterator._workers_done_event
    assert not event.is_set()
    event.set()
    assert event.is_set() and iterator._workers_done_event.is_set()
    assert wait_until(lambda: all(map(gone, worker_pids(iterator))))


@pytest.mark.ours
def test_none_for_every_worker_ends_them():
    iterator = iter(DataLoader(Numbers(6), num_workers=2, persistent_workers=True))
    values(iterator)
    for queue in iterator._index_queues:
        queue.put(None)
    for worker in iterator._workers:
        worker.join(60)
    assert [w.exitcode for w in iterator._workers] == [0, 0]
    iterator._shutdown_workers()


@pytest.mark.ours
def test_an_index_put_into_a_queue_by_hand_is_refused():
    iterator = iter(DataLoader(Numbers(6), num_workers=1))
    with pytest.raises(RuntimeError, match="must override _try_put_index"):
        iterator._index_queues[0].put((7, [1]))
    assert len(values(iterator)) == 6


@pytest.mark.ours
@pytest.mark.handover
def test_t15_a_copy_of_torchs_loop_runs_whole_on_torchs_iterator(caplog):
    class Unordered(LoaderIter):
        def _next_data(self):
            if not self._task_info:
                self._shutdown_workers()
                raise StopIteration
            index, data = self._get_data()
            self._tasks_outstanding -= 1
            del self._task_info[index]
            return self._process_data(data) if OLD_TORCH else self._process_data(data, 0)

    iterator = Unordered(DataLoader(Numbers(7), num_workers=1, batch_size=None))
    assert sorted(values(iterator)) == list(range(7))
    assert iterator.engine_batches == 0
    assert "Unordered._next_data uses _get_data" in caplog.text


def test_table_plain_attributes_are_torchs():
    """The iterator has every plain attribute of torch's iterator, with the same value."""
    names = (
        "_num_yielded _num_workers _prefetch_factor _persistent_workers _pin_memory _pin_memory_device _timeout "
        "_collate_fn _drop_last _auto_collation _dataset _dataset_kind _in_order _worker_init_fn _world_size _rank "
        "_profile_name _IterableDataset_len_called _shutdown _index_sampler"
    ).split()
    common = {"num_workers": 2, "batch_size": 2, "prefetch_factor": 3, "timeout": 60, "in_order": False}
    dataset = Numbers(5)
    own, expected = (iter(cls(dataset, **common)) for cls in (DataLoader, torch.utils.data.DataLoader))
    for name in names:
        if name != "_index_sampler":
            assert getattr(own, name) == getattr(expected, name), name
    assert type(own._index_sampler) is type(expected._index_sampler)
    assert isinstance(own, torch_dataloader._BaseDataLoaderIter) and len(own) == len(expected) == 3
    assert isinstance(own._base_seed, int) and own._workers_status == expected._workers_status == [True, True]
    for iterator in (own, expected):
        iterator._shutdown_workers()


@pytest.mark.ours
def test_an_interrupt_while_workers_start_again_leaves_none_half_started(monkeypatch):
    loader = DataLoader(Numbers(6), num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    assert len(list(iterator)) == 6
    iterator._shutdown_workers()

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(rustloader.system.moved_storages, "watch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
    assert iterator._shutdown and outcome(next, iterator) == ("end",)
    assert values(list(loader)) == [[i] for i in range(6)]
