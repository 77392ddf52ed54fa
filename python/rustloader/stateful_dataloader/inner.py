"""The sampler in a BatchSampler, and its state under the keys of torchdata's BatchSampler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data.dataloader import _InfiniteConstantSampler

from rustloader._core import call_into
from rustloader.stateful_dataloader.schema import INNER_ITER_STATE, INNER_STATE, SAMPLES_YIELDED
from rustloader.stateful_dataloader.stateful import Stateful


class Inner:
    """The sampler in torch's BatchSampler, and the single iterator over it that torch's code uses."""

    def __init__(self, sampler: Any, saved: Mapping[str, Any] | None) -> None:
        self._sampler = sampler
        self._saved = saved
        self._iterators: list[Iterator[Any]] = []

    def begin(self) -> Iterator[Any]:
        """Returns the iterator, which the first call creates."""
        if not self._iterators:
            if self._saved is None:
                call_into(self._iterators, iter, self._sampler)
            else:
                call_into(self._iterators, load_batch_state, self._saved, self._sampler)
        return self._iterators[0]

    def __iter__(self) -> Iterator[Any]:
        iterator = self.begin()
        # torch's code calls `iter` for each batch. A sampler that is its own iterator might start over each time.
        return map(next, itertools.repeat(iterator)) if isinstance(iterator, Stateful) else iterator

    def state(self, samples_yielded: int) -> dict[str, Any] | None:
        """Returns a state like that of torchdata's BatchSampler; None if neither sampler nor iterator has a state."""
        iterator = self.begin()
        if isinstance(self._sampler, Stateful) or isinstance(iterator, Stateful):
            return batch_state(samples_yielded, self._sampler, iterator)
        return None


def batch_state(samples_yielded: int, sampler: Any, indices: Any) -> dict[str, Any]:
    """Returns the state of an iterator over batches, with the states of its sampler and of the sampler's iterator."""
    state: dict[str, Any] = {SAMPLES_YIELDED: samples_yielded}
    if isinstance(sampler, Stateful):
        state[INNER_STATE] = sampler.state_dict()
    if isinstance(indices, Stateful):
        state[INNER_ITER_STATE] = indices.state_dict()
    return state


def load_batch_state(state: Mapping[str, Any], sampler: Any) -> Iterator[Any]:
    """Loads a state from ``batch_state`` and returns an iterator over the remaining indices.

    Raises:
        ValueError: ``state`` contains the state of a sampler or of its iterator, but this sampler or iterator cannot
            load a state.
    """
    if INNER_STATE in state:
        as_stateful(sampler).load_state_dict(state[INNER_STATE])
    indices = iter(sampler)
    if INNER_ITER_STATE in state:
        as_stateful(indices).load_state_dict(state[INNER_ITER_STATE])
    has_state = isinstance(sampler, Stateful) or isinstance(indices, Stateful)
    if not has_state and not isinstance(sampler, _InfiniteConstantSampler):
        return itertools.islice(indices, state[SAMPLES_YIELDED], None)
    return indices


def as_stateful(sampler: Any) -> Stateful:
    """Returns a sampler or iterator unchanged, typed as a stateful object.

    Raises:
        ValueError: The sampler or iterator cannot save and load a state.
    """
    if not isinstance(sampler, Stateful):
        raise ValueError(
            f"the state includes that of a sampler, but {type(sampler).__qualname__} lacks state_dict or "
            "load_state_dict: load the state into a loader with the same sampler, or start without a state"
        )
    return sampler
