"""A loader that is stopped after some batches and resumed elsewhere delivers the rest, as torchdata's class does."""

import copy
import itertools

import pytest
import torch
from pairwise import pairs
from sample_data import Held
from stateful import datasets
from stateful.datasets import unchanged

from rustloader.stateful_dataloader import StatefulDataLoader

pytestmark = pytest.mark.ours


def resumed(make, interrupt, epochs_before=0):
    """Returns the batches after the interruption, and those that another loader delivers from the state."""
    loader = make()
    for _ in range(epochs_before):
        list(loader)
    iterator = iter(loader)
    for _ in range(interrupt):
        next(iterator)
    state = loader.state_dict()
    rest = list(iterator)
    loader = make()
    loader.load_state_dict(state)
    return rest, list(loader)


def check(make, interrupt, **kw):
    rest, from_state = resumed(make, interrupt, **kw)
    assert rest, "this tests nothing: no batch was left"
    assert from_state == rest


def loaders(lib, dataset, **kw):
    kw.setdefault("collate_fn", unchanged)
    return lambda: lib.StatefulDataLoader(copy.deepcopy(dataset), **kw)


# (batch size, number of batches that are taken)
STOPS = [(None, 0), (None, 10), (7, 1), (7, 4)]
# (num_workers, snapshot_every_n_steps)
WORKERS = [(0, 1), (0, 10), (3, 1), (3, 2), (3, 10), (3, 0)]


def check_stop(lib, dataset, workers, stop):
    (number, every), (batch_size, interrupt) = workers, stop
    check(loaders(lib, dataset, num_workers=number, batch_size=batch_size, snapshot_every_n_steps=every), interrupt)


@pairs(workers=WORKERS, stop=STOPS, kind=["ordered", "without generator", "drawing"])
def test_an_iterable_dataset_whose_iterator_has_state(lib, kind, workers, stop):
    torch.manual_seed(3)
    dataset = datasets.Shards((31, 0, 25), draws=kind == "drawing", with_generator=kind != "without generator")
    check_stop(lib, dataset, workers, stop)


@pairs(workers=WORKERS, stop=STOPS, kind=["LazyGenerator", "StatelessShards"])
def test_an_iterable_dataset_with_a_generator_function(lib, kind, workers, stop):
    check_stop(lib, getattr(datasets, kind)((31, 0, 25)), workers, stop)


@pairs(workers=[0, 2], interrupt=[0, 1, 5], kind=["OwnIterator", "BothStateful", "GrowingState"])
def test_where_an_iterable_dataset_keeps_its_state(lib, kind, workers, interrupt):
    dataset = getattr(datasets, kind)(24)
    if (lib.name, kind, workers) == ("torchdata", "GrowingState", 0):
        return  # torchdata returns the dataset's own dictionary, which keeps growing
    check(loaders(lib, dataset, num_workers=workers, batch_size=2), interrupt)


@pairs(workers=WORKERS, stop=STOPS, kind=["Records", "DrawingRecords", "CountingRecords"])
def test_a_map_style_dataset(lib, kind, workers, stop):
    check_stop(lib, getattr(datasets, kind)(58), workers, stop)


@pairs(workers=[(0, 1), (3, 1), (3, 5)], kind=["Records", "DrawingRecords"], interrupt=[0, 1, 10])
def test_a_shuffled_map_style_dataset(lib, kind, workers, interrupt):
    torch.manual_seed(5)
    dataset, (number, every) = getattr(datasets, kind)(40), workers
    make = loaders(lib, dataset, num_workers=number, batch_size=2, shuffle=True, snapshot_every_n_steps=every)
    check(make, interrupt)
    check(make, interrupt, epochs_before=1)


@pytest.mark.parametrize("saved, loaded", [(0, 2), (2, 0), (1, 3), (3, 2)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_map_style_dataset_resumes_with_another_number_of_workers(saved, loaded, shuffle):  # not with torchdata
    def make(workers):
        options = {"shuffle": shuffle, "collate_fn": unchanged, "snapshot_every_n_steps": 4}
        return StatefulDataLoader(datasets.Records(40), 3, num_workers=workers, **options)

    numbers = iter([saved, loaded])
    rest, from_state = resumed(lambda: make(next(numbers)), 6)
    assert from_state == rest and len(rest) == 8


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("interrupt", [0, 1, 10])
def test_shuffling_with_a_generator(lib, workers, interrupt):
    def make():
        return lib.StatefulDataLoader(
            datasets.Records(40),
            batch_size=3,
            shuffle=True,
            num_workers=workers,
            generator=torch.Generator().manual_seed(11),
            collate_fn=unchanged,
        )

    check(make, interrupt)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_batch_is_small_or_dropped(lib, workers, drop_last):
    make = loaders(lib, datasets.Records(23), num_workers=workers, batch_size=5, drop_last=drop_last)
    rest, from_state = resumed(make, 3)
    assert from_state == rest
    assert [len(batch) for batch in from_state] == ([5] if drop_last else [5, 3])


@pytest.mark.parametrize("interrupt", [0, 1, 8])
@pytest.mark.parametrize("style", ["map", "iterable", "generator"])
def test_persistent_workers(lib, style, interrupt):
    dataset = {
        "map": datasets.CountingRecords(40),
        "iterable": datasets.Shards((31, 9)),
        "generator": datasets.GeneratorShards((31, 9)),
    }[style]
    make = loaders(lib, dataset, num_workers=2, batch_size=2, persistent_workers=True)
    check(make, interrupt)
    if style != "map":  # its count continues across epochs, but only in the first loader
        check(make, interrupt, epochs_before=1)


@pytest.mark.parametrize("style", ["map", "iterable"])
def test_workers_that_are_spawned(lib, style):
    dataset = datasets.CountingRecords(12) if style == "map" else datasets.Shards((7, 5))
    check(loaders(lib, dataset, num_workers=2, batch_size=2, multiprocessing_context="spawn"), 3)


@pytest.mark.parametrize("style", ["map", "iterable", "stateless"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_resumed_loader_is_stopped_and_resumed_again(lib, style, every):
    if (lib.name, style) == ("torchdata", "stateless"):
        return  # torchdata ends early, or reports that the dataset has changed
    dataset = {
        "map": datasets.CountingRecords(40),
        "iterable": datasets.Shards((31, 9)),
        "stateless": datasets.StatelessShards((31, 9)),
    }[style]
    make = loaders(lib, dataset, num_workers=2, batch_size=2, snapshot_every_n_steps=every)
    expected, delivered, state = list(make()), [], {}
    for steps in (4, 1, 0, 7, 100):
        loader = make()
        loader.load_state_dict(state)
        iterator = iter(loader)
        delivered += list(itertools.islice(iterator, steps))
        state = loader.state_dict()
    assert delivered == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_back_to_its_own_state(lib, workers):
    loader = loaders(lib, datasets.Shards((31, 9)), num_workers=workers, batch_size=2)()
    iterator = iter(loader)
    first = [next(iterator) for _ in range(3)]
    state = loader.state_dict()
    rest = list(iterator)
    loader.load_state_dict(state)
    assert list(loader) == rest
    loader.load_state_dict({})
    assert list(loader) == first + rest


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("style", ["map", "iterable"])
def test_an_empty_dataset(lib, workers, style):
    dataset = datasets.Records(0) if style == "map" else datasets.Shards((0, 0))
    make = loaders(lib, dataset, num_workers=workers, batch_size=2)
    loader = make()
    iterator = iter(loader)
    state = loader.state_dict()
    assert list(iterator) == []
    loader = make()
    loader.load_state_dict(state)
    assert list(loader) == []


class Late(Held):
    """Sample 2 waits until a worker begins sample 6 or a later one: by then, others have overtaken it."""

    def __getitem__(self, i):
        if i >= 6:
            open(self.file, "w").close()
        return int(super().__getitem__(i))


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("interrupt", [0, 2, 5])
def test_out_of_order_each_sample_comes_once(lib, workers, interrupt, tmp_path):
    files = (tmp_path / f"go {n}" for n in itertools.count())

    def make():
        return lib.StatefulDataLoader(
            Late(10, 2, next(files)), batch_size=None, num_workers=workers, prefetch_factor=1, in_order=False
        )

    loader = make()
    iterator = iter(loader)
    before = [next(iterator) for _ in range(interrupt)]
    state = loader.state_dict()
    rest = list(iterator)
    assert sorted(before + rest) == list(range(10))
    assert before + rest != list(range(10))
    loader = make()
    loader.load_state_dict(state)
    from_state = list(loader)
    if lib.name == "rustloader" or interrupt == 0:  # torchdata guarantees nothing here, and sometimes loses samples
        assert sorted(before + from_state) == list(range(10))


@pytest.mark.parametrize("interrupt", [0, 3, 9])
def test_out_of_order_each_sample_of_an_iterable_dataset_comes_once(lib, interrupt):
    def make():
        dataset = datasets.Shards((12, 5), with_generator=False)
        return lib.StatefulDataLoader(
            dataset, batch_size=None, num_workers=2, prefetch_factor=1, in_order=False, collate_fn=unchanged
        )

    everything = sorted((worker, i) for worker, size in enumerate((12, 5)) for i in range(size))
    loader = make()
    iterator = iter(loader)
    before = [next(iterator) for _ in range(interrupt)]
    state = loader.state_dict()
    rest = list(iterator)
    assert sorted((r["worker"], r["id"]) for r in before + rest) == everything
    loader = make()
    loader.load_state_dict(state)
    from_state = list(loader)
    if lib.name == "rustloader" or interrupt == 0:
        assert sorted((r["worker"], r["id"]) for r in before + from_state) == everything
