"""Statistics of loaders and iterators, and the verdicts on loaders that are built to provoke them."""

import copy
import dataclasses
import gc
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from pinning_support import pinning
from sample_data import Held, Images, Numbers
from support import (
    DataLoader,
    TorchDataLoader,
    rustloader,
    wait_until,
    waits_in_next,
    while_next_waits,
    worker_pids,
    workers_report,
)
from torch.utils.data import Dataset, IterableDataset

pytestmark = [pytest.mark.ours, pytest.mark.timeout(180)]

if rustloader is not None:
    from rustloader.metrics import ledger

# So far apart that they remain distinct on a busy machine.
LONG, SHORT = 0.2, 0.0


class Slow(Dataset):
    """The seconds that a sample takes depend on its worker and its index."""

    def __init__(self, n, seconds):
        self.n, self.seconds = n, seconds

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        time.sleep(self.seconds(torch.utils.data.get_worker_info().id, i))
        return torch.tensor(i)


def short(worker, i):
    return SHORT


def long(worker, i):
    return LONG


def long_now_and_then(worker, i):
    return 6 * LONG if i % 13 == 5 else SHORT


class Unpickled:
    """A batch that is slow to unpickle."""

    def __reduce__(self):
        return slow_to_make, ()


def slow_to_make():
    time.sleep(LONG)
    return Unpickled()


def hard_to_unpickle(samples):
    return Unpickled()


def slow_collate(samples):
    time.sleep(LONG)
    return samples


class SlowSampler:
    def __iter__(self):
        for i in range(24):
            time.sleep(LONG)
            yield i


def trained(loader, step=0.0):
    """Runs an epoch with training steps of `step` seconds. Returns the loader."""
    for _ in loader:
        time.sleep(step)
    return loader


# Figures


def test_the_figures_of_an_epoch():
    loader = DataLoader(Images(8), batch_size=2, num_workers=2)
    iterator = iter(loader)
    batches = [next(iterator)]
    # Until then, a worker may take memory between two reads of the sizes.
    assert wait_until(lambda: sum(worker.tasks for worker in rustloader.stats(iterator).workers) == 4)
    live = rustloader.stats(iterator)
    assert (live.batches, live.epochs, live.iterators, live.num_workers) == (1, 1, 1, 2)
    assert [worker.pid for worker in live.workers] == worker_pids(iterator)
    assert all(worker.alive and worker.rss_bytes > 1 << 20 for worker in live.workers)
    size = sum(tensor.nbytes for tensor in batches[0])
    # The labels travel in the message.
    assert live.arena.leased_bytes >= batches[0][0].nbytes and live.arena.warm_bytes >= live.arena.leased_bytes
    assert live.arena.high_water_bytes >= live.arena.warm_bytes and live.arena.blocks > 0
    batches += list(iterator)
    for done in (rustloader.stats(iterator), rustloader.stats(loader)):
        assert (done.batches, done.epochs) == (4, 1)
        assert 4 * size <= done.bytes < 4 * size + 4096
        assert sum(worker.tasks for worker in done.workers) == 4
        assert not any(worker.alive or worker.rss_bytes for worker in done.workers)
        assert [worker.pid for worker in done.workers] == [worker.pid for worker in live.workers]
        assert all(worker.fetch_seconds > 0 and worker.pack_seconds > 0 for worker in done.workers)
        assert done.arena.leased_bytes == done.arena.warm_bytes == 0 < done.arena.high_water_bytes
        assert done.copies.count == 0 == done.copies.pickled
        assert len(done.slowest) == 4 and done.slowest[0].seconds >= done.slowest[-1].seconds > 0
        assert {task.index for task in done.slowest} == {"[0, 1]", "[2, 3]", "[4, 5]", "[6, 7]"}


class WhenWaitedFor(Held):
    """Items are slow, and the held one does not begin before the main process waits for it."""

    def __getitem__(self, i):
        item = super().__getitem__(i)
        time.sleep(LONG)
        return item


def test_times_lie_where_they_were_spent(tmp_path):
    go = tmp_path / "go"
    dataset = WhenWaitedFor(12, 0, go)
    loader = DataLoader(dataset, num_workers=1, collate_fn=slow_collate, persistent_workers=True)
    thread, start = while_next_waits(go.touch), time.monotonic()
    trained(loader, step=LONG)
    took = time.monotonic() - start
    thread.join()
    stats = rustloader.stats(loader)
    (worker,) = stats.workers
    assert 11 * LONG <= stats.step_seconds < took and worker.fetch_seconds >= 12 * LONG
    assert worker.collate_seconds >= 12 * LONG
    assert stats.waited_seconds + stats.first_seconds + stats.own_seconds == pytest.approx(stats.next_seconds)
    assert stats.next_seconds + stats.step_seconds <= took
    assert stats.first_seconds >= 2 * LONG
    assert stats.blocked_seconds == 0
    # Between two epochs, only the time of the workers is counted.
    assert workers_report(loader._iterator, state="idle")
    start = time.monotonic()
    time.sleep(LONG)
    paused, start = time.monotonic() - start, time.monotonic()
    trained(loader)
    took = time.monotonic() - start
    later = rustloader.stats(loader)
    assert later.next_seconds + later.step_seconds - stats.next_seconds - stats.step_seconds <= took
    assert later.workers[0].idle_seconds >= worker.idle_seconds + paused
    assert (later.epochs, later.batches, later.iterators) == (2, 24, 1)


def test_wait_for_a_later_batch_is_no_start(tmp_path):
    dataset = WhenWaitedFor(3, 2, tmp_path / "go")
    iterator = iter(DataLoader(dataset, num_workers=1))
    next(iterator), next(iterator)
    before = rustloader.stats(iterator)
    thread = while_next_waits((tmp_path / "go").touch)
    next(iterator)
    thread.join()
    later = rustloader.stats(iterator)
    assert later.waited_seconds >= before.waited_seconds + LONG and later.first_seconds == before.first_seconds


def test_a_loader_has_the_totals_of_all_its_iterators():
    loader = DataLoader(Numbers(6), num_workers=2)
    for epochs in range(1, 4):
        trained(loader)
        stats = rustloader.stats(loader)
        assert (stats.batches, stats.epochs, stats.iterators) == (6 * epochs, epochs, epochs)
        assert sum(worker.tasks for worker in stats.workers) == 6 * epochs
    assert len(ledger.find(loader)._meters) == 1, "epochs that have ended are summed"
    first, second = iter(loader), iter(loader)
    next(first), next(second), next(second)
    assert rustloader.stats(first).batches == 1 and rustloader.stats(second).batches == 2
    stats = rustloader.stats(loader)
    assert (stats.batches, stats.iterators) == (21, 5)
    # Batches in flight are not counted.
    del first
    gc.collect()
    assert rustloader.stats(loader).batches == 21
    second._shutdown_workers()


def test_copies_and_pickles_are_told():
    arrays = DataLoader(
        [np.zeros(40_000, np.uint8)] * 4, batch_size=None, collate_fn=lambda sample: sample, num_workers=1
    )
    stats = rustloader.stats(trained(arrays))
    assert (stats.copies.count, stats.copies.bytes, stats.copies.pickled) == (4, 160_000, 0)
    others = DataLoader(Numbers(3), num_workers=1, collate_fn=set)
    assert rustloader.stats(trained(others)).copies.pickled == 3


def test_slow_batches_are_named_shortly():
    sampler = [list(range(100)), (1, "two"), [None], [torch.tensor(3)], 4, ["x" * 100]]

    class Indifferent(Dataset):
        def __getitem__(self, i):
            return 0

    loader = DataLoader(Indifferent(), batch_sampler=None, batch_size=None, sampler=sampler, num_workers=1)
    named = {task.index for task in rustloader.stats(trained(loader)).slowest}
    many = "[" + ", ".join(map(str, range(16))) + ", ... 100 in all]"
    assert named == {many, '(1, "two")', "[None]", "[<Tensor>]", "4", f'["{"x" * 60}"...]'}

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(10))

    stats = rustloader.stats(trained(DataLoader(Stream(), batch_size=5, num_workers=2)))
    assert stats.batches == 4 and sum(worker.tasks for worker in stats.workers) == 4
    assert {task.index for task in stats.slowest} == {"[None, None, None, None, None]"}


def test_errors_are_tasks_but_no_batches():
    iterator = iter(DataLoader(Slow(3, lambda worker, i: SHORT / (i - 1) ** 2), batch_size=None, num_workers=1))
    next(iterator)
    with pytest.raises(ZeroDivisionError):
        next(iterator)
    assert len(list(iterator)) == 1
    stats = rustloader.stats(iterator)
    assert stats.batches == 2 and stats.workers[0].tasks == 3


def test_pinned_batches(monkeypatch):
    def slow_pin(data, device=None):
        time.sleep(0.05)
        return data

    with pinning():
        monkeypatch.setattr(torch.utils.data._utils.pin_memory, "pin_memory", slow_pin)
        loader = DataLoader(Slow(12, short), num_workers=2, pin_memory=True)
        iterator = iter(loader)
        next(iterator)
        assert rustloader.stats(loader).pinning.running
        list(iterator)
        stats = rustloader.stats(loader)
    assert not stats.pinning.running and stats.pinning.batches == 12 and stats.pinning.seconds >= 12 * 0.05


def test_workers_that_died_are_replaced():
    loader = DataLoader(Numbers(4), num_workers=1, persistent_workers=True)
    trained(loader)
    (before,) = rustloader.stats(loader).workers
    loader._iterator._shutdown_workers()
    trained(loader)
    for source in (loader, loader._iterator):
        (worker,) = rustloader.stats(source).workers
        assert worker.tasks == 8 and worker.alive and worker.pid != before.pid
    loader._iterator._shutdown_workers()


# Sources


def test_torchs_loader_with_and_without_install():
    loader = TorchDataLoader(Numbers(4), num_workers=1)
    assert rustloader.stats(loader).verdict().kind == "unknown"
    with rustloader.installed():
        iterator = iter(loader)
        assert len(list(iterator)) == 4
    assert rustloader.stats(loader).batches == rustloader.stats(iterator).batches == 4
    other = iter(loader)
    next(other)
    stats = rustloader.stats(other)
    assert "install" in stats.note and stats.batches == 1
    other._shutdown_workers()
    with rustloader.installed(prefetch_factor=3):
        trained(loader)
    assert rustloader.stats(loader).batches == 8


def test_what_is_no_loader():
    for thing in (3, [1], Numbers(3), DataLoader):
        with pytest.raises(TypeError, match="takes a DataLoader or its iterator"):
            rustloader.stats(thing)


def test_copies_of_a_loader_begin_at_zero():
    loader = trained(DataLoader(Numbers(4), num_workers=1))
    before = set(vars(loader))
    for twin in (pickle.loads(pickle.dumps(loader)), copy.copy(loader), copy.deepcopy(loader)):
        assert rustloader.stats(twin).batches == 0
        assert rustloader.stats(trained(twin)).batches == 4
        assert set(vars(twin)) == before
    assert rustloader.stats(loader).batches == 4


def test_loaders_that_compare_by_value_are_told_apart():
    class Equal(DataLoader):
        def __eq__(self, other):
            return True

    first, second = trained(Equal(Numbers(3), num_workers=1)), Equal(Numbers(3), num_workers=1)
    assert (rustloader.stats(first).batches, rustloader.stats(second).batches) == (3, 0)


def test_nothing_is_kept_alive_and_nothing_is_left():
    gc.disable()
    try:
        entries = len(ledger._ledgers._entries)
        loader = DataLoader(Numbers(40), num_workers=1)
        iterator = iter(loader)
        next(iterator)
        rustloader.stats(iterator), rustloader.stats(loader)
        dead, gone = weakref.ref(iterator), weakref.ref(loader)
        del iterator
        assert dead() is None
        assert len(ledger._ledgers._entries) == entries + 1
        assert ledger.find(loader).totals().counts["batches"] == 1
        del loader
        assert gone() is None and len(ledger._ledgers._entries) == entries
    finally:
        gc.enable()


def test_the_attributes_of_an_iterator_keep_their_compact_form():
    iterator = iter(DataLoader(Numbers(8), num_workers=1))
    next(iterator)
    # CPython's limit: beyond it, each access is slower, and the object takes some kilobytes more.
    assert len(vars(iterator)) < 30


def test_stats_can_be_asked_for_while_next_waits(tmp_path):
    loader = DataLoader(Held(4, 1, tmp_path / "go"), num_workers=1)
    seen = []
    stop = threading.Event()

    def ask():
        while not stop.wait(0.002):
            seen.append(rustloader.stats(loader))
            if seen[-1].batches == 1 and waits_in_next():
                (tmp_path / "go").touch()

    thread = threading.Thread(target=ask)
    thread.start()
    trained(loader)
    stop.set()
    thread.join()
    counts = [stats.batches for stats in seen]
    assert counts == sorted(counts) and 1 in counts
    totals = [sum(worker.tasks for worker in stats.workers) for stats in seen]
    assert totals == sorted(totals)


# Forms


def test_as_dict_is_plain_and_flat_is_floats():
    loader = trained(DataLoader(Images(4), batch_size=2, num_workers=2))
    stats = rustloader.stats(loader)
    plain = stats.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["batches"] == 2 and plain["workers"][1]["id"] == 1 and plain["slowest"][0]["index"]
    assert len(plain["recent_seconds"]) == 2 and plain["scheduling"]["dispatch"] == "round_robin"
    flat = stats.as_dict(flat=True)
    assert flat["scheduling_prefetch_factor"] == 2.0 and not any("recent" in name for name in flat)
    assert flat["batches"] == 2.0 and flat["workers_1_fetch_seconds"] == stats.workers[1].fetch_seconds
    assert flat["arena_high_water_bytes"] == stats.arena.high_water_bytes
    assert all(type(value) is float and math.isfinite(value) and key.isidentifier() for key, value in flat.items())


# CPU time


def test_the_processor_time_of_workers_at_work_and_after_their_end():
    loader = DataLoader(Computing(6), batch_size=None, num_workers=2)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    live = rustloader.stats(loader)
    list(iterator)
    done, of_iterator = rustloader.stats(loader), rustloader.stats(iterator)
    for before, after, same in zip(live.workers, done.workers, of_iterator.workers, strict=True):
        assert 2 * LONG / 2 <= before.cpu_seconds <= after.cpu_seconds == same.cpu_seconds
        assert after.cpu_seconds >= 3 * LONG / 2 and after.queued_seconds >= before.queued_seconds >= 0
    assert not any(worker.alive for worker in done.workers)
    # The next epoch's workers add to these; nothing is lost if the iterator is never closed.
    trained(loader)
    for before, after in zip(done.workers, rustloader.stats(loader).workers, strict=True):
        assert after.cpu_seconds >= before.cpu_seconds + 3 * LONG / 2


def test_killed_worker_is_unmeasured_and_the_next_one_measured():
    loader = DataLoader(Slow(12, long), batch_size=None, num_workers=2)
    iterator = iter(loader)
    first = [next(iterator) for _ in range(4)]
    os.kill(worker_pids(iterator)[0], signal.SIGKILL)
    # The kernel keeps its CPU time until it is waited for.
    iterator._workers[0].join()
    with pytest.raises(RuntimeError, match="killed"):
        list(iterator)
    assert len(first) == 4
    stats = rustloader.stats(loader)
    killed, other = stats.workers
    assert killed.cpu_seconds is None and killed.busy_seconds > LONG
    assert killed.unmeasured_seconds == pytest.approx(killed.busy_seconds)
    assert other.cpu_seconds is not None and other.unmeasured_seconds == 0
    assert killed.fetch_measured_seconds > LONG  # what is known of its fetches stays
    assert stats.as_dict()["workers"][0]["cpu_seconds"] is None
    assert "workers_0_cpu_seconds" not in stats.as_dict(flat=True)
    restarted = rustloader.stats(trained(loader)).workers[0]
    assert restarted.unmeasured_seconds == pytest.approx(killed.unmeasured_seconds)
    assert 0 < restarted.cpu_seconds < restarted.busy_seconds - restarted.unmeasured_seconds


def test_the_start_of_a_process_is_not_work():
    loader = DataLoader(
        Slow(4, long), batch_size=None, num_workers=1, worker_init_fn=lambda worker: Computing(1, 5 * LONG)[0]
    )
    iterator = iter(loader)
    before = rustloader.stats(loader).workers[0]
    assert before.cpu_seconds == 0 and before.queued_seconds == 0
    next(iterator)
    live = rustloader.stats(loader).workers[0]
    list(iterator)
    (done,) = rustloader.stats(loader).workers
    # By then another epoch uses the arena.
    later = rustloader.stats(trained(loader)).workers[0]
    assert 0 < live.cpu_seconds <= done.cpu_seconds < later.cpu_seconds < 5 * LONG, later


def test_the_processor_time_of_fetches():
    loader = DataLoader(Computing(12), batch_size=2, num_workers=2)
    for _ in range(2):
        trained(loader)
    for worker in rustloader.stats(loader).workers:
        # Each fetch of both epochs is measured, without collating.
        assert worker.fetch_measured_seconds == pytest.approx(worker.fetch_seconds, rel=0.05), worker
        assert 12 * LONG / 2 <= worker.fetch_cpu_seconds <= worker.cpu_seconds, worker
        # On a busy machine they wait for a core as well.
        assert worker.fetch_cpu_seconds + worker.queued_seconds > worker.fetch_seconds / 2, worker
    sleeping = DataLoader(Slow(8, long), batch_size=2, num_workers=1, collate_fn=lambda samples: Computing(1)[0])
    (worker,) = rustloader.stats(trained(sleeping)).workers
    assert worker.fetch_measured_seconds >= 8 * LONG and worker.fetch_cpu_share < 0.2, worker
    assert worker.cpu_seconds >= 4 * LONG / 2


def test_the_processor_time_of_children_and_threads_in_a_fetch_counts():
    class Indirect(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            if i == 0:
                subprocess.run([sys.executable, "-c", f"{BUSY}: pass"], check=True)
            else:
                thread = threading.Thread(target=Computing(1).__getitem__, args=(0,))
                thread.start()
                thread.join()
            return i

    for i in range(2):
        loader = DataLoader(Indirect(), batch_size=None, sampler=[i], num_workers=1)
        (worker,) = rustloader.stats(trained(loader)).workers
        assert worker.fetch_cpu_seconds >= LONG / 2, (i, worker)


BUSY = f"import time\nwhile time.process_time() < {LONG / 2}"


def test_no_fetch_no_share():
    assert rustloader.WorkerStats(0).fetch_cpu_share is None
    assert rustloader.WorkerStats(0, fetch_cpu_seconds=1.0, fetch_measured_seconds=4.0).fetch_cpu_share == 0.25


# Head-of-line waits


def test_batches_that_others_waited_for_are_named():
    loader = DataLoader(Slow(26, long_now_and_then), num_workers=2)
    for epochs in (1, 2):
        stats = rustloader.stats(trained(loader))
        # Batches 5 and 18, of worker 1 and worker 0; the others finish while one of them is under way.
        named = [task for task in stats.blocking if task.blocked_seconds > LONG]
        assert sorted((task.index, task.worker) for task in named) == sorted([("[5]", 1), ("[18]", 0)] * epochs)
        assert all(LONG < task.blocked_seconds <= task.seconds + LONG for task in named), named
        assert stats.blocking[0] == named[0] == max(stats.blocking, key=lambda task: task.blocked_seconds)
        assert sum(task.blocked_seconds for task in named) <= stats.blocked_seconds <= stats.waited_seconds
    assert len(stats.recent_seconds) == 52 and sum(seconds > 5 * LONG for seconds in stats.recent_seconds) == 4
    assert [n for n, seconds in enumerate(stats.recent_seconds) if seconds > 5 * LONG] == [5, 18, 31, 44]
    verdict = stats.verdict()
    assert verdict.kind == "head_of_line" and verdict.predicted_gain > 1.3, verdict
    assert 'dispatch="shared_queue" and reorder_window=' in verdict.sentence
    assert any(f"[{i}] took" in verdict.sentence for i in (5, 18)), verdict


def test_no_batch_is_blocked_in_the_order_of_completion():
    stats = rustloader.stats(trained(DataLoader(Slow(14, long_now_and_then), num_workers=2, in_order=False)))
    assert stats.blocking == () and stats.blocked_seconds == 0 and len(stats.recent_seconds) == 14


def test_the_settings_of_the_last_iterator():
    assert rustloader.stats(DataLoader(Numbers(4), num_workers=1)).scheduling is None
    loader = DataLoader(Numbers(8), batch_size=2, num_workers=1)
    settings = rustloader.SchedulingStats(batch_size=2)
    assert rustloader.stats(trained(loader)).scheduling == settings
    loader.prefetch_factor = 3
    with rustloader.installed(in_order=False, reorder_window=16):
        iterator = iter(loader)
    changed = dataclasses.replace(settings, prefetch_factor=3, in_order=False, reorder_window=16)
    assert rustloader.stats(iterator).scheduling == rustloader.stats(loader).scheduling == changed
    assert json.loads(json.dumps(rustloader.stats(loader).as_dict()))["scheduling"]["reorder_window"] == 16
    iterator._shutdown_workers()


def test_what_worker_threads_have_no_effect_on():
    class Whole(Numbers):
        def __getitems__(self, indices):
            return [self[i] for i in indices]

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(8))

    def scheduling(dataset, **options):
        return rustloader.stats(trained(DataLoader(dataset, num_workers=1, **options))).scheduling

    assert not scheduling(Whole(4), batch_size=2).per_sample
    assert not scheduling(Numbers(4), batch_size=None).per_sample
    with rustloader.installed(worker_threads=4):
        stream = scheduling(Stream(), batch_size=2, dispatch="shared_queue")
        assert scheduling(Numbers(4), batch_size=2).worker_threads == 4
    assert not stream.per_sample and not stream.map_style
    assert (stream.dispatch, stream.worker_threads) == ("round_robin", 1)
    batches = scheduling(Numbers(4), batch_sampler=[[0, 1], [2]])
    assert batches.per_sample and batches.batch_size is None


# Verdicts


class Computing(Dataset):
    """Samples that take CPU time."""

    def __init__(self, n, seconds=LONG / 2):
        self.n, self.seconds = n, seconds

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        end = time.process_time() + self.seconds
        while time.process_time() < end:
            pass
        return i


# test_verdict.py has the verdicts on all kinds of figures.
@pytest.mark.parametrize(
    "kind, word, options",
    [
        ("main", "sampler", {"batch_size": None, "sampler": SlowSampler()}),
        ("main", "opening", {"collate_fn": hard_to_unpickle}),
        ("starting", "", {"dataset": Slow(12, short), "worker_init_fn": lambda worker: time.sleep(5 * LONG)}),
    ],
)
def test_verdict_on_what_limits(kind, word, options):
    loader = DataLoader(**{"dataset": Slow(24, short), "num_workers": 2} | options)
    for _ in range(1 + (kind == "starting")):  # the start of one epoch is no verdict
        trained(loader)
    verdict = rustloader.stats(loader).verdict()
    assert verdict.kind == kind and word in verdict.sentence, verdict


class SlowToBegin(torch.utils.data.Sampler):
    def __iter__(self):
        time.sleep(LONG)
        return iter(range(4))

    def __len__(self):
        return 4


@pytest.mark.parametrize("persistent", [False, True])
def test_rate_counts_iter(persistent):
    loader = DataLoader(Numbers(4), sampler=SlowToBegin(), num_workers=1, persistent_workers=persistent)
    start = time.monotonic()
    for _ in range(3):
        list(loader)
    took = time.monotonic() - start
    stats = rustloader.stats(loader)
    assert 3 * LONG <= stats.turnaround_seconds <= stats.loop_seconds <= took
    assert stats.scalars()["batches_per_second"] == 12 / stats.loop_seconds


def test_turnaround_counts_no_second_twice(monkeypatch):
    of_loader = ledger.Ledger()
    counters = ledger.Ledger(of_loader)
    now = [10.0]
    monkeypatch.setattr(ledger.time, "monotonic", lambda: now[0])
    counters.turn_around(9.0)
    now[0] = 12.0
    counters.turn_around(8.0)  # contains the first interval
    now[0] = 20.0
    counters.turn_around(19.0)
    assert counters.turnaround_seconds == of_loader.turnaround_seconds == 4.0


# Reports


def test_report_calls_back_now_and_then_and_at_the_end():
    loader = DataLoader(Slow(10, short), batch_size=None, num_workers=1)
    seen = []
    with rustloader.report(loader, seen.append, every=LONG):
        trained(loader, step=LONG)
        assert wait_until(lambda: len(seen) >= 5)
        during = len(seen)
    assert len(seen) == during + 1 and seen[-1].batches == 10
    counts = [stats.batches for stats in seen]
    assert counts == sorted(counts) and counts[0] < 10
    trained(loader)
    assert len(seen) == during + 1


def test_an_error_of_the_callback_loses_no_batch():
    loader = DataLoader(Numbers(4), batch_size=None, num_workers=1)
    calls = []

    def fails_once(stats):
        calls.append(stats)
        if len(calls) == 1:
            raise ValueError("of the callback")

    got = []
    with rustloader.report(loader, fails_once, every=1e-6):
        iterator = iter(loader)
        with pytest.raises(ValueError, match="of the callback"):
            next(iterator)
        got += [batch.item() for batch in iterator]
    assert got == [0, 1, 2, 3] and len(calls) > 2


def test_the_error_of_the_body_comes_before_that_of_the_last_report():
    def callback(stats):
        raise KeyError("of the callback")

    loader = DataLoader(Numbers(1))
    with pytest.raises(ValueError, match="of the body") as caught, rustloader.report(loader, callback, every=LONG):
        raise ValueError("of the body")
    assert "KeyError: 'of the callback'" in caught.value.__notes__[0]
    with pytest.raises(KeyError, match="of the callback"), rustloader.report(loader, callback, every=LONG):
        pass


def test_workers_report_nothing(tmp_path):
    class Nested(Numbers):
        def __getitem__(self, i):
            from rustloader.system import hooks

            return len(hooks.before_next)

    loader = DataLoader(Nested(4), batch_size=None, num_workers=1)
    with rustloader.report(loader, lambda stats: None):
        assert list(loader) == [0] * 4


@pytest.mark.parametrize("every", [0, -1, math.nan])
def test_report_wants_a_time(every):
    with (
        pytest.raises(ValueError, match=r"^every must be a positive number of seconds, got "),
        rustloader.report(DataLoader(Numbers(1)), print, every),
    ):
        pass


def test_a_report_on_a_loader_without_workers_comes_at_the_end():
    seen = []
    loader = DataLoader(Numbers(3))
    with rustloader.report(loader, seen.append, every=1e-6):
        trained(loader)
    assert len(seen) == 1
