"""The common part of batch samplers that plan an epoch's batches from the lengths of the samples."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import Sampler

from rustloader._core import SequenceBatches, SequencePlan
from rustloader.sequences.lengths import Lengths, positive

_WORDS = 2**64
# Keys of the state of a sampler, and of the start of an epoch.
_EPOCH, _CONSUMED, _SETTINGS = "epoch", "consumed", "settings"
_REPLICAS, _FIRST = "num_replicas", "first"


class SequenceBatchSampler(Sampler[list[int]]):
    """The base class of the batch samplers for sequences.

    A plan of an epoch contains the batches of all ranks. It depends on the arguments and the epoch only. The ranks take
    its batches in turn. ``docs/sequences.md`` describes the use.
    """

    # The epoch, and the number of batches of its plan that were delivered before the next ``iter()``.
    _loaded: tuple[int, int] | None = None
    # The start of the current epoch, and its batches.
    _current: tuple[dict[str, Any], SequenceBatches] | None = None
    # The plan that was made last, and its epoch.
    _planned: tuple[int, SequencePlan] | None = None

    def __init__(
        self,
        lengths: Lengths,
        settings: dict[str, Any],
        *,
        window: int,
        shuffle: bool,
        seed: int,
        num_replicas: int | None,
        rank: int | None,
        drop_last: bool,
    ) -> None:
        self._lengths, self.drop_last = lengths, bool(drop_last)
        self._order = bool(shuffle), int(seed) % _WORDS, positive("window", window)
        self._num_replicas = None if num_replicas is None else positive("num_replicas", num_replicas)
        self._rank = rank
        # The entries of a state that must be the same when it is loaded.
        settings = {"sampler": type(self).__name__, **settings, "window": window, "seed": int(seed)}
        self._settings = settings | {"shuffle": bool(shuffle), "lengths": lengths.identity}
        self.epoch = 0
        if num_replicas is not None and rank is not None:
            self._place()

    def _plan(self, order: tuple[bool, int, int, int]) -> SequencePlan:
        """Plans an epoch. ``order`` consists of ``shuffle``, the seed, the epoch and the window."""
        raise NotImplementedError

    @property
    def sampler(self) -> SequenceBatchSampler:
        """The object whose ``set_epoch`` frameworks call: this one."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which determines the order. Call it before each epoch, as with a DistributedSampler.

        A position that was loaded for another epoch is dropped.
        """
        if epoch != self.epoch:
            self.epoch, self._loaded, self._current = int(epoch), None, None

    def __iter__(self) -> Iterator[list[int]]:
        caller = type(sys._getframe(1).f_locals.get("self")).__name__
        if caller == "BatchSamplerShard" and self._place()[0] > 1:
            raise RuntimeError(
                f"accelerate's prepare would deal the batches of a {type(self).__name__} to the ranks a second time, "
                "and most samples would be lost: do not pass the loader to prepare, or make the sampler with "
                "num_replicas=1 and rank=0, so that only accelerate deals them"
            )
        return SequenceBatches(lambda batches: self._begin(self._start(), 0, batches))

    def __len__(self) -> int:
        """Returns the number of batches of each rank in the current epoch. Epochs differ by a few batches."""
        replicas, _ = self._place()
        return self._plan_of(self.epoch).rounds(0, replicas, self.drop_last)

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, the number of batches that all ranks together have taken in it, and the arguments.

        Workers take batches before the program gets them. A ``StatefulDataLoader`` saves the position of the batches
        that were delivered.
        """
        if self._loaded is not None or self._current is None:
            epoch, consumed = self._loaded or (self.epoch, 0)
        else:
            start, batches = self._current
            epoch, consumed = start[_EPOCH], start[_CONSUMED] + batches.round * start[_REPLICAS]
        return {_EPOCH: epoch, _CONSUMED: consumed, _SETTINGS: dict(self._settings)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state of any rank. The next ``iter()`` yields the batches of the epoch that no rank has taken.

        Raises:
            ValueError: ``state_dict`` is not a state of a sampler with the same arguments and lengths.
        """
        self.check(state_dict, _CONSUMED)
        self.epoch, self._current = state_dict[_EPOCH], None
        self._loaded = self.epoch, state_dict[_CONSUMED]

    def check(self, state: Mapping[str, Any], *counts: str) -> None:
        """Raises ValueError if a state or a start is not that of a sampler with the same arguments and lengths."""
        settings = state.get(_SETTINGS) if isinstance(state, Mapping) else None
        if not isinstance(settings, Mapping):
            raise ValueError(f"a state of a {type(self).__name__} must have {_SETTINGS!r}, got {state!r}")
        for name in (_EPOCH, *counts):
            if type(state.get(name)) is not int or state[name] < 0:
                raise ValueError(f"the sampler's {name!r} in the state must be a non-negative int, got {state!r}")
        for name, value in self._settings.items():
            if settings.get(name) != value:
                raise ValueError(
                    f"the state was saved with {name}={settings.get(name)!r}, but this sampler has {name}={value!r}: "
                    "make the sampler with the same arguments and lengths, or start without a state"
                )

    # For `order.planned`.

    def _start(self) -> dict[str, Any]:
        """Returns the start of the next epoch: the epoch; the number of batches of the plan that were delivered before;
        the number of ranks, and the ordinal of the first batch, since then. A position that was loaded is used up."""
        (epoch, consumed), self._loaded = self._loaded or (self.epoch, 0), None
        return {
            _EPOCH: epoch,
            _CONSUMED: consumed,
            _REPLICAS: self._place()[0],
            _FIRST: 0,
            _SETTINGS: dict(self._settings),
        }

    def check_start(self, start: Mapping[str, Any]) -> None:
        """Raises ValueError if the start in a loader's state does not fit the sampler."""
        self.check(start, _CONSUMED, _REPLICAS, _FIRST)

    def resumed(self, start: Mapping[str, Any], position: int) -> tuple[dict[str, Any], int]:
        """Returns the start for the present number of ranks, and the number of batches to skip from there.

        ``position`` is the number of batches that each of the earlier ranks has delivered.
        """
        replicas, rounds = self._place()[0], max(position - start[_FIRST], 0)
        if replicas == start[_REPLICAS]:
            return dict(start), rounds
        consumed = start[_CONSUMED] + rounds * start[_REPLICAS]
        return dict(start) | {_CONSUMED: consumed, _REPLICAS: replicas, _FIRST: position}, 0

    def batches_from(self, start: dict[str, Any], skip: int) -> SequenceBatches:
        """Returns the batches of this rank from a start, without the first ``skip``."""
        return SequenceBatches(functools.partial(self._begin, start, skip))

    def _begin(self, start: dict[str, Any], skip: int, batches: SequenceBatches) -> tuple[Any, ...]:
        replicas, rank = self._place()
        plan, self._current = self._plan_of(start[_EPOCH]), (start, batches)
        return plan, min(start[_CONSUMED], len(plan)), rank, replicas, self.drop_last, skip

    def _plan_of(self, epoch: int) -> SequencePlan:
        if self._planned is None or self._planned[0] != epoch:
            shuffle, seed, window = self._order
            self._planned = epoch, self._plan((shuffle, seed, epoch % _WORDS, window))
        return self._planned[1]

    def _place(self) -> tuple[int, int]:
        """Returns the number of ranks and the rank: the arguments, or those of the process group; without one, 1 and
        0."""
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

    def _rustloader_check_dataset(self, dataset: Any) -> None:
        """Raises ValueError if a dataset has another number of samples. Called by rustloader's loaders."""
        if hasattr(dataset, "__len__") and len(dataset) != len(self._lengths.array):
            raise ValueError(
                f"the dataset has {len(dataset)} samples, but the batch sampler has lengths of "
                f"{len(self._lengths.array)}: pass the length of each sample of this dataset"
            )

    def __getstate__(self) -> dict[str, Any]:
        # A copy makes its plans again, and has begun no epoch.
        return vars(self) | {"_planned": None, "_current": None}
