"""Samplers and batch samplers, with and without a state, behave as they do with torchdata."""

import itertools

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


def test_random_sampler_draws_what_torchdatas_does(lib):
    """The numbers are pinned, so that states of torchdata's loaders give the same order here."""
    sampler = lib.RandomSampler(range(10), generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    assert list(sampler) == torch.randperm(10, generator=generator).tolist()
    assert list(sampler) == torch.randperm(10, generator=generator).tolist()
    sampler = lib.RandomSampler(range(10), True, 70, torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(10, (32,), generator=generator).tolist() for _ in range(3)]
    assert list(sampler) == list(itertools.chain(*drawn))[:70]
    assert len(sampler) == sampler.num_samples == 70


def test_the_state_of_a_random_samplers_iterator(lib):
    sampler = lib.RandomSampler(range(50), generator=torch.Generator().manual_seed(3))
    before = sampler.generator.get_state()
    iterator = iter(sampler)
    assert isinstance(iterator, lib.Stateful)
    for _ in range(7):
        next(iterator)
    state = iterator.state_dict()
    assert set(state) == {"yielded", "generator"}
    assert state["yielded"] == 7 and torch.equal(state["generator"], before)
    rest = list(iterator)
    other = iter(lib.RandomSampler(range(50)))
    other.load_state_dict(state)
    assert list(other) == rest


def test_arguments_of_random_sampler(lib):
    with pytest.raises(TypeError, match="replacement"):
        lib.RandomSampler(range(3), replacement=1)
    with pytest.raises(ValueError, match="num_samples"):
        lib.RandomSampler(range(3), num_samples=0)
    with pytest.raises(ValueError, match="num_samples"):
        lib.RandomSampler([])
    assert len(lib.RandomSampler(range(3), num_samples=8)) == 8


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", [*STATEFUL, "WithoutState"])
def test_the_state_of_a_batch_samplers_iterator(lib, kind, drop_last):
    def make():
        return lib.BatchSampler(getattr(datasets, kind)(22), 4, drop_last)

    everything = list(make())
    assert len(everything) == len(make()) == (5 if drop_last else 6)
    iterator = iter(make())
    assert isinstance(iterator, lib.Stateful)
    assert [next(iterator) for _ in range(3)] == everything[:3]
    state = iterator.state_dict()
    assert state["samples_yielded"] == 12
    assert ("sampler_state" in state) == (kind in ("SamplerWithState", "OwnIteratorWithState"))
    assert ("sampler_iter_state" in state) == (kind in ("IteratorWithState", "OwnIteratorWithState"))
    other = iter(make())
    other.load_state_dict(state)
    assert list(other) == everything[3:]


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


def test_a_batch_sampler_calls_iter_once(lib):
    sampler = datasets.OwnIteratorWithState(22)
    assert len(list(lib.BatchSampler(sampler, 4, False))) == 6
    assert sampler.calls == 1


def distributed(lib, **kw):
    kw = {"num_replicas": 1, "rank": 0, "shuffle": False, **kw}
    return lib.StatefulDistributedSampler(list(range(100)), **kw)


def test_the_distributed_samplers_attributes(lib):
    data = list(range(100))
    sampler = lib.StatefulDistributedSampler(data, num_replicas=10, rank=2, shuffle=False, seed=42, drop_last=True)
    assert isinstance(sampler, DistributedSampler) and isinstance(sampler, lib.Stateful)
    assert sampler.dataset is data
    assert (sampler.num_replicas, sampler.rank, sampler.shuffle, sampler.seed) == (10, 2, False, 42)
    assert sampler.drop_last is True and sampler.yielded == 0 and sampler.next_yielded is None
    assert sampler._YIELDED == "yielded"
    assert list(sampler) == list(range(2, 100, 10)) and len(sampler) == 10


def test_the_distributed_samplers_state(lib):
    sampler = distributed(lib)
    sampler.yielded = 5
    assert sampler.state_dict() == {"yielded": 5}
    sampler.load_state_dict({"yielded": 3})
    assert sampler.next_yielded == 3
    assert list(sampler) == list(range(3, 100))
    assert sampler.next_yielded is None and sampler.yielded == 100
    assert list(sampler) == list(range(100))
    with pytest.raises(ValueError, match="negative"):
        sampler.load_state_dict({"yielded": -1})
    with pytest.raises(ValueError):
        sampler.load_state_dict({"other": 1})


def test_a_load_does_not_move_an_iterator_of_the_distributed_sampler(lib):
    sampler = distributed(lib, shuffle=True, seed=42, num_replicas=2)
    iterator = iter(sampler)
    next(iterator)
    assert sampler.yielded == 1 and sampler.next_yielded is None
    sampler.load_state_dict({"yielded": 5})
    assert sampler.next_yielded == 5
    next(iterator)
    assert sampler.yielded == 2 and sampler.next_yielded == 5
    # rustloader returns the loaded state until it takes effect.
    assert sampler.state_dict() == {"yielded": 2 if lib.name == "torchdata" else 5}


@pytest.mark.parametrize("drop_last, length", [(True, 33), (False, 34)])
def test_the_distributed_samplers_length(lib, drop_last, length):
    samplers = [distributed(lib, num_replicas=3, rank=rank, drop_last=drop_last) for rank in range(3)]
    parts = [list(sampler) for sampler in samplers]
    assert [len(part) for part in parts] == [length] * 3 == [len(sampler) for sampler in samplers]
    assert len(set(itertools.chain(*parts))) == min(100, 3 * length)


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
