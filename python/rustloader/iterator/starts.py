"""The origin of an epoch's order: the first draw of its sampler, in a form that can be saved."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rustloader._core import call_into

_NUMBERS = ("epoch", "seed", "rank", "num_replicas")


class Start:
    """The start of an epoch's order. It is noted when the sampler begins, or given by an earlier run.

    It is one of:

    * ``{"seed": int}``: what a RandomSampler without a generator has drawn.
    * ``{"generator": tensor}``: the state of the sampler's own generator before its first draw.
    * ``{"global_generator": tensor}``: the state of torch's global generator before the sampler's first draw.
    * The settings of a DistributedSampler, as ``shard_start`` returns them.
    * None: the sampler has not begun, and draws as torch does.

    Args:
        saved: The start that an earlier run has saved.
        is_owed: Whether torch's draw is made all the same. Nothing comes of it.

    Attributes:
        given: The start that an earlier run has saved.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None, is_owed: bool = False) -> None:
        self.given = None if saved is None else dict(saved)
        self._is_owed = is_owed
        self._noted: dict[str, Any] | None = None
        # The first one counts. A signal handler that asks for the start while it is drawn may add a second one.
        self._seeds: list[torch.Tensor] = []

    @property
    def saved(self) -> dict[str, Any] | None:
        """The start that was given or noted; None as long as nothing is drawn."""
        if self.given is not None:
            return self.given
        if self._seeds:
            return {"seed": int(self._seeds[0].item())}
        return self._noted

    def note(self, start: dict[str, Any] | None) -> None:
        """Keeps the start of an epoch that does not come from an earlier run."""
        self._noted = start

    def seed(self) -> int:
        """Returns the seed of a RandomSampler without a generator, drawn once as torch draws it."""
        if not self._seeds and (self.given is None or self._is_owed):
            call_into(self._seeds, torch.Tensor.random_, torch.empty((), dtype=torch.int64))
        if self.given is not None:
            return int(self.given["seed"])
        return int(self._seeds[0].item())

    def generator_of(self, sampler: Any) -> tuple[Any, bool]:
        """Returns the generator that a RandomSampler draws from, in the state before its first draw, and whether it is
        private.

        The sampler's own generator takes a saved state over. For any other saved start there is a private one.
        """
        own, saved = sampler.generator, self.given
        if own is not None and (saved is None or "generator" in saved):
            if saved is not None:
                own.set_state(saved["generator"])
            return own, False
        return private_generator(self.seed() if saved is None or "seed" in saved else saved), True


def private_generator(start: int | Mapping[str, Any]) -> torch.Generator:
    """Returns a generator that no program sees, from a seed or in the saved state of another one."""
    generator = torch.Generator()
    if isinstance(start, int):
        generator.manual_seed(start)
    else:
        generator.set_state(start["generator"] if "generator" in start else start["global_generator"])
    return generator


def shard_start(sampler: Any) -> dict[str, Any] | None:
    """Returns the start of an epoch of a DistributedSampler: all that its order depends on. None if a setting is no
    number.
    """
    try:
        # Plain ints: neither bools nor those of NumPy.
        numbers = {name: int(operator.index(getattr(sampler, name))) for name in _NUMBERS}
    except TypeError:
        return None
    return numbers | {
        "shuffle": bool(sampler.shuffle),
        "drop_last": bool(sampler.drop_last),
        "dataset_length": len(sampler.dataset),
        # Samples at the start of the order that were delivered under other numbers of ranks, and the ordinal of the
        # first index batch after them.
        "consumed": 0,
        "first": 0,
    }


def shard(start: Mapping[str, Any]) -> np.ndarray:
    """Returns the indices of one rank, of what is left of the order of all ranks.

    The order is torch's: a permutation seeded by seed + epoch, or all indices. Without ``consumed`` samples, the result
    is what torch's DistributedSampler yields.
    """
    size = start["dataset_length"]
    if start["shuffle"]:
        generator = private_generator(start["seed"] + start["epoch"])
        order = np.asarray(torch.randperm(size, generator=generator))
    else:
        order = np.arange(size)
    left = order[start["consumed"] :]
    replicas = start["num_replicas"]
    # As torch: either the tail is left out, or the order is repeated from its begin until all ranks have as many.
    each = len(left) // replicas if start["drop_last"] else -(-len(left) // replicas)
    places = np.arange(start["rank"], each * replicas, replicas)
    return left[places % max(len(left), 1)]
