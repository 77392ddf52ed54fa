"""Decides what the options of a loader change about the way its batches are fetched."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from rustloader import options
from rustloader.fetch import torchs
from rustloader.fetch.seeds import Seeding
from rustloader.iterator import settings
from rustloader.metrics import ledger

logger = logging.getLogger("rustloader")

# Attribute of a loader: the base seed of its first epoch, and the number of epochs that have begun. It travels with
# copies and pickles of the loader. Only loaders with ``seed_by`` have it.
_EPOCHS = "_rustloader_epochs"


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
    return dataclasses.replace(seeding, base_seed=base_seed, epoch=epoch)


def note_begun(loader: Any, seeding: Seeding) -> None:
    """Counts an epoch that has begun. One that failed to begin, or was interrupted, gives its number to the next."""
    setattr(settings.original(loader), _EPOCHS, (seeding.base_seed, seeding.epoch + 1))


def _not_apart(loader: Any) -> str | None:
    """Why the samples of a batch cannot be told apart, or None."""
    if torchs.takes_batches(loader._dataset_kind, loader.dataset, loader._auto_collation):
        return f"the __getitems__ of {type(loader.dataset).__qualname__} makes a whole batch"
    if not torchs.is_own(loader._dataset_kind):
        return "torch's fetcher was replaced"
    return None


def _tell(loader: Any, text: str) -> None:
    """Logs a text once per loader."""
    if ledger.of(settings.original(loader)).is_new(text):
        logger.info("a DataLoader: %s", text)
