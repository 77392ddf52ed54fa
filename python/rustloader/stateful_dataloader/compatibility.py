"""Checks that a loader's dataset and sampler match those of a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

from rustloader.order.base import Order, length_of
from rustloader.order.computed import shard_start
from rustloader.order.stream import KNOWN_SAMPLERS
from rustloader.stateful_dataloader.recording import resumable
from rustloader.stateful_dataloader.schema import DatasetState, SamplerState
from rustloader.system.protocols import LoaderLike
from rustloader.workers.snapshots import is_stateful

_DATASETS = {"map": "a map-style dataset", "iterable": "an iterable dataset"}
_SAMPLERS = {kind: f"a {cls}" for kind, cls in KNOWN_SAMPLERS.items()} | {
    "none": "an iterable dataset, which has no sampler",
    "stateful": "a sampler of another class",
    "other": "a sampler of another class",
}
_USE_SAME_DATASET = "load it into a loader over the same dataset, or start without a state"
_USE_SAME_SETTINGS = "make the loader with the same settings, or start without a state"
# For each entry that must match: the description of its value, and the remedy if it differs.
_OF_SAMPLERS = {
    "length": ("a sampler of length {}", _USE_SAME_DATASET),
    "data_length": ("a sampler over {} indices", _USE_SAME_DATASET),
    "batch_size": ("batch_size={}", _USE_SAME_SETTINGS),
    "drop_last": ("drop_last={}", _USE_SAME_SETTINGS),
    "replacement": ("a sampler with replacement={}", _USE_SAME_SETTINGS),
}
_OF_SHARDS = {
    "dataset_length": ("a DistributedSampler over {} indices", _USE_SAME_DATASET),
    "num_replicas": (
        "{} ranks",
        "load it with the same number of ranks, or make states for another number with "
        "rustloader.stateful_dataloader.reshard",
    ),
    "seed": ("a DistributedSampler with seed={}", _USE_SAME_SETTINGS),
    "shuffle": ("a DistributedSampler with shuffle={}", _USE_SAME_SETTINGS),
    "drop_last": ("a DistributedSampler with drop_last={}", _USE_SAME_SETTINGS),
}


def dataset_of(loader: LoaderLike) -> DatasetState:
    """Describes the dataset of a loader for a state."""
    dataset = loader.dataset
    if loader._dataset_kind == _DatasetKind.Iterable:
        # `len` of an iterable dataset is only an estimate, and may be slow.
        return DatasetState("iterable", None, is_stateful(dataset))
    return DatasetState("map", length_of(dataset), is_stateful(dataset))


def check(saved: DatasetState | SamplerState, loader: LoaderLike) -> None:
    """Checks that a loader's dataset or sampler matches that of a state.

    Args:
        saved: The description of the dataset or of the sampler in a state.
        loader: The loader that loads the state.

    Raises:
        ValueError: The dataset or the sampler differs, or the description is malformed.
    """
    if isinstance(saved, DatasetState):
        _check_dataset(saved, dataset_of(loader))
    else:
        _check_sampler(saved, resumable(loader._index_sampler))


def _check_dataset(saved: DatasetState, present: DatasetState) -> None:
    if saved.kind != present.kind:
        raise _difference(_DATASETS.get(saved.kind, "another dataset"), _DATASETS[present.kind], _USE_SAME_DATASET)
    _compare(saved.length, present.length, "a dataset of length {}", _USE_SAME_DATASET)


def _check_sampler(saved: SamplerState, order: Order) -> None:
    present = SamplerState(**order.entries())
    _check_kind(saved.kind, order.name)
    if saved.start is not None:
        _check_start(saved.start, order)
    size = present.batch_size
    if saved.says_batch_size and (saved.batch_size is None) != (size is None):
        raise _difference(f"batch_size={saved.batch_size}", f"batch_size={size}", _USE_SAME_SETTINGS)
    for name, (text, remedy) in _OF_SAMPLERS.items():
        _compare(getattr(saved, name), getattr(present, name), text, remedy)


def _check_kind(saved: Any, present: str) -> None:
    description = _SAMPLERS.get(saved) if isinstance(saved, str) else None
    if description is None:
        raise ValueError(f"the state's kind of sampler must be one of {', '.join(_SAMPLERS)}, got {saved!r}")
    # "stateful" and "other" cannot be told apart before iteration: the state may be only in the sampler's iterator.
    if saved != present and not {saved, present} <= {"stateful", "other"}:
        remedy = "load it into a loader with the same sampler, or start without a state"
        raise _difference(description, _SAMPLERS[present], remedy)


def _compare(saved: Any, present: Any, text: str, remedy: str) -> None:
    if saved is not None and present is not None and saved != present:
        raise _difference(text.format(saved), text.format(present), remedy)


def _difference(saved: str, present: str, remedy: str) -> ValueError:
    return ValueError(f"the state was saved with {saved}, but this loader has {present}: {remedy}")


def _check_start(start: Any, order: Order) -> None:
    if not isinstance(start, Mapping):
        raise ValueError(f"the sampler's start in the state must be a dict or None, got {start!r}")
    order.check_start(start)
    if order.name == "distributed":
        present = shard_start(order.inner) or {}
        for name, (text, remedy) in _OF_SHARDS.items():
            _compare(start[name], present.get(name), text, remedy)
