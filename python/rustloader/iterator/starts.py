"""The start of an epoch's order, in a form that can be saved: a seed, a generator's state, or a sampler's settings."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rustloader._core import call_into

_NUMBERS = ("epoch", "seed", "rank", "num_replicas")


class Start:
    """The start of an epoch's order. It either comes from an earlier run, or is recorded at the sampler's first draw.

    The value, ``saved``, is one of:

    * ``{"seed": int}``: the seed that a RandomSampler without a generator has drawn.
    * ``{"generator": tensor}``: the state of the sampler's own generator before the sampler's first draw.
    * ``{"global_generator": tensor}``: the state of torch's global generator before the sampler's first draw.
    * The settings of a DistributedSampler, as ``shard_start`` returns them.
    * None: the sampler has drawn nothing yet, and will draw as torch does.

    Args:
        saved: The start that an earlier run saved; None if there is none.
        owes_draws: Whether ``seed`` also draws a seed from torch's global generator if ``saved`` is given. That seed is
            not used: the draw only advances the generator as torch would.

    Attributes:
        given: The start that an earlier run saved; None if there is none.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None, owes_draws: bool = False) -> None:
        self.given = None if saved is None else dict(saved)
        self._owes_draws = owes_draws
        self._noted: dict[str, Any] | None = None
        # Only the first seed is used. A signal handler that runs during the draw and calls `seed` may add another.
        self._seeds: list[torch.Tensor] = []

    @property
    def saved(self) -> dict[str, Any] | None:
        """The start that was given or recorded; None until the sampler's first draw."""
        if self.given is not None:
            return self.given
        if self._seeds:
            return {"seed": int(self._seeds[0].item())}
        return self._noted

    def note(self, start: dict[str, Any] | None) -> None:
        """Records the start of an epoch that began in this run. A start from an earlier run takes precedence."""
        self._noted = start

    def seed(self) -> int:
        """Returns the seed of a RandomSampler without a generator: the given one, or one that the first call draws as
        torch does."""
        if not self._seeds and (self.given is None or self._owes_draws):
            call_into(self._seeds, torch.Tensor.random_, torch.empty((), dtype=torch.int64))
        if self.given is not None:
            return int(self.given["seed"])
        return int(self._seeds[0].item())

    def generator_of(self, sampler: Any) -> tuple[Any, bool]:
        """Returns the generator from which a random sampler must draw, in its state before the first draw, and whether
        that generator is private.

        A sampler's own generator is used if there is no start from an earlier run. It is also used if that start is the
        state of such a generator, which is then loaded into it. Otherwise, the generator is private.
        """
        own, saved = sampler.generator, self.given
        if own is not None and (saved is None or "generator" in saved):
            if saved is not None:
                own.set_state(saved["generator"])
            return own, False
        return private_generator(self.seed() if saved is None or "seed" in saved else saved), True


def private_generator(start: int | Mapping[str, Any]) -> torch.Generator:
    """Returns a new generator that the program cannot see. ``start`` is its seed, or a start with a state for it."""
    generator = torch.Generator()
    if isinstance(start, int):
        generator.manual_seed(start)
    else:
        generator.set_state(start["generator"] if "generator" in start else start["global_generator"])
    return generator


def shard_start(sampler: Any) -> dict[str, Any] | None:
    """Returns the start of a DistributedSampler's epoch: all settings that determine its order. Returns None if a
    setting that must be an int is not one.
    """
    try:
        # Bools and NumPy's ints become plain ints.
        numbers = {name: int(operator.index(getattr(sampler, name))) for name in _NUMBERS}
    except TypeError:
        return None
    return numbers | {
        "shuffle": bool(sampler.shuffle),
        "drop_last": bool(sampler.drop_last),
        "dataset_length": len(sampler.dataset),
        # `reshard` changes these: the number of samples, from the start of the order, that were delivered before the
        # number of ranks changed, and the ordinal of the first index batch after that.
        "consumed": 0,
        "first": 0,
    }


def shard(start: Mapping[str, Any]) -> np.ndarray:
    """Returns the indices of one rank, taken from the part of the order that follows the first ``consumed`` samples.

    The order is torch's: a permutation seeded with ``seed + epoch`` if ``shuffle`` is set, otherwise ascending. If
    ``consumed`` is 0, the result is what torch's DistributedSampler yields.
    """
    size = start["dataset_length"]
    if start["shuffle"]:
        generator = private_generator(start["seed"] + start["epoch"])
        order = np.asarray(torch.randperm(size, generator=generator))
    else:
        order = np.arange(size)
    remaining = order[start["consumed"] :]
    replicas = start["num_replicas"]
    # As in torch, the order is either truncated or repeated from its start, so that all ranks get equally many samples.
    each = len(remaining) // replicas if start["drop_last"] else -(-len(remaining) // replicas)
    places = np.arange(start["rank"], each * replicas, replicas)
    return remaining[places % max(len(remaining), 1)]
