"""`describe` describes states of rustloader and torchdata, and never fails on a malformed one."""

import collections
import copy
import doctest
import random
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


# A rank whose epoch was resharded at batch 10: each of the 4 ranks has 129 of the 515 remaining samples.
RESHARDED = {
    "rank": 1,
    "num_replicas": 4,
    "epoch": 2,
    "seed": 0,
    "dataset_length": 2000,
    "consumed": 1485,
    "first": 10,
    "drop_last": False,
}


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
            "sampler: RandomSampler, 16,000 indices in batches of 32, order from seed 77",
            "dataset: map-style, 16,000 samples, without a state",
            "random numbers: base seed 12345",
        ]
    )


def test_a_state_with_workers_and_states_of_the_dataset():
    workers = [
        {"delivered": 60, "replay": 0, "batches": 60, "samples": 0},
        {"delivered": 1, "replay": 2, "batches": 60, "samples": 0},
    ]
    snapshots = [snapshot(0, dataset=b"x" * 5000), snapshot(1, iterator=b"x" * 2_000_000, ended=True)]
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
            "sampler: none (the dataset is iterable) in batches of 32, without an incomplete last batch",
            "dataset: iterable, with a state",
            "random numbers: base seed 12345; seed_by with base seed 9, epoch 4",
            "worker 0: state of the dataset: 5.0 kB",
            "worker 1: state of the iterator: 2.0 MB, 2 batches to fetch again, at its end",
        ]
    )


@pytest.mark.parametrize(
    "changes, at, words",
    [
        ({}, 499, "499 batches delivered of 500; the next one is batch 499"),
        (
            {},
            500,
            "500 batches delivered of 500; the loop had not ended, and the next iter() yields no batches",
        ),
        ({"drop_last": False, "length": 16001}, 500, "500 batches delivered of 501; the next one is batch 500"),
        ({"drop_last": True, "length": 16001}, 500, "500 batches delivered of 500; the loop had not ended"),
        ({"batch_size": None, "length": 500}, 1, "1 batch delivered of 500; the next one is batch 1"),
        ({"batch_size": "many"}, 1, "1 batch delivered; the next one is batch 1"),
        ({"batch_size": 0}, 1, "1 batch delivered; the next one is batch 1"),
        ({"length": None}, 1, "1 batch delivered; the next one is batch 1"),
        # The length of a batch sampler counts batches.
        ({"kind": "other"}, 1, "1 batch delivered; the next one is batch 1"),
        ({"kind": "stateful"}, 1, "1 batch delivered; the next one is batch 1"),
        ({"kind": "stateful", "batch_size": None}, 1, "1 batch delivered of 16,000; the next one is batch 1"),
        ({"kind": "distributed", "start": RESHARDED}, 1, "1 batch delivered of 15; the next one is batch 1"),
        (
            {"kind": "distributed", "start": RESHARDED | {"drop_last": True}, "drop_last": True},
            1,
            "1 batch delivered of 14;",
        ),
        ({"kind": "distributed", "start": RESHARDED | {"consumed": 10**6}}, 1, "1 batch delivered of 10; the next"),
        (
            {"kind": "distributed", "start": RESHARDED | {"first": None}},
            1,
            "1 batch delivered; the next one is batch 1",
        ),
        (
            {"kind": "distributed", "start": RESHARDED | {"num_replicas": 0}},
            1,
            "1 batch delivered; the next one is batch",
        ),
    ],
)
@pytest.mark.parametrize("workers", [False, True])
def test_the_position_among_all_batches(changes, at, words, workers):
    sampler = own_part()["sampler"] | changes
    if workers:
        state = state_with_workers([snapshot(0)], at=at - 1, steps=1, sampler=sampler)
    else:
        state = state_without_workers(at, sampler=sampler, delivered=at)
    assert line(state, "position").startswith(f"epoch 3, {words}")


def test_an_epoch_that_has_ended_says_what_comes_next():
    state = state_without_workers(500, finished=True, next={"base_seed": 5, "sampler": {"seed": 6}})
    ended = "epoch 3, 500 batches delivered of 500; the epoch has ended, and the next iter() begins another one"
    assert line(state, "position") == ended
    assert line(state, "next epoch") == "base seed 5, order from seed 6"


def test_a_position_that_a_program_has_moved():
    """accelerate subtracts the batches that it has read ahead."""
    state = state_without_workers()
    state["_sampler_iter_yielded"] -= 1
    assert line(state, "position").endswith("the next one is batch 119 (edited: it was batch 120)")


@pytest.mark.parametrize(
    "ahead, words",
    [
        ([], None),
        ([122], "batch 122 was delivered already (in_order=False)"),
        (
            list(range(121, 129)),
            "batches 121, 122, 123, 124, 125, 126, 127, 128 were delivered already (in_order=False)",
        ),
        (list(range(121, 131)), "batches 121, 122, 123, 124, 125, 126, 127, 128 and 2 more were delivered already (in"),
    ],
)
def test_batches_ahead_of_the_position(ahead, words):
    text = line(state_without_workers(ahead=ahead), "ahead")
    assert text is None if words is None else text.startswith(words)


@pytest.mark.parametrize(
    "sampler, words",
    [
        ({"kind": "sequential", "length": 1}, "SequentialSampler, 1 index"),
        (
            {"kind": "random", "start": {"generator": torch.zeros(8)}},
            "RandomSampler, order from the state of its generator",
        ),
        ({"kind": "subset", "start": {}}, "SubsetRandomSampler"),
        ({"kind": "weighted"}, "WeightedRandomSampler"),
        ({"kind": "stateful"}, "one with a state"),
        ({"kind": "other", "length": 7}, "one without a state, iterated again up to the position, length 7"),
        ({"kind": "of a later version"}, "'of a later version'"),
        (
            {"kind": "distributed", "start": {"rank": 1, "num_replicas": 4, "epoch": 2, "seed": 0, "consumed": 0}},
            "DistributedSampler, rank 1 of 4, sampler epoch 2",
        ),
        (
            {"kind": "distributed", "start": {"rank": 0, "num_replicas": 2, "epoch": 2, "seed": 0, "consumed": 64}},
            "DistributedSampler, rank 0 of 2, sampler epoch 2, after 64 samples delivered before the reshard",
        ),
    ],
)
def test_samplers(sampler, words):
    assert line(state_without_workers(sampler=sampler), "sampler") == words


def test_the_states_of_a_sampler():
    state = state_without_workers()
    state["_sampler_iter_state"] = {"samples_yielded": 3840, "sampler_iter_state": {"yielded": 3840}}
    assert line(state, "sampler's state").startswith("_sampler_iter_state, ")
    assert line(state, "sampler's state").endswith(" B, 3,840 samples drawn")
    state["_sampler_iter_state"] = {"samples_yielded": 3840}
    assert line(state, "sampler's state") is None
    state = state_with_workers([snapshot(0)])
    state["_snapshot"]["_main_snapshot"]["_index_sampler_state"] = b"x" * 3000
    assert line(state, "sampler's state") == "_index_sampler_state, 3.0 kB"


def test_a_state_of_a_later_version():
    words = "StatefulDataLoader of rustloader in format 7, which is newer than this rustloader's, 1, without workers"
    assert line(state_without_workers(version=7), "written by") == words


def test_keys_of_a_program():
    state = state_without_workers() | {"dp_rank": 3, 4: 5}
    assert line(state, "other keys") == "'dp_rank', 4"
    many = {f"key {k}": k for k in range(10)}
    assert line(state_without_workers() | many, "other keys").endswith("'key 7' and 2 more")


def test_a_state_that_cannot_be_pickled_has_no_size():
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
    # The state of its sampler contains that of a generator: 5,056 bytes.
    drawn = 6 if workers else 9
    assert line(state, "sampler's state") == f"_sampler_iter_state, 5.5 kB, {drawn} samples drawn"
    assert line(state, "since these snapshots") == ("1 batch" if workers else None)
    assert line(state, "workers") == ("no states" if workers else None)
    assert line(state, "problems") is line(state, "other keys") is line(state, "dataset") is None
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
def test_what_is_no_dict_is_a_type_error(value):
    with pytest.raises(TypeError, match=r"describe\(\) takes the dict that state_dict\(\) returned, got "):
        describe(value)


def test_other_dicts():
    assert describe({}) == "an empty state: load_state_dict() makes the loader start from scratch"
    assert describe({"a": 1, 2: 3}) == (
        "not a state of a StatefulDataLoader: it has 'a', 2, but neither '_snapshot' nor '_num_yielded'"
    )
    for kind in (collections.OrderedDict, collections.UserDict, types.MappingProxyType):
        assert describe(kind(state_without_workers())) == describe(state_without_workers())


@pytest.mark.parametrize("state", [state_without_workers(), state_with_workers([snapshot(0)])])
def test_it_changes_nothing(state):
    before = copy.deepcopy(state)
    describe(state)
    assert state == before


@pytest.mark.parametrize(
    "path, problem",
    [
        ("_iterator_finished", "_iterator_finished is missing"),
        ("_steps_since_snapshot", "_steps_since_snapshot is missing"),
        ("_snapshot/_snapshot_step", "_snapshot._snapshot_step is missing"),
        ("_snapshot/_main_snapshot/_num_workers", "_snapshot._main_snapshot._num_workers is missing"),
        ("_snapshot/_worker_snapshots", "_snapshot._worker_snapshots is missing"),
        ("_rustloader/version", "_rustloader.version is missing"),
        ("_rustloader/delivered", "_rustloader.delivered is missing"),
        ("_rustloader/sampler/kind", "_rustloader.sampler.kind is missing"),
    ],
)
def test_what_is_missing_or_of_another_type_is_named(path, problem):
    state = state_with_workers([snapshot(0), snapshot(1)])
    *parents, last = path.split("/")
    part = state
    for name in parents:
        part = part[name]
    value = part.pop(last)
    assert line(state, "problems") == problem
    part[last] = object()
    type_name = {int: "int", bool: "bool", dict: "dict", str: "str"}[type(value)]
    assert line(state, "problems") == problem.replace("is missing", f"must be of type {type_name}, is object")


@pytest.mark.parametrize("number", [-1, 10**19, -(10**5000)], ids=["negative", "large", "without a text"])
def test_numbers_out_of_range_are_named(number):
    state = state_without_workers()
    state["_num_yielded"] = number
    assert line(state, "problems").startswith(f"_num_yielded must be a number from 0 to {2**63 - 1}, is ")
    assert line(state, "position").startswith("epoch 3, an unknown number of batches delivered of 500")


class Hostile:
    """Can be neither printed nor pickled."""

    def __repr__(self):
        raise RuntimeError("no text")

    __str__ = __reduce__ = __repr__

    def __deepcopy__(self, memo):
        return self


JUNK = [None, -1, 0, 1, 2.5, True, 10**19, 10**5000, "", "x" * 1000, b"\0", [], [[]], {}, {3: 4}, (), (None, 1)]
JUNK += [object(), Hostile(), [Hostile()], {Hostile(): Hostile()}, float("nan"), torch.zeros(3), int, print]


def entries_of(value):
    """Yields (container, key) of every value in a state."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from entries_of(inner)


@pytest.mark.parametrize("seed", range(40))
def test_it_never_fails(seed):
    draw = random.Random(seed)
    states = [
        state_without_workers(ahead=[122, 130], next={"base_seed": 1, "sampler": {"seed": 2}}),
        state_without_workers(sampler=own_part()["sampler"] | {"kind": "distributed", "start": RESHARDED}),
        state_with_workers(
            [snapshot(0, dataset={"a": 1}), snapshot(1, iterator=[2])],
            seeds={"base_seed": 1, "epoch": 2},
            workers=[{"delivered": 3, "replay": 4}] * 2,
        ),
    ]
    for _ in range(100):
        state = copy.deepcopy(draw.choice(states))
        for _ in range(draw.randint(1, 4)):
            part, key = draw.choice(list(entries_of(state)))
            match draw.randrange(3):
                case 0:
                    del part[key]
                case 1:
                    part[key] = copy.deepcopy(draw.choice(JUNK))
                case 2 if isinstance(part, dict):
                    part[draw.choice(["more", 7, None, "_rustloader", "_snapshot"])] = copy.deepcopy(draw.choice(JUNK))
        text = describe(state)
        assert text and "object at 0x" not in text.partition("\nproblems: ")[0].partition("\nother keys: ")[0], text


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
        assert line(state, "sampler").startswith(f"{name}, 20 indices in batches of 3")
        assert line(state, "dataset") == "map-style, 20 samples, without a state"
        assert line(state, "problems") is line(state, "other keys") is None
    assert ("order from seed" in line(states[1], "sampler")) is shuffle
    assert line(states[-1], "next epoch").startswith("base seed ")


def test_the_example_of_the_docstring():
    (test,) = doctest.DocTestFinder(recurse=False).find(describe, "describe", globs={"rustloader": rustloader})
    assert test.examples
    output = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=output.append)
    assert not output, "".join(output)
