"""Random numbers of main and of the workers (P13, P14, T17, T25)."""

import itertools
import random

import numpy as np
import pytest
import torch
from generators import main_state
from sample_data import Draws, EagerSampler, LazySampler, NthDraw, Numbers, as_list
from support import BOTH, DataLoader, TorchDataLoader, epoch, values
from torch.utils.data import RandomSampler, WeightedRandomSampler

SAMPLERS = {
    "sequential": lambda g: dict(),
    "shuffle": lambda g: dict(shuffle=True),
    "generator": lambda g: dict(shuffle=True, generator=g),
    "generator alone": lambda g: dict(generator=g),
    "replacement": lambda g: dict(sampler=RandomSampler(range(9), replacement=True, num_samples=40)),
    "weighted": lambda g: dict(sampler=WeightedRandomSampler([1.0, 2.0, 3.0], 7)),
    "lazy": lambda g: dict(sampler=LazySampler(9, [], draw=True)),
    "eager": lambda g: dict(sampler=EagerSampler(9, [], draw=True)),
}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_p13_t17_mains_generators_move_when_torch_moves_them(kind, workers, persistent):
    def trace(cls):
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        generator = torch.Generator().manual_seed(6)
        more = dict(persistent_workers=persistent) if workers else {}
        loader = cls(Numbers(9), num_workers=workers, batch_size=2, **more, **SAMPLERS[kind](generator))
        steps = [main_state(generator)]
        for taken in (2, 99, 99):
            iterator = iter(loader)
            steps.append(main_state(generator))
            for batch in itertools.islice(iterator, taken):
                steps.append((batch.tolist(), main_state(generator)))
            steps.append(main_state(generator))
            del iterator
        return steps

    theirs, ours = map(trace, BOTH)
    assert ours == theirs


def test_p13_the_main_state_is_the_same_with_and_without_workers():
    def after(workers, **more):
        torch.manual_seed(1)
        loader = DataLoader(Numbers(5), shuffle=True, num_workers=workers, **more)
        for _ in range(2):
            epoch(loader)
        return torch.initial_seed(), main_state()[0]

    assert after(0) == after(2)
    assert after(0) != after(2, persistent_workers=True)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_p14_seeds_of_the_workers_are_torchs(workers, persistent):
    def draws(cls):
        torch.manual_seed(17)
        loader = cls(Draws(7), num_workers=workers, batch_size=None, persistent_workers=persistent)
        return [list(loader) for _ in range(3)]

    theirs, ours = map(draws, BOTH)
    assert ours == theirs
    seeds = [{sample["seed"] for sample in e if sample["id"] == 0} for e in ours]
    assert all(len(s) == 1 for s in seeds)
    assert (seeds[0] == seeds[1]) == persistent, "persistent workers keep their seed, new ones get a new one"


def test_p14_the_base_seed_comes_from_the_loaders_generator():
    def seeds(cls, seed):
        loader = cls(Draws(2), num_workers=1, batch_size=None, generator=torch.Generator().manual_seed(seed))
        return [sample["seed"] for sample in loader]

    assert seeds(DataLoader, 1) == seeds(TorchDataLoader, 1) != seeds(DataLoader, 2)


def test_p14_the_base_seed_is_kept_by_the_iterator():
    torch.manual_seed(3)
    iterator = iter(DataLoader(Draws(2), num_workers=1, batch_size=None))
    assert next(iterator)["seed"] == iterator._base_seed


def test_p14_random_augmentation_is_bit_identical_over_epochs():
    def run(cls):
        torch.manual_seed(23)
        loader = cls(Draws(20), shuffle=True, num_workers=2, batch_size=3, collate_fn=as_list)
        return [list(loader) for _ in range(3)]

    theirs, ours = map(run, BOTH)
    assert ours == theirs


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_t25_streams_go_on_behind_stale_tasks(taken):
    loader = DataLoader(NthDraw(10), num_workers=1, prefetch_factor=4, batch_size=None, persistent_workers=True)
    assert list(itertools.islice(loader, taken)) == list(range(taken))
    assert next(iter(loader)) == 4 + taken


def test_t25_streams_after_a_break_with_two_workers_are_torchs():
    def streams(cls, taken):
        torch.manual_seed(9)
        loader = cls(Draws(30), num_workers=2, batch_size=None, persistent_workers=True)
        return [list(itertools.islice(loader, taken)), list(itertools.islice(loader, taken)), list(loader)]

    for taken in range(5):
        theirs, ours = (streams(cls, taken) for cls in BOTH)
        assert ours == theirs


def test_p14_numpy_and_random_streams_differ_between_workers():
    samples = epoch(DataLoader(Draws(2), num_workers=2, batch_size=None))
    for key in ("torch", "random", "numpy", "seed"):
        assert samples[0][key] != samples[1][key]


def test_p13_a_sampler_may_draw_from_pythons_generator():
    def run(cls):
        random.seed(2)
        return values(
            cls(Numbers(9), sampler=sorted(range(9), key=lambda i: random.random()), num_workers=2)
        ), random.random()

    theirs, ours = map(run, BOTH)
    assert ours == theirs
