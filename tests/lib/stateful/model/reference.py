"""The batches that a loader must deliver, from torch's own loader and a few lines of code."""

import torch

from rustloader import _core

from . import parts

ERROR = "error"


class Reference:
    """The epochs of one chain of loaders, each of which resumes from an earlier one.

    Args:
        settings: Those of the first loader. The settings that change from loader to loader do not affect the batches:
            `num_workers` does not change if the dataset is bound to it.
    """

    def __init__(self, settings):
        self.settings = settings
        self.generator = torch.Generator().manual_seed(0)
        has_loader = settings.is_map or settings.is_drawing
        self.loader = parts.make_reference(settings, self.generator) if has_loader else None
        self.iterator = None
        # The base seed of the first epoch, which seed_by uses.
        self.base_seed = None

    def set_epoch(self, epoch):
        if self.loader is not None:
            parts.set_epoch(self.loader, epoch)

    def indices(self, keeps_workers):
        """The index batches of an epoch that begins now, as torch draws them; the batches of a drawing dataset."""
        if self.loader is None:
            if not keeps_workers:
                self.keep_base_seed(int(torch.empty((), dtype=torch.int64).random_()))
            return []
        if keeps_workers:
            self.iterator._reset(self.loader)
        else:
            self.iterator = iter(self.loader)
            self.keep_base_seed(self.iterator._base_seed)
        return list(self.iterator if self.settings.is_drawing else self.iterator._sampler_iter)

    def keep_base_seed(self, base_seed):
        if self.base_seed is None:
            self.base_seed = base_seed

    def batches(self, epoch, indices, counts):
        """The batches of an epoch. `counts` holds the samples that each worker's copy of the dataset has made, and is
        updated."""
        if self.settings.is_drawing:
            return indices
        if self.settings.is_map:
            return [self.batch(epoch, ordinal, index, counts) for ordinal, index in enumerate(indices)]
        workers = range(max(self.settings.num_workers, 1))
        streams = [self.stream(epoch, worker) for worker in workers]
        # The workers take turns until each has ended.
        turns = range(max(map(len, streams)))
        return [stream[turn] for turn in turns for stream in streams if turn < len(stream)]

    def batch(self, epoch, ordinal, index, counts):
        settings = self.settings
        worker = ordinal % len(counts)
        draw = self.drawing(0, epoch, ordinal)
        batch = []
        for place, i in enumerate(index if isinstance(index, list) else [index]):
            counts[worker] += 1
            if i in settings.errors:
                return [ERROR, i]
            count = counts[worker] if settings.dataset == "stateful map" else None
            batch.append([i, count, draw(place, ordinal)])
        return batch if isinstance(index, list) else batch[0]

    def stream(self, epoch, worker):
        """The batches of one worker of an iterable dataset."""
        settings = self.settings
        size, length = settings.batch_size or 1, settings.sizes[worker]
        batches = []
        for ordinal, start in enumerate(range(0, length, size)):
            draw = self.drawing(worker + 1, epoch, ordinal)
            batch = [[i, worker, draw(0, i)] for i in range(start, min(start + size, length))]
            if len(batch) == size or not settings.drop_last:
                batches.append(batch if settings.batch_size else batch[0])
        return batches

    def drawing(self, worker, epoch, ordinal):
        """A function of a sample's place and ordinal that draws what the sample draws, with the seeds of
        docs/reproducibility.md."""
        by = self.settings.seed_by
        generator = torch.Generator()

        def seeded(place, ordinal):
            seed = _core.seed_words(self.base_seed, place, ordinal, worker, epoch)[0] & ((1 << 63) - 1)
            generator.manual_seed(seed)
            return seed

        if by == "worker":
            return lambda place, ordinal: None
        if by == "batch":
            seed = seeded(0, ordinal)
            return lambda place, ordinal: [seed, parts.draw(generator)]
        return lambda place, ordinal: [seeded(1 + place, ordinal), parts.draw(generator)]
