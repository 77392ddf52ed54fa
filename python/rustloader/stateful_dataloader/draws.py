"""The random draws at the border of two epochs: those of the next one, made before it begins."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import IterDataPipe

from rustloader.stateful_dataloader.kinds import Kind, kind_of, length_of
from rustloader.stateful_dataloader.recording import may_be_stateful, recorder_of
from rustloader.stateful_dataloader.sampler import RandomSampler
from rustloader.stateful_dataloader.schema import Draws, SamplerState
from rustloader.stateful_dataloader.sources import Source, start_of
from rustloader.system.protocols import LoaderLike

# Samplers that draw random numbers.
_DRAWING = ("random", "subset", "weighted")


def draws(loader: LoaderLike, index_sampler: Any, with_base_seed: bool) -> Draws:
    """Makes the draws of the next ``iter()`` and its first ``next``, in torch's order.

    Args:
        loader: The loader, whose generator the base seed comes from.
        index_sampler: The source of its index batches.
        with_base_seed: Whether ``iter()`` draws a base seed. Persistent workers keep the one that they have.
    """
    if isinstance(loader.dataset, IterDataPipe):
        # Its processes agree on a seed before the base seed is drawn.
        return Draws(None, None)
    base_seed = None
    if with_base_seed:
        base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
    return Draws(base_seed, _draw(kind_of(index_sampler)))


def foreseen(loader: LoaderLike, index_sampler: Any) -> Draws:
    """Foresees the result of ``draws`` with a base seed. Draws from copies of the generators, which costs little."""
    copies: dict[int, torch.Generator] = {}

    def copy_of(generator: torch.Generator | None) -> torch.Generator:
        own = _generator_or_global(generator)
        if id(own) not in copies:
            copies[id(own)] = torch.Generator(own.device)
            copies[id(own)].set_state(own.get_state())
        return copies[id(own)]

    if isinstance(loader.dataset, IterDataPipe):
        return Draws(None, None)
    base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=copy_of(loader.generator)).item())
    kind = kind_of(index_sampler)
    start: dict[str, Any] | None = None
    if kind.name in _DRAWING:
        generator = copy_of(kind.inner.generator)
        if kind.inner.generator is not None:
            start = {"generator": generator.get_state()}
        elif kind.name == "random":
            start = {"seed": int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())}
        else:
            start = {"global_generator": generator.get_state()}
    return Draws(base_seed, start)


class ForeseenDraws:
    """The draws of the first epoch, as a state before it has them. The epoch makes the same draws when torch does, and
    replaces the results by these: so the program's other draws are those of a run without the state.

    Args:
        loader: As for ``draws``.
        index_sampler: As for ``draws``.

    Attributes:
        draws: The result of ``foreseen``.
    """

    are_made = False

    def __init__(self, loader: LoaderLike, index_sampler: Any) -> None:
        self.draws = foreseen(loader, index_sampler)
        own = loader.generator
        self._watches = [SeedWatch(generator) for generator in ([None] if own is None else [None, own])]

    def was_seeded_since(self) -> bool:
        """Does the same as ``KeptDraws.was_seeded_since``."""
        return any(watch.was_seeded() for watch in self._watches)


class KeptDraws:
    """The draws of the next epoch, until it begins.

    Args:
        loader: As for ``draws``.
        index_sampler: As for ``draws``.
        with_base_seed: As for ``draws``.

    Attributes:
        draws: The result of ``draws``.
        are_made: Whether the generators have made them.
    """

    are_made = True

    def __init__(self, loader: LoaderLike, index_sampler: Any, with_base_seed: bool) -> None:
        own = loader.generator
        generators = [None] if own is None else [None, own]
        before = [_generator_or_global(generator).get_state() for generator in generators]
        self.draws = draws(loader, index_sampler, with_base_seed)
        drawn = [
            (generator, state)
            for generator, state in zip(generators, before, strict=True)
            if not torch.equal(state, _generator_or_global(generator).get_state())
        ]
        self._before = drawn
        self._watches = [SeedWatch(generator) for generator, _ in drawn]

    def was_seeded_since(self) -> bool:
        """Returns True if the program has since seeded a generator or restored its state: then its own draws count, as
        in a run without a state. Seeding with the same number and drawing before the next epoch is not noticed."""
        restored = any(
            torch.equal(_generator_or_global(generator).get_state(), state) for generator, state in self._before
        )
        return restored or any(watch.was_seeded() for watch in self._watches)


class SeedWatch:
    """Notices that the program seeds a generator (None: torch's global one) from now on.

    It does not if the program seeds with the same number as before, and then draws, or had not drawn since.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        # Not the global one itself: a copy of the loader would have a copy of it.
        self._generator = generator
        now = _generator_or_global(generator)
        self._seed, self._was_fresh = now.initial_seed(), _is_fresh(now)

    def was_seeded(self) -> bool:
        """Returns True if the generator was seeded."""
        generator = _generator_or_global(self._generator)
        return generator.initial_seed() != self._seed or (_is_fresh(generator) and not self._was_fresh)


def _generator_or_global(generator: torch.Generator | None) -> torch.Generator:
    return torch.default_generator if generator is None else generator


def _is_fresh(generator: torch.Generator) -> bool:
    """Returns True if a generator is where its seed puts it."""
    seeded = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    return torch.equal(generator.get_state(), seeded.get_state())


def _draw(kind: Kind) -> dict[str, Any] | None:
    if kind.name not in _DRAWING:
        return None
    if kind.inner.generator is not None:
        return {"generator": kind.inner.generator.get_state()}
    source = Source(kind, None, skip=0)
    source.begin()
    return source.saved


def restore(index_sampler: Any, start: Mapping[str, Any] | None) -> None:
    """Sets a sampler's own generator to the state of a start, so that the next epoch draws from there.

    A program that seeds its generator for each epoch has the last word, as in a run without a state.
    """
    generator = getattr(kind_of(index_sampler).inner, "generator", None)
    if start is not None and "generator" in start and generator is not None:
        generator.set_state(start["generator"])


def run_out(index_sampler: Any, saved: SamplerState | None, position: int = 0, has_ended: bool = False) -> None:
    """Brings a sampler to the end of a saved epoch: its generator, or the state that it has.

    For the state of a finished epoch that does not say where the next one starts from.

    Args:
        index_sampler: The source of the loader's index batches.
        saved: As for ``sampling``.
        position: Number of index batches that were delivered.
        has_ended: Whether the state that a sampler has is that after its epoch.
    """
    kind = kind_of(index_sampler)
    if saved is None:
        return
    if not kind.is_known:
        torch_iterator = iter(index_sampler)
        if may_be_stateful(kind, torch_iterator):
            recorder, left = recorder_of(kind, torch_iterator, saved, position, every=0)
            if has_ended:
                recorder.begin()
                return
            # Not a sampler without an end, which a program can call finished.
            _exhaust(itertools.islice(recorder, max(left, length_of(index_sampler) or 0) + 1))
        return
    start = start_of(kind, saved)
    generator = getattr(kind.inner, "generator", None)
    if generator is not None and start is not None and "generator" in start:
        generator.set_state(start["generator"])
        _exhaust(kind.inner if saved.kind is not None else _as_torchdata(kind.inner))


def _as_torchdata(inner: Any) -> RandomSampler:
    """Makes a sampler that draws from a RandomSampler's generator as torchdata does."""
    return RandomSampler(inner.data_source, inner.replacement, inner.num_samples, inner.generator)


def _exhaust(iterable: Iterable[Any]) -> None:
    collections.deque(iterable, maxlen=0)
