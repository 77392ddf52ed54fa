"""The index batches of an epoch from any position, and the sampler's part of a state."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rustloader.order.base import Order
from rustloader.order.stream import from_position, stream
from rustloader.stateful_dataloader.recording import Recorder, after_batches, may_be_stateful, resumable
from rustloader.stateful_dataloader.schema import INNER_ITER_STATE, SamplerState, copied


class Sampling:
    """The index batches of an epoch.

    The base class serves iterable datasets, and samplers for which only the position can be saved.

    Attributes:
        iterator: Yields the index batches from the position on.
        is_repeatable: Whether another iterator from the same saved state yields the same index batches.
    """

    is_repeatable = False

    def __init__(self, order: Order, iterator: Iterator[Any]) -> None:
        self._order = order
        self.iterator = iterator

    def draw(self) -> None:
        """Makes the random draws that torch makes in the first ``next``, unless they have been made."""

    def state(self, position: int) -> SamplerState:
        """Returns the state of the sampler after the batches before ``position`` were delivered.

        Makes the draws of the first ``next`` unless they have been made, because they belong to the state.
        """
        return after_batches(self._order, self._unstarted, position)

    @functools.cached_property
    def _unstarted(self) -> SamplerState:
        # Computed on first use, because `len` of a sampler may run the program's code.
        return SamplerState(**self._order.entries())


class _FromStart(Sampling):
    """The index batches of torch's own samplers, whose state is the start of the order and a position."""

    is_repeatable = True

    def draw(self) -> None:
        self._order.begin()

    def state(self, position: int) -> SamplerState:
        start = copied(self._order.begin())
        return after_batches(self._order, replace(self._unstarted, start=start), position)


class _Recorded(Sampling):
    """The index batches of a sampler that has a state, or whose iterator has one."""

    is_repeatable = True

    def __init__(self, order: Order, recorder: Recorder) -> None:
        super().__init__(order, _skipping(recorder, recorder.to_skip))
        self._recorder = recorder

    def draw(self) -> None:
        self._recorder.begin()

    def state(self, position: int) -> SamplerState:
        entry = self._recorder.entry(position)
        if entry is None:
            return after_batches(self._order, replace(self._unstarted, kind="other"), position)
        return replace(
            self._unstarted,
            kind="stateful",
            state_position=entry.position,
            index_sampler_state=entry.index_sampler_state,
            sampler_iter_state=entry.sampler_iter_state,
        )


def sampling(
    index_sampler: Any,
    torch_iterator: Iterator[Any],
    saved: SamplerState | None,
    position: int,
    ahead: Sequence[int],
    every: int,
    map_style: bool,
) -> Sampling:
    """Returns the index batches of an epoch from a position on.

    Makes no draws and loads no states before the first ``next``.

    Args:
        index_sampler: The source of the loader's index batches.
        torch_iterator: ``iter(index_sampler)``, unstarted.
        saved: The result of ``Sampling.state``. It may contain only the start, or only torchdata's two states, which
            are those at the position unless there is a ``state_position``. With None, the epoch starts as in torch.
        position: Number of index batches to skip.
        ahead: Ordinals after the position that are skipped as well.
        every: Number of index batches between two saved states of a sampler; 0 saves only the first state.
        map_style: Whether the dataset is map-style. For an iterable dataset, no index batches are skipped.

    Raises:
        ValueError: ``saved`` contains the state of a sampler, but this sampler cannot load a state.
    """
    order = resumable(index_sampler)
    if not map_style:
        return Sampling(order, stream(index_sampler, torch_iterator))
    if order.sampler_class is not None:
        skipped = order.resume(start_of(order, saved), saved is not None and saved.owes_draws, position)
        batches: Sampling = _FromStart(order, from_position(order, torch_iterator, skipped))
    elif may_be_stateful(order, torch_iterator):
        batches = _Recorded(order, Recorder(order, torch_iterator, saved, position, every))
    else:
        batches = Sampling(order, _skipping(torch_iterator, position))
    if ahead:
        # This chain runs entirely in C, so an interrupt cannot lose an index batch.
        delivered = set(ahead)
        wanted = [ordinal not in delivered for ordinal in range(position, max(ahead) + 1)]
        batches.iterator = itertools.compress(batches.iterator, itertools.chain(wanted, itertools.repeat(True)))
    return batches


def _skipping(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    return itertools.islice(iterator, count, None) if count else iterator


def start_of(order: Order, saved: SamplerState | None) -> Mapping[str, Any] | None:
    """Returns the saved start of a known sampler; None if there is none.

    A state of torchdata's RandomSampler contains the state of its generator, from which torch's sampler draws the same
    indices.
    """
    if saved is None:
        return None
    if saved.kind is not None or saved.start is not None:
        start: Mapping[str, Any] | None = saved.start
        return start or None
    state = saved.sampler_iter_state
    if order.batches is not None and isinstance(state, Mapping):
        state = state.get(INNER_ITER_STATE)
    if order.name == "random" and isinstance(state, Mapping) and "generator" in state:
        return {"generator": state["generator"]}
    return None
