"""States at the beginning and the end of an epoch, and over several epochs, behave as they do with torchdata."""

import copy

import pytest
import torch
from pairwise import pairs
from stateful import datasets
from stateful.datasets import unchanged

pytestmark = pytest.mark.ours

SIZES = (23, 0, 11)
DATASETS = {
    "map": datasets.Records(40),
    "drawing map": datasets.DrawingRecords(40),
    "iterable": datasets.Shards(SIZES),
    "drawing iterable": datasets.Shards(SIZES, draws=True),
    "generator": datasets.GeneratorShards(SIZES),
    "lazy generator": datasets.LazyGenerator(SIZES),
    "restarting generator": datasets.Restarting(SIZES),
    "stateless": datasets.StatelessShards(SIZES),
}
# The number of workers, and snapshot_every_n_steps.
STARTS = [(0, 1), (3, 1), (3, 5), (3, 10)]
WORKERS = pytest.mark.parametrize("workers, every", STARTS)


def maker(lib, kind, workers, **kw):
    kw.setdefault("batch_size", 3)
    return lambda: lib.StatefulDataLoader(
        copy.deepcopy(DATASETS[kind]), num_workers=workers, collate_fn=unchanged, **kw
    )


@pairs(start=STARTS, kind=list(DATASETS), when=["before iter", "after iter"])
def test_a_state_of_nothing_delivered(lib, kind, start, when):
    torch.manual_seed(2)
    workers, every = start
    make = maker(lib, kind, workers, snapshot_every_n_steps=every)
    loader = make()
    if when == "before iter":
        if lib.name == "rustloader" and "drawing" in kind:
            return  # it would be the state of a worker's dataset, and rustloader starts no worker for it
        state = loader.state_dict()
        iterator = iter(loader)
    else:
        iterator = iter(loader)
        state = loader.state_dict()
    expected = list(iterator)
    assert expected
    loader.load_state_dict(state)
    assert list(loader) == expected
    loader = make()
    loader.load_state_dict(state)
    assert list(loader) == expected


@WORKERS
@pytest.mark.parametrize("kind", ["map", "drawing map"])
def test_a_state_of_nothing_delivered_holds_the_shuffled_order(lib, kind, workers, every):
    torch.manual_seed(2)
    make = maker(lib, kind, workers, shuffle=True, snapshot_every_n_steps=every)
    loader = make()
    iterator = iter(loader)
    state = loader.state_dict()
    expected = list(iterator)
    loader = make()
    loader.load_state_dict(state)
    assert list(loader) == expected


@WORKERS
@pytest.mark.parametrize("kind", DATASETS)
def test_a_state_after_the_end_is_the_next_epochs(lib, kind, workers, every):
    torch.manual_seed(2)
    if kind == "lazy generator" and not workers and lib.name == "torchdata":
        return  # torchdata loads the state and iterates twice; it takes nothing from the first iterator
    if "drawing" in kind and workers and lib.name == "torchdata":
        return  # torchdata draws another base seed for the next epoch's workers
    make = maker(lib, kind, workers, snapshot_every_n_steps=every)
    loader = make()
    list(loader)
    state = loader.state_dict()
    expected = list(loader)
    assert expected
    loader = make()
    loader.load_state_dict(state)
    assert list(loader) == expected


@WORKERS
@pytest.mark.parametrize("kind", ["map", "drawing map"])
def test_a_state_after_the_end_is_the_next_epochs_shuffled_order(lib, kind, workers, every):
    torch.manual_seed(2)
    if kind == "drawing map" and workers and lib.name == "torchdata":
        return  # torchdata draws another base seed for the next epoch's workers
    make = maker(lib, kind, workers, shuffle=True, snapshot_every_n_steps=every)
    loader = make()
    first = list(loader)
    state = loader.state_dict()
    expected = list(loader)
    assert expected != first
    loader = make()
    loader.load_state_dict(state)
    assert list(loader) == expected


@WORKERS
@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("persistent", [False, True])
def test_at_the_last_batch_nothing_is_left_and_the_next_epoch_is_full(lib, kind, workers, every, persistent):
    if persistent and not workers:
        return
    if kind == "restarting generator" and workers and lib.name == "torchdata":
        return  # torchdata asks workers for more after their dataset has ended
    if kind == "lazy generator" and not workers and lib.name == "torchdata":
        return  # as above
    make = maker(lib, kind, workers, snapshot_every_n_steps=every, persistent_workers=persistent)
    number = len(list(make()))
    loader = make()
    iterator = iter(loader)
    for _ in range(number):
        next(iterator)
    state = loader.state_dict()
    with pytest.raises(StopIteration):
        next(iterator)
    after = loader.state_dict()
    loader = make()
    loader.load_state_dict(state)
    assert list(loader) == []
    assert len(list(loader)) == number
    loader = make()
    loader.load_state_dict(after)
    assert len(list(loader)) == number
    assert len(list(loader)) == number


@pytest.mark.parametrize("persistent", [False, True])
def test_a_state_after_the_end_has_the_workers_states(lib, persistent):
    dataset = datasets.CountingRecords(12)
    options = {"num_workers": 2, "collate_fn": unchanged, "persistent_workers": persistent}
    loader = lib.StatefulDataLoader(dataset, 3, **options)
    list(loader)
    snapshots = loader.state_dict()["_snapshot"]["_worker_snapshots"]
    assert [snapshots[f"worker_{worker}"]["dataset_state"] for worker in (0, 1)] == [{"made": 6}] * 2


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", ["map", "iterable", "generator", "stateless"])
def test_a_resumed_epoch_is_followed_by_a_whole_one(lib, kind, workers, persistent):
    if persistent and not workers:
        return
    make = maker(lib, kind, workers, persistent_workers=persistent)
    loader = make()
    epochs = [list(loader) for _ in range(2)]
    assert epochs[0] == epochs[1]
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = loader.state_dict()
    del iterator
    loader = make()
    loader.load_state_dict(state)
    assert list(loader) == epochs[0][4:]
    assert list(loader) == epochs[0]
    assert list(loader) == epochs[0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_every_shuffled_epoch_has_each_sample_once(lib, workers, persistent):
    if persistent and not workers:
        return
    torch.manual_seed(4)
    loader = maker(lib, "map", workers, shuffle=True, persistent_workers=persistent)()
    orders = []
    for _ in range(3):
        orders.append([sample["id"] for batch in loader for sample in batch])
        loader.state_dict()
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_seed_gives_the_same_epoch_with_and_without_a_resume(lib, workers):
    def make():
        torch.manual_seed(9)
        return maker(lib, "map", workers, shuffle=True)()

    expected = list(make())
    loader = make()
    iterator = iter(loader)
    first = [next(iterator) for _ in range(5)]
    state = loader.state_dict()
    loader = make()
    loader.load_state_dict(state)
    assert first + list(loader) == expected


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "iterable", "generator", "stateless"])
def test_a_broken_epoch_is_followed_by_a_whole_one(lib, kind, workers):
    loader = maker(lib, kind, workers)()
    expected = list(loader)
    for _ in zip(range(2), loader, strict=False):
        loader.state_dict()
    if kind != "generator" or workers:  # without workers, the dataset stays where the loop left it
        assert list(loader) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_iter_twice_after_a_load_begins_a_whole_epoch(lib, workers):
    make = maker(lib, "map", workers)
    loader = make()
    expected = list(loader)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    del iterator
    loader = make()
    loader.load_state_dict(state)
    iter(loader)
    assert list(loader) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_the_last_load_counts(lib, workers):
    make = maker(lib, "map", workers)
    loader = make()
    expected = list(loader)
    states = []
    for _ in loader:
        states.append(copy.deepcopy(loader.state_dict()))
    loader = make()
    loader.load_state_dict(states[5])
    loader.load_state_dict(states[1])
    assert list(loader) == expected[2:]
    loader.load_state_dict(states[7])
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(states[3])
    assert list(loader) == expected[4:]
