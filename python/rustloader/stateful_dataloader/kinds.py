"""Describes a loader's sampler in a state, and checks whether a sampler can resume from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _InfiniteConstantSampler
from torch.utils.data.distributed import DistributedSampler

from rustloader.iterator import indices
from rustloader.iterator.starts import shard_start
from rustloader.stateful_dataloader.schema import SamplerState, check_random_start, check_shard_start
from rustloader.stateful_dataloader.stateful import Stateful
from rustloader.system.protocols import LoaderLike

# The samplers of torch whose order this package can begin anywhere, by the code that yields their indices.
_KNOWN = {
    indices.SEQUENTIAL: "sequential",
    indices.RANDOM: "random",
    indices.SHARD: "distributed",
    indices.SUBSET: "subset",
    indices.WEIGHTED: "weighted",
}


@dataclass(frozen=True)
class Kind:
    """A loader's index sampler.

    Attributes:
        name: ``"sequential"``, ``"random"``, ``"distributed"``, ``"subset"`` or ``"weighted"`` for torch's samplers,
            ``"none"`` for that of an iterable dataset, ``"stateful"`` for one with a state, ``"other"`` for the rest.
        inner: The sampler of single indices, if torch's BatchSampler makes batches of them; else the index sampler.
        batches: torch's BatchSampler, or None.
    """

    name: str
    inner: Any
    batches: Any

    @property
    def index_sampler(self) -> Any:
        """The index sampler itself."""
        return self.inner if self.batches is None else self.batches

    @property
    def is_known(self) -> bool:
        """True if the order can begin anywhere."""
        return self.name not in ("other", "stateful", "none")


def kind_of(index_sampler: Any) -> Kind:
    """Returns the kind of a loader's index sampler. Calls no method of it."""
    is_batches = isinstance(index_sampler, BatchSampler) and _code_of(index_sampler) is indices.BATCHES is not None
    batches = index_sampler if is_batches else None
    inner = index_sampler.sampler if is_batches else index_sampler
    name = "other"
    if isinstance(inner, _InfiniteConstantSampler):
        name = "none"
    elif isinstance(index_sampler, Stateful) or isinstance(inner, Stateful):
        name = "stateful"
    elif _code_of(inner) is not None and (batches is None or type(batches.batch_size) is int):
        name = _KNOWN.get(_code_of(inner), "other")
    return Kind(name, inner, batches)


def _code_of(iterable: Any) -> Any:
    return getattr(getattr(type(iterable), "__iter__", None), "__code__", None)


def about(kind: Kind) -> SamplerState:
    """Describes a sampler for a state, without its start."""
    inner = kind.inner
    batches = inner if isinstance(inner, BatchSampler) else kind.batches
    data = {"random": "data_source", "weighted": "weights"}.get(kind.name)
    return SamplerState(
        kind=kind.name,
        length=None if kind.name == "none" else length_of(inner),
        batch_size=_typed_attribute(int, batches, "batch_size"),
        drop_last=_typed_attribute(bool, batches, "drop_last"),
        data_length=data and length_of(getattr(inner, data)),
        replacement=data and bool(inner.replacement),
    )


def _typed_attribute(cls: type, sampler: Any, name: str) -> Any:
    value = getattr(sampler, name, None)
    return value if type(value) is cls else None


def length_of(sized: Any) -> int | None:
    """Returns the length of an object, or None."""
    try:
        return len(sized)
    except Exception:
        return None


_SAMPLERS = {
    "sequential": "a SequentialSampler",
    "random": "a RandomSampler",
    "distributed": "a DistributedSampler",
    "subset": "a SubsetRandomSampler",
    "weighted": "a WeightedRandomSampler",
    "none": "an iterable dataset, which has no sampler",
    "stateful": "a sampler of another class",
    "other": "a sampler of another class",
}
_DATASET = "load it into a loader over the same dataset, or begin without a state"
_SETTINGS = "make the loader with the same settings, or begin without a state"
_TEXTS = {
    "length": ("a sampler of length {}", _DATASET),
    "data_length": ("a sampler over {} indices", _DATASET),
    "batch_size": ("a loader with batch_size={}, whose batches it counts", _SETTINGS),
    "drop_last": ("a loader with drop_last={}", _SETTINGS),
    "replacement": ("a sampler with replacement={}", _SETTINGS),
}
_SHARD_TEXTS = {
    "dataset_length": ("a DistributedSampler over {} indices", _DATASET),
    "num_replicas": (
        "{} ranks",
        "load it with the same number of ranks, or let rustloader.stateful_dataloader.reshard make states for another",
    ),
    "seed": ("a DistributedSampler with seed={}", _SETTINGS),
    "shuffle": ("a DistributedSampler with shuffle={}", _SETTINGS),
    "drop_last": ("a DistributedSampler with drop_last={}", _SETTINGS),
}


def check(saved: SamplerState, loader: LoaderLike) -> None:
    """Checks that a loader's sampler can resume where a saved one was.

    Args:
        saved: A state's description of its sampler.
        loader: The loader that loads the state.

    Raises:
        ValueError: The sampler is another one, or something is wrong with what was saved.
    """
    kind = kind_of(loader._index_sampler)
    present = about(kind)
    _check_kind(saved.kind, kind.name)
    if saved.start is not None:
        _check_start(saved.start, kind)
    size = present.batch_size
    if saved.says_batch_size and None in (saved.batch_size, size) and saved.batch_size != size:
        raise ValueError(
            f"the state is of a loader with batch_size={saved.batch_size}, and this has {size}: {_SETTINGS}"
        )
    for name, (text, way_out) in _TEXTS.items():
        _compare(getattr(saved, name), getattr(present, name), text, way_out)


def _check_kind(saved: Any, present: str) -> None:
    names = _SAMPLERS.get(saved) if isinstance(saved, str) else None
    if names is None:
        raise ValueError(f"the state's kind of sampler must be one of {', '.join(_SAMPLERS)}, got {saved!r}")
    # Only iteration shows whether a sampler has a state.
    if saved != present and not {saved, present} <= {"stateful", "other"}:
        raise ValueError(
            f"the state is of {names}, and this loader has {_SAMPLERS[present]}: load it into a loader with the same "
            "sampler, or begin without a state"
        )


def _compare(saved: Any, present: Any, text: str, way_out: str) -> None:
    if saved is not None and present is not None and saved != present:
        raise ValueError(f"the state is of {text.format(saved)}, and this loader's has {present}: {way_out}")


def _check_start(start: Any, kind: Kind) -> None:
    if not isinstance(start, Mapping):
        raise ValueError(f"the state's start of the sampler must be a dict or None, got {start!r}")
    if kind.name == "distributed":
        _check_shard(start, kind.inner)
    elif kind.name in ("random", "subset", "weighted"):
        check_random_start(start)


def _check_shard(start: Mapping[str, Any], inner: DistributedSampler[Any]) -> None:
    check_shard_start(start)
    present = shard_start(inner) or {}
    for name, (text, way_out) in _SHARD_TEXTS.items():
        _compare(start[name], present.get(name), text, way_out)
