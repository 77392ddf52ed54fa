"""The index batches of an epoch from any position, and the sampler's part of a state."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rustloader._core import IndexStream
from rustloader.iterator import indices
from rustloader.iterator.starts import Start, shard_start
from rustloader.stateful_dataloader.recording import Recorder, may_be_stateful
from rustloader.stateful_dataloader.sampler_kinds import Kind, kind_of
from rustloader.stateful_dataloader.schema import SamplerState
from rustloader.stateful_dataloader.sources import Source, iterate, start_of

logger = logging.getLogger("rustloader")


class Sampling:
    """The index batches of an epoch.

    The base class serves iterable datasets, and samplers for which only the position can be saved.

    Attributes:
        iterator: Yields the index batches from the position on.
        is_repeatable: Whether another iterator from the same saved state yields the same index batches.
    """

    is_repeatable = False

    def __init__(self, kind: Kind, iterator: Iterator[Any]) -> None:
        self._kind = kind
        self.iterator = iterator

    def draw(self) -> None:
        """Makes the random draws that torch makes in the first ``next``, unless they have been made."""

    def state(self, position: int) -> SamplerState:
        """Returns the state of the sampler after the batches before ``position`` were delivered.

        Makes the draws of the first ``next`` unless they have been made, because they belong to the state.
        """
        return self._kind.after_batches(self._unstarted, position)

    @functools.cached_property
    def _unstarted(self) -> SamplerState:
        # Computed on first use, because `len` of a sampler may run the program's code.
        return self._kind.unstarted()


class _FromStart(Sampling):
    """The index batches of torch's own samplers, whose state is the start of the order and a position.

    Args:
        kind: The sampler.
        iterator: Yields the sampler's index batches.
        begin: Makes the first draws, unless an earlier call has made them. Returns the start of the order; None if the
            start cannot be saved.
    """

    is_repeatable = True

    def __init__(self, kind: Kind, iterator: Iterator[Any], begin: Callable[[], dict[str, Any] | None]) -> None:
        super().__init__(kind, iterator)
        self._begin = begin

    def draw(self) -> None:
        self._begin()

    def state(self, position: int) -> SamplerState:
        start = self._begin()
        if start is not None:
            start = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in start.items()}
        return self._kind.after_batches(replace(self._unstarted, start=start), position)


class _Recorded(Sampling):
    """The index batches of a sampler that has a state, or whose iterator has one."""

    is_repeatable = True

    def __init__(self, kind: Kind, recorder: Recorder) -> None:
        super().__init__(kind, _skipping(recorder, recorder.to_skip))
        self._recorder = recorder

    def draw(self) -> None:
        self._recorder.begin()

    def state(self, position: int) -> SamplerState:
        entry = self._recorder.entry(position)
        if entry is None:
            return self._kind.after_batches(replace(self._unstarted, kind="other"), position)
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
    kind = kind_of(index_sampler)
    if not map_style:
        return Sampling(kind, indices.stream(index_sampler, torch_iterator))
    if kind.is_known:
        batches: Sampling = _of_torch_sampler(kind, torch_iterator, saved, position)
    elif may_be_stateful(kind, torch_iterator):
        batches = _Recorded(kind, Recorder(kind, torch_iterator, saved, position, every))
    else:
        batches = Sampling(kind, _skipping(torch_iterator, position))
    if ahead:
        # This chain runs entirely in C, so an interrupt cannot lose an index batch.
        delivered = set(ahead)
        wanted = [ordinal not in delivered for ordinal in range(position, max(ahead) + 1)]
        batches.iterator = itertools.compress(batches.iterator, itertools.chain(wanted, itertools.repeat(True)))
    return batches


def _skipping(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    return itertools.islice(iterator, count, None) if count else iterator


def _of_torch_sampler(
    kind: Kind, torch_iterator: Iterator[Any], saved: SamplerState | None, position: int
) -> _FromStart:
    saved_start = start_of(kind, saved)
    if kind.name == "sequential":
        # A sequential order has an empty start, which `dict` returns.
        if position:
            return _FromStart(kind, iterate(kind, Source(kind, None, _indices(kind, position))), dict)
        return _FromStart(kind, indices.stream(kind.index_sampler, torch_iterator), dict)
    if kind.name == "distributed" and saved_start is not None:
        _warn_of_epoch(saved_start, kind.inner)
        # Frameworks load the state of one rank on all ranks. This works because the position is the same for each rank.
        saved_start = {**saved_start, "rank": kind.inner.rank}
        # A program may have moved the position back to a batch from before the reshard.
        position = max(position - saved_start["first"], 0)
    owes_draws = saved is not None and saved.owes_draws
    start = Start(saved_start, owes_draws)
    stream = indices.stream(kind.index_sampler, torch_iterator, start)
    if isinstance(stream, IndexStream):
        if position:
            stream.skip(position)
        return _FromStart(kind, stream, functools.partial(_begin_stream, kind, start))
    is_begun = kind.name == "distributed" and kind.batches is None
    source = Source(kind, saved_start, _indices(kind, position), torch_iterator if is_begun else None, owes_draws)
    if is_begun:
        # torch read the sampler's settings when it created the iterator, so they are recorded now.
        source.begin()
    return _FromStart(kind, iterate(kind, source), lambda: source.begin()[1])


def _begin_stream(kind: Kind, start: Start) -> dict[str, Any] | None:
    """Makes the first draws of an index stream, unless they have been made. Returns the start of the order."""
    if start.saved is None:
        if kind.name == "distributed":
            start.note(shard_start(kind.inner))
        elif kind.inner.generator is None:
            start.seed()
        else:
            start.note({"generator": kind.inner.generator.get_state()})
    return start.saved


def _indices(kind: Kind, position: int) -> int:
    return position if kind.batches is None else position * int(kind.batches.batch_size)


def _warn_of_epoch(start: Mapping[str, Any], inner: Any) -> None:
    if inner.epoch != start["epoch"]:
        logger.warning(
            "the loaded state is of epoch %s of the DistributedSampler, whose epoch is now %s: the rest of epoch %s "
            "follows. Call set_epoch(%s) before the loop to silence this",
            start["epoch"],
            inner.epoch,
            start["epoch"],
            start["epoch"],
        )
