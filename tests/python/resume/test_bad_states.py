"""A state that does not fit, as with another num_workers, causes one clear error and leaves the loader as it was."""

import copy

import pytest
import torch
from stateful import datasets
from stateful.datasets import unchanged

from rustloader.stateful_dataloader import StatefulDataLoader

pytestmark = [
    pytest.mark.ours,
    pytest.mark.filterwarnings("ignore:load_state_dict.. replaces an iterator:UserWarning"),
    pytest.mark.filterwarnings("ignore:an epoch of 0 batches:UserWarning"),
]

SIZE = 24
KINDS = {
    "map": lambda: datasets.Records(SIZE),
    "stateful map": lambda: datasets.CountingRecords(SIZE),
    "iterable": lambda: datasets.Shards((13, 11), with_generator=False),
    "stateless": lambda: datasets.StatelessShards((13, 11)),
}


def make(kind="map", workers=0, dataset=None, **kw):
    kw.setdefault("batch_size", 3)
    return StatefulDataLoader(dataset or KINDS[kind](), num_workers=workers, collate_fn=unchanged, **kw)


def stopped(loader, steps=3):
    """Returns the iterator after some batches, and the state at that position."""
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    return iterator, loader.state_dict()


def parts(state, path=()):
    """Yields the paths of all values in a state, except those inside the state of a dataset or a sampler."""
    for key, value in state.items():
        yield (*path, key)
        if isinstance(value, dict) and key not in ("dataset_state", "dataset_iter_state", "start"):
            yield from parts(value, (*path, key))


def changed(state, path, change):
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return state


def refused_or_right(loader, state, allowed):
    """Requires that the state is refused, or that the epoch is one that `allowed` accepts."""
    before = loader.state_dict()
    try:
        loader.load_state_dict(state)
    except ValueError as error:
        assert len(str(error)) > 20 and "\n" not in str(error), "the error says too little, or too much"
        assert loader.state_dict() == before, "a part of the state was loaded"
        return "refused"
    try:
        epoch = list(loader)
    except (ValueError, AssertionError):
        return "refused"
    assert allowed(epoch), epoch
    return "loaded"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_missing(kind, workers):
    loader = make(kind, workers)
    everything = list(make(kind, workers))
    iterator, state = stopped(loader)
    del iterator
    outcomes = {}
    for path in parts(state):
        bad = changed(state, path, lambda inner, key: inner.pop(key))
        # Without rustloader's own key it is a state of torchdata, and those can be loaded.
        outcomes[path] = refused_or_right(make(kind, workers), bad, lambda epoch: epoch == everything[3:])
    assert "refused" in outcomes.values()
    assert outcomes["_rustloader",] == "loaded"
    required = [("_iterator_finished",), ("_rustloader", "version"), ("_rustloader", "sampler")]
    required += [("_snapshot",), ("_steps_since_snapshot",), ("_snapshot", "_main_snapshot")] if workers else []
    required += [("_num_yielded",), ("_sampler_iter_yielded",)] if not workers else []
    assert {path: outcomes[path] for path in required} == dict.fromkeys(required, "refused")


JUNK = [None, "x", -1, 1.5, True, [], {}, (1, 2), b"", torch.zeros(2), [None], {"a": 1}, 1 << 40]


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: repr(junk).replace(" ", ""))
@pytest.mark.parametrize("kind, workers", [("map", 0), ("map", 2), ("stateful map", 0), ("iterable", 0)])
def test_a_value_that_is_junk(kind, workers, junk):
    everything = list(make(kind, workers))
    iterator, state = stopped(make(kind, workers))
    del iterator
    outcomes = []
    for path in parts(state):
        bad = changed(state, path, lambda inner, key: inner.update({key: junk}))
        # A number may be a valid position; the epoch must then be the rest of the whole one. A dataset may accept any
        # state of its own.
        if path[-1] in ("dataset_state", "dataset_iter_state", "worker_id"):
            continue
        # Programs set this key; the next epoch follows.
        if path == ("_iterator_finished",) and junk is True:
            continue
        outcomes.append(
            refused_or_right(
                make(kind, workers), bad, lambda epoch: epoch == everything[len(everything) - len(epoch) :]
            )
        )
    assert outcomes.count("refused") > 5 or junk in (None, True)


@pytest.mark.parametrize("junk", [*JUNK, object(), int], ids=lambda junk: repr(junk).replace(" ", "").split("at0x")[0])
def test_a_value_that_is_not_a_state(junk):
    if isinstance(junk, dict) and not junk:
        return  # an empty dict means a fresh start
    loader = make()
    with pytest.raises(ValueError, match=r"state_dict\(\)"):
        loader.load_state_dict(junk)
    assert list(loader) == list(make())


# Settings of the loader that saves and of the other one, and a pattern of the error. test_sampling.py has more.
OTHERS = {
    "length": ({}, {"dataset": datasets.Records(25)}, "24.*25"),
    "no batch size": ({}, {"batch_size": None}, "batch"),
    "iterable": ({}, {"kind": "iterable"}, "map-style.*iterable"),
    "map-style": ({"kind": "iterable"}, {}, "iterable.*map-style"),
    "stateless": ({"kind": "stateful map"}, {}, "state"),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_of_another_loader(other, workers):
    saver, loader, text = OTHERS[other]
    iterator, state = stopped(make(**saver, workers=workers))
    del iterator
    loader = make(**loader, workers=workers)
    expected = list(loader)
    iterator = iter(loader)
    first = next(iterator)
    with pytest.raises(ValueError, match=text):
        loader.load_state_dict(state)
    # The iterator goes on, and so does the loader.
    assert [first, *iterator] == expected
    assert len(list(loader)) == len(expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_of_a_later_version(workers):
    iterator, state = stopped(make(workers=workers))
    del iterator
    state["_rustloader"]["version"] += 1
    loader = make(workers=workers)
    with pytest.raises(ValueError, match=r"format 2.*update rustloader"):
        loader.load_state_dict(state)
    assert list(loader) == list(make())


OTHER_NUMBERS = pytest.mark.parametrize("saved, loaded", [(0, 2), (2, 0), (2, 1), (1, 2)])


@OTHER_NUMBERS
def test_another_number_of_workers_resumes_a_map_style_dataset_without_a_state(saved, loaded):
    iterator, state = stopped(make("map", saved), 2)
    loader = make("map", loaded)
    loader.load_state_dict(state)
    assert list(loader) == list(iterator)


@pytest.mark.parametrize("kind", ["stateful map", "iterable", "stateless"])
@OTHER_NUMBERS
def test_another_number_of_workers_is_refused_for_other_datasets(kind, saved, loaded):
    iterator, state = stopped(make(kind, saved), 2)
    rest = list(iterator)
    loader = make(kind, loaded)
    loader.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(AssertionError, match=f"num_workers={saved}.* has num_workers={loaded}"):
            iter(loader)
    assert loader.state_dict() == state
    loader.num_workers, loader.prefetch_factor = saved, 2 if saved else None
    assert list(loader) == rest


@pytest.mark.parametrize("back", [-1, 1.0, True, "1", None])
@pytest.mark.parametrize("workers", [0, 2])
def test_back_is_a_small_number(workers, back):
    loader = make(workers=workers)
    for steps in (0, 2):
        iterator = stopped(loader, steps)[0]
        with pytest.raises(ValueError, match="back"):
            loader.state_dict(back=back)
        with pytest.raises(ValueError, match="back"):
            loader.state_dict(back=steps + 1)
    del iterator


@pytest.mark.parametrize("every", [-1, 1.5, "1", True])
def test_snapshot_every_n_steps_is_a_number(every):
    with pytest.raises(ValueError, match="snapshot_every_n_steps must be a non-negative integer"):
        make(snapshot_every_n_steps=every)
