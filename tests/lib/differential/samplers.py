"""The samplers of programs: torch's, and user-defined ones. Most record their calls."""

import itertools

import torch
from torch.utils import data

import rustloader

from . import describe
from .parts import Part

# Numbers the walks of samplers.
_walks = itertools.count()


class Recording(Part, data.Sampler):
    """Records the calls to a sampler, and passes on its indices."""

    def __init__(self, program, recorder, inner):
        super().__init__(program, recorder)
        self.inner = inner

    def __len__(self):
        self.recorder("sampler", "len")
        return len(self.inner)

    def __iter__(self):
        self.recorder("sampler", "iter")
        return self.Walk(self, iter(self.inner), next(_walks))

    class Walk:
        def __init__(self, sampler, walk, number):
            self.sampler, self.walk, self.number = sampler, walk, number

        def __iter__(self):
            return self

        def __next__(self):
            note = self.sampler.recorder
            try:
                index = next(self.walk)
            except BaseException as e:
                note("sampler", type(e).__name__, None, self.number)
                raise
            note("sampler", "next", describe.value(index), self.number)
            return index


class UserSampler(Part, data.Sampler):
    """A user-defined sampler: `lazy` is a generator, `eager` draws everything in __iter__, `walk` is an iterator
    that continues after an error, `infinite` is the same without an end."""

    shift = 0

    def __init__(self, program, recorder):
        super().__init__(program, recorder)
        self.kind = program.sampler

    def __len__(self):
        if self.kind == "infinite":
            raise TypeError("an infinite sampler has no length")
        return self.program.size

    def index(self, at):
        if self.fails("sampler", at):
            self.fail("sampler")
        return (at + self.shift + int(torch.randint(100, ()))) % self.program.size

    def __iter__(self):
        if self.kind == "eager":
            return iter([self.index(at) for at in range(self.program.size)])
        if self.kind == "lazy":
            return self.lazily()
        return Walk(self)

    def lazily(self):
        for at in range(self.program.size):
            yield self.index(at)


class Walk:
    def __init__(self, sampler):
        self.sampler, self.at = sampler, -1

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        if self.sampler.kind != "infinite" and self.at >= self.sampler.program.size:
            raise StopIteration
        return self.sampler.index(self.at)


def sampler(program, recorder, dataset, generator):
    """The arguments of the loader that choose the sampler."""
    p, n = program, program.size

    def recording(inner):
        return {"sampler": Recording(p, recorder, inner)}

    def batches(inner):
        return {"batch_sampler": Recording(p, recorder, inner)}

    kind = p.sampler
    if kind in ("default", "none"):
        return {}
    if kind == "shuffle":
        return {"shuffle": True}
    if kind == "sequential":
        return recording(data.SequentialSampler(dataset))
    if kind == "random":
        return recording(data.RandomSampler(dataset, generator=generator))
    if kind == "replacement":
        return {"sampler": data.RandomSampler(dataset, replacement=True, num_samples=n + 3, generator=generator)}
    if kind == "subset":
        return {"sampler": data.SubsetRandomSampler(range(0, n, 2), generator=generator)}
    if kind == "weighted":
        return recording(data.WeightedRandomSampler([float(1 + i % 3) for i in range(n)], n + 1, generator=generator))
    if kind == "distributed":
        inner = data.DistributedSampler(dataset, num_replicas=2, rank=1, seed=p.seed)
        return {"sampler": inner} if p.seed % 2 else recording(inner)
    if kind == "batch sampler":
        return batches(data.BatchSampler(data.SequentialSampler(dataset), 3, drop_last=p.seed % 2 == 0))
    if kind == "list of batches":
        cuts = [list(range(i, min(i + 1 + i % 4, n))) for i in range(0, n, 4)]
        return batches([tuple(b) if k % 2 else b for k, b in enumerate(cuts)] + [[]] * (p.collate != "default"))
    if kind == "array of batches":
        whole = torch.arange(n - n % 2).reshape(n // 2, 2)
        return {"batch_sampler": whole if p.seed % 2 else whole.numpy()}
    if kind in ("token budget", "packs"):
        lengths, options = [1 + i % 5 for i in range(n)], {"window": 7, "seed": p.seed, "num_replicas": 1, "rank": 0}
        if kind == "packs":
            inner = rustloader.PackingBatchSampler(lengths, 7, **options)
        else:
            inner = rustloader.TokenBudgetBatchSampler(lengths, 12, **options)
        return {"batch_sampler": inner} if p.seed % 2 else batches(inner)
    if kind == "tensors":
        return recording(torch.arange(n).flip(0))
    if kind == "odd indices":
        return {"sampler": list(itertools.islice(itertools.cycle([0, True, n - 1, -1]), n if n < 2 else n + 2))}
    return recording(UserSampler(p, recorder))
