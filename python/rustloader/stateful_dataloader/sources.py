"""The indices of torch's samplers from a saved start and position, and torch's batches of these indices."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler

from rustloader._core import call_into
from rustloader.iterator.starts import Start, shard, shard_start
from rustloader.stateful_dataloader.sampler_kinds import Kind
from rustloader.stateful_dataloader.schema import INNER_ITER_STATE, SamplerState

_Begun = tuple[Iterator[Any], dict[str, Any] | None]


class Source:
    """The indices of one epoch of a sampler.

    The epoch begins when the first index is drawn, or earlier if ``begin`` is called.

    Args:
        kind: The sampler, for which ``is_known`` must be True.
        start: The start of the order; None to draw the order as torch does.
        skip: Number of indices to skip.
        iterator: The iterator over a DistributedSampler, if torch has already created it.
        owes_draws: As for ``Start``.
    """

    def __init__(
        self,
        kind: Kind,
        start: Mapping[str, Any] | None,
        skip: int,
        iterator: Iterator[Any] | None = None,
        owes_draws: bool = False,
    ) -> None:
        self._owes_draws = owes_draws
        self._kind = kind
        self._start = start
        self._skip = skip
        self._iterator = iterator
        # Only the first entry counts. A signal handler that calls `begin` during a call of `begin` may add a second.
        self._begun: list[_Begun] = []
        # Makes other threads wait. Reentrant, because a signal handler may run in the thread that holds it.
        self._lock = threading.RLock()

    def begin(self) -> _Begun:
        """Makes the draws for the first index, unless an earlier call has made them.

        Returns:
            The iterator, and the start to save, which is None if it cannot be saved.
        """
        with self._lock:
            if not self._begun:
                call_into(self._begun, self._shard if self._kind.name == "distributed" else self._random)
            return self._begun[0]

    def __iter__(self) -> Iterator[Any]:
        if self._kind.name == "sequential":
            return iter(range(len(self._kind.inner.data_source))[self._skip :])
        iterator, _ = self.begin()
        return itertools.islice(iterator, self._skip, None) if self._skip else iterator

    def _shard(self) -> _Begun:
        if self._start is not None:
            return iter(shard(self._start).tolist()), dict(self._start)
        start = shard_start(self._kind.inner)
        return iter(self._kind.inner) if self._iterator is None else self._iterator, start

    def _random(self) -> _Begun:
        inner = self._kind.inner
        if inner.generator is None and self._start is None and self._kind.name != "random":
            # torch draws from the global generator.
            state = torch.get_rng_state()
            return _advanced(iter(inner)), {"global_generator": state}
        if self._owes_draws and self._start is not None and "global_generator" in self._start:
            _advanced(iter(inner))
        start = Start(self._start, self._owes_draws)
        generator, is_private = start.generator_of(inner)
        if is_private:
            inner = copy.copy(inner)
            inner.generator = generator
            return iter(inner), start.saved
        state = generator.get_state()
        return _advanced(iter(inner)), {"generator": state}


def _advanced(iterator: Iterator[Any]) -> Iterator[Any]:
    """Makes the first draw of an iterator, and returns the iterator."""
    return itertools.chain(list(itertools.islice(iterator, 1)), iterator)


class _Batches:
    """A stand-in for a BatchSampler in torch's code, with another sampler. Other attributes are the original's."""

    def __init__(self, batches: BatchSampler, inner: Any) -> None:
        self._batches = batches
        self.sampler = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def iterate(kind: Kind, source: Any) -> Iterator[Any]:
    """Returns torch's iterator over a source's batches, or an iterator over its indices if there is no BatchSampler.

    The source is not read before the first ``next``.
    """
    if kind.batches is not None:
        return BatchSampler.__iter__(_Batches(kind.batches, source))  # type: ignore[arg-type]
    return _lazily(source)


def _lazily(source: Any) -> Iterator[Any]:
    yield from source


def start_of(kind: Kind, saved: SamplerState | None) -> Mapping[str, Any] | None:
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
    if kind.batches is not None and isinstance(state, Mapping):
        state = state.get(INNER_ITER_STATE)
    if kind.name == "random" and isinstance(state, Mapping) and "generator" in state:
        return {"generator": state["generator"]}
    return None
