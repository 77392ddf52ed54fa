"""A position has one state, however it was reached, and a state before the first `iter()` determines what follows."""

import copy
import os
import signal
import time

import pytest
import torch
from resume_support import plain
from sample_data import as_list
from stateful import datasets
from support import rustloader
from torch.utils.data import Dataset

pytestmark = [pytest.mark.ours, pytest.mark.warns]

N = 44


class Plain(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, i):
        return i, torch.randint(1000, ()).item()


def loader_of(make, workers, **kw):
    return rustloader.StatefulDataLoader(make(), **dict(batch_size=4, num_workers=workers, collate_fn=as_list) | kw)


DATASETS = {
    "map": lambda: datasets.Records(N),
    "drawing map": lambda: datasets.DrawingRecords(N),
    "stateless": lambda: datasets.StatelessShards((N // 2,) * 2),
    "lazy generator": lambda: datasets.LazyGenerator((N // 2,) * 2),
    "drawing iterator": lambda: datasets.Shards((N // 2,) * 2, draws=True),
}
KINDS = pytest.mark.parametrize("kind", DATASETS)
WORKERS = pytest.mark.parametrize("workers", [0, 2])


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
