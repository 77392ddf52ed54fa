"""torch's samplers that draw their order from a generator."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler, sampler

from rustloader._core import call_into
from rustloader.order.base import Begun, Generator, NextArray, Order, Start, array_of
from rustloader.system.torch_side import known_code


class _Drawn(Order):
    """The order of a sampler that draws it from its own generator, or from torch's global one."""

    def __init__(self, inner: Any, batches: Any = None) -> None:
        super().__init__(inner, batches)
        # Only the first seed is used. A signal handler that runs during the draw may add another.
        self._seeds: list[torch.Tensor] = []
        # Holds a permutation that an interrupted call drew but did not return.
        self._drawn: list[torch.Tensor] = []
        # The start of the order, from the moment on that its first draw may be under way.
        self._drawing: Start | None = None

    def begin(self) -> Start | None:
        # Waits for a draw of another thread. A signal handler may ask in the midst of this thread's draw.
        with self._lock:
            return super().begin() if self._begun or self._drawing is None else self._drawing

    @property
    def start(self) -> Start | None:
        if self.given is None and self._seeds:
            return {"seed": int(self._seeds[0].item())}
        return super().start

    def _seed(self) -> int:
        """Returns the seed of a RandomSampler without a generator: the given one, or one that the first call draws as
        torch does. A draw that is owed only advances the generator; its result is not used."""
        if not self._seeds and (self.given is None or self._owes_draws):
            call_into(self._seeds, torch.Tensor.random_, torch.empty((), dtype=torch.int64))
        return int(self._seeds[0].item() if self.given is None else self.given["seed"])

    def _generator(self) -> tuple[torch.Generator, bool]:
        """Returns the generator to draw from, in its state before the first draw, and whether it is private.

        A sampler's own generator is used if there is no start from an earlier run. It is also used if that start is the
        state of such a generator, which is then loaded into it. Otherwise, the program cannot see the generator.
        """
        own, given = self.inner.generator, self.given
        if own is not None and (given is None or "generator" in given):
            if given is not None:
                own.set_state(given["generator"])
            return own, False
        generator = torch.Generator()
        if given is None or "seed" in given:
            generator.manual_seed(self._seed())
        else:
            generator.set_state(given["generator"] if "generator" in given else given["global_generator"])
        return generator, True

    def _first(self, torch_iterator: Iterator[Any] | None) -> Begun:
        inner, given = self.inner, self.given
        if inner.generator is None and given is None and not isinstance(self, Random):
            # torch draws from the global generator.
            return self._with_draw({"global_generator": torch.get_rng_state()})
        if self._owes_draws and given is not None and "global_generator" in given:
            self._with_draw(given)
        generator, is_private = self._generator()
        if is_private:
            inner = copy.copy(inner)
            inner.generator = generator
            return iter(inner), self.start
        return self._with_draw({"generator": generator.get_state()})

    def _with_draw(self, start: Start) -> Begun:
        """Makes the first draw of torch's iterator. Returns the iterator and ``start``, which describes the generator
        before the draw."""
        self._drawing = start
        try:
            # A signal handler that asked for the start before the line above has made the draw. A later one makes none.
            return self._begun[0] if self._begun else (_advanced(iter(self.inner)), start)
        except BaseException:
            self._drawing = None
            raise

    def draw_next(self, use: Callable[[Generator], Generator]) -> Start | None:
        own = self.inner.generator
        generator = use(own)
        start = {"global_generator" if own is None else "generator": or_global(generator).get_state()}
        if own is None:
            # With the first index, torch draws the whole order from its global generator.
            drawing = copy.copy(self.inner)
            drawing.generator = generator
            next(iter(drawing), None)
        return start

    def advance(self, following: Any) -> None:
        following.generator = copied(self.inner.generator)

    def check_start(self, start: Mapping[str, Any]) -> None:
        seed, states = start.get("seed"), [start.get(name) for name in ("generator", "global_generator")]
        has_seed = type(seed) is int and 0 <= seed < 2**63
        if not has_seed and not any(isinstance(it, torch.Tensor) and it.dtype == torch.uint8 for it in states):
            raise ValueError(
                f"the sampler's start in the state must have a seed or a generator's state, got {dict(start)!r}: load "
                "what state_dict() of a StatefulDataLoader returned"
            )


def _advanced(iterator: Iterator[Any]) -> Iterator[Any]:
    """Makes the first draw of an iterator, and returns the iterator."""
    return itertools.chain(list(itertools.islice(iterator, 1)), iterator)


def or_global(generator: Generator) -> torch.Generator:
    """Returns a generator, or torch's global one for None."""
    return torch.default_generator if generator is None else generator


def copied(generator: Generator) -> torch.Generator:
    """Returns a new generator in the state of another."""
    own = or_global(generator)
    result = torch.Generator(own.device)
    result.set_state(own.get_state())
    return result


def random_seed(generator: Generator) -> int:
    """Draws a seed, as a RandomSampler and the ``iter()`` of a loader do."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


class Random(_Drawn):
    """The order of a RandomSampler.

    A stream draws each permutation when torch would. If a signal handler raises, the next call returns the permutation
    that was already drawn; none is drawn twice.
    """

    name = "random"
    sampler_class = RandomSampler
    code = known_code(
        RandomSampler.__iter__,
        sampler,
        "len data_source generator int torch empty int64 random_ item Generator manual_seed replacement range "
        "num_samples randint tolist randperm",
    )
    drawn_from = "data_source"
    # The generator of a stream, and whether the program cannot see it.
    _stream: tuple[torch.Generator, bool] | None = None
    _size = 0
    # A range whose length is the number of complete permutations that remain.
    _whole = range(0)
    _has_begun = _has_ended = False

    def arrays(self) -> NextArray:
        return self._next_array

    def _next_array(self) -> np.ndarray | None:
        """Returns the next permutation, and None after the last one."""
        if self._stream is None:
            size = len(self.inner.data_source)
            drawn_from = self._generator()
            self._size, self._whole = size, range(self.inner.num_samples // size)
            self._stream = drawn_from
        (generator, is_private), whole, ended = self._stream, self._whole[1:], not self._whole
        if self._has_ended:
            return None
        if ended and is_private and self.inner.num_samples % self._size == 0:
            # Here torch draws a permutation that it does not use. With a private generator, the draw can be omitted.
            self._has_ended = True
            return None
        if not self._drawn:
            if self._records and not self._has_begun and not is_private:
                self.recorded = {"generator": generator.get_state()}
            call_into(self._drawn, functools.partial(torch.randperm, self._size, generator=generator))
        array = array_of(self._drawn[0])
        if ended:
            array = array[: self.inner.num_samples % self._size]
        # Atomic for signal handlers.
        self._whole, self._has_ended, self._drawn, self._has_begun = whole, ended, [], True
        return array

    def _record(self) -> None:
        if self.inner.generator is None:
            self._seed()
        else:
            self.recorded = {"generator": self.inner.generator.get_state()}

    def draw_next(self, use: Callable[[Generator], Generator]) -> Start | None:
        return {"seed": random_seed(use(None))} if self.inner.generator is None else super().draw_next(use)

    def advance(self, following: Any) -> None:
        super().advance(following)
        if self.inner.generator is None:
            following.generator = torch.Generator().manual_seed(random_seed(following.generator))


class Subset(_Drawn):
    """The order of a SubsetRandomSampler."""

    name = "subset"
    sampler_class = SubsetRandomSampler
    code = known_code(SubsetRandomSampler.__iter__, sampler, "torch randperm len indices generator tolist")

    @property
    def is_exact(self) -> bool:
        # Reading any other sequence may run the program's code.
        return super().is_exact and type(self.inner.indices) in (list, tuple, range)


class Weighted(_Drawn):
    """The order of a WeightedRandomSampler."""

    name = "weighted"
    sampler_class = WeightedRandomSampler
    code = known_code(
        WeightedRandomSampler.__iter__,
        sampler,
        "torch multinomial weights num_samples replacement generator iter tolist",
    )
    drawn_from = "weights"
