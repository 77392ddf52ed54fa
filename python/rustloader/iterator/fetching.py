"""Decides how a loader's options affect the fetching of its batches."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.data import BatchSampler, _DatasetKind

from rustloader.fetch import torch_fetcher
from rustloader.fetch.seeds import Seeding
from rustloader.metrics.fields import SchedulingStats
from rustloader.remote.context import is_remote
from rustloader.settings import loader_state, options
from rustloader.settings.config import LoaderConfig, original
from rustloader.system.protocols import IteratorLike, LoaderLike

logger = logging.getLogger("rustloader")


def adapted(loader: LoaderLike, config: LoaderConfig) -> LoaderConfig:
    """Returns the settings, with torch's behavior for options that have no effect for the loader. Logs these options
    and the reasons once per loader. Also logs if ``seed_by="sample"`` seeds whole batches."""
    changed: dict[str, Any] = {}
    if config.worker_threads > 1 and (reason := _why_not_concurrent(loader)) is not None:
        _log_once(loader, f"worker_threads={config.worker_threads} has no effect: {reason}")
        changed["worker_threads"] = 1
    if config.seed_by == "sample" and (reason := _why_not_per_sample(loader)) is not None:
        _log_once(loader, f'seed_by="sample" seeds each batch, not each sample: {reason}')
    if not config.raises and not torch_fetcher.is_original(loader._dataset_kind):
        _log_once(loader, "on_error has no effect: torch's fetcher was replaced", logging.WARNING)
        changed["on_error"] = "raise"
    return config.changed(**changed) if changed else config


def check(loader: LoaderLike) -> None:
    """Raises ValueError if one of the loader's options cannot be used with its dataset."""
    count = options.in_force(loader, "worker_threads")
    if count > 1 and loader._dataset_kind == _DatasetKind.Iterable:
        raise ValueError(
            f"worker_threads needs a map-style dataset, got {count} for an iterable one, whose samples come one after "
            "another; leave worker_threads at 1 and set a larger num_workers"
        )
    if options.in_force(loader, "overlap_epochs") and loader._dataset_kind == _DatasetKind.Iterable:
        raise ValueError(
            "overlap_epochs needs a map-style dataset, got True for an iterable one, whose next epoch begins with "
            "iter(dataset); leave overlap_epochs out"
        )


def scheduling(
    loader: LoaderLike, iterator: IteratorLike, config: LoaderConfig, auto_workers: int | None = None
) -> SchedulingStats:
    """Returns the settings that the statistics show. Values that torch's constructor copied from the loader are read
    from the iterator, because the program may have defined the loader's attributes as properties."""
    map_style = loader._dataset_kind == _DatasetKind.Map
    sampler = iterator._index_sampler
    batch_size = sampler.batch_size if type(sampler) is BatchSampler else None
    return SchedulingStats(
        prefetch_factor=int(config.prefetch_factor or 0),  # torch's is None without workers
        in_order=bool(config.in_order),
        # An iterable dataset always uses round robin and one thread.
        dispatch=config.dispatch if map_style else "round_robin",
        reorder_window=config.reorder_window,
        worker_threads=config.worker_threads if map_style else 1,
        map_style=map_style,
        batch_size=batch_size if isinstance(batch_size, int) else None,
        # Looked up on the class, because reading an attribute of the dataset itself may run the program's code.
        per_sample=map_style and bool(iterator._auto_collation) and not hasattr(type(loader.dataset), "__getitems__"),
        auto_workers=auto_workers,
        remote=is_remote(loader.multiprocessing_context),
    )


def seeding(loader: LoaderLike, config: LoaderConfig, drawn: int) -> Seeding | None:
    """Returns the seeds of the loader's next epoch; None if they are torch's.

    ``drawn`` is the base seed that torch drew for the iterator. It is used only if this is the loader's first epoch.
    """
    if config.seed_by == "worker":
        return None
    return next_epoch(loader, Seeding(config.seed_by == "sample", drawn, 0))


def next_epoch(loader: LoaderLike, seeding: Seeding) -> Seeding:
    """Returns the seeds of the loader's next epoch. If no epoch of the loader has started yet, they use the base seed
    of ``seeding``."""
    base_seed, epoch = loader_state.epochs(original(loader)) or (seeding.base_seed, 0)
    return Seeding(seeding.by_sample, base_seed, epoch)


def note_begun(loader: LoaderLike, seeding: Seeding) -> None:
    """Counts an epoch that has started. An epoch whose start failed or was interrupted is not counted, so the next
    epoch gets the same number."""
    loader_state.set_epochs(original(loader), seeding.base_seed, seeding.epoch + 1)


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


def _log_once(loader: LoaderLike, text: str, level: int = logging.INFO) -> None:
    """Logs a message once per loader."""
    if loader_state.of(original(loader)).first_time(text):
        logger.log(level, "a DataLoader: %s", text)
