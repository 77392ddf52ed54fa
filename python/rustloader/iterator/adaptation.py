"""Decides which of a loader's options have an effect on its dataset."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.data import _DatasetKind

from rustloader.fetch import torch_fetcher
from rustloader.settings import loader_state
from rustloader.settings.config import LoaderConfig, original
from rustloader.system.protocols import LoaderLike

logger = logging.getLogger("rustloader")

_NO_QUEUE_TEXT = "dispatch='shared_queue' does not apply to {}; its workers use round robin"


def adapted(loader: LoaderLike, config: LoaderConfig) -> LoaderConfig:
    """Returns the settings, with torch's behavior for options that have no effect for the loader. Logs these options
    and the reasons once per loader. Also logs if ``seed_by="sample"`` seeds whole batches."""
    changed: dict[str, Any] = {}
    if config.worker_threads > 1 and (reason := _why_not_concurrent(loader)) is not None:
        log_once(loader, f"worker_threads={config.worker_threads} has no effect: {reason}")
        changed["worker_threads"] = 1
    if config.seed_by == "sample" and (reason := _why_not_per_sample(loader)) is not None:
        log_once(loader, f'seed_by="sample" seeds each batch, not each sample: {reason}')
    if not config.raises and not torch_fetcher.is_original(loader._dataset_kind):
        log_once(loader, "on_error has no effect: torch's fetcher was replaced", logging.WARNING)
        changed["on_error"] = "raise"
    return config.changed(**changed) if changed else config


def round_robin(loader: LoaderLike, config: LoaderConfig, kind: str) -> LoaderConfig:
    """Returns the settings with ``dispatch="round_robin"``, for a dataset to which a shared queue does not apply. Logs
    once per loader if this changes the settings. ``kind`` describes the dataset in the log message."""
    if config.dispatch == "round_robin":
        return config
    if loader_state.of(original(loader)).first_time(_NO_QUEUE_TEXT):
        logger.info(_NO_QUEUE_TEXT.format(kind))
    return config.changed(dispatch="round_robin")


def _why_not_per_sample(loader: LoaderLike) -> str | None:
    """Returns the reason why the samples of a batch cannot be fetched one by one; None if they can."""
    if torch_fetcher.takes_batches(loader._dataset_kind, loader.dataset, loader._auto_collation):
        return f"the __getitems__ of {type(loader.dataset).__qualname__} makes a whole batch"
    if not torch_fetcher.is_original(loader._dataset_kind):
        return "torch's fetcher was replaced"
    return None


def _why_not_concurrent(loader: LoaderLike) -> str | None:
    """Returns the reason why threads cannot fetch the samples of a batch concurrently; None if they can."""
    if loader._dataset_kind == _DatasetKind.Iterable:
        return "the samples of an iterable dataset come one after another"
    if not loader._auto_collation:
        return "with batch_size=None a batch is one sample"
    return _why_not_per_sample(loader)


def log_once(loader: LoaderLike, text: str, level: int = logging.INFO) -> None:
    """Logs a message once per loader."""
    if loader_state.of(original(loader)).first_time(text):
        logger.log(level, "a DataLoader: %s", text)
