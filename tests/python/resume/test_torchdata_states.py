"""The contents of a state: torchdata's keys and values, which programs read and write."""

import pytest
import torch
from stateful import datasets
from stateful.datasets import unchanged

from rustloader.stateful_dataloader import StatefulDataLoader

pytestmark = pytest.mark.ours


def worker_states(state):
    """The workers' states in order of worker ID; without workers, the loader's own state."""
    if "_snapshot" not in state:
        return [state]
    return [
        state["_snapshot"]["_worker_snapshots"][f"worker_{i}"]
        for i in range(len(state["_snapshot"]["_worker_snapshots"]))
    ]


def stopped(loader, steps):
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    return iterator


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_is_its_own_iterator_has_its_state_once(lib, workers):
    loader = lib.StatefulDataLoader(datasets.OwnIterator(10), num_workers=workers)
    iterator = stopped(loader, 2)
    for state in worker_states(loader.state_dict()):
        assert state["dataset_state"] is None
        assert set(state["fetcher_state"]["dataset_iter_state"]) == {"i", "iter_calls"}
    del iterator
    loader = lib.StatefulDataLoader(datasets.BothStateful(10), num_workers=workers)
    iterator = stopped(loader, 2)
    for state in worker_states(loader.state_dict()):
        assert state["dataset_state"] == {"epochs": 1}
        assert set(state["fetcher_state"]["dataset_iter_state"]) == {"i"}
    del iterator


def test_a_program_may_write_into_a_state(lib):
    """accelerate does this to take back a batch that it has read ahead."""
    loader = lib.StatefulDataLoader(datasets.Records(20), batch_size=2, collate_fn=unchanged)
    iterator = stopped(loader, 3)
    state = loader.state_dict()
    rest = list(iterator)
    state["_sampler_iter_yielded"] -= 1
    state["_num_yielded"] -= 1
    if state["_sampler_iter_state"] is not None:
        state["_sampler_iter_state"]["samples_yielded"] -= 2
    loader = lib.StatefulDataLoader(datasets.Records(20), batch_size=2, collate_fn=unchanged)
    loader.load_state_dict(state)
    assert [[sample["id"] for sample in batch] for batch in loader] == [[4, 5], *([s["id"] for s in b] for b in rest)]


class FailingIteration(datasets.Shards):
    def __iter__(self):
        raise ZeroDivisionError("iter has failed")


class FailingLoad(datasets.CountingRecords):
    def load_state_dict(self, state):
        raise ZeroDivisionError("load_state_dict has failed")


def fail_at_start(_):
    raise ZeroDivisionError("worker_init_fn has failed")


@pytest.mark.parametrize(
    "dataset", [datasets.Records(9), datasets.CountingRecords(9), datasets.Shards((9, 9)), FailingIteration((3, 3))]
)
def test_error_of_worker_init_fn_is_raised_by_iter(dataset):
    """As by torchdata's loader, whose workers then stay behind."""
    with pytest.raises(ZeroDivisionError, match="worker_init_fn has failed"):
        iter(StatefulDataLoader(dataset, num_workers=2, worker_init_fn=fail_at_start))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset, text", [(FailingIteration((3, 3)), "iter"), (FailingLoad(9), "load_state_dict")])
def test_error_of_start_is_raised_once_workers_have_begun(dataset, text, workers):
    """`iter` waits for the workers only if there is a worker_init_fn."""
    loader = StatefulDataLoader(dataset, num_workers=workers)
    if text == "load_state_dict":
        stopped(loader, 2)
        loader.load_state_dict(loader.state_dict())
    with pytest.raises(ZeroDivisionError, match=f"{text} has failed"):
        next(iter(loader))


def test_the_protocol(lib):
    assert isinstance(lib.StatefulDataLoader(datasets.Records(3)), lib.Stateful)
    assert isinstance(datasets.CountingRecords(3), lib.Stateful)
    assert not isinstance(datasets.Records(3), lib.Stateful)
    assert not isinstance(torch.utils.data.DataLoader(datasets.Records(3)), lib.Stateful)
    loader = lib.StatefulDataLoader(datasets.Records(7), 2, collate_fn=unchanged, snapshot_every_n_steps=3)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert loader.snapshot_every_n_steps == 3 and len(loader) == 4


@pytest.mark.parametrize("kind", ["CountedIterations", "OwnIterator"])
@pytest.mark.parametrize("workers", [0, 2])
def test_state_after_iter_has_its_effect(lib, kind, workers):
    def calls(loader):
        iter(loader)
        state = loader.state_dict()
        states = [part["dataset_state"] or part["fetcher_state"]["dataset_iter_state"] for part in worker_states(state)]
        return state, [part["iter_calls"] for part in states]

    dataset = getattr(datasets, kind)(20)
    state, first = calls(lib.StatefulDataLoader(dataset, num_workers=workers))
    resumed = lib.StatefulDataLoader(dataset, num_workers=workers)
    resumed.load_state_dict(state)
    # A worker has a copy of the dataset, whose iterator applies the loaded place alone.
    again = 1 if workers and kind == "OwnIterator" else 2
    assert (first, calls(resumed)[1]) == ([1] * max(workers, 1), [again] * max(workers, 1))
