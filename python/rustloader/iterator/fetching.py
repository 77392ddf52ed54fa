"""Decides what the options of a loader change about the way its batches are fetched."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.data import _DatasetKind

from rustloader import options
from rustloader.fetch import torchs
from rustloader.fetch.seeds import Seeding
from rustloader.iterator import settings
from rustloader.metrics import ledger

logger = logging.getLogger("rustloader")

# Attribute of a loader: the base seed of its first epoch, and the number of epochs that have begun. It travels with
# copies and pickles of the loader. Only loaders with ``seed_by`` have it.
_EPOCHS = "_rustloader_epochs"


def check(loader: Any) -> None:
    """Raises ValueError if the loader's own options do not go with its dataset."""
    count = options.in_force(settings.original(loader), "worker_threads")
    if count > 1 and loader._dataset_kind == _DatasetKind.Iterable:
        raise ValueError(
            f"worker_threads needs a map-style dataset, got {count} for an iterable one, whose samples come one after "
            "the other; leave worker_threads at 1 and set a larger num_workers"
        )


def threads(loader: Any) -> int:
    """The number of threads that make the samples of a batch in each worker."""
    count: int = options.in_force(loader, "worker_threads")
    reason = _why_one_after_the_other(loader) if count > 1 else None
    if reason is None:
        return count
    _tell(loader, f"worker_threads={count} has no effect: {reason}")
    return 1


def on_error(loader: Any) -> Any:
    """What an exception of a sample does: an ``on_error``."""
    policy = options.in_force(loader, "on_error")
    if is_raise(policy) or torchs.is_own(loader._dataset_kind):
        return policy
    _tell(loader, "on_error has no effect: torch's fetcher was replaced", logging.WARNING)
    return "raise"


def is_raise(policy: Any) -> bool:
    """Whether an ``on_error`` does as torch. A function may compare equal to anything."""
    return isinstance(policy, str) and policy == "raise"


def seeding(loader: Any, drawn: int) -> Seeding | None:
    """The seeds of the epoch that a loader begins next; None: those of torch. ``drawn`` is torch's base seed of the
    iterator, and counts if this is the loader's first epoch."""
    seed_by = options.in_force(loader, "seed_by")
    if seed_by == "worker":
        return None
    if seed_by == "sample":
        reason = _not_apart(loader)
        if reason is not None:
            _tell(loader, f'seed_by="sample" seeds each batch, not each sample: {reason}')
    return next_epoch(loader, Seeding(seed_by == "sample", drawn, 0))


def next_epoch(loader: Any, seeding: Seeding) -> Seeding:
    """The seeds of the epoch that a loader begins next."""
    base_seed, epoch = getattr(loader, _EPOCHS, (seeding.base_seed, 0))
    return Seeding(seeding.by_sample, base_seed, epoch)


def note_begun(loader: Any, seeding: Seeding) -> None:
    """Counts an epoch that has begun. One that failed to begin, or was interrupted, gives its number to the next."""
    set_next(loader, seeding.base_seed, seeding.epoch + 1)


def set_next(loader: Any, base_seed: int, epoch: int) -> None:
    """Sets the base seed of a loader and the number of the epoch that it begins next."""
    # Past a class that refuses attributes.
    object.__setattr__(settings.original(loader), _EPOCHS, (base_seed, epoch))


def next_seeds(loader: Any) -> dict[str, int] | None:
    """The seeds of the epoch that a loader begins next, for a state; None before its first epoch with ``seed_by``."""
    found = vars(settings.original(loader)).get(_EPOCHS)
    return None if found is None else {"base_seed": found[0], "epoch": found[1]}


def forget_epochs(loader: Any) -> None:
    """Makes the next epoch of a loader its first one: it takes a new base seed."""
    vars(settings.original(loader)).pop(_EPOCHS, None)


def _not_apart(loader: Any) -> str | None:
    """Why the samples of a batch cannot be told apart, or None."""
    if torchs.takes_batches(loader._dataset_kind, loader.dataset, loader._auto_collation):
        return f"the __getitems__ of {type(loader.dataset).__qualname__} makes a whole batch"
    if not torchs.is_own(loader._dataset_kind):
        return "torch's fetcher was replaced"
    return None


def _why_one_after_the_other(loader: Any) -> str | None:
    """Why threads cannot make the samples of a batch at the same time, or None."""
    if loader._dataset_kind == _DatasetKind.Iterable:
        return "the samples of an iterable dataset come one after the other"
    if not loader._auto_collation:
        return "with batch_size=None a batch is one sample"
    return _not_apart(loader)


def _tell(loader: Any, text: str, level: int = logging.INFO) -> None:
    """Logs a text once per loader."""
    if ledger.of(settings.original(loader)).is_new(text):
        logger.log(level, "a DataLoader: %s", text)
