"""torch's samplers whose order follows from their settings."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import SequentialSampler, dataloader, distributed, sampler
from torch.utils.data.dataloader import _InfiniteConstantSampler
from torch.utils.data.distributed import DistributedSampler

from rustloader.order.base import Begun, NextArray, Order, Start, array_of
from rustloader.system.torch_side import known_code

# Number of indices in each array of a SequentialSampler's stream.
_CHUNK = 8192
_NUMBERS = ("epoch", "seed", "rank", "num_replicas")


class Constant(Order):
    """The sampler that torch gives an iterable dataset. It yields None without end."""

    name = "none"
    describes_state = True
    code = known_code(_InfiniteConstantSampler.__iter__, dataloader, "")


class Sequential(Order):
    """The order of a SequentialSampler."""

    name = "sequential"
    sampler_class = SequentialSampler
    code = known_code(SequentialSampler.__iter__, sampler, "iter range len data_source")

    def arrays(self) -> NextArray:
        size = len(self.inner.data_source)
        starts = range(0, size, _CHUNK)
        # Runs only C code, so an interrupt cannot lose an array.
        return functools.partial(next, map(np.arange, starts, itertools.chain(starts[1:], (size,))), None)

    def begin(self) -> Start:
        return {}

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.inner.data_source))[self.skip :])


class Distributed(Order):
    """The order of a DistributedSampler. Its start consists of all settings that determine it."""

    name = "distributed"
    sampler_class = DistributedSampler
    code = known_code(
        DistributedSampler.__iter__,
        distributed,
        # Older versions use an assert statement; newer ones raise an AssertionError with a message.
        "shuffle torch Generator manual_seed seed epoch randperm len dataset tolist list range drop_last total_size "
        "math ceil rank num_replicas num_samples iter",
        "shuffle torch Generator manual_seed seed epoch randperm len dataset tolist list range drop_last total_size "
        "math ceil AssertionError rank num_replicas num_samples iter",
    )

    def arrays(self) -> NextArray | None:
        start = self.given
        if start is None:
            start = self.recorded = shard_start(self.inner)
            if start is None or not _is_regular(self.inner, start):
                return None
        return functools.partial(next, iter([shard(start)]), None)

    def resume(self, start: Mapping[str, Any] | None, owes_draws: bool, position: int) -> int:
        super().resume(start, owes_draws, position)
        if self.given is None:
            return position
        self._warn_of_epoch()
        # Frameworks load the state of one rank on all ranks. This works because the position is the same for each rank.
        self.given["rank"] = self.inner.rank
        # A program may have moved the position back to a batch from before the reshard.
        return int(max(position - self.given["first"], 0))

    def place(self) -> tuple[int, int]:
        return self.inner.num_replicas, self.inner.rank

    def _record(self) -> None:
        self.recorded = shard_start(self.inner)

    def _first(self, torch_iterator: Iterator[Any] | None) -> Begun:
        if self.given is not None:
            return iter(shard(self.given).tolist()), self.given
        start = shard_start(self.inner)
        return iter(self.inner) if torch_iterator is None else torch_iterator, start

    def advance(self, following: Any) -> None:
        following.epoch += 1

    def check_start(self, start: Mapping[str, Any]) -> None:
        check_shard_start(start)


def shard_start(inner: Any) -> Start | None:
    """Returns the start of a DistributedSampler's epoch. Returns None if a setting that must be an int is not one."""
    try:
        # Bools and NumPy's ints become plain ints.
        numbers = {name: int(operator.index(getattr(inner, name))) for name in _NUMBERS}
    except (AttributeError, TypeError):
        return None
    return numbers | {
        "shuffle": bool(inner.shuffle),
        "drop_last": bool(inner.drop_last),
        "dataset_length": len(inner.dataset),
        # `reshard` changes these: the number of samples, from the start of the order, that were delivered before the
        # number of ranks changed, and the ordinal of the first index batch after that.
        "consumed": 0,
        "first": 0,
    }


def check_shard_start(start: Mapping[str, Any]) -> None:
    """Raises ValueError if something is missing or wrong in the start of a DistributedSampler."""
    for name in (*_NUMBERS, "dataset_length", "consumed", "first"):
        value = start.get(name)
        may_be_negative = name in ("epoch", "seed")
        if type(value) is not int or (value < 0 and not may_be_negative):
            kind = "an int" if may_be_negative else "a non-negative int"
            raise ValueError(f"the sampler's {name!r} in the state must be {kind}, got {value!r}")
    for name in ("shuffle", "drop_last"):
        if type(start.get(name)) is not bool:
            raise ValueError(f"the sampler's {name!r} in the state must be a bool, got {start.get(name)!r}")


def _is_regular(inner: Any, start: Start) -> bool:
    """Returns True if torch's code yields ``shard(start)``: the sampler's numbers are still those of its constructor,
    and the dataset has not changed its length."""
    rank, replicas, count, total = inner.rank, inner.num_replicas, inner.num_samples, inner.total_size
    if any(type(value) is not int for value in (rank, replicas, count, total)) or not 0 <= rank < replicas:
        return False
    return total == count * replicas and count == samples_per_rank(start["dataset_length"], replicas, inner.drop_last)


def samples_per_rank(length: int, replicas: int, drop_last: bool) -> int:
    """Returns the number of samples that each rank gets from an order of ``length`` samples.

    As in torch, the order is either truncated or repeated from its start, so that all ranks get equally many samples.
    """
    return length // replicas if drop_last else -(-length // replicas)


def shard(start: Mapping[str, Any]) -> np.ndarray:
    """Returns the indices of one rank, taken from the part of the order that follows the first ``consumed`` samples.

    The order is torch's: a permutation seeded with ``seed + epoch`` if ``shuffle`` is set, otherwise ascending. If
    ``consumed`` is 0, the result is what torch's DistributedSampler yields.
    """
    size, consumed, replicas = start["dataset_length"], start["consumed"], start["num_replicas"]
    count = samples_per_rank(size - consumed, replicas, start["drop_last"])
    places = np.arange(start["rank"], count * replicas, replicas) % max(size - consumed, 1) + consumed
    if not start["shuffle"]:
        return places
    generator = torch.Generator()
    generator.manual_seed(start["seed"] + start["epoch"])
    return array_of(torch.randperm(size, generator=generator))[places]
