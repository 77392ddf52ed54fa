"""The start of an epoch's order: what its sampler draws first, or its settings, in a form that can be saved."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rustloader._core import call_into

_NUMBERS = ("epoch", "seed", "rank", "num_replicas")


class Start:
    """The start of an epoch's order. It comes from an earlier run, or is recorded when the sampler begins.

    Its value is one of:

    * ``{"seed": int}``: the seed that a RandomSampler without a generator has drawn.
    * ``{"generator": tensor}``: the state of the sampler's own generator before its first draw.
    * ``{"global_generator": tensor}``: the state of torch's global generator before the sampler's first draw.
    * The settings of a DistributedSampler, as ``shard_start`` returns them.
    * None: the sampler has not begun, and will draw as torch does.

    Args:
        saved: The start that an earlier run saved; None if there is none.
        is_owed: Whether the seed is drawn as in torch although ``saved`` is used. The drawn seed is not used.

    Attributes:
        given: The start that an earlier run saved; None if there is none.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None, is_owed: bool = False) -> None:
        self.given = None if saved is None else dict(saved)
        self._is_owed = is_owed
        self._noted: dict[str, Any] | None = None
        # The first seed counts. A signal handler that asks for the start while it is being drawn may add a second one.
        self._seeds: list[torch.Tensor] = []

    @property
    def saved(self) -> dict[str, Any] | None:
        """The start that was given or recorded; None until the sampler has begun."""
        if self.given is not None:
            return self.given
        if self._seeds:
            return {"seed": int(self._seeds[0].item())}
        return self._noted

    def note(self, start: dict[str, Any] | None) -> None:
        """Records the start of an epoch that does not come from an earlier run."""
        self._noted = start

    def seed(self) -> int:
        """Returns the seed of a RandomSampler without a generator. Draws it at the first call, as torch does."""
        if not self._seeds and (self.given is None or self._is_owed):
            call_into(self._seeds, torch.Tensor.random_, torch.empty((), dtype=torch.int64))
        if self.given is not None:
            return int(self.given["seed"])
        return int(self._seeds[0].item())

    def generator_of(self, sampler: Any) -> tuple[Any, bool]:
        """Returns the generator from which a RandomSampler draws, in its state before the first draw, and whether the
        generator is private.

        The sampler's own generator is set to a saved state. For any other start a private generator is made.
        """
        own, saved = sampler.generator, self.given
        if own is not None and (saved is None or "generator" in saved):
            if saved is not None:
                own.set_state(saved["generator"])
            return own, False
        return private_generator(self.seed() if saved is None or "seed" in saved else saved), True


def private_generator(start: int | Mapping[str, Any]) -> torch.Generator:
    """Returns a new generator that programs cannot see, with the seed or the saved state in ``start``."""
    generator = torch.Generator()
    if isinstance(start, int):
        generator.manual_seed(start)
    else:
        generator.set_state(start["generator"] if "generator" in start else start["global_generator"])
    return generator


def shard_start(sampler: Any) -> dict[str, Any] | None:
    """Returns the start of a DistributedSampler's epoch: all settings that its order depends on. None if a setting that
    must be a number is not one.
    """
    try:
        # Converted to plain ints, also from bools and NumPy's ints.
        numbers = {name: int(operator.index(getattr(sampler, name))) for name in _NUMBERS}
    except TypeError:
        return None
    return numbers | {
        "shuffle": bool(sampler.shuffle),
        "drop_last": bool(sampler.drop_last),
        "dataset_length": len(sampler.dataset),
        # Number of samples at the start of the order that were delivered before the number of ranks changed, and the
        # ordinal of the first index batch after them.
        "consumed": 0,
        "first": 0,
    }


def shard(start: Mapping[str, Any]) -> np.ndarray:
    """Returns the indices of one rank, from the part of the order after the ``consumed`` samples.

    The order is torch's: a permutation seeded by seed + epoch, or all indices. If no samples are consumed, the result
    is what torch's DistributedSampler yields.
    """
    size = start["dataset_length"]
    if start["shuffle"]:
        generator = private_generator(start["seed"] + start["epoch"])
        order = np.asarray(torch.randperm(size, generator=generator))
    else:
        order = np.arange(size)
    remaining = order[start["consumed"] :]
    replicas = start["num_replicas"]
    # As in torch: either the tail is dropped, or the order is repeated from its start until all ranks have as many.
    each = len(remaining) // replicas if start["drop_last"] else -(-len(remaining) // replicas)
    places = np.arange(start["rank"], each * replicas, replicas)
    return remaining[places % max(len(remaining), 1)]
