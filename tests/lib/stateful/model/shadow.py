"""torchdata's loader beside the one under test: its states must have the same values under the same keys."""

import contextlib
import logging
import warnings

import torch
from support import same

from . import parts

# Samplers whose states are the same in both libraries.
SAMPLERS = (
    "sequential",
    "distributed",
    "custom",
    "custom iterator state",
    "custom state",
    "batch sampler",
    "batch sampler state",
)
# Seeds differ, because a resume draws none.
SEEDS = ("_base_seed", "_shared_seed")
OF_DATASET = ("dataset_state", "dataset_iter_state", "fetcher_ended")
OF_SAMPLER = ("_sampler_iter_state", "_index_sampler_state", "_sampler_iter_yielded")


def make(settings, resumed=False):
    """A shadow; None if states of the two libraries cannot be compared."""
    comparable = settings.sampler in SAMPLERS and settings.in_order and not settings.errors
    # With workers, torchdata's snapshot may be older. After a resume, it counts batches of a plain stream twice, and a
    # stream that had ended draws again.
    is_inexact = resumed and settings.dataset in ("iterable", "drawing stream")
    if not comparable or (settings.num_workers and settings.every != 1) or is_inexact:
        return None
    return Shadow(settings)


class Shadow:
    """A loader of torchdata, with its own state of torch's generator."""

    def __init__(self, settings):
        from torchdata.stateful_dataloader import StatefulDataLoader

        logging.getLogger("torchdata").setLevel(logging.ERROR)
        self.settings = settings
        self.iterator = None
        self.is_loaded = self.is_resumed = False
        self.generator = torch.get_rng_state()
        arguments = parts.batch_arguments(settings) | parts.sampler_arguments(settings, None)
        with self.quiet():
            self.loader = StatefulDataLoader(
                parts.CLASSES[settings.dataset](settings),
                num_workers=settings.num_workers,
                prefetch_factor=settings.prefetch_factor if settings.num_workers else None,
                persistent_workers=settings.persistent,
                snapshot_every_n_steps=settings.every,
                collate_fn=parts.unchanged,
                **arguments,
            )

    @contextlib.contextmanager
    def quiet(self):
        """Neither draws from the program's generator nor warns."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.generator)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield
            finally:
                self.generator = torch.get_rng_state()
                torch.set_rng_state(before)

    def iter(self, epoch):
        self.generator = torch.get_rng_state()
        if hasattr(self.loader.sampler, "set_epoch"):
            self.loader.sampler.set_epoch(epoch)
        self.is_resumed, self.is_loaded = self.is_loaded, False
        with self.quiet():
            self.iterator = iter(self.loader)

    def next(self):
        with self.quiet():
            next(self.iterator, None)

    def state(self):
        with self.quiet():
            return self.loader.state_dict()

    def load(self, state):
        self.is_loaded = True
        with self.quiet():
            self.loader.load_state_dict(state)

    def difference(self, state):
        """A key whose values in a state and in the shadow's differ, with both values; None if there is none.

        Only before the first epoch, the state contains nothing of workers and iterators. After an epoch, it contains
        the draws of the next one, and the sampler at its last batch.
        """
        skipped = {*SEEDS}
        if self.settings.dispatch == "shared_queue":
            # Any worker may make a batch.
            skipped |= {"_last_yielded_worker_id"}
        if self.iterator is None or state["_iterator_finished"]:
            skipped |= {*OF_DATASET, *OF_SAMPLER}
        if self.settings.batch_size is None or (self.is_resumed and self.settings.num_workers):
            # Without batches, torch's fetcher does not note the end of its dataset. torchdata's workers forget it in a
            # resume, and find it again.
            skipped |= {"fetcher_ended"}
        if self.settings.num_workers and not self.settings.is_map:
            # torchdata counts the tasks for which a worker found no data.
            skipped |= {*OF_SAMPLER}
        if "state_position" in state["_rustloader"]["sampler"]:
            own = state["_rustloader"]
            # Samplers may have been asked for a state at an earlier position.
            if own["sampler"]["state_position"] != own["delivered"]:
                skipped |= {*OF_SAMPLER}
        ours, theirs = dict(values(state)), dict(values(self.state()))
        for path in sorted(ours.keys() | theirs.keys()):
            if not skipped.intersection(path) and not same(ours.get(path), theirs.get(path)):
                return path, ours.get(path), theirs.get(path)
        return None


def values(state, path=()):
    """The values under torchdata's keys, each with its path."""
    for key, value in state.items():
        if key == "_rustloader":
            continue
        if isinstance(value, dict) and key not in (*OF_DATASET, *OF_SAMPLER):
            yield from values(value, (*path, key))
        else:
            yield (*path, key), value
