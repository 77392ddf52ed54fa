"""The contents of a state besides its position: errors, earlier positions, seeds, and draws of the next epoch."""

import copy
import multiprocessing
import pickle
import random

import pytest
import torch
from support import rustloader
from torch.utils.data import Dataset, DistributedSampler

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


class WithSetEpoch(Dataset):
    epoch = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return 10 * self.epoch + index

    def set_epoch(self, epoch):
        self.epoch = epoch


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


def test_a_new_seed_counts_after_a_state_at_the_end():
    whole = loader(range(64), shuffle=True)
    list(whole)
    torch.manual_seed(5)
    expected = list(whole)
    torch.manual_seed(6)
    list(whole)
    whole.state_dict()
    torch.manual_seed(5)
    assert list(whole) == expected


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_new_seed_counts_for_a_copy_of_a_loader(copied, is_loaded):
    torch.manual_seed(5)
    expected = list(loader(range(64), shuffle=True))
    torch.manual_seed(6)
    whole = loader(range(64), shuffle=True)
    list(whole)
    state = whole.state_dict()
    if is_loaded:
        whole = loader(range(64), shuffle=True)
        whole.load_state_dict(state)
    other = copied(whole)
    torch.manual_seed(5)
    assert list(other) == expected


def test_a_state_after_a_new_seed_has_the_order_of_that_seed():
    whole = loader(range(64), shuffle=True)
    list(whole)
    whole.state_dict()
    torch.manual_seed(5)
    state = whole.state_dict()
    torch.manual_seed(5)
    expected = list(loader(range(64), shuffle=True))
    torch.manual_seed(6)
    other = loader(range(64), shuffle=True)
    other.load_state_dict(state)
    assert list(other) == expected


def test_each_rank_goes_on_with_its_own_samples_from_the_state_of_another():
    def ranked(rank):
        return dict(dataset=range(8), sampler=DistributedSampler(range(8), 2, rank, shuffle=False))

    stopped = loader(**ranked(0))
    next(iter(stopped))
    assert list(resumed(stopped.state_dict(), **ranked(1))) == [[3], [5], [7]]


def test_persistent_workers_are_told_the_epoch_of_the_dataset():
    dataset = WithSetEpoch()
    persistent = loader(dataset, num_workers=1, persistent_workers=True)
    assert list(persistent) == [[0], [1], [2], [3]]
    dataset.set_epoch(2)
    assert list(persistent) == [[20], [21], [22], [23]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("own", [False, True])
def test_a_seed_between_the_load_of_a_finished_epoch_and_iter_counts(own, workers):
    def begun(epoch, state=None):
        generator = torch.Generator() if own else None
        stateful = loader(range(32), shuffle=True, generator=generator, num_workers=workers)
        if state is not None:
            torch.rand(1)
            stateful.load_state_dict(state)
        torch.manual_seed(100 + epoch)
        if own:
            generator.manual_seed(200 + epoch)
        return stateful, list(stateful)

    first, _ = begun(0)
    state = first.state_dict()
    assert begun(1, state)[1] == begun(1)[1]


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
