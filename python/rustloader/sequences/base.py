"""The common part of batch samplers that plan an epoch's batches from the lengths of the samples."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import Sampler

from rustloader._core import SequencePlan
from rustloader.sequences.lengths import Lengths, integer, positive

_WORDS = 2**64
# The keys of a state, and those that the start of an epoch has besides.
_EPOCH, _CONSUMED, _SETTINGS = "epoch", "consumed", "settings"
_REPLICAS, _RANK, _FIRST = "num_replicas", "rank", "first"


class SequenceBatchSampler(Sampler[list[int]]):
    """The base class of the batch samplers for sequences.

    A plan has the batches of all ranks in an epoch. It depends on the arguments and the epoch only.
    """

    # The position that was loaded for the next `iter()`: the epoch, and the number of batches of its plan before it.
    _loaded: tuple[int, int] | None = None
    # The iterator that has begun last.
    _current: Batches | None = None
    # The plan that was made last, and its epoch.
    _planned: tuple[int, SequencePlan] | None = None
    epoch = 0

    def __init__(
        self,
        lengths: Lengths,
        settings: dict[str, Any],
        window: int,
        shuffle: bool,
        seed: int,
        num_replicas: int | None,
        rank: int | None,
        drop_last: bool,
    ) -> None:
        self._lengths, self.drop_last = lengths, bool(drop_last)
        self._num_replicas = None if num_replicas is None else positive("num_replicas", num_replicas)
        self._rank = None if rank is None else integer("rank", rank)
        self._order = bool(shuffle), integer("seed", seed) % _WORDS, positive("window", window)
        settings |= {"window": int(window), "shuffle": bool(shuffle), "seed": int(seed), "lengths": lengths.identity}
        # What must be the same when a state is loaded.
        self._settings = {"sampler": type(self).__name__} | settings
        if num_replicas is not None and rank is not None:
            self.place()

    def _plan(self, order: tuple[bool, int, int, int]) -> SequencePlan:
        """Plans an epoch. ``order`` consists of ``shuffle``, the seed, the epoch and the window."""
        raise NotImplementedError

    def plan(self, epoch: int) -> SequencePlan:
        """Returns the plan of an epoch."""
        planned = self._planned
        if planned is None or planned[0] != epoch:
            shuffle, seed, window = self._order
            # Meanwhile, another thread may plan another epoch.
            self._planned = planned = epoch, self._plan((shuffle, seed, epoch % _WORDS, window))
        return planned[1]

    def place(self) -> tuple[int, int]:
        """Returns the number of ranks, and the rank: the arguments, or those of the process group, or 1 and 0."""
        has_group = dist.is_available() and dist.is_initialized()
        replicas = self._num_replicas or (dist.get_world_size() if has_group else 1)
        rank = self._rank if self._rank is not None else dist.get_rank() if has_group else 0
        is_half_given = (self._num_replicas is None) != (self._rank is None) and not has_group
        if is_half_given or not 0 <= rank < replicas:
            raise ValueError(
                f"rank must be from 0 to {replicas - 1}, got num_replicas={self._num_replicas} and rank={self._rank}: "
                "without a process group, pass both or neither"
            )
        return replicas, rank

    @property
    def sampler(self) -> SequenceBatchSampler:
        """The object whose ``set_epoch`` frameworks call: this one."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which determines the order. A position that was loaded for another epoch is dropped."""
        epoch = integer("epoch", epoch)
        if epoch != self.epoch:
            self.epoch, self._loaded, self._current = epoch, None, None

    def __iter__(self) -> Iterator[list[int]]:
        if type(sys._getframe(1).f_locals.get("self")).__name__ == "BatchSamplerShard" and self.place()[0] > 1:
            raise RuntimeError(
                f"accelerate's prepare would deal the batches of a {type(self).__name__} to the ranks a second time, "
                "and most samples would be lost: do not pass the loader to prepare, or make the sampler with "
                "num_replicas=1 and rank=0, so that only accelerate deals them"
            )
        return Batches(self)

    def __len__(self) -> int:
        """Returns the number of batches of each rank in the current epoch. Epochs differ by a few batches."""
        return self.rounds(len(self.plan(self.epoch)), self.place()[0])

    def rounds(self, batches: int, replicas: int) -> int:
        """Returns the number of batches that each of ``replicas`` ranks gets."""
        return batches // replicas if self.drop_last else -(-batches // replicas)

    def start(self) -> dict[str, Any]:
        """Returns the start of the next epoch: the epoch; the number of batches of the plan that were delivered before;
        the number of ranks, and the ordinal of the first batch, from there on."""
        epoch, consumed = self._loaded or (self.epoch, 0)
        replicas, rank = self.place()
        position = {_EPOCH: epoch, _CONSUMED: consumed, _FIRST: 0}
        return position | {_REPLICAS: replicas, _RANK: rank, _SETTINGS: dict(self._settings)}

    def resumed(self, start: Mapping[str, Any], position: int) -> tuple[dict[str, Any], int]:
        """Returns the start for the present number of ranks, and the number of batches to skip from there.

        ``position`` is the number of batches that each of the earlier ranks has delivered.
        """
        (replicas, rank), rounds = self.place(), max(position - start[_FIRST], 0)
        if replicas == start[_REPLICAS]:
            return {**start, _RANK: rank}, rounds
        consumed = start[_CONSUMED] + rounds * start[_REPLICAS]
        return {**start, _CONSUMED: consumed, _REPLICAS: replicas, _RANK: rank, _FIRST: position}, 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, the number of batches that all ranks together have taken in it, and the arguments.

        Workers take batches early. The state of a ``StatefulDataLoader`` counts those that were delivered.
        """
        state, current = self.start(), self._current
        if self._loaded is None and current is not None:
            taken = current.start[_CONSUMED] + current.round * current.start[_REPLICAS]
            state |= {_EPOCH: current.start[_EPOCH], _CONSUMED: taken}
        return {key: state[key] for key in (_EPOCH, _CONSUMED, _SETTINGS)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state of any rank. The next ``iter()`` yields the batches of the epoch that no rank has taken.

        Raises:
            ValueError: ``state_dict`` is not the state of a sampler with the same arguments and lengths.
        """
        self.check(state_dict, _EPOCH, _CONSUMED)
        self.epoch, self._current = state_dict[_EPOCH], None
        self._loaded = self.epoch, state_dict[_CONSUMED]

    def check(self, state: Any, *counts: str) -> None:
        """Raises ValueError if a state, or by default a start, is not that of a sampler with the same arguments.

        The ranks and ``drop_last`` may differ.
        """
        settings = state.get(_SETTINGS) if isinstance(state, Mapping) else None
        if not isinstance(settings, Mapping):
            raise ValueError(f"a state of a {type(self).__name__} must have {_SETTINGS!r}, got {state!r}")
        for name in counts or (_EPOCH, _CONSUMED, _REPLICAS, _RANK, _FIRST):
            if type(state.get(name)) is not int or (state[name] < 0 and name != _EPOCH):
                raise ValueError(f"the sampler's {name!r} in the state must be a non-negative int, got {state!r}")
        for name, value in self._settings.items():
            if settings.get(name) != value:
                raise ValueError(
                    f"the state was saved with {name}={settings.get(name)!r}, but this sampler has {name}={value!r}: "
                    "make the sampler with the same arguments and lengths, or start without a state"
                )

    def _rustloader_check(self, loader: Any) -> None:
        """Raises ValueError if a loader uses this batch sampler as a sampler, or if its dataset has another number of
        samples. rustloader's loaders call this."""
        if loader.batch_sampler not in (self, None):
            raise ValueError(f"a {type(self).__name__} yields batches: pass it as batch_sampler, not as sampler")
        try:
            samples = len(loader.dataset)
        except Exception:  # the dataset has no length
            return
        if samples != len(self._lengths.array):
            raise ValueError(
                f"the dataset has {samples} samples, but the batch sampler has lengths of {len(self._lengths.array)}: "
                "pass the length of each sample of this dataset"
            )

    def __getstate__(self) -> dict[str, Any]:
        # A copy makes its plans again, and has begun no epoch.
        return vars(self) | {"_planned": None, "_current": None}


class Batches(Iterator[list[int]]):
    """The batches of this rank from a start (default: None, that of the sampler in the first ``next``).

    Attributes:
        start: The start.
        round: Number of batches of this rank before the next one, including ``skip``.
    """

    _plan: SequencePlan | None = None

    def __init__(self, sampler: SequenceBatchSampler, start: Any = None, skip: int = 0) -> None:
        self._sampler, self.start, self.round = sampler, start, skip

    def __next__(self) -> list[int]:
        sampler = self._sampler
        if self._plan is None:
            start = self.start or sampler.start()
            plan = sampler.plan(start[_EPOCH])
            # Atomic for signal handlers. A position that was loaded is used up.
            self.start, self._plan, sampler._current, sampler._loaded = start, plan, self, None
        replicas, rank = self.start[_REPLICAS], self.start[_RANK]
        consumed = min(self.start[_CONSUMED], len(self._plan))
        remaining = len(self._plan) - consumed
        if self.round >= sampler.rounds(remaining, replicas):
            raise StopIteration
        # An incomplete last round is filled with the first batches.
        batch = self._plan.batch(consumed + (self.round * replicas + rank) % remaining)
        # Atomic for signal handlers.
        self.round += 1
        return batch
