"""Whole epochs with ``max_restarts``: workers die, and the batches are those of a run without deaths."""

import os
import signal

import pytest
import torch
from restart_support import (
    Deaths,
    Mortal,
    MortalStream,
    ShuffledStream,
    StatefulStream,
    epochs,
    kill,
    loader_of,
    without_order,
)
from sample_data import as_list
from support import TORCH_MODE, DataLoader, same, state_of, wait_until, worker_pids

if not TORCH_MODE:
    import rustloader
    from rustloader import StatefulDataLoader

pytestmark = [pytest.mark.ours, pytest.mark.warns]

N = 24


def compare_epochs(folder, dataset, deaths, count=3, ordered=True, **kw):
    """Compares epochs with deaths to those without."""
    actual = epochs(loader_of(dataset(deaths), **kw), count)
    expected = epochs(loader_of(dataset(Deaths()), **kw), count)
    if not ordered:
        actual, expected = without_order(actual), without_order(expected)
    assert actual == expected
    assert deaths.count() == sum(deaths.fatal.values()), "not all deaths have occurred"


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
    compare_epochs(tmp_path, lambda deaths: Mortal(N, deaths), deaths, ordered=kw.get("in_order", True), **options)


@pytest.mark.parametrize("window", [{}, {"reorder_window": 12}, {"reorder_window": "1MiB"}, {"prefetch_factor": 1}])
@pytest.mark.parametrize("how", [signal.SIGSEGV, 0, 3])
def test_any_death_with_any_window(tmp_path, how, window):
    deaths = Deaths(tmp_path, {3: 1, 4: 1, 20: 1}, how)
    compare_epochs(tmp_path, lambda deaths: Mortal(N, deaths), deaths, 1, num_workers=3, **window)


def test_tensors_in_the_arena(tmp_path):
    deaths = Deaths(tmp_path, {3: 1, 9: 1, 17: 1})
    kw = {"collate_fn": None}
    actual = epochs(loader_of(Mortal(N, deaths, 30_000), **kw))
    assert same(actual, epochs(loader_of(Mortal(N, size=30_000), **kw))) and deaths.count() == 3


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_each_way_of_starting_workers(tmp_path, method):
    deaths = Deaths(tmp_path, {3: 1, 12: 1})
    kw = {"multiprocessing_context": method, "persistent_workers": True}
    compare_epochs(tmp_path, lambda deaths: Mortal(N, deaths), deaths, 2, **kw)


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("seed_by", ["sample", "batch"])
@pytest.mark.parametrize("kind", [MortalStream, StatefulStream])
def test_an_iterable_dataset_repeats_its_batches(tmp_path, kind, seed_by, persistent):
    deaths = Deaths(tmp_path, {(0, 0): 1, (0, 7): 2, (1, 3): 1, (0, 10): 1})
    kw = {"persistent_workers": persistent, "seed_by": seed_by}
    compare_epochs(tmp_path, lambda deaths: kind([11, 4], deaths), deaths, **kw)


@pytest.mark.parametrize("every", [1, 3, 0])
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("kind", [MortalStream, StatefulStream])
def test_an_iterable_dataset_of_a_stateful_loader_continues_from_its_snapshot(tmp_path, kind, persistent, every):
    deaths = Deaths(tmp_path, {(0, 0): 1, (0, 7): 2, (1, 3): 1, (0, 10): 1})
    kw = {"cls": StatefulDataLoader, "persistent_workers": persistent, "snapshot_every_n_steps": every}
    compare_epochs(tmp_path, lambda deaths: kind([11, 4], deaths), deaths, **kw)


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
    actual = [next(iterator) for _ in range(cut)]
    state = loaded.state_dict()
    del iterator
    resumed = loader("second", {early: 1, late: 1})
    resumed.load_state_dict(state)
    actual += list(resumed)
    assert actual == expected


@pytest.mark.parametrize("kw", [{}, {"dispatch": "shared_queue"}, {"persistent_workers": True}])
def test_a_sample_that_kills_each_worker_is_skipped_with_on_error(tmp_path, kw):
    loader = loader_of(Mortal(N, Deaths(tmp_path, {7: 3})), on_error="skip", **kw)
    actual, expected = epochs(loader), epochs(loader_of(Mortal(N), **kw))
    assert actual == [[[sample for sample in batch if sample[0] != 7] for batch in epoch] for epoch in expected]
    assert len(os.listdir(tmp_path)) == 3
    faults = rustloader.stats(loader).faults
    assert (faults.restarts, faults.skipped, len(faults.deaths)) == (3, 1, 3)
    assert faults.failures[0].index == 7 and "3 workers have died at this sample" in faults.failures[0].error_text
    assert faults.deaths[0].endswith("was killed by signal: Killed, at batch 3 (index [6, 7])")


@pytest.mark.parametrize("fatal", [{(0, 5): 2, (1, 2): 1}, {"start": 1}])
def test_an_iterable_dataset_without_a_state_repeats_its_order_with_torchs_seeds(tmp_path, fatal):
    """Its first samples are drawn again, with the same random numbers."""
    deaths = Deaths(tmp_path, fatal)
    compare_epochs(
        tmp_path,
        lambda deaths: MortalStream([9, 5], deaths),
        deaths,
        1,
        seed_by="worker",
        worker_init_fn=lambda worker: deaths.pass_by("start"),
    )


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("seed_by", ["sample", "batch"])
@pytest.mark.parametrize("cls", ["DataLoader", "StatefulDataLoader"])
def test_an_order_that_iter_draws_is_drawn_again_in_each_epoch(cls, seed_by, persistent):
    kw = {"cls": getattr(rustloader, cls), "seed_by": seed_by, "persistent_workers": persistent}
    expected = epochs(loader_of(ShuffledStream([24, 24]), **kw), 4)
    assert len({str(epoch) for epoch in expected}) == 4
    torch.manual_seed(3)
    loader, actual = loader_of(ShuffledStream([24, 24]), **kw), []
    for number in range(4):
        iterator = iter(loader)
        actual.append([next(iterator), next(iterator), next(iterator)])
        kill(*worker_pids(iterator))
        actual[-1] += iterator
        if persistent and number == 1:
            # A death between two epochs.
            kill(*worker_pids(iterator))
    assert actual == expected


def test_pinned_batches(host, tmp_path):
    deaths = Deaths(tmp_path, {3: 1, 9: 1, 17: 2})
    kw = {"collate_fn": None, "pin_memory": True, "persistent_workers": True}
    actual = epochs(loader_of(Mortal(N, deaths, 3000), **kw), 2)
    assert all(batch.is_pinned() or host.owns(batch) for batch in actual[0])
    assert same(actual, epochs(loader_of(Mortal(N, size=3000), **kw), 2)) and deaths.count() == 4


# Moments


@pytest.mark.parametrize("dispatch", ["round_robin", "shared_queue"])
@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
def test_kills_between_batches(victims, dispatch):
    kw = {"dispatch": dispatch, "max_restarts": 1000}
    (expected,) = epochs(loader_of(Mortal(N), **kw))
    torch.manual_seed(3)
    iterator, actual = iter(loader_of(Mortal(N), **kw)), []
    for number in range(N // 2):
        # Not for each batch: one at which three workers die is not retried.
        if number % 3 == 0:
            pids = worker_pids(iterator)
            kill(*(pids[victim] for victim in victims))
        actual.append(next(iterator))
    assert actual == expected


def test_a_kill_between_epochs_of_persistent_workers():
    loader = loader_of(Mortal(N), persistent_workers=True)
    actual = epochs(loader, 1)
    for _ in range(3):
        pids = worker_pids(loader._iterator)
        kill(*pids)
        assert wait_until(lambda pids=pids: all(state_of(pid) in "ZX" for pid in pids))
        actual.append(list(loader))
        assert not set(worker_pids(loader._iterator)) & set(pids)
    assert actual == epochs(loader_of(Mortal(N), persistent_workers=True), 4)


def test_deaths_during_the_start(tmp_path):
    deaths = Deaths(tmp_path, {"start 0": 1, "start 1": 2})
    actual = epochs(loader_of(Mortal(N), worker_init_fn=lambda worker: deaths.pass_by(f"start {worker}")))
    assert actual == epochs(loader_of(Mortal(N))) and deaths.count() == 3


def test_deaths_while_iter_runs(tmp_path):
    """Persistent workers die as soon as they begin the epoch."""

    class Dataset(MortalStream):
        def __iter__(self):
            self.deaths.pass_by("iter")
            return super().__iter__()

    loader = loader_of(Dataset([6, 6], Deaths(tmp_path, {"iter": 0})), persistent_workers=True)
    actual = epochs(loader)
    # The running workers have copies of the dataset: this affects only those started later.
    loader.dataset.deaths.fatal["iter"] = 2
    kill(*worker_pids(loader._iterator))
    actual += [list(loader), list(loader)]
    assert actual == epochs(loader_of(MortalStream([6, 6]), persistent_workers=True), 3)
    assert loader.dataset.deaths.count() == 2


class Reusing:
    """A batch sampler that reuses one list for all batches."""

    def __len__(self):
        return 10

    def __iter__(self):
        batch = []
        for index in range(40):
            batch.append(index)
            if len(batch) == 4:
                yield batch
                batch.clear()


@pytest.mark.parametrize("dispatch", ["round_robin", "shared_queue"])
def test_a_sampler_may_reuse_its_list(dispatch, tmp_path):
    loader = DataLoader(
        Mortal(40, Deaths(tmp_path, {9: 1})),
        batch_sampler=Reusing(),
        collate_fn=as_list,
        num_workers=1,
        prefetch_factor=4,
        max_restarts=1,
        dispatch=dispatch,
    )
    assert [sample[0] for batch in loader for sample in batch] == list(range(40))
    assert len(os.listdir(tmp_path)) == 1
