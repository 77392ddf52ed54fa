"""Whole epochs with ``max_restarts``: workers die, and the batches are those of a run without deaths."""

import contextlib
import errno
import logging
import os
import signal
import threading
from unittest import mock

import pytest
import torch
from restart_support import Deaths, Mortal, MortalStream, StatefulStream, as_sets, epochs, loader_of
from sample_data import Slow
from support import (
    STARTED,
    TORCH_MODE,
    DataLoader,
    children,
    in_thread,
    open_files,
    same,
    state_of,
    values,
    wait_until,
    within,
    worker_pids,
)

if not TORCH_MODE:
    import rustloader
    from rustloader import LoaderTimeoutError, StatefulDataLoader, WorkerDiedError
    from rustloader.workers import process, restarts

pytestmark = [pytest.mark.ours, pytest.mark.warns]

N = 24


@pytest.fixture
def lines(caplog):
    """The lines of the log."""
    caplog.set_level(logging.INFO, "rustloader")
    return lambda text: [record.getMessage() for record in caplog.records if text in record.getMessage()]


def compared(folder, dataset, deaths, count=3, ordered=True, **kw):
    """Compares epochs with deaths to those without."""
    found = epochs(loader_of(dataset(deaths), **kw), count)
    expected = epochs(loader_of(dataset(Deaths()), **kw), count)
    if not ordered:
        found, expected = as_sets(found), as_sets(expected)
    assert found == expected
    assert deaths.count() == sum(deaths.fatal.values()), "not all deaths have taken place"


# Batches


@pytest.mark.parametrize("seed_by", ["sample", "batch"])
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize(
    "kw",
    [{}, {"dispatch": "shared_queue"}, {"in_order": False}, {"dispatch": "shared_queue", "in_order": False}],
    ids=["round robin", "shared queue", "out of order", "shared queue, out of order"],
)
def test_the_batches_are_those_of_a_run_without_deaths(tmp_path, kw, persistent, seed_by):
    deaths = Deaths(tmp_path, {0: 1, 5: 2, 6: 1, 13: 1, N - 1: 1})
    options = {"persistent_workers": persistent, "seed_by": seed_by, "shuffle": True, **kw}
    compared(tmp_path, lambda deaths: Mortal(N, deaths), deaths, ordered=kw.get("in_order", True), **options)


@pytest.mark.parametrize("window", [{}, {"reorder_window": 12}, {"reorder_window": "1MiB"}, {"prefetch_factor": 1}])
@pytest.mark.parametrize("how", [signal.SIGSEGV, 0, 3])
def test_of_any_death_and_window(tmp_path, how, window):
    deaths = Deaths(tmp_path, {3: 1, 4: 1, 20: 1}, how)
    compared(tmp_path, lambda deaths: Mortal(N, deaths), deaths, 1, num_workers=3, **window)


def test_tensors_in_the_arena(tmp_path):
    deaths = Deaths(tmp_path, {3: 1, 9: 1, 17: 1})
    kw = {"collate_fn": None}
    found = epochs(loader_of(Mortal(N, deaths, 30_000), **kw))
    assert same(found, epochs(loader_of(Mortal(N, size=30_000), **kw))) and deaths.count() == 3


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_each_way_of_starting_workers(tmp_path, method):
    deaths = Deaths(tmp_path, {3: 1, 12: 1})
    kw = {"multiprocessing_context": method, "persistent_workers": True}
    compared(tmp_path, lambda deaths: Mortal(N, deaths), deaths, 2, **kw)


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("seed_by", ["sample", "batch"])
@pytest.mark.parametrize("kind", [MortalStream, StatefulStream])
def test_an_iterable_dataset_makes_its_batches_again(tmp_path, kind, seed_by, persistent):
    deaths = Deaths(tmp_path, {(0, 0): 1, (0, 7): 2, (1, 3): 1, (0, 10): 1})
    kw = {"persistent_workers": persistent, "seed_by": seed_by}
    compared(tmp_path, lambda deaths: kind([11, 4], deaths), deaths, **kw)


@pytest.mark.parametrize("every", [1, 3, 0])
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("kind", [MortalStream, StatefulStream])
def test_an_iterable_dataset_of_a_stateful_loader_goes_on_at_its_snapshot(tmp_path, kind, persistent, every):
    deaths = Deaths(tmp_path, {(0, 0): 1, (0, 7): 2, (1, 3): 1, (0, 10): 1})
    kw = {"cls": StatefulDataLoader, "persistent_workers": persistent, "snapshot_every_n_steps": every}
    compared(tmp_path, lambda deaths: kind([11, 4], deaths), deaths, **kw)


@pytest.mark.parametrize("kind", [Mortal, MortalStream, StatefulStream])
@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_state_after_a_restart_resumes_exactly(tmp_path, kind, cut):
    def loader(folder, fatal):
        (tmp_path / folder).mkdir()
        size = 15 if kind is Mortal else [9, 6]
        return loader_of(kind(size, Deaths(tmp_path / folder, fatal)), StatefulDataLoader)

    early, late = (2, 11) if kind is Mortal else ((0, 1), (1, 4))
    torch.manual_seed(5)
    expected = list(loader("undisturbed", {}))
    torch.manual_seed(5)
    iterator = iter(loaded := loader("first", {early: 1, late: 1}))
    found = [next(iterator) for _ in range(cut)]
    state = loaded.state_dict()
    del iterator
    resumed = loader("second", {early: 1, late: 1})
    resumed.load_state_dict(state)
    found += list(resumed)
    assert found == expected


def test_pinned_batches(host, tmp_path):
    deaths = Deaths(tmp_path, {3: 1, 9: 1, 17: 2})
    kw = {"collate_fn": None, "pin_memory": True, "persistent_workers": True}
    found = epochs(loader_of(Mortal(N, deaths, 3000), **kw), 2)
    assert all(batch.is_pinned() or host.owns(batch) for batch in found[0])
    assert same(found, epochs(loader_of(Mortal(N, size=3000), **kw), 2)) and deaths.count() == 4


# Moments


def kill(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("dispatch", ["round_robin", "shared_queue"])
@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
def test_kills_between_batches(victims, dispatch):
    kw = {"dispatch": dispatch, "max_restarts": 1000}
    iterator, found = iter(loader_of(Mortal(N), **kw)), []
    torch.manual_seed(3)
    expected = list(loader_of(Mortal(N), **kw))
    torch.manual_seed(3)
    iterator = iter(loader_of(Mortal(N), **kw))
    pids = worker_pids(iterator)
    kill(*(pids[victim] for victim in victims))
    for batch in iterator:
        found.append(batch)
        pids = worker_pids(iterator)
        kill(*(pids[victim] for victim in victims))
    assert found == expected


def test_a_kill_between_epochs_of_persistent_workers():
    loader = loader_of(Mortal(N), persistent_workers=True)
    found = epochs(loader, 1)
    for _ in range(3):
        pids = worker_pids(loader._iterator)
        kill(*pids)
        assert wait_until(lambda pids=pids: all(state_of(pid) in "ZX" for pid in pids))
        found.append(list(loader))
        assert not set(worker_pids(loader._iterator)) & set(pids)
    assert found == epochs(loader_of(Mortal(N), persistent_workers=True), 4)


def die_at_start(folder):
    deaths = Deaths(folder, {"start 0": 1, "start 1": 2})
    return lambda worker: deaths.pass_by(f"start {worker}")


def test_deaths_during_the_start(tmp_path, lines):
    (tmp_path / "none").mkdir()
    found = epochs(loader_of(Mortal(N), worker_init_fn=die_at_start(tmp_path)))
    assert found == epochs(loader_of(Mortal(N)))
    assert len(lines("was started again")) == 3


def test_deaths_while_iter_runs(tmp_path):
    """Persistent workers die as soon as they are told of the epoch."""

    class Dataset(MortalStream):
        def __iter__(self):
            self.deaths.pass_by("iter")
            return super().__iter__()

    loader = loader_of(Dataset([6, 6], Deaths(tmp_path, {"iter": 0})), persistent_workers=True)
    found = epochs(loader)
    # The workers have a copy of the dataset: this is for those that are started next.
    for name in ("fatal", "iter"):
        assert name
    loader.dataset.deaths.fatal["iter"] = 2
    kill(*worker_pids(loader._iterator))
    found += [list(loader), list(loader)]
    assert found == epochs(loader_of(MortalStream([6, 6]), persistent_workers=True), 3)
    assert loader.dataset.deaths.count() == 2


# Limits


def test_beyond_the_limit_the_error_is_torchs_with_a_history(tmp_path):
    deaths = Deaths(tmp_path, {2: 1, 6: 1, 11: 1})
    iterator = iter(loader_of(Mortal(N, deaths), max_restarts=2))
    first_pids = worker_pids(iterator)
    found = []
    with pytest.raises(WorkerDiedError) as caught:
        found.extend(iter(iterator.__next__, None))
    assert [[sample[0] for sample in batch] for batch in found] == [[2 * n, 2 * n + 1] for n in range(5)]
    error, pids = caught.value, worker_pids(iterator)
    assert str(error) == f"DataLoader worker (pid {pids[1]}) is killed by signal: Killed. "
    assert (error.worker_id, error.pid, error.exitcode, error.index, error.restarts) == (1, pids[1], -9, [10, 11], 2)
    history = error.__notes__[1].splitlines()
    assert error.__notes__[0] == "Worker 1 was to fetch the batch of index [10, 11]."
    assert history[0] == "Other deaths of workers in this epoch, with max_restarts=2:"
    assert history[1] == f"  worker 1 (pid {first_pids[1]}) was killed by signal: Killed, at batch 1 of index [2, 3]"
    assert history[2].endswith("was killed by signal: Killed, at batch 3 of index [6, 7]")
    assert len(history) == 3 and len(error.__notes__) == 2
    with pytest.raises(WorkerDiedError) as again:
        next(iterator)
    assert str(again.value) == str(error) and again.value.__notes__ == error.__notes__


def test_each_epoch_has_its_own_limit(tmp_path):
    class Dataset(Mortal):
        def __getitem__(self, i):
            return super().__getitem__(i)

    loader = loader_of(Mortal(N), max_restarts=1, persistent_workers=True)
    for _ in range(3):
        iterator = iter(loader)
        next(iterator)
        kill(worker_pids(iterator)[0])
        assert len(list(iterator)) == N // 2 - 1
    iterator = iter(loader)
    kill(worker_pids(iterator)[0])
    next(iterator)
    with pytest.raises(WorkerDiedError):
        for _ in range(N):
            kill(worker_pids(iterator)[1])
            next(iterator)
    assert len(list(loader)) == N // 2, "the loader begins anew"


def test_a_batch_that_kills_each_worker_ends_the_epoch(tmp_path):
    iterator = iter(loader_of(Mortal(N, Deaths(tmp_path, {3: 100})), max_restarts=100))
    next(iterator)
    with within(30), pytest.raises(WorkerDiedError) as caught:
        next(iterator)
    assert len(os.listdir(tmp_path)) == 3 and caught.value.restarts == 2
    assert caught.value.__notes__[-1] == "3 workers have died in its batch, which is not tried again."


def test_without_the_option_a_death_is_final_at_once(tmp_path):
    deaths = Deaths(tmp_path, {3: 1})
    iterator = iter(loader_of(Mortal(N, deaths), max_restarts=0))
    next(iterator)
    with pytest.raises(WorkerDiedError) as caught:
        next(iterator)
    assert caught.value.__notes__ == ["Worker 1 was to fetch the batch of index [2, 3]."]
    assert caught.value.restarts == 0 and deaths.count() == 1


def test_install_sets_the_option(tmp_path):
    deaths = Deaths(tmp_path, {3: 1})
    with rustloader.installed(max_restarts=1):
        loader = torch.utils.data.DataLoader(Mortal(N, deaths), num_workers=2, batch_size=None)
        assert [sample[0] for sample in loader] == list(range(N))


# What a program sees


def test_the_list_of_workers_stays_the_same_object(tmp_path):
    iterator = iter(loader_of(Mortal(N, Deaths(tmp_path, {3: 1}))))
    workers, before = iterator._workers, worker_pids(iterator)
    assert len(list(iterator)) == N // 2
    assert iterator._workers is workers and len(workers) == 2
    assert workers[0].pid == before[0] and workers[1].pid != before[1]
    assert state_of(before[1]) == "X", "the dead process was not waited for"


def test_a_program_may_empty_the_list_of_workers(tmp_path):
    iterator = iter(loader_of(Mortal(N, Deaths(tmp_path, {3: 1}))))
    iterator._workers.clear()
    assert len(list(iterator)) == N // 2


def test_many_restarts_leave_nothing_behind():
    iterator = iter(loader_of(Mortal(200), max_restarts=1000))
    next(iterator)
    kill(worker_pids(iterator)[0])
    next(iterator)
    files, processes = len(open_files()), len(children())
    for _ in range(60):
        kill(worker_pids(iterator)[0])
        next(iterator)
    assert len(open_files()) <= files + 2 and len(children()) == processes


def test_each_restart_is_a_line_in_the_log(tmp_path, lines):
    iterator = iter(loader_of(Mortal(N, Deaths(tmp_path, {3: 1, 10: 1})), max_restarts=7))
    before = worker_pids(iterator)
    list(iterator)
    first, second = lines("was started again")
    assert first.startswith(
        f"DataLoader worker 1 (pid {before[1]}) was killed by signal: Killed, at batch 1 of index [2, 3]. "
    )
    assert first.endswith(": 1 of max_restarts=7 in this epoch") and second.endswith(
        f"as pid {worker_pids(iterator)[1]}: 2 of max_restarts=7 in this epoch"
    )


def test_worker_init_fn_runs_again(tmp_path):
    def init(worker):
        with open(tmp_path / f"init-{worker}", "a") as file:
            file.write(".")

    (tmp_path / "deaths").mkdir()
    list(loader_of(Mortal(N, Deaths(tmp_path / "deaths", {3: 1})), worker_init_fn=init))
    assert [(tmp_path / f"init-{worker}").read_text() for worker in (0, 1)] == [".", ".."]


def test_an_error_of_worker_init_fn_in_the_replacement_comes_in_place_of_each_batch(tmp_path):
    def init(worker):
        if os.listdir(tmp_path):
            raise KeyError("not twice")

    iterator = iter(loader_of(Mortal(8, Deaths(tmp_path, {2: 1})), worker_init_fn=init))
    assert [sample[0] for sample in next(iterator)] == [0, 1]
    with pytest.raises(KeyError, match="not twice"):
        next(iterator)
    assert [sample[0] for sample in next(iterator)] == [4, 5]
    with pytest.raises(KeyError, match="not twice"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_seeds_of_workers_go_on_with_new_streams(tmp_path, lines):
    kw = {"seed_by": "worker"}
    found = epochs(loader_of(Mortal(N, Deaths(tmp_path, {6: 1, 10: 1})), **kw))
    expected = epochs(loader_of(Mortal(N), **kw))
    same_batches = [a == b for a, b in zip(found[0], expected[0], strict=True)]
    assert same_batches == [n % 2 == 0 or n < 3 for n in range(N // 2)]
    numbers = [number for batch in found[0] for sample in batch for number in sample[1:]]
    assert len(set(numbers)) == len(numbers)
    assert [[sample[0] for sample in batch] for batch in found[0]] == [
        [sample[0] for sample in batch] for batch in expected[0]
    ]
    assert len(lines("goes on with other random numbers")) == 1
    (tmp_path / "again").mkdir()
    again = epochs(loader_of(Mortal(N, Deaths(tmp_path / "again", {6: 1, 10: 1})), **kw))
    assert again == found, "the new streams come from the base seed"


def test_timeouts_go_on(tmp_path):
    deaths = Deaths(tmp_path, {3: 1})
    assert len(list(loader_of(Mortal(N, deaths), timeout=100))) == N // 2
    iterator = iter(loader_of(Slow(4, {1: 3.0}), timeout=0.5, batch_size=None, collate_fn=None))
    assert next(iterator) == 0
    kill(worker_pids(iterator)[1])
    with pytest.raises(LoaderTimeoutError):
        next(iterator)
    with contextlib.suppress(LoaderTimeoutError):
        assert next(iterator) == 1


def test_processor_times_go_on(tmp_path):
    loader = loader_of(Mortal(N, Deaths(tmp_path, {3: 1, 12: 1})))
    iterator = iter(loader)
    list(iterator)
    times = rustloader.iterator.core.ledger.of(iterator).processor_times()
    assert len(times) == 2 and all(time.cpu is not None and time.cpu >= 0 for time in times)


# Starts that fail


def refusing(times, error):
    """Lets the next starts of processes fail."""
    real, left = process.start, [times]

    def start(worker, name):
        if left[0]:
            left[0] -= 1
            raise error
        real(worker, name)

    return mock.patch.object(process, "start", start)


def test_a_refused_start_is_tried_again(tmp_path, lines):
    iterator = iter(loader_of(Mortal(N, Deaths(tmp_path, {3: 1})), max_restarts=3))
    with refusing(2, OSError(errno.EAGAIN, "none left")):
        found = list(iterator)
    assert len(found) == N // 2 and len(lines("was started again")) == 1


def test_a_start_that_is_always_refused_ends_in_the_death(tmp_path):
    iterator = iter(loader_of(Mortal(N, Deaths(tmp_path, {3: 1})), max_restarts=3))
    next(iterator)
    with refusing(100, OSError(errno.ENOMEM, "no memory")), pytest.raises(WorkerDiedError) as caught:
        next(iterator)
    assert caught.value.index == [2, 3]
    assert "worker 1 could not be started: [Errno 12] no memory" in caught.value.__notes__[1]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_an_interrupt_during_a_restart_loses_nothing(tmp_path, moment, kind):
    """Ctrl-C, and what a handler of another signal raises."""
    kw = {"max_restarts": 4}
    expected = epochs(loader_of(Mortal(N), **kw))[0]
    torch.manual_seed(3)
    iterator = iter(loader_of(Mortal(N, Deaths(tmp_path, {3: 1})), **kw))
    found = [next(iterator)]
    real, started = process.start, []

    def start(worker, name):
        if moment == "after":
            real(worker, name)
            started.append(worker.pid)
        raise kind

    with mock.patch.object(process, "start", start), pytest.raises(kind):
        next(iterator)
    assert all(state_of(pid) == "X" for pid in started) and len(started) == (moment == "after")
    found += list(iterator)
    assert found == expected


def test_an_interrupt_just_after_a_restart_loses_nothing():
    """The new process is killed, because the engine may not know it yet: another death."""
    iterator = iter(loader_of(Mortal(N), max_restarts=4))
    group, found = iterator._group, [next(iterator)]
    real = group.engine

    class Registering:
        def __getattr__(self, name):
            return getattr(real, name)

        def started(self, worker, pid):
            real.started(worker, pid)
            raise KeyboardInterrupt

    kill(worker_pids(iterator)[1])
    group.engine = Registering()
    with contextlib.suppress(KeyboardInterrupt):
        for _ in range(N):
            found.append(next(iterator))
    group.engine = real
    found += list(iterator)
    assert [[sample[0] for sample in batch] for batch in found] == [[2 * n, 2 * n + 1] for n in range(N // 2)]


# Ends


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_a_loader_ends_while_a_worker_is_vacant(tmp_path, persistent):
    deaths = Deaths(tmp_path, {3: 100})
    iterator = iter(loader_of(Mortal(N, deaths), max_restarts=2, timeout=0.3, persistent_workers=persistent))
    next(iterator)
    with refusing(100, OSError(errno.EAGAIN, "none left")), contextlib.suppress(LoaderTimeoutError):
        next(iterator)
    with within(20):
        iterator._shutdown_workers()
        del iterator


def test_threads_share_an_iterator(tmp_path):
    deaths = Deaths(tmp_path, {3: 1, 8: 1, 13: 1, 19: 1})
    iterator, found = iter(loader_of(Mortal(N, deaths))), []

    def take():
        for batch in iterator:
            found.append([sample[0] for sample in batch])

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(STARTED)
    assert sorted(found) == [[2 * n, 2 * n + 1] for n in range(N // 2)]


def test_a_restart_in_another_thread(tmp_path):
    iterator = iter(loader_of(Mortal(N, Deaths(tmp_path, {3: 1}))))
    assert len(in_thread(list, iterator)) == N // 2


# Warnings


def test_a_fork_beside_threads_is_warned_of_once(tmp_path, lines):
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        list(loader_of(Mortal(N, Deaths(tmp_path, {3: 1, 10: 1}))))
    finally:
        stop.set()
        thread.join()
    (line,) = lines("by a fork")
    assert 'multiprocessing_context="forkserver"' in line and "other thread" in line


def test_a_clean_start_is_not_warned_of(tmp_path, lines):
    with mock.patch.object(restarts, "hazard_of_fork", lambda: "runs 1 other thread"):
        deaths = Deaths(tmp_path, {3: 1})
        assert len(list(loader_of(Mortal(N, deaths), multiprocessing_context="forkserver"))) == N // 2
    assert lines("was started again") and not lines("by a fork")


def test_a_loader_on_torchs_iterator_says_that_the_options_are_lost(lines):
    class Context:
        Process = torch.multiprocessing.get_context("fork").Process

        def __getattr__(self, name):
            return getattr(torch.multiprocessing.get_context("fork"), name)

    class Foreign(torch.multiprocessing.get_context("fork").Process):
        def is_alive(self):
            return super().is_alive()

    context = torch.multiprocessing.get_context("fork")
    with mock.patch.object(type(context), "Process", Foreign):
        loader = DataLoader(
            range(4),
            num_workers=1,
            multiprocessing_context=context,
            max_restarts=2,
            on_error="skip",
        )
        for _ in range(2):
            assert len(values(loader)) == 4
        list(DataLoader(range(4), num_workers=1, multiprocessing_context=context))
    assert lines("no effect") == [
        "max_restarts, on_error of a DataLoader have no effect: it runs on torch's own iterator"
    ]
