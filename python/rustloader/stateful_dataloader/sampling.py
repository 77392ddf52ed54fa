"""The index batches of an epoch from any position, and the sampler's part of a state."""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rustloader._core import IndexStream
from rustloader.iterator import indices
from rustloader.iterator.starts import Start, shard_start
from rustloader.stateful_dataloader.draws import draws, restore, run_out
from rustloader.stateful_dataloader.kinds import Kind, about, check, kind_of
from rustloader.stateful_dataloader.recording import Recorder, may_be_stateful, recorder_of
from rustloader.stateful_dataloader.schema import SAMPLES_YIELDED, SamplerState
from rustloader.stateful_dataloader.sources import Source, iterate, start_of

__all__ = ["Sampling", "check", "draws", "restore", "run_out", "sampling", "unstarted"]

logger = logging.getLogger("rustloader")


class Sampling(ABC):
    """The index batches of an epoch.

    Attributes:
        iterator: Yields those that are left.
    """

    iterator: Iterator[Any]
    # True if another iterator from the same saved state yields the same.
    is_repeatable = True

    def __init__(self, kind: Kind, iterator: Iterator[Any]) -> None:
        self._kind = kind
        self.iterator = iterator
        self._about: SamplerState | None = None

    @abstractmethod
    def draw(self) -> None:
        """Makes the random draws that the first ``next`` would make, unless they are made."""

    @abstractmethod
    def state(self, position: int) -> SamplerState:
        """Returns the state of the sampler when all index batches before a position are delivered.

        Makes the draws of the first ``next`` if they are not made, so that the state says what comes.
        """

    def _describe(self, **more: Any) -> SamplerState:
        # Computed on first use: `len` of a sampler may be code of the program.
        description = self._about
        if description is None:
            description = self._about = about(self._kind)
        return replace(description, **more)


class _Streamed(Sampling):
    """The batches of torch's samplers whose indices are arrays: the start of the order and a position are the whole
    state."""

    def __init__(self, kind: Kind, iterator: Iterator[Any], start: Start) -> None:
        super().__init__(kind, iterator)
        self._start = start

    def draw(self) -> None:
        start, inner = self._start, self._kind.inner
        if start.saved is not None:
            return
        if self._kind.name == "distributed":
            start.note(shard_start(inner))
        elif inner.generator is None:
            start.seed()
        else:
            start.note({"generator": inner.generator.get_state()})

    def state(self, position: int) -> SamplerState:
        saved = self._start.saved
        if saved is None:
            self.draw()
            saved = self._start.saved
        return _with_samples(self._describe(start=_cloned(saved)), position)


class _Sourced(Sampling):
    """The batches of torch's other samplers: the start of the order and a position are the whole state."""

    def __init__(self, kind: Kind, iterator: Iterator[Any], source: Source | None) -> None:
        super().__init__(kind, iterator)
        # None: indices in order, which start from nothing.
        self._source = source

    def draw(self) -> None:
        if self._source is not None:
            self._source.begin()

    def state(self, position: int) -> SamplerState:
        source = self._source
        if source is None:
            return _with_samples(self._describe(start={}), position)
        if source.saved is None:
            source.begin()
        return _with_samples(self._describe(start=_cloned(source.saved)), position)


class _Recorded(Sampling):
    """The batches of samplers that have a state, or whose iterator has one."""

    def __init__(self, kind: Kind, iterator: Iterator[Any], recorder: Recorder) -> None:
        super().__init__(kind, iterator)
        self._recorder = recorder

    def draw(self) -> None:
        self._recorder.begin()

    def state(self, position: int) -> SamplerState:
        entry = self._recorder.entry(position)
        if entry is None:
            return self._describe(kind="other")
        at, index_sampler, sampler_iter = entry
        return self._describe(
            kind="stateful", state_position=at, index_sampler_state=index_sampler, sampler_iter_state=sampler_iter
        )


class _Other(Sampling):
    """The batches of all other samplers, and of iterable datasets: a position is all that can be saved."""

    is_repeatable = False

    def draw(self) -> None:
        pass

    def state(self, position: int) -> SamplerState:
        description = self._describe()
        return _with_samples(description, position) if self._kind.name == "none" else description


def _cloned(start: dict[str, Any] | None) -> dict[str, Any] | None:
    if start is None:
        return None
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in start.items()}


def _with_samples(description: SamplerState, position: int) -> SamplerState:
    """Adds torchdata's state of the batches of a sampler without a state."""
    if description.batch_size is None:
        return description
    samples = position * description.batch_size
    samples = samples if description.length is None else min(samples, description.length)
    return replace(description, sampler_iter_state={SAMPLES_YIELDED: samples})


def unstarted(index_sampler: Any) -> SamplerState:
    """Returns the state of a sampler before the first epoch. Draws nothing."""
    return about(kind_of(index_sampler))


def sampling(
    index_sampler: Any,
    torch_iterator: Iterator[Any],
    saved: SamplerState | None,
    position: int,
    ahead: Sequence[int],
    every: int,
    map_style: bool,
) -> Sampling:
    """Returns the index batches of an epoch from a position on. Draws and loads nothing before the first ``next``.

    Args:
        index_sampler: The source of the loader's index batches.
        torch_iterator: ``iter(index_sampler)``, unstarted.
        saved: The result of ``Sampling.state``; also the start alone, or torchdata's two states alone, which are
            those at the position unless it has a ``state_position``. None starts the epoch as torch draws it.
        position: Number of index batches to leave out.
        ahead: Ordinals from the position on to leave out as well.
        every: Number of index batches from one state of a sampler to the next; 0 for the first one alone.
        map_style: Whether the dataset is map-style. An iterable one has no index batches to leave out.

    Raises:
        ValueError: The saved states are of a sampler that has a state, and this one has none.
    """
    kind = kind_of(index_sampler)
    if not map_style:
        return _Other(kind, indices.stream(index_sampler, torch_iterator))
    batches = _from_position(kind, torch_iterator, saved, position, every)
    if ahead:
        # All of C code: an interrupt cannot lose an index batch.
        delivered = set(ahead)
        wanted = [ordinal not in delivered for ordinal in range(position, max(ahead) + 1)]
        batches.iterator = itertools.compress(batches.iterator, itertools.chain(wanted, itertools.repeat(True)))
    return batches


def _from_position(
    kind: Kind, torch_iterator: Iterator[Any], saved: SamplerState | None, position: int, every: int
) -> Sampling:
    if kind.is_known:
        return _of_known_sampler(kind, torch_iterator, saved, position)
    if may_be_stateful(kind, torch_iterator):
        recorder, left = recorder_of(kind, torch_iterator, saved, position, every)
        return _Recorded(kind, _skipping(recorder, left), recorder)
    return _Other(kind, _skipping(torch_iterator, position))


def _skipping(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    return itertools.islice(iterator, count, None) if count else iterator


def _of_known_sampler(kind: Kind, torch_iterator: Iterator[Any], saved: SamplerState | None, position: int) -> Sampling:
    saved_start = start_of(kind, saved)
    if kind.name == "sequential":
        if position:
            return _Sourced(kind, iterate(kind, Source(kind, None, _indices(kind, position))), None)
        return _Sourced(kind, indices.stream(kind.index_sampler, torch_iterator), None)
    if kind.name == "distributed" and saved_start is not None:
        _warn_of_epoch(saved_start, kind.inner)
        # Frameworks load the state of one rank on all: it is a position, and the same for each.
        saved_start = {**saved_start, "rank": kind.inner.rank}
        # A program may have set the position back to one of other ranks.
        position = max(position - saved_start["first"], 0)
    is_owed = saved is not None and saved.is_owed
    start = Start(saved_start, is_owed)
    stream = indices.stream(kind.index_sampler, torch_iterator, start)
    if isinstance(stream, IndexStream):
        if position:
            stream.skip(position)
        return _Streamed(kind, stream, start)
    is_begun = kind.name == "distributed" and kind.batches is None
    source = Source(kind, saved_start, _indices(kind, position), torch_iterator if is_begun else None, is_owed)
    if is_begun:
        # torch has read the sampler's settings just now.
        source.begin()
    return _Sourced(kind, iterate(kind, source), source)


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
