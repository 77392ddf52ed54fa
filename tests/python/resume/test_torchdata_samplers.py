"""Samplers and batch samplers, with and without a state, behave as they do with torchdata."""

import pytest
import torch
from pairwise import pairs
from stateful import datasets
from stateful.datasets import unchanged
from torch.utils.data import DistributedSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

pytestmark = pytest.mark.ours

SIZE = 40
STATEFUL = ["IteratorWithState", "SamplerWithState", "OwnIteratorWithState"]
# The number of workers, and snapshot_every_n_steps.
STARTS = [dict(num_workers=workers, snapshot_every_n_steps=every) for workers, every in [(0, 1), (3, 1), (3, 5)]]
INTERRUPTS = [0, 1, 6]


def resumed(make, interrupt):
    loader = make()
    iterator = iter(loader)
    first = [next(iterator) for _ in range(interrupt)]
    state = loader.state_dict()
    rest = list(iterator)
    loader = make()
    loader.load_state_dict(state)
    return first, rest, list(loader), list(loader)


def ids(batches):
    return [sample["id"] for batch in batches for sample in (batch if isinstance(batch, list) else [batch])]


@pairs(start=STARTS, interrupt=INTERRUPTS, batch_size=[None, 4], kind=[*STATEFUL, "WithoutState"])
def test_a_sampler_of_the_users(lib, kind, batch_size, start, interrupt):
    if (kind, batch_size, lib.name) == ("OwnIteratorWithState", 4, "rustloader"):
        return  # torch's BatchSampler calls iter() for each batch, so this one never ends in torch's loader either

    def make():
        return lib.StatefulDataLoader(
            datasets.Records(SIZE),
            sampler=getattr(datasets, kind)(SIZE),
            batch_size=batch_size,
            collate_fn=unchanged,
            **start,
        )

    first, rest, from_state, following = resumed(make, interrupt)
    order = datasets.WithoutState(SIZE).all()
    assert ids(first + rest) == order
    assert from_state == rest
    assert ids(following) == order


@pairs(start=STARTS, interrupt=INTERRUPTS, kind=[*STATEFUL, "WithoutState", "list"])
def test_a_batch_sampler_of_the_users(lib, kind, start, interrupt):
    batches = datasets.WithoutState(SIZE, batch=4).all()

    def make():
        return lib.StatefulDataLoader(
            datasets.Records(SIZE),
            batch_sampler=batches if kind == "list" else getattr(datasets, kind)(SIZE, batch=4),
            collate_fn=unchanged,
            **start,
        )

    first, rest, from_state, following = resumed(make, interrupt)
    assert [ids([batch]) for batch in first + rest] == batches
    assert from_state == rest
    assert [ids([batch]) for batch in following] == batches


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("interrupt", [0, 3])
@pytest.mark.parametrize("name", ["sequential", "subset", "weighted", "distributed"])
def test_torchs_samplers_without_state(lib, name, workers, interrupt):
    def make():
        # torchdata fast-forwards by drawing again; the draws are the same only if the program sets the seed again.
        torch.manual_seed(6)
        sampler = {
            "sequential": lambda: SequentialSampler(range(SIZE)),
            "subset": lambda: SubsetRandomSampler(range(SIZE), generator=torch.Generator().manual_seed(1)),
            "weighted": lambda: WeightedRandomSampler(
                torch.ones(SIZE), SIZE, generator=torch.Generator().manual_seed(1)
            ),
            "distributed": lambda: DistributedSampler(range(2 * SIZE), 2, 1, seed=5),
        }[name]()
        return lib.StatefulDataLoader(
            datasets.Records(2 * SIZE), 4, sampler=sampler, num_workers=workers, collate_fn=unchanged
        )

    first, rest, from_state, _ = resumed(make, interrupt)
    if name in ("subset", "weighted") and lib.name == "torchdata":
        return  # torchdata's iterators draw the generator's next order, not the interrupted one
    assert from_state == rest
    assert len(ids(first + from_state)) == SIZE


# torchdata's samplers


@pairs(start=STARTS, interrupt=INTERRUPTS, replacement=[False, True], own_generator=[False, True])
def test_random_sampler(lib, replacement, own_generator, start, interrupt):
    torch.manual_seed(8)

    def make():
        generator = torch.Generator().manual_seed(3) if own_generator else None
        sampler = lib.RandomSampler(range(SIZE), replacement=replacement, generator=generator)
        return lib.StatefulDataLoader(
            datasets.Records(SIZE),
            sampler=sampler,
            batch_size=3,
            collate_fn=unchanged,
            **start,
        )

    first, rest, from_state, following = resumed(make, interrupt)
    assert from_state == rest
    if not replacement:
        assert sorted(ids(first + from_state)) == list(range(SIZE))
        assert sorted(ids(following)) == list(range(SIZE))
    assert ids(following) != ids(first + rest)


@pairs(start=STARTS, interrupt=INTERRUPTS)
def test_batch_sampler_in_a_loader(lib, start, interrupt):
    def make():
        sampler = lib.BatchSampler(lib.RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(2)), 3, False)
        return lib.StatefulDataLoader(
            datasets.Records(SIZE),
            batch_sampler=sampler,
            collate_fn=unchanged,
            **start,
        )

    first, rest, from_state, _ = resumed(make, interrupt)
    assert from_state == rest
    assert sorted(ids(first + from_state)) == list(range(SIZE))


def distributed(lib, **kw):
    kw = {"num_replicas": 1, "rank": 0, "shuffle": False, **kw}
    return lib.StatefulDistributedSampler(list(range(100)), **kw)


def test_the_distributed_samplers_order_is_torchs(lib):
    for epoch in (0, 3):
        sampler, reference = distributed(lib, shuffle=True, seed=9), DistributedSampler(range(100), 1, 0, seed=9)
        sampler.set_epoch(epoch)
        reference.set_epoch(epoch)
        order = list(reference)
        assert list(sampler) == order != list(range(100))
        loader = lib.StatefulDataLoader(range(100), batch_size=None, sampler=sampler)
        assert list(loader) == order


@pairs(start=STARTS, interrupt=INTERRUPTS, shuffle=[False, True])
def test_the_distributed_sampler_in_a_loader(lib, shuffle, start, interrupt):
    def make(rank):
        sampler = distributed(lib, num_replicas=2, rank=rank, shuffle=shuffle, seed=4)
        return lib.StatefulDataLoader(
            datasets.Records(100),
            batch_size=5,
            sampler=sampler,
            collate_fn=unchanged,
            **start,
        )

    delivered = []
    for rank in range(2):
        first, rest, from_state, following = resumed(lambda rank=rank: make(rank), interrupt)
        assert from_state == rest
        assert following == first + rest
        delivered += ids(first + from_state)
    assert sorted(delivered) == list(range(100))


@pytest.mark.parametrize("interrupt", [1, 4])
def test_each_epoch_of_the_distributed_sampler_has_its_order(lib, interrupt):
    def make():
        sampler = distributed(lib, shuffle=True, seed=4)
        loader = lib.StatefulDataLoader(range(100), batch_size=10, sampler=sampler, collate_fn=unchanged)
        return sampler, loader

    sampler, loader = make()
    sampler.set_epoch(2)
    iterator = iter(loader)
    for _ in range(interrupt):
        next(iterator)
    state = loader.state_dict()
    rest = list(iterator)
    sampler.set_epoch(3)
    following = list(loader)
    assert following != rest
    sampler, loader = make()
    sampler.set_epoch(2)
    loader.load_state_dict(state)
    assert list(loader) == rest
    sampler.set_epoch(3)
    assert list(loader) == following
