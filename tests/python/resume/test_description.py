"""`describe` describes states of rustloader and torchdata, and says why a malformed one cannot be loaded."""

import collections
import copy
import doctest
import types
import warnings

import pytest
import torch
from support import rustloader

pytestmark = pytest.mark.ours

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchdata.stateful_dataloader import StatefulDataLoader as TorchdataLoader

if rustloader is not None:
    from rustloader.stateful_dataloader.description import describe


class Counter(torch.utils.data.IterableDataset):
    """Counts to 10, with a state of a known size."""

    def __init__(self):
        self.count = 0

    def __iter__(self):
        while self.count < 10:
            self.count += 1
            yield self.count

    def state_dict(self):
        return {"count": self.count, "buffer": b"x" * 5000}

    def load_state_dict(self, state):
        self.count = state["count"]


def own_part(**changes):
    return {
        "version": 1,
        "epoch": 3,
        "base_seed": 12345,
        "delivered": 120,
        "ahead": [],
        "sampler": {
            "kind": "random",
            "length": 16000,
            "batch_size": 32,
            "drop_last": False,
            "start": {"seed": 77},
        },
        "dataset": {"kind": "map", "length": 16000, "stateful": False},
        "seeds": None,
        "workers": None,
    } | changes


def state_without_workers(at=120, finished=False, fetcher=None, dataset=None, **changes):
    return {
        "_index_sampler_state": None,
        "_sampler_iter_state": None,
        "_sampler_iter_yielded": at,
        "_num_yielded": at,
        "_IterableDataset_len_called": None,
        "_shared_seed": None,
        "fetcher_state": fetcher,
        "dataset_state": dataset,
        "_iterator_finished": finished,
        "_rustloader": own_part(**changes),
    }


def snapshot(worker, dataset=None, iterator=None, ended=False):
    return {
        "worker_id": worker,
        "dataset_state": dataset,
        "fetcher_state": {"fetcher_ended": ended, "dataset_iter_state": iterator},
    }


def state_with_workers(snapshots, at=120, steps=0, finished=False, **changes):
    return {
        "_snapshot": {
            "_snapshot_step": at,
            "_last_yielded_worker_id": 1,
            "_main_snapshot": {
                "_num_workers": len(snapshots),
                "_sampler_iter_state": None,
                "_index_sampler_state": None,
                "_sampler_iter_yielded": at,
                "_IterableDataset_len_called": None,
                "_shared_seed": None,
                "_base_seed": 12345,
            },
            "_worker_snapshots": {f"worker_{one['worker_id']}": one for one in snapshots},
        },
        "_steps_since_snapshot": steps,
        "_iterator_finished": finished,
        "_rustloader": own_part(**{"delivered": at + steps} | changes),
    }


RESHARDED = {"rank": 0, "num_replicas": 2, "epoch": 2, "consumed": 64}


def line(state, name):
    """The text of the line with this name, or None if there is no such line."""
    texts = [text.removeprefix(f"{name}: ") for text in describe(state).splitlines() if text.startswith(f"{name}: ")]
    assert len(texts) <= 1
    return texts[0] if texts else None


def test_a_state_without_workers():
    assert describe(state_without_workers()) == "\n".join(
        [
            "written by: StatefulDataLoader of rustloader, without workers",
            "position: epoch 3, 120 batches delivered of 500; the next one is batch 120",
            "sampler: RandomSampler, 16,000 samples in batches of 32, order from seed 77",
            "dataset: map-style, 16,000 samples, without a state",
            "random numbers: base seed 12345",
        ]
    )


def test_a_state_with_workers_and_states_of_the_dataset():
    workers = [
        {"delivered": 60, "replay": 0, "batches": 60, "samples": 0},
        {"delivered": 1, "replay": 2, "batches": 60, "samples": 0},
    ]
    snapshots = [snapshot(0, dataset=b"x" * 5000), snapshot(1, iterator=b"x" * 2_000_000)]
    state = state_with_workers(
        snapshots,
        workers=workers,
        sampler={"kind": "none", "length": None, "batch_size": 32, "drop_last": True, "start": None},
        dataset={"kind": "iterable", "length": None, "stateful": True},
        seeds={"base_seed": 9, "epoch": 4},
    )
    assert describe(state) == "\n".join(
        [
            "written by: StatefulDataLoader of rustloader, with 2 workers",
            "position: epoch 3, 120 batches delivered; the next one is batch 120",
            "sampler: none in batches of 32, without an incomplete last batch",
            "dataset: iterable, with a state",
            "random numbers: base seed 12345; seed_by with base seed 9, epoch 4",
            "worker 0: state of the dataset: 5.0 kB",
            "worker 1: state of the iterator: 2.0 MB, 2 batches to fetch again",
        ]
    )


@pytest.mark.parametrize(
    "changes, at, words",
    [
        ({}, 499, "499 batches delivered of 500; the next one is batch 499"),
        ({}, 500, "500 batches delivered of 500; the loop had not ended, and the next iter() yields no batches"),
        ({"drop_last": True, "length": 16001}, 500, "500 batches delivered of 500; the loop had not ended"),
        ({"batch_size": None, "length": 500}, 1, "1 batch delivered of 500; the next one is batch 1"),
        # The length of a batch sampler counts batches.
        ({"kind": "other"}, 1, "1 batch delivered; the next one is batch 1"),
        ({"kind": "distributed", "start": RESHARDED}, 1, "1 batch delivered; the next one is batch 1"),
    ],
)
@pytest.mark.parametrize("workers", [False, True])
def test_position_counts_batches(changes, at, words, workers):
    sampler = own_part()["sampler"] | changes
    if workers:
        state = state_with_workers([snapshot(0)], at=at - 1, steps=1, sampler=sampler)
    else:
        state = state_without_workers(at, sampler=sampler, delivered=at)
    assert line(state, "position").startswith(f"epoch 3, {words}")


@pytest.mark.parametrize(
    "sampler, words",
    [
        ({"kind": "sequential", "length": 1}, "SequentialSampler, 1 sample"),
        (
            {"kind": "random", "length": 2, "start": {"generator": torch.zeros(8)}},
            "RandomSampler, 2 samples, order from the state of its generator",
        ),
        ({"kind": "stateful"}, "stateful"),
        ({"kind": "of a later version"}, "of a later version"),
        (
            {"kind": "distributed", "length": 9, "start": RESHARDED},
            "DistributedSampler, 9 samples, rank 0 of 2, sampler epoch 2, after 64 samples before the reshard",
        ),
    ],
)
def test_samplers(sampler, words):
    assert (
        line(
            state_without_workers(
                ahead=[122],
                sampler=sampler,
            ),
            "sampler",
        )
        == words
    )


def test_state_of_a_later_version():
    text = describe(state_without_workers(version=7))
    assert text.startswith("cannot be loaded: the state has format 7, and this version of rustloader reads format 1")


def test_state_that_cannot_be_pickled_has_no_size():
    state = state_without_workers(dataset=lambda: None)
    assert line(state, "main process") == "state of the dataset: cannot be pickled"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_states_of_torchdata(workers):
    """With workers, torchdata draws its sampler ahead; the state holds the sampler's state at the last snapshot."""
    loader = TorchdataLoader(range(20), batch_size=3, shuffle=True, num_workers=workers, snapshot_every_n_steps=2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    kind = "with 2 workers" if workers else "without workers"
    assert line(state, "written by") == f"StatefulDataLoader of torchdata, {kind}"
    assert line(state, "position") == "3 batches delivered; the next one is batch 3"
    assert line(state, "dataset") is None
    assert sum(1 for _ in batches) == 4
    assert "the epoch has ended" in line(loader.state_dict(), "position")


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_states_of_torchdata_of_a_dataset_with_a_state(workers):
    loader = TorchdataLoader(Counter(), batch_size=4, num_workers=workers)
    batches = list(loader)
    for name in ["worker 0", "worker 1"] if workers else ["main process"]:
        assert line(loader.state_dict(), name) == "state of the dataset: 5.0 kB, at its end"
    assert len(batches) == 3 * max(workers, 1)


@pytest.mark.parametrize("value", [None, [], "state", 3, b"", object()])
def test_other_types_are_type_errors(value):
    with pytest.raises(TypeError, match=r"describe\(\) takes the dict that state_dict\(\) returned, got "):
        describe(value)


def test_other_dicts():
    assert describe({}) == "an empty state: load_state_dict() makes the loader start from scratch"
    assert describe({"a": 1}).startswith("cannot be loaded: the state has no '_iterator_finished': load what")
    for kind in (collections.OrderedDict, collections.UserDict, types.MappingProxyType):
        assert describe(kind(state_without_workers())) == describe(state_without_workers())


@pytest.mark.parametrize("state", [state_without_workers(), state_with_workers([snapshot(0)])])
def test_state_is_not_changed(state):
    before = copy.deepcopy(state)
    describe(state)
    assert state == before


@pytest.mark.parametrize("path", ["_iterator_finished", "_snapshot/_snapshot_step", "_rustloader/version"])
def test_damage_is_named(path):
    class Hostile:
        def __repr__(self):
            raise RuntimeError("no text")

    state = part = state_with_workers([snapshot(0), snapshot(1)])
    *parents, last = path.split("/")
    for name in parents:
        part = part[name]
    del part[last]
    assert describe(state).startswith(f"cannot be loaded: the state has no {last!r}")
    part[last] = "x"
    assert describe(state).startswith(f"cannot be loaded: the state's {last!r} must be of type")
    part[last] = Hostile()
    assert describe(state) == "cannot be described: no text"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_states_of_a_loader(workers, shuffle):
    loader = rustloader.StatefulDataLoader(range(20), batch_size=3, shuffle=shuffle, num_workers=workers)
    states = [loader.state_dict()]
    for _ in loader:
        states.append(loader.state_dict())
    states.append(loader.state_dict())
    positions = [f"{k} batch{'es' * (k != 1)} delivered of 7; the next one is batch {k}" for k in range(7)]
    positions.append("7 batches delivered of 7; the loop had not ended, and the next iter() yields no batches")
    positions.append("7 batches delivered of 7; the epoch has ended, and the next iter() begins another one")
    assert [line(state, "position") for state in states] == [f"epoch 0, {position}" for position in positions]
    for state in states:
        assert line(state, "written by").endswith("with 2 workers" if workers else "without workers")
        name = "RandomSampler" if shuffle else "SequentialSampler"
        assert line(state, "sampler").startswith(f"{name}, 20 samples in batches of 3")
        assert line(state, "dataset") == "map-style, 20 samples, without a state"
    assert ("order from seed" in line(states[1], "sampler")) is shuffle
    assert line(states[-1], "next epoch").startswith("base seed ")


def test_the_example_of_the_docstring():
    (test,) = doctest.DocTestFinder(recurse=False).find(describe, "describe", globs={"rustloader": rustloader})
    assert test.examples
    output = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=output.append)
    assert not output, "".join(output)
