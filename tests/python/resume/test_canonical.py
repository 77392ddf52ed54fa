"""A position has one state, however it was reached, and a state before the first `iter()` determines what follows."""

import copy
import os
import signal
import time

import pytest
import torch
from sample_data import as_list
from stateful import datasets
from support import rustloader
from torch.utils.data import Dataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

pytestmark = [pytest.mark.ours, pytest.mark.warns]

N = 44


class Plain(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, i):
        return i, torch.randint(1000, ()).item()


def loader_of(make, workers, **kw):
    return rustloader.StatefulDataLoader(make(), **dict(batch_size=4, num_workers=workers, collate_fn=as_list) | kw)


def plain(value):
    """A copy of a state that `==` can compare."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(plain, value)]
    return bytes(value.numpy()) if isinstance(value, torch.Tensor) else value


DATASETS = {
    "map": lambda: datasets.Records(N),
    "drawing map": lambda: datasets.DrawingRecords(N),
    "stateless": lambda: datasets.StatelessShards((N // 2,) * 2),
    "lazy generator": lambda: datasets.LazyGenerator((N // 2,) * 2),
    "drawing iterator": lambda: datasets.Shards((N // 2,) * 2, draws=True),
}
KINDS = pytest.mark.parametrize("kind", DATASETS)
WORKERS = pytest.mark.parametrize("workers", [0, 2])


@KINDS
@WORKERS
@pytest.mark.parametrize("every", [1, 3, 0])
def test_a_state_does_not_tell_how_its_position_was_reached(kind, workers, every):
    make = DATASETS[kind]
    torch.manual_seed(5)
    loader = loader_of(make, workers, snapshot_every_n_steps=every)
    iterator = iter(loader)
    states, batches = [plain_and_real(loader)], []
    for _ in range(5):
        batches.append(next(iterator))
        states.append(plain_and_real(loader))
    for at in (0, 1, 4):
        resumed = loader
        # Resumed once, and twice.
        for _ in range(2):
            state = states[at][1] if resumed is loader else resumed.state_dict()
            resumed = loader_of(make, workers, snapshot_every_n_steps=every)
            resumed.load_state_dict(state)
            assert plain(resumed.state_dict()) == states[at][0]
            iterator = iter(resumed)
            assert plain(resumed.state_dict()) == states[at][0]
        for place in range(at, 5):
            assert next(iterator) == batches[place]
            assert plain(resumed.state_dict()) == states[place + 1][0], place


class Ending(datasets.GeneratorShards):
    """Takes some time to end; its state is then that of the beginning."""

    def __init__(self, sizes, seconds=0.0):
        super().__init__(sizes)
        self.seconds = seconds

    def records(self):
        yield from super().records()
        time.sleep(self.seconds)
        self.i = 0


def walked(sizes, seconds, step=0.0, state=None):
    """The batches of an epoch, each with the state after it, then the state at the end. A step takes `step` seconds."""
    torch.manual_seed(5)
    loader = loader_of(lambda: Ending(sizes, seconds), len(sizes), batch_size=1)
    if state is not None:
        loader.load_state_dict(state)
    walk = []
    for batch in loader:
        time.sleep(step)
        walk.append((batch, loader.state_dict()))
    # The rest of that state has the next epoch's draws, which differ after a resume.
    return [*walk, ("the end", loader.state_dict()["_snapshot"])]


@pytest.mark.parametrize("sizes", [(1, 3), (3, 1), (2, 2), (0, 2), (2, 0), (1, 4, 2)], ids=str)
def test_a_state_does_not_tell_whether_a_worker_has_reached_its_end(sizes):
    late, early = walked(sizes, 0.2), walked(sizes, 0, step=0.05)
    assert [plain(it) for it in late] == [plain(it) for it in early]
    for at, (_, state) in enumerate(early[:-2]):
        assert [plain(it) for it in walked(sizes, 0, state=state)] == [plain(it) for it in early[at + 1 :]]


def plain_and_real(loader):
    state = loader.state_dict()
    return plain(state), state


@KINDS
def test_a_state_does_not_tell_that_a_worker_was_replaced(kind):
    def states_of(loader, kills):
        iterator = iter(loader)
        states = [plain(loader.state_dict())]
        for step in range(8):
            next(iterator)
            if kills and step in (1, 4):
                os.kill(loader._iterator._workers[step % 2].pid, signal.SIGKILL)
            states.append(plain(loader.state_dict()))
        return states

    torch.manual_seed(5)
    expected = states_of(loader_of(DATASETS[kind], 2, max_restarts=5), False)
    torch.manual_seed(5)
    loader = loader_of(DATASETS[kind], 2, max_restarts=5)
    assert states_of(loader, True) == expected


def test_a_changed_state_changes_nothing_else():
    loader = loader_of(DATASETS["drawing iterator"], 2)
    state = loader_state_after(loader, 2)
    resumed = loader_of(DATASETS["drawing iterator"], 2)
    resumed.load_state_dict(state)
    iter(resumed)
    before = plain(resumed.state_dict())
    for snapshot in resumed.state_dict()["_snapshot"]["_worker_snapshots"].values():
        snapshot["fetcher_state"]["dataset_iter_state"].clear()
    assert plain(resumed.state_dict()) == before


def loader_state_after(loader, steps):
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    return loader.state_dict()


def test_an_early_form_of_a_state_is_read():
    """It stores the state that a worker started from next to the first snapshot."""
    loader = loader_of(DATASETS["lazy generator"], 2)
    state = loader_state_after(loader, 4)
    for number, record in enumerate(state["_rustloader"]["workers"]):
        snapshot = state["_snapshot"]["_worker_snapshots"][f"worker_{number}"]
        record["start"] = {**snapshot, "batches": 0, "samples": 0}
        state["_snapshot"]["_worker_snapshots"][f"worker_{number}"] = {**snapshot, "dataset_state": {"i": 0}}
    resumed = loader_of(DATASETS["lazy generator"], 2)
    resumed.load_state_dict(state)
    assert [*resumed] == [*loader_of(DATASETS["lazy generator"], 2)][4:]


# Before the first `iter()`.

SAMPLERS = {
    "in order": lambda dataset: {},
    "shuffled": lambda dataset: {"shuffle": True},
    "own generator": lambda dataset: {"shuffle": True, "generator": torch.Generator().manual_seed(draw())},
    "subset": lambda dataset: {"sampler": SubsetRandomSampler(range(30))},
    "weighted": lambda dataset: {"sampler": WeightedRandomSampler([1.0] * N, 20)},
    "replacement": lambda dataset: {"sampler": RandomSampler(dataset, replacement=True)},
}


def draw():
    return int(torch.randint(1000, ()))


def program(sampler, workers, persistent, asks, between):
    """Runs two epochs; returns the state, if it `asks` for one, the epochs, and everything else that is drawn."""
    torch.manual_seed(3)
    dataset = Plain()
    loader = loader_of(lambda: dataset, workers, persistent_workers=persistent, **SAMPLERS[sampler](dataset))
    state = None
    if asks:
        state = loader.state_dict()
        assert plain(loader.state_dict()) == plain(state)
    torch.rand(between)
    epochs, drawn = [], []
    for _ in range(2):
        epochs.append(list(map(with_draw, loader)))
        drawn.append(draw())
    return state, epochs, [*drawn, plain(torch.get_rng_state())]


def with_draw(batch):
    # A training step draws too.
    torch.rand(1)
    return batch


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("between", [0, 5])
def test_a_state_before_the_first_iter_says_what_comes(sampler, workers, persistent, between):
    state, epochs, drawn = program(sampler, workers, persistent, True, between)
    _, expected, drawn_without = program(sampler, workers, persistent, False, between)
    if workers:
        assert drawn == drawn_without
    if not between and workers:
        assert epochs == expected
    torch.manual_seed(99)
    dataset = Plain()
    loader = loader_of(lambda: dataset, workers, persistent_workers=persistent, **SAMPLERS[sampler](dataset))
    loader.load_state_dict(state)
    assert plain(loader.state_dict()) == plain(state)
    batches = list(loader)
    # Without workers, samples draw from the program's generator.
    assert (batches if workers else indices(batches)) == (epochs[0] if workers else indices(epochs[0]))


def indices(batches):
    return [[index for index, _ in batch] for batch in batches]


class Reshuffled:
    """A sampler whose state is the number of its epoch, which determines the order."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return N

    def __iter__(self):
        yield from torch.randperm(N, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


@WORKERS
@pytest.mark.parametrize("batch_size", [None, 4])
def test_state_before_first_iter_includes_sampler(workers, batch_size):
    sampler = Reshuffled()
    sampler.epoch = 3
    loader = loader_of(Plain, workers, sampler=sampler, batch_size=batch_size, collate_fn=None)
    state = loader.state_dict()
    resumed = loader_of(Plain, workers, sampler=Reshuffled(), batch_size=batch_size, collate_fn=None)
    resumed.load_state_dict(state)
    orders = [[index.tolist() if batch_size else index for index, _ in it] for it in (loader, resumed)]
    assert orders[0] == orders[1]


def test_a_state_before_the_first_iter_starts_nothing_and_draws_nothing():
    loader = loader_of(DATASETS["drawing map"], 2, shuffle=True)
    before = plain(torch.get_rng_state())
    loader.state_dict()
    assert loader._iterator is None and plain(torch.get_rng_state()) == before


def test_a_copy_of_a_loader_has_draws_of_its_own():
    torch.manual_seed(3)
    loader = loader_of(Plain, 2, shuffle=True)
    loader.state_dict()
    other = copy.copy(loader)
    assert list(loader) != list(other)
