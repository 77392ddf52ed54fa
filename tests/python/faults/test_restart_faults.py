"""Restarts as a program observes them: limits, errors, the log, seeds, times."""

import os

import pytest
from restart_support import Deaths, DiesAgain, Mortal, MortalStream, epochs, kill, loader_of
from support import (
    TORCH_MODE,
    within,
    worker_pids,
)

if not TORCH_MODE:
    import rustloader
    from rustloader import WorkerDiedError

pytestmark = [pytest.mark.ours, pytest.mark.warns]

N = 24


# Limits


def test_beyond_the_limit_the_error_is_torchs_with_a_history(tmp_path):
    deaths = Deaths(tmp_path, {2: 1, 6: 1, 11: 1})
    iterator = iter(loader_of(Mortal(N, deaths), max_restarts=2))
    first_pids = worker_pids(iterator)
    actual = []
    with pytest.raises(WorkerDiedError) as caught:
        actual.extend(iter(iterator.__next__, None))
    assert [[sample[0] for sample in batch] for batch in actual] == [[2 * n, 2 * n + 1] for n in range(5)]
    error, pids = caught.value, worker_pids(iterator)
    assert str(error) == f"DataLoader worker (pid {pids[1]}) is killed by signal: Killed. "
    assert (error.worker_id, error.pid, error.exitcode, error.index, error.restarts) == (1, pids[1], -9, [10, 11], 2)
    history = error.__notes__[1].splitlines()
    assert error.__notes__[0] == "Worker 1 was assigned the batch with index [10, 11]."
    assert history[0] == "Other worker deaths in this epoch (max_restarts=2):"
    assert history[1] == f"  worker 1 (pid {first_pids[1]}) was killed by signal: Killed, at batch 1 (index [2, 3])"
    assert history[2].endswith("was killed by signal: Killed, at batch 3 (index [6, 7])")
    assert len(history) == 3 and len(error.__notes__) == 2
    with pytest.raises(WorkerDiedError) as repeated:
        next(iterator)
    assert str(repeated.value) == str(error) and repeated.value.__notes__ == error.__notes__


def test_each_epoch_has_its_own_limit():
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
    assert len(list(loader)) == N // 2, "the loader starts over"


class DiesCollating:
    """A collate_fn that ends the first `times` workers that collate a particular batch."""

    def __init__(self, folder, times):
        self.folder, self.times = folder, times

    def __call__(self, samples):
        if samples[0][0] == 4 and len(os.listdir(self.folder)) < self.times:
            open(f"{self.folder}/{os.getpid()}", "w").close()
            os._exit(7)
        return list(samples)


@pytest.mark.parametrize("where", ["sample", "collate"])
def test_the_third_death_at_a_batch_is_final(tmp_path, where):
    kw = {"collate_fn": DiesCollating(str(tmp_path), 100), "on_error": "skip"} if where == "collate" else {}
    loader = loader_of(Mortal(N, Deaths(tmp_path, {4: 100} if where == "sample" else {})), max_restarts=100, **kw)
    with within(60), pytest.raises(WorkerDiedError) as caught:
        list(loader)
    assert len(os.listdir(tmp_path)) == 3 and caught.value.restarts == 2
    assert caught.value.__notes__[-1] == "The batch is not retried: 3 workers died while fetching it."
    assert rustloader.stats(loader).faults.failures == ()


def test_deaths_in_a_replay_do_not_count_against_the_batch_after_it(tmp_path):
    dataset = DiesAgain([10, 10], tmp_path)
    assert epochs(loader_of(dataset)) == epochs(loader_of(MortalStream([10, 10])))
    assert dataset.deaths.count() == 5


def test_deaths_in_a_replay_count_toward_the_limit(tmp_path):
    with pytest.raises(WorkerDiedError) as caught:
        epochs(loader_of(DiesAgain([10, 10], tmp_path), max_restarts=4))
    assert caught.value.restarts == 4
    assert not any("not retried" in note for note in caught.value.__notes__)


def test_a_start_that_the_program_ends_does_not_count_against_the_first_batch(tmp_path):
    deaths = Deaths(tmp_path, {0: 4}, how="SystemExit")
    assert epochs(loader_of(Mortal(N), worker_init_fn=deaths.pass_by)) == epochs(loader_of(Mortal(N)))
    assert deaths.count() == 4


# What a program observes


def test_a_program_may_empty_the_list_of_workers(tmp_path):
    iterator = iter(loader_of(Mortal(N, Deaths(tmp_path, {3: 1}))))
    workers = [*iterator._workers]
    iterator._workers.clear()
    assert len(list(iterator)) == N // 2
    for worker in workers:
        worker.join()


def test_each_restart_is_a_line_in_the_log(tmp_path, lines):
    iterator = iter(loader_of(Mortal(N, Deaths(tmp_path, {3: 1, 10: 1})), max_restarts=7))
    before = worker_pids(iterator)
    list(iterator)
    first, second = lines("was restarted")
    assert first.startswith(
        f"DataLoader worker 1 (pid {before[1]}) was killed by signal: Killed, at batch 1 (index [2, 3]). "
    )
    assert first.endswith(": 1 of max_restarts=7 used in this epoch") and second.endswith(
        f"as pid {worker_pids(iterator)[1]}: 2 of max_restarts=7 used in this epoch"
    )


def test_an_error_of_worker_init_fn_in_the_replacement_is_raised_in_place_of_each_batch(tmp_path):
    def init(worker):
        if worker == 1 and os.listdir(tmp_path):  # the other worker may start after this one has died
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


def test_seeds_of_workers_continue_with_new_streams(tmp_path, lines):
    kw = {"seed_by": "worker"}
    actual = epochs(loader_of(Mortal(N, Deaths(tmp_path, {6: 1, 10: 1})), **kw))
    expected = epochs(loader_of(Mortal(N), **kw))
    same_batches = [a == b for a, b in zip(actual[0], expected[0], strict=True)]
    assert same_batches == [n % 2 == 0 or n < 3 for n in range(N // 2)]
    numbers = [number for batch in actual[0] for sample in batch for number in sample[1:]]
    assert len(set(numbers)) == len(numbers)
    assert [[sample[0] for sample in batch] for batch in actual[0]] == [
        [sample[0] for sample in batch] for batch in expected[0]
    ]
    assert len(lines("uses different random numbers")) == 1
    (tmp_path / "again").mkdir()
    repeated = epochs(loader_of(Mortal(N, Deaths(tmp_path / "again", {6: 1, 10: 1})), **kw))
    assert repeated == actual, "the new streams come from the base seed"


def test_processor_times_are_still_measured_after_a_restart(tmp_path):
    loader = loader_of(Mortal(N, Deaths(tmp_path, {3: 1, 12: 1})))
    iterator = iter(loader)
    list(iterator)
    times = rustloader.iterator.core.ledger.of(iterator).cpu_times()
    assert len(times) == 2 and all(time.cpu is not None and time.cpu >= 0 for time in times)
