"""The kinds of samplers that a state distinguishes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _InfiniteConstantSampler

from rustloader.iterator import indices
from rustloader.stateful_dataloader.schema import SAMPLES_YIELDED, SamplerState
from rustloader.stateful_dataloader.stateful import Stateful

# torch's samplers whose order this package can start at any position: class names, by kind.
TORCH_SAMPLERS = {
    "sequential": "SequentialSampler",
    "random": "RandomSampler",
    "distributed": "DistributedSampler",
    "subset": "SubsetRandomSampler",
    "weighted": "WeightedRandomSampler",
}
# The kinds of these samplers that draw random numbers from a generator.
RANDOM_SAMPLERS = ("random", "subset", "weighted")
# The kinds of these samplers, by the code object that yields their indices.
_KIND_OF_CODE = {
    indices.SEQUENTIAL: "sequential",
    indices.RANDOM: "random",
    indices.SHARD: "distributed",
    indices.SUBSET: "subset",
    indices.WEIGHTED: "weighted",
}


@dataclass(frozen=True)
class Kind:
    """A loader's index sampler, classified.

    Attributes:
        name: A key of ``TORCH_SAMPLERS``, ``"none"`` for the sampler that torch gives an iterable dataset,
            ``"stateful"`` for a sampler with a state, or ``"other"``.
        inner: The sampler of single indices, if torch's BatchSampler batches them; otherwise the index sampler itself.
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
        """True if the order can start at any position."""
        return self.name in TORCH_SAMPLERS

    def unstarted(self) -> SamplerState:
        """Returns the state of the sampler before an epoch. Draws nothing."""
        inner = self.inner
        batches = inner if isinstance(inner, BatchSampler) else self.batches
        data = {"random": "data_source", "weighted": "weights"}.get(self.name)
        return SamplerState(
            kind=self.name,
            length=None if self.name == "none" else length_of(inner),
            batch_size=_typed_attribute(int, batches, "batch_size"),
            drop_last=_typed_attribute(bool, batches, "drop_last"),
            data_length=data and length_of(getattr(inner, data)),
            replacement=data and bool(inner.replacement),
        )

    def after_batches(self, state: SamplerState, number: int) -> SamplerState:
        """Returns a state with torchdata's state of batches of a sampler without a state: the number of samples in the
        first ``number`` batches."""
        if self.batches is None or state.batch_size is None:
            return state
        samples = number * state.batch_size
        samples = samples if state.length is None else min(samples, state.length)
        return replace(state, sampler_iter_state={SAMPLES_YIELDED: samples})


def kind_of(index_sampler: Any) -> Kind:
    """Returns the kind of a loader's index sampler. Calls none of the sampler's methods."""
    is_batches = isinstance(index_sampler, BatchSampler) and _code_of(index_sampler) is indices.BATCHES is not None
    batches = index_sampler if is_batches else None
    inner = index_sampler.sampler if is_batches else index_sampler
    code, name = _code_of(inner), "other"
    if isinstance(inner, _InfiniteConstantSampler):
        name = "none"
    elif isinstance(index_sampler, Stateful) or isinstance(inner, Stateful):
        name = "stateful"
    elif code is not None and (batches is None or type(batches.batch_size) is int):
        name = _KIND_OF_CODE.get(code, "other")
    return Kind(name, inner, batches)


def _code_of(iterable: Any) -> Any:
    return getattr(getattr(type(iterable), "__iter__", None), "__code__", None)


def _typed_attribute(cls: type, sampler: Any, name: str) -> Any:
    value = getattr(sampler, name, None)
    return value if type(value) is cls else None


def length_of(sized: Any) -> int | None:
    """Returns the length of an object; None if ``len`` fails."""
    try:
        return len(sized)
    except Exception:
        return None
