"""Datasets, samplers and loaders of the programs."""

import functools
import time

import torch
from torch.utils.data import DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import rustloader
from rustloader.fetch import seeds
from rustloader.stateful_dataloader import StatefulDataLoader
from rustloader.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler
from stateful import datasets
from stateful.datasets import IteratorWithState, SamplerWithState, WithoutState, unchanged


class SampleError(Exception):
    """The error that a sample raises."""


def noise():
    """The sample's seed and a random number; None for seed_by="worker"."""
    if seeds.current() is None:
        return None
    return [rustloader.sample_seed(), draw(None)]


def draw(generator):
    return int(torch.randint(1 << 40, (), generator=generator))


class Made:
    """Makes a sample [i, mark, noise]. The mark is the worker of an iterable dataset, or the number of samples that a
    copy of a map-style one has made, if known."""

    def __init__(self, settings, **options):
        super().__init__(settings.length if settings.is_map else settings.sizes, **options)
        self.settings = settings

    def sample(self, i, mark=None):
        if i in self.settings.slow:
            time.sleep(0.002)
        if i in self.settings.errors:
            raise SampleError(f"sample {i}")
        return [i, mark, noise()]


class Mapped(Made, datasets.Records):
    pass


class StatefulMapped(Made, datasets.CountingRecords):
    pass


class Streamed(Made, datasets.StatelessShards):
    pass


class StatefulStreamed(Made, datasets.Shards):
    pass


class StatefulGenerator(Made, datasets.Restarting):
    pass


class DrawingMapped(Made, datasets.DrawingRecords):
    """Sample i is [i, None, a random number]."""

    def __getitem__(self, i):
        return [int(i), None, draw(None)]


class DrawingStreamed(StatefulGenerator):
    """Sample i is [i, a random number of the epoch, a random number]."""

    number = loaded = None

    def __iter__(self):
        self.number = draw(None) if self.loaded is None else self.loaded
        self.loaded = None
        return self.drawing(super().__iter__())

    def drawing(self, samples):
        for i, _, _ in samples:
            yield [i, self.number, draw(None)]
        self.number = None

    def state_dict(self):
        return super().state_dict() | {"number": self.number, "generator": torch.get_rng_state()}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.number = self.loaded = state["number"]
        torch.set_rng_state(state["generator"])


CLASSES = {
    "drawing map": DrawingMapped,
    "drawing stream": DrawingStreamed,
    "map": Mapped,
    "stateful map": StatefulMapped,
    "iterable": Streamed,
    "stateful iterable": functools.partial(StatefulStreamed, with_generator=False),
    "generator": StatefulGenerator,
}
BATCH = 3


def sampler_arguments(settings, generator):
    """The arguments of a loader that choose its sampler."""
    n, kind = settings.length, settings.sampler
    if kind == "sequential":
        return {}
    if kind == "shuffle":
        return {"shuffle": True}
    if kind == "batch sampler":
        return {"batch_sampler": WithoutState(n, BATCH)}
    if kind == "batch sampler state":
        return {"batch_sampler": IteratorWithState(n, BATCH)}
    lengths = [1 + index % 4 for index in range(n)]
    if kind == "batch sampler budget":
        return {"batch_sampler": rustloader.TokenBudgetBatchSampler(lengths, 8, window=5, num_replicas=1, rank=0)}
    if kind == "batch sampler packs":
        return {"batch_sampler": rustloader.PackingBatchSampler(lengths, 7, window=5, num_replicas=1, rank=0)}
    makers = {
        "shuffle with generator": lambda: RandomSampler(range(n), generator=generator),
        "distributed": lambda: DistributedSampler(range(n), 2, 1, seed=5),
        "subset": lambda: SubsetRandomSampler(range(0, n, 2), generator),
        "weighted": lambda: WeightedRandomSampler(torch.arange(1, n + 1.0), n),
        "weighted with generator": lambda: WeightedRandomSampler(torch.arange(1, n + 1.0), n, generator=generator),
        "torchdata random": lambda: StatefulRandomSampler(range(n), generator=generator),
        "custom": lambda: WithoutState(n),
        "custom iterator state": lambda: IteratorWithState(n),
        "custom state": lambda: SamplerWithState(n),
    }
    return {"sampler": makers[kind]()}


def set_epoch(loader, epoch):
    """Calls the `set_epoch` of the loader's sampler, if it has one."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)


def batch_arguments(settings):
    if settings.sampler.startswith("batch sampler"):
        return {}
    return {"batch_size": settings.batch_size, "drop_last": settings.drop_last}


def make_loader(settings, generator):
    """A StatefulDataLoader."""
    workers = settings.num_workers
    return StatefulDataLoader(
        CLASSES[settings.dataset](settings),
        num_workers=workers,
        prefetch_factor=settings.prefetch_factor if workers else None,
        persistent_workers=settings.persistent,
        overlap_epochs=settings.overlap_epochs,
        in_order=settings.in_order,
        dispatch=settings.dispatch,
        reorder_window=settings.reorder_window,
        seed_by=settings.seed_by,
        snapshot_every_n_steps=settings.every,
        collate_fn=unchanged,
        **batch_arguments(settings),
        **sampler_arguments(settings, generator),
    )


def make_reference(settings, generator):
    """torch's loader, for the order of the indices."""
    if settings.sampler == "torchdata random":
        sampler = dict(sampler=Permutations(settings.length, generator))
    else:
        sampler = sampler_arguments(settings, generator)
    dataset = CLASSES[settings.dataset](settings) if settings.is_drawing else range(settings.length)
    arguments = batch_arguments(settings) | sampler
    return torch.utils.data.DataLoader(dataset, collate_fn=unchanged, **arguments)


class Permutations(torch.utils.data.Sampler):
    """Yields the order of torchdata's RandomSampler: one permutation per epoch."""

    def __init__(self, n, generator):
        self.n, self.generator = n, generator

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter(torch.randperm(self.n, generator=self.generator).tolist())
