"""The pin thread from the start of the workers to their end; `faults.drops` drops its iterators in every way."""

import gc
import itertools

import pytest
import torch
from copied_shutdown import copied_shutdown
from pinning_support import pinning
from sample_data import Images, Numbers
from support import (
    TORCH_MODE,
    DataLoader,
    TorchDataLoader,
    arena_bytes,
    epoch,
    from_engine,
    gone,
    mappings,
    open_files,
    threads_named,
    trim_pool,
    values,
    wait_until,
    within,
    worker_pids,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
THREAD = "pt_data_pin" if TORCH_MODE else "rl_pin"


@pytest.fixture
def host():
    with pinning() as host:
        yield host
        assert wait_until(lambda: gc.collect() is not None and not host.live), "pinned memory was not freed"


def none_left(pids):
    return wait_until(lambda: all(map(gone, pids)) and threads_named(THREAD) == 0)


class Recorded:
    """An engine that records the order in which its methods are called."""

    def __init__(self, engine, calls):
        self.engine, self.calls = engine, calls

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.engine, name)


@pytest.mark.ours
def test_s4_the_pin_thread_is_told_to_end_before_the_workers(host):
    iterator = iter(DataLoader(Images(40), batch_size=2, num_workers=2, pin_memory=True))
    pids, calls = worker_pids(iterator), []
    iterator._mode.group.engine = Recorded(iterator._engine(), calls)
    iterator._shutdown_workers()
    ending = [name for name in calls if name in ("stop_pinning", "close", "join_pinning", "wait_gone")]
    assert ending[:4] == ["stop_pinning", "close", "join_pinning", "wait_gone"]
    assert none_left(pids)


def test_p11_persistent_epochs_also_after_a_break(host):
    loader = DataLoader(Numbers(24), batch_size=2, num_workers=3, pin_memory=True, persistent_workers=True)
    expected = values(TorchDataLoader(Numbers(24), batch_size=2))
    for taken in (2, 0, 11, 12, 5, 1):
        iterator = iter(loader)
        thread = iterator._pin_memory_thread
        assert values(itertools.islice(iterator, taken)) == expected[:taken]
    with from_engine(12):
        assert values(loader) == expected
    assert loader._iterator is iterator and iterator._pin_memory_thread is thread and threads_named(THREAD) == 1
    iterator._shutdown_workers()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("taken", [0, 3, 30])
def test_a_copied_shutdown_routine_ends_thread_and_workers(host, persistent, taken):
    iterator = iter(DataLoader(Numbers(30), num_workers=2, pin_memory=True, persistent_workers=persistent))
    for _ in range(taken):
        next(iterator)
    with within(20):
        copied_shutdown(iterator)
    assert [w.exitcode for w in iterator._workers] == [0, 0]
    assert not iterator._pin_memory_thread.is_alive()
    iterator._shutdown_workers()
    copied_shutdown(iterator)
    assert none_left(worker_pids(iterator))


@pytest.mark.ours
def test_a_thread_that_was_told_to_end_is_joined_and_its_end_is_an_error(host):
    """In torch's loader, next() notices after up to 5 s."""
    host.delay = 1.5
    iterator = iter(DataLoader(Numbers(30), num_workers=1, pin_memory=True))
    event, thread = iterator._pin_memory_thread_done_event, iterator._pin_memory_thread
    assert wait_until(lambda: THREAD in host.threads), "the thread never reached the allocator"
    assert not event.is_set()
    event.set()
    assert event.is_set()
    thread.join(0.01)
    assert thread.is_alive(), "join() waits no longer than it is told to"
    thread.join()
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="Pin memory thread exited unexpectedly"):
        values(iterator)
    assert wait_until(lambda: all(map(gone, worker_pids(iterator))))


@pytest.mark.ours
def test_a_thread_that_cannot_be_started_is_an_error_of_iter(host, monkeypatch):
    def fail(self, device):
        raise RuntimeError("no device")

    monkeypatch.setattr("rustloader.device.pinning.Pinner.__init__", fail)
    loader = DataLoader(Numbers(4), num_workers=2, pin_memory=True, persistent_workers=True)
    with within(10), pytest.raises(RuntimeError, match="no device"):
        iter(loader)
    monkeypatch.undo()
    assert values(loader) == [[i] for i in range(4)]
    loader._iterator._shutdown_workers()


@pytest.mark.ours
def test_the_arena_of_an_epoch_is_used_by_the_next_and_nothing_grows(host):
    loader = DataLoader(Images(24, (3, 128, 128)), batch_size=4, num_workers=2, pin_memory=True)
    trim_pool()
    files, arenas, memory = [], [], []
    for k in range(4):
        for taken, _ in zip(range(6), loader, strict=False):
            if k == 2 and taken == 3:
                break  # batches are pinned and not delivered
        assert wait_until(lambda: threads_named(THREAD) == 0), "the thread, which holds descriptors, is still alive"
        files.append(len(open_files()))
        arenas.append(len(mappings()))
        memory.append(arena_bytes())
    assert arenas == [1] * 4, "each epoch must reuse the arena from the pool"
    assert files[1:] == files[:-1]
    assert max(memory) < 2 * memory[0] + (1 << 20)


@pytest.mark.ours
def test_blocks_of_batches_that_nobody_took_are_given_back(host):
    loader = DataLoader(Images(400, (3, 64, 64)), batch_size=4, num_workers=2, pin_memory=True, persistent_workers=True)
    for _ in range(12):
        iterator = iter(loader)
        next(iterator)
    assert len(epoch(loader)) == 100
    used, held = iterator._core.memory()
    assert held < 1 << 20 and used < 8 << 20, "more than reserves and warm pages of outstanding batches"
    iterator._shutdown_workers()
    assert torch.equal(next(iter(loader))[0][0], Images(1, (3, 64, 64)).image(0))
    loader._iterator._shutdown_workers()
