"""The random draws of the next epoch, made or predicted early because a state includes them."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterDataPipe, RandomSampler

from rustloader.order.base import Generator, length_of
from rustloader.order.drawn import copied, or_global, random_seed
from rustloader.stateful_dataloader.recording import Recorder, may_be_stateful, resumable
from rustloader.stateful_dataloader.sampling import start_of
from rustloader.stateful_dataloader.schema import Draws, SamplerState
from rustloader.system.protocols import LoaderLike


def draw(
    loader: LoaderLike,
    index_sampler: Any,
    with_base_seed: bool,
    use: Callable[[Generator], Generator] = lambda generator: generator,
) -> Draws:
    """Makes the draws of the next ``iter()`` and its first ``next``, in torch's order.

    Args:
        loader: The loader, from whose generator the base seed is drawn.
        index_sampler: The source of the loader's index batches.
        with_base_seed: Whether ``iter()`` draws a base seed. Persistent workers keep their base seed.
        use: Maps the generator of the loader or of the sampler to the generator to draw from.
    """
    if isinstance(loader.dataset, IterDataPipe):
        # The processes that read a DataPipe agree on a shared seed before the base seed is drawn.
        return Draws(None, None)
    base_seed = random_seed(use(loader.generator)) if with_base_seed else None
    return Draws(base_seed, resumable(index_sampler).draw_next(use))


@contextlib.contextmanager
def generators_after_draws(loader: LoaderLike, index_sampler: Any) -> Iterator[None]:
    """Makes the generators, for the body, those that the draws of the first ``iter()`` and its first ``next`` leave."""
    _, copies = predict(loader, index_sampler)
    before = [(generator, generator.get_state()) for generator, _ in copies]
    try:
        for generator, after in copies:
            generator.set_state(after.get_state())
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


def predict(loader: LoaderLike, index_sampler: Any) -> tuple[Draws, list[tuple[torch.Generator, torch.Generator]]]:
    """Makes the draws of the first ``iter()`` and its first ``next`` from copies of the generators.

    Returns:
        The draws, and the generators with their copies.
    """
    copies: dict[int, tuple[torch.Generator, torch.Generator]] = {}

    def copy_of(generator: Generator) -> torch.Generator:
        own = or_global(generator)
        if id(own) not in copies:
            copies[id(own)] = own, copied(own)
        return copies[id(own)][1]

    return draw(loader, index_sampler, True, copy_of), [*copies.values()]


class EarlyDraws:
    """The draws of the next epoch, made or predicted for a state, until the epoch begins.

    If the draws are only predicted, the epoch still makes them when torch would, and replaces the results with the
    predicted ones. So the program's other draws are the same as in a run without the state.

    Args:
        loader: As for ``draw``.
        index_sampler: As for ``draw``.
        are_made: True for ``draw``, False for ``predict``.
        with_base_seed: As for ``draw``.

    Attributes:
        draws: The result of ``draw`` or ``predict``.
        are_made: Whether the draws were made, rather than predicted.
    """

    def __init__(self, loader: LoaderLike, index_sampler: Any, are_made: bool, with_base_seed: bool = True) -> None:
        self.are_made = are_made
        watched = [None] if loader.generator is None else [None, loader.generator]
        # The generators that were drawn from, with their states before the draws.
        self._drawn_from: list[tuple[Generator, torch.Tensor]] = []
        if are_made:
            before = [(generator, or_global(generator).get_state()) for generator in watched]
            self.draws = draw(loader, index_sampler, with_base_seed)
            self._drawn_from = [(generator, state) for generator, state in before if not _is_at(generator, state)]
            watched = [generator for generator, _ in self._drawn_from]
        else:
            self.draws, _ = predict(loader, index_sampler)
        self._watches = [SeedWatch(generator) for generator in watched]

    def was_seeded_since(self) -> bool:
        """Returns True if the program has seeded a generator, or restored its state, since these draws.

        The next epoch then makes new draws, as in a run without a state. Seeding with the same number goes unnoticed if
        the program then draws before the next epoch.
        """
        restored = any(_is_at(generator, state) for generator, state in self._drawn_from)
        return restored or any(watch.was_seeded() for watch in self._watches)


class SeedWatch:
    """Detects whether the program has seeded a generator (None: torch's global generator).

    Seeding with the same number as before goes undetected if the program draws afterwards, or had not drawn before.
    """

    def __init__(self, generator: Generator) -> None:
        # Keeps None for the global generator, because a copy of the loader would contain a copy of the generator.
        self._generator = generator
        now = or_global(generator)
        self._seed, self._was_fresh = now.initial_seed(), _is_fresh(now)

    def was_seeded(self) -> bool:
        """Returns True if the generator was seeded."""
        generator = or_global(self._generator)
        return generator.initial_seed() != self._seed or (_is_fresh(generator) and not self._was_fresh)


def _is_at(generator: Generator, state: torch.Tensor) -> bool:
    return torch.equal(or_global(generator).get_state(), state)


def _is_fresh(generator: torch.Generator) -> bool:
    """Returns True if a generator has not drawn since it was seeded."""
    seeded = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    return torch.equal(generator.get_state(), seeded.get_state())


def restore(index_sampler: Any, start: Mapping[str, Any] | None) -> bool:
    """Sets a sampler's own generator to the state of a start, so that the next epoch draws from there.

    If the program then seeds the generator for its epoch, that seed takes precedence, as in a run without a state.

    Returns:
        False if the sampler has no generator, or the start does not contain its state.
    """
    generator = getattr(resumable(index_sampler).inner, "generator", None)
    if start is None or "generator" not in start or generator is None:
        return False
    generator.set_state(start["generator"])
    return True


def run_out(index_sampler: Any, saved: SamplerState | None, position: int = 0, has_ended: bool = False) -> None:
    """Advances the generator or the state of a sampler to the end of a saved epoch.

    Used for the state of a finished epoch that does not include the start of the next epoch.

    Args:
        index_sampler: The source of the loader's index batches.
        saved: As for ``sampling``.
        position: Number of batches that were delivered.
        has_ended: Whether the saved state of a stateful sampler was taken after the epoch.
    """
    order = resumable(index_sampler)
    if saved is None:
        return
    if order.sampler_class is not None:
        if restore(index_sampler, start_of(order, saved)):
            if saved.kind is None:
                _draw_as_torchdata(order.inner)
            else:
                _exhaust(order.inner)
        return
    torch_iterator = iter(index_sampler)
    if may_be_stateful(order, torch_iterator):
        recorder = Recorder(order, torch_iterator, saved, position, every=0)
        if has_ended:
            recorder.begin()
            return
        # Limited, because a program can declare the epoch of an endless sampler finished.
        _exhaust(itertools.islice(recorder, max(recorder.to_skip, length_of(index_sampler) or 0) + 1))


def _draw_as_torchdata(sampler: RandomSampler) -> None:
    """Draws what torchdata's RandomSampler draws in an epoch: 32 indices at a time, or whole permutations."""
    size = len(sampler.data_source)
    count = 32 if sampler.replacement else max(size, 1)
    for _ in range(0, sampler.num_samples, count):
        if sampler.replacement:
            torch.randint(size, (count,), generator=sampler.generator)
        else:
            torch.randperm(size, generator=sampler.generator)


def _exhaust(iterable: Iterable[Any]) -> None:
    collections.deque(iterable, maxlen=0)
