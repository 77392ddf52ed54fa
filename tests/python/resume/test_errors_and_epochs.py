"""The contents of a state besides its position: errors, earlier positions, seeds, and draws of the next epoch."""

import copy
import multiprocessing
import pickle
import random

import pytest
import torch
from support import rustloader
from torch.utils.data import Dataset

pytestmark = pytest.mark.ours


class Failing(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 3:
            raise KeyError(index)
        return index


class Draws(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index, random.random()


def as_is(samples):
    return list(samples)


def loader(dataset, **kw):
    return rustloader.StatefulDataLoader(dataset, **dict(collate_fn=as_is) | kw)


def resumed(state, dataset, **kw):
    other = loader(dataset, **kw)
    other.load_state_dict(state)
    return other


def taken(iterator, count):
    """The next `count` answers, with None for an error."""
    answers = []
    for _ in range(count):
        try:
            answers.append(next(iterator))
        except KeyError:
            answers.append(None)
    return answers


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("back", "rest"), [(0, 6), (1, 5), (2, 4), (3, 2)])
def test_an_error_is_delivered_but_is_no_batch(workers, back, rest):
    stopped = loader(Failing(), num_workers=workers)
    taken(iter(stopped), 6)
    state = stopped.state_dict(back=back)
    counted = state["_snapshot"]["_snapshot_step"] if workers else state["_num_yielded"]
    assert counted == 5 - back
    resumed_iterator = iter(resumed(state, Failing(), num_workers=workers))
    assert taken(resumed_iterator, 8 - rest) == [[index] if index != 3 else None for index in range(rest, 8)]
    assert next(resumed_iterator, None) is None


def test_the_workers_of_a_resumed_epoch_keep_their_base_seed():
    stopped = loader(Draws(), num_workers=1)
    next(iter(stopped))
    state = stopped.state_dict()
    other = resumed(state, Draws(), num_workers=1)
    next(iter(other))
    saved = other.state_dict()["_snapshot"]["_main_snapshot"]["_base_seed"]
    assert saved == state["_snapshot"]["_main_snapshot"]["_base_seed"]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_epoch_after_a_finished_one_has_its_own_seeds(workers):
    whole = loader(Draws(), num_workers=workers, seed_by="sample")
    first = list(whole)
    state = whole.state_dict()
    second = list(whole)
    assert first != second
    assert list(resumed(state, Draws(), num_workers=workers, seed_by="sample")) == second


AFTER = {
    "the loader itself": lambda stateful, make: stateful,
    "a copy": lambda stateful, make: copy.deepcopy(stateful),
    "a pickle": lambda stateful, make: pickle.loads(pickle.dumps(stateful)),
    "another loader": lambda stateful, make: loaded(make(), stateful.state_dict()),
    "a copy of another loader": lambda stateful, make: copy.deepcopy(loaded(make(), stateful.state_dict())),
}


def loaded(other, state):
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("after", AFTER)
def test_new_seed_after_state_counts(after, own, epochs, workers):
    def make():
        generator = torch.Generator() if own else None
        return loader(range(64), shuffle=True, generator=generator, num_workers=workers)

    def seed(stateful, number):
        torch.manual_seed(number)
        if own:
            stateful.generator.manual_seed(number)

    whole = make()
    seed(whole, 5)
    expected = list(whole)
    seed(whole := make(), 6)
    for _ in range(epochs):
        list(whole)
    whole.state_dict()
    whole = AFTER[after](whole, make)
    seed(whole, 5)
    assert list(whole) == expected


def test_state_after_new_seed_has_the_order_of_that_seed():
    whole = loader(range(64), shuffle=True)
    list(whole)
    whole.state_dict()
    torch.manual_seed(5)
    state = whole.state_dict()
    torch.manual_seed(5)
    expected = list(loader(range(64), shuffle=True))
    torch.manual_seed(6)
    assert list(resumed(state, range(64), shuffle=True)) == expected


def test_the_workers_of_an_abandoned_epoch_end_before_others_start(monkeypatch):
    abandoned = loader(Draws(), num_workers=2)
    next(iter(abandoned))
    workers = {worker.pid for worker in abandoned._iterator._workers}
    make, observed = abandoned._make_iterator, []

    def watched(plan):
        observed.append((workers & {it.pid for it in multiprocessing.active_children()}, abandoned.state_dict()))
        return make(plan)

    monkeypatch.setattr(abandoned, "_make_iterator", watched)
    iter(abandoned)
    ((alive, state),) = observed
    assert len(workers) == 2 and not alive
    assert len(list(resumed(state, Draws(), num_workers=2))) == 7
