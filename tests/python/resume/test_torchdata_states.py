"""The contents of a state: torchdata's keys and values, which programs read and write."""

import time

import pytest
import torch
from stateful import datasets, libraries
from stateful.datasets import unchanged
from support import run_script

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


def outcome(name, kind, workers):
    """The error of iter() of such a loader, or else that of next()."""
    lib = libraries.library(name)
    dataset = {
        "map": datasets.Records(30),
        "stateful map": datasets.CountingRecords(30),
        "iterable": datasets.Shards((20, 10)),
        "failing iter": FailingIteration((3, 3)),
        "failing load": FailingLoad(9),
    }[kind]
    loader = lib.StatefulDataLoader(
        dataset, num_workers=workers, worker_init_fn=None if "failing" in kind else fail_at_start
    )
    if kind == "failing load":
        iterator = stopped(loader, 2)
        loader.load_state_dict(loader.state_dict())
        del iterator
    where = "iter"
    try:
        iterator = iter(loader)
        where = "next"
        next(iterator)
    except ZeroDivisionError as error:
        return f"{where}: {str(error).splitlines()[-1]}"
    return "no error"


@pytest.mark.parametrize(
    "kind, workers, expected",
    [
        ("map", 2, "iter: ZeroDivisionError: worker_init_fn has failed"),
        ("stateful map", 2, "iter: ZeroDivisionError: worker_init_fn has failed"),
        ("iterable", 2, "iter: ZeroDivisionError: worker_init_fn has failed"),
        ("failing iter", 0, "iter: iter has failed"),
        ("failing iter", 2, "iter: ZeroDivisionError: iter has failed"),
        ("failing load", 0, "iter: load_state_dict has failed"),
        ("failing load", 2, "iter: ZeroDivisionError: load_state_dict has failed"),
    ],
)
def test_an_error_at_the_start_surfaces_in_iter(lib, kind, workers, expected):
    if lib.name == "rustloader" and "failing" in kind and workers:
        expected = expected.replace("iter:", "next:")  # iter() waits for the workers only if there is a worker_init_fn
    # In a process of its own: torchdata's loader leaves its workers behind.
    status, out, err = run_script(f"""
        import multiprocessing, os, warnings
        warnings.simplefilter("ignore")
        from test_torchdata_states import outcome
        print(outcome({lib.name!r}, {kind!r}, {workers}), flush=True)
        for worker in multiprocessing.active_children():
            worker.kill()
        os._exit(0)
    """)
    assert (status, out) == (0, f"{expected}\n"), err


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


class Ends(torch.utils.data.IterableDataset):
    """Worker 0 has 3 samples, worker 1 has thousands."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info().id
        return iter(range(3) if worker == 0 else range(3, 5000))


def test_worker_that_ended_out_of_order(lib):
    loader = lib.StatefulDataLoader(Ends(), num_workers=2, in_order=False)
    delivered = []
    for batch in loader:
        delivered += batch.tolist()
        time.sleep(0.001)
        state = loader.state_dict()
        ended = [part["fetcher_state"]["fetcher_ended"] for part in worker_states(state)]
        if ended[0] or len(delivered) == 4000:
            break
    assert ended == [True, False]
    if lib.name == "rustloader":
        resumed = lib.StatefulDataLoader(Ends(), num_workers=2, in_order=False)
        resumed.load_state_dict(state)
        delivered += [sample for batch in resumed for sample in batch.tolist()]
        assert sorted(delivered) == [*range(5000)]


@pytest.mark.parametrize("workers", [0, 2])
def test_partial_batch_ends_dataset_without_state(lib, workers):
    loader = lib.StatefulDataLoader(datasets.StatelessShards((3, 4)), batch_size=2, num_workers=workers)
    stopped(loader, 4 if workers else 2)
    state = loader.state_dict()
    ended = [part["fetcher_state"]["fetcher_ended"] for part in worker_states(state)]
    assert ended == ([True, False] if workers else [True])
    resumed = lib.StatefulDataLoader(datasets.StatelessShards((3, 4)), batch_size=2, num_workers=workers)
    resumed.load_state_dict(state)
    assert not [*resumed]


@pytest.mark.parametrize("sampler", ["default", "list", "SamplerWithState"])
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_yielded_before_and_after_iter(lib, sampler, workers):
    makers = {"default": None, "list": [*range(9)], "SamplerWithState": datasets.SamplerWithState(9)}
    loader = lib.StatefulDataLoader(range(9), batch_size=2, sampler=makers[sampler], num_workers=workers)
    for steps in (None, 0, 1, 5):
        if steps is not None:
            stopped(loader, steps)
        state = loader.state_dict()
        state = state["_snapshot"]["_main_snapshot"] if workers else state
        assert state["_sampler_iter_state"]["samples_yielded"] == min(2 * (steps or 0), 9)
