"""A loader that is stopped anywhere and resumed elsewhere delivers the rest, then whole epochs, as torchdata's does."""

import copy
import itertools

import pytest
import torch
from pairwise import pairs
from sample_data import Held
from stateful import datasets
from stateful.datasets import unchanged

pytestmark = pytest.mark.ours

SIZE, SIZES = 40, (43, 0, 25)
# (num_workers, snapshot_every_n_steps)
STARTS = [(0, 1), (0, 10), (3, 1), (3, 2), (3, 10), (3, 0)]
# (epochs before, number of batches that are taken before the state; None: iter() has not been called)
STOPS = [(0, None), (0, 0), (0, 5), (0, 1000), (1, None), (1, 5)]


def resumed(make, stop):
    """Returns the batches before and after the state, those of the next epoch, and the two epochs of another loader."""
    epochs_before, steps = stop
    loader = make()
    for _ in range(epochs_before):
        list(loader)
    iterator = None if steps is None else iter(loader)
    first = list(itertools.islice(iterator, take_all_but_the_end(make, steps))) if steps else []
    state = loader.state_dict()
    rest = list(loader if iterator is None else iterator)
    following = list(loader)
    loader = make()
    loader.load_state_dict(state)
    return first, rest, following, list(loader), list(loader)


def take_all_but_the_end(make, steps):
    """At most the number of batches of an epoch, so that the loop does not find its end."""
    return min(steps, len(list(make()))) if steps > 5 else steps


DATASETS = {
    "map": datasets.Records(SIZE),
    "drawing map": datasets.DrawingRecords(SIZE),
    "counting map": datasets.CountingRecords(SIZE),
    "empty map": datasets.Records(0),
    "iterable": datasets.Shards(SIZES),
    "iterable without generator": datasets.Shards(SIZES, with_generator=False),
    "drawing iterable": datasets.Shards(SIZES, draws=True),
    "empty iterable": datasets.Shards((0, 0, 0)),
    "generator": datasets.GeneratorShards(SIZES),
    "lazy generator": datasets.LazyGenerator(SIZES),
    "restarting generator": datasets.Restarting(SIZES),
    "stateless": datasets.StatelessShards(SIZES),
    "own iterator": datasets.OwnIterator(43),
    "both stateful": datasets.BothStateful(43),
    "growing state": datasets.GrowingState(43),
}


def is_different(lib, kind, workers, stop):
    """Whether torchdata does something else, or rustloader gives no guarantee."""
    epochs_before, steps = stop
    at_end = steps == 1000 or (epochs_before and steps is None)
    if lib.name == "rustloader":
        # It would be the state of an iterator, or of a worker's dataset, and rustloader makes none for it.
        return "drawing" in kind and stop == (0, None)
    return (
        # It returns the dataset's own dictionary, which keeps growing.
        (kind == "growing state" and not workers)
        # It draws another base seed for the next epoch's workers.
        or ("drawing" in kind and workers and at_end)
        # It asks workers for more after their dataset has ended.
        or (kind == "restarting generator" and workers and at_end)
        # It loads the state and iterates twice; it takes nothing from the first iterator.
        or (kind == "lazy generator" and not workers and at_end)
    )


@pairs(kind=list(DATASETS), stop=STOPS, start=STARTS, batch_size=[None, 3, 7], persistent=[False, True])
@pytest.mark.filterwarnings("ignore:an epoch of 0 batches:UserWarning")
def test_rest_and_next_epoch_follow_state(lib, kind, stop, start, batch_size, persistent):
    workers, every = start
    if is_different(lib, kind, workers, stop):
        return
    torch.manual_seed(3)

    def make():
        return lib.StatefulDataLoader(
            copy.deepcopy(DATASETS[kind]),
            batch_size=batch_size,
            num_workers=workers,
            snapshot_every_n_steps=every,
            persistent_workers=persistent and workers > 0,
            collate_fn=unchanged,
        )

    _, rest, following, from_state, next_epoch = resumed(make, stop)
    assert bool(rest) == (stop[1] != 1000 and not kind.startswith("empty"))
    assert from_state == rest
    assert len(next_epoch) == len(following)
    if "drawing" not in kind:
        assert next_epoch == following


@pytest.mark.parametrize("persistent", [False, True])
def test_state_after_end_has_states_of_workers(lib, persistent):
    options = {"num_workers": 2, "collate_fn": unchanged, "persistent_workers": persistent}
    loader = lib.StatefulDataLoader(datasets.CountingRecords(12), 3, **options)
    list(loader)
    snapshots = loader.state_dict()["_snapshot"]["_worker_snapshots"]
    assert [snapshots[f"worker_{worker}"]["dataset_state"] for worker in (0, 1)] == [{"made": 6}] * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_last_load_counts(lib, workers):
    loader = lib.StatefulDataLoader(datasets.Shards((31, 9)), 2, num_workers=workers, collate_fn=unchanged)
    states, expected = [], []
    for batch in loader:
        expected.append(batch)
        states.append(copy.deepcopy(loader.state_dict()))
    # Before iter(), in mid-epoch, and after it.
    for loaded in ([5, 1], [7, "next", 3], [4, "iter", "iter", "whole"]):
        for step in loaded:
            if step == "next":
                next(iter(loader))
            elif step == "iter":
                iterator = iter(loader)
                del iterator
            elif step == "whole":
                loader.load_state_dict({})
            else:
                loader.load_state_dict(states[step])
        assert list(loader) == expected[0 if step == "whole" else step + 1 :]


@pytest.mark.parametrize("workers", [0, 2])
def test_second_iter_after_load_begins_whole_epoch(lib, workers):
    loader = lib.StatefulDataLoader(datasets.Records(9), num_workers=workers, collate_fn=unchanged)
    expected = list(loader)
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(loader.state_dict())
    iter(loader)
    assert list(loader) == expected


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
