"""`describe` describes states of rustloader and torchdata, and says why a malformed one cannot be loaded."""

import collections
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
    from rustloader.stateful_dataloader.schema import DatasetState, SamplerState, State
    from rustloader.workers.snapshots import WorkerStart


SAMPLER = {"kind": "random", "length": 16000, "batch_size": 32, "drop_last": False, "start": {"seed": 77}}
RESHARDED = {"rank": 0, "num_replicas": 2, "epoch": 2, "consumed": 64}


def state_of(at=120, sampler=None, workers=None, **changes):
    """The state of a loader after `at` batches; `workers` are the states of its workers."""
    values = {
        "sampler": SamplerState(**SAMPLER | (sampler or {})),
        "dataset": DatasetState("map", 16000, False),
        "workers": workers or [WorkerStart()],
        "num_workers": len(workers or []),
        "last_worker": len(workers or []) - 1,
        "has_records": True,
        "base_seed": 12345,
        "epoch": 3,
    }
    return State(**{"low": at, "yielded": at} | values | changes).to_torchdata()


def line(state, name):
    """The text of the line with this name, or None if there is no such line."""
    texts = [text.removeprefix(f"{name}: ") for text in describe(state).splitlines() if text.startswith(f"{name}: ")]
    assert len(texts) <= 1
    return texts[0] if texts else None


def test_a_state_of():
    assert describe(state_of()).splitlines() == [
        "written by: StatefulDataLoader of rustloader, without workers",
        "position: epoch 3, 120 batches delivered of 500; the next one is batch 120",
        "sampler: RandomSampler, 16,000 samples in batches of 32, order from seed 77",
        "dataset: map-style, 16,000 samples, without a state",
        "random numbers: base seed 12345",
    ]


def test_a_state_with_workers_and_states_of_the_dataset():
    state = state_of(
        workers=[WorkerStart(b"x" * 5000), WorkerStart(None, b"x" * 2_000_000, replay=2), WorkerStart(7, ended=True)],
        sampler={"kind": "none", "length": None, "drop_last": True, "start": None},
        dataset=DatasetState("iterable", None, True),
        seeds=(9, 4),
        yielded=122,
        ahead=(121, 125),
    )
    assert describe(state).splitlines() == [
        "written by: StatefulDataLoader of rustloader, with 3 workers",
        "position: epoch 3, 122 batches delivered; the next one is batch 120",
        "ahead: 121, 125 (delivered already, in_order=False)",
        "sampler: none in batches of 32, without an incomplete last batch",
        "dataset: iterable, with a state",
        "random numbers: base seed 12345; seed_by with base seed 9, epoch 4",
        "worker 0: state of the dataset: 5.0 kB",
        "worker 1: state of the iterator: 2.0 MB, 2 batches to fetch again",
        "worker 2: state of the dataset: 5 B, at its end",
    ]


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
    state = state_of(at, changes, [WorkerStart()] * workers)
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
    assert line(state_of(sampler={"batch_size": None, "start": None} | sampler), "sampler") == words


def test_state_of_a_later_version():
    state = state_of()
    state["_rustloader"]["version"] = 7
    text = describe(state)
    assert text.startswith("cannot be loaded: the state has format 7, and this version of rustloader reads format 1")


def test_state_that_cannot_be_pickled_has_no_size():
    state = state_of(workers=[WorkerStart(lambda: None)], num_workers=0)
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


@pytest.mark.parametrize("value", [None, [], "state", 3, b"", object()])
def test_other_types_are_type_errors(value):
    with pytest.raises(TypeError, match=r"describe\(\) takes the dict that state_dict\(\) returned, got "):
        describe(value)


def test_other_dicts():
    assert describe({}) == "an empty state: load_state_dict() makes the loader start from scratch"
    assert describe({"a": 1}).startswith("cannot be loaded: the state has no '_iterator_finished': load what")
    for kind in (collections.OrderedDict, collections.UserDict, types.MappingProxyType):
        assert describe(kind(state_of())) == describe(state_of())


@pytest.mark.parametrize("path", ["_iterator_finished", "_snapshot/_snapshot_step", "_rustloader/version"])
def test_damage_is_named(path):
    class Hostile:
        def __repr__(self):
            raise RuntimeError("no text")

    state = part = state_of(workers=[WorkerStart()] * 2)
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
