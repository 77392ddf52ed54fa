"""Plans of samplers: any number of samplers with the same settings, which may be random."""

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

KINDS = ["sequential", "random", "distributed", "subset", "weighted"]


class Sized:
    """A dataset whose length can change. Sample i is i."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


class OwnRandom(RandomSampler):
    """A subclass with torch's code."""


class OwnBatches(BatchSampler):
    """A subclass with torch's code."""

    def __len__(self):
        return 7


class Backwards(Sampler):
    """A sampler that this package does not know."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        yield from reversed(range(self.size))

    def __len__(self):
        return self.size


class Plan:
    """The settings of a sampler. Creates it any number of times, as new processes do.

    Args:
        kind: One of KINDS, or "other".
        size: Length of the dataset.
        batch_size: None for a sampler without batches.
        given: Whether the sampler has a generator of its own.
        cls: The class of the sampler or of the batches, if it is not torch's.
        kw: Further arguments of the sampler. Of a distributed one, `cut` is its drop_last.
    """

    def __init__(self, kind, size, batch_size=3, drop_last=False, given=False, cls=None, dataset=Sized, **kw):
        self.kind, self.size, self.batch_size, self.drop_last, self.given = kind, size, batch_size, drop_last, given
        self.cls, self.dataset, self.kw = cls, dataset, kw

    def __repr__(self):
        return str(vars(self))

    def make(self, seed=1):
        """An index sampler, and its generator or None."""
        generator = torch.Generator().manual_seed(seed) if self.given else None
        data = self.dataset(self.size)
        if self.kind == "sequential":
            inner = SequentialSampler(data)
        elif self.kind == "random":
            inner = (self.cls or RandomSampler)(data, generator=generator, **self.kw)
        elif self.kind == "distributed":
            settings = dict(self.kw)
            epoch, cut = settings.pop("epoch", 0), settings.pop("cut", False)
            inner = DistributedSampler(data, drop_last=cut, **settings)
            inner.set_epoch(epoch)
        elif self.kind == "subset":
            inner = SubsetRandomSampler([index * 3 for index in range(self.size)], generator=generator)
        elif self.kind == "weighted":
            inner = WeightedRandomSampler(
                [1.0 + index % 3 for index in range(self.size)], generator=generator, **self.kw
            )
        else:
            inner = Backwards(self.size)
        if self.batch_size is None:
            return inner, generator
        cls = OwnBatches if self.cls is OwnBatches else BatchSampler
        return cls(inner, self.batch_size, self.drop_last), generator


def random_plan(rng, kind=None):
    kind = kind or rng.choice(KINDS)
    size = rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, 90)])
    common = dict(batch_size=rng.choice([None, 1, rng.randint(1, 12), size]), drop_last=rng.random() < 0.4)
    common["given"] = rng.random() < 0.5
    if kind == "random":
        common["replacement"] = rng.random() < 0.4
        common["num_samples"] = rng.choice([None, size, 2 * size, rng.randint(1, 3 * size), 64, 32])
        common["cls"] = rng.choice([None, None, OwnRandom])
    elif kind == "distributed":
        replicas = rng.choice([1, 2, rng.randint(1, 9), size + 3])
        common |= dict(num_replicas=replicas, rank=rng.randrange(replicas), shuffle=rng.random() < 0.6)
        common |= dict(seed=rng.randrange(3), epoch=rng.randrange(3), cut=rng.random() < 0.4, given=False)
    elif kind == "weighted":
        replacement = rng.random() < 0.5
        common |= dict(num_samples=rng.randint(1, 2 * size if replacement else size), replacement=replacement)
    return Plan(kind, size, **common)
