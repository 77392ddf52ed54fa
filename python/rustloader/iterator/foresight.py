"""The beginning of a persistent loader's next epoch, foreseen before the current one has ended."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.dataloader import _DatasetKind
from torch.utils.data.distributed import DistributedSampler

from rustloader.iterator import indices
from rustloader.iterator.epochs import Epochs
from rustloader.remote.context import is_remote
from rustloader.settings import loader_state
from rustloader.settings.config import LoaderConfig, original
from rustloader.system.interrupts import is_interrupt
from rustloader.system.protocols import LoaderLike, WorkersIterator

logger = logging.getLogger("rustloader")

# Seeds that a program may draw from torch's generator between two epochs, as the `iter()` of another loader does.
_MAX_DRAWS = 8
# Number of wrong guesses in a row after which there is no further one.
_MAX_WRONG = 3

# The samplers that can be foreseen, if their code is torch's.
_KNOWN = {
    SequentialSampler: indices.SEQUENTIAL,
    RandomSampler: indices.RANDOM,
    SubsetRandomSampler: indices.SUBSET,
    WeightedRandomSampler: indices.WEIGHTED,
    DistributedSampler: indices.SHARD,
}


@dataclass
class _Guess:
    """The start of a guess: the state of torch's global generator, or the epoch of a sampler."""

    state: torch.Tensor | None = None
    epoch: int | None = None


class Foresight:
    """The index batches of the next epoch, as they will be if the program continues as before.

    They come from copies of the sampler and of its generator, so that nothing which a program can see changes. They may
    be wrong: the beginning of the epoch draws from the sampler itself and compares.

    Wrong guesses teach how the program acts between two epochs: how far it moves torch's global generator, and which
    epoch it sets.

    Args:
        index_sampler: The source of the loader's index batches.
        epochs: Gives the message that the next epoch begins with.
    """

    def __init__(self, index_sampler: Any, epochs: Epochs) -> None:
        self._sampler, self._epochs = index_sampler, epochs
        self._batches: Iterator[Any] = iter(())
        # True if the current epoch has asked.
        self._has_asked = False
        self._guess: _Guess | None = None
        # The guess for the epoch that begins, and the state that it finds.
        self._judged: tuple[_Guess, _Guess] | None = None
        self._wrong = 0
        # The number of seeds that the program draws until the next epoch, and the step by which it raises the sampler's
        # epoch.
        self._draws, self._step = 0, 1

    def begin(self) -> bytes | None:
        """Returns the message that begins the next epoch; None if it cannot be foreseen. Answers once in an epoch."""
        if self._has_asked or self._wrong >= _MAX_WRONG:
            return None
        self._has_asked = True
        try:
            message, sampler = self._epochs.next_message(), self._copied()
            if message is None or sampler is None:
                return None
            self._batches = iter(indices.stream(sampler, iter(sampler)))
        except Exception as error:
            if is_interrupt(error):
                raise
            return None
        return packed(message)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except Exception as error:
            if is_interrupt(error):
                raise
        # The sampler itself raises it when its turn comes.
        raise StopIteration

    def epoch_begins(self) -> None:
        """Notes the state at the start of the epoch that begins, before its first draw."""
        guess, self._guess, self._judged = self._guess, None, None
        # A short epoch asks for the next one while it begins.
        self._has_asked, self._batches = False, iter(())
        if guess is not None:
            actual = _Guess(torch.default_generator.get_state(), getattr(self._inner(), "epoch", None))
            self._judged = guess, actual

    def epoch_has_begun(self, is_right: bool | None) -> None:
        """Compares the epoch that has begun with the guess. None: the workers had not begun it."""
        if self._judged is None or is_right is None:
            self._judged = None
            return
        self._wrong = 0 if is_right else self._wrong + 1
        if not is_right:
            self._learn(*self._judged)
        if self._wrong == _MAX_WRONG:
            logger.info(
                "a DataLoader: overlap_epochs has no effect from now on: %d epochs in a row did not begin as foreseen",
                _MAX_WRONG,
            )

    def _learn(self, guess: _Guess, actual: _Guess) -> None:
        if guess.epoch is not None and type(actual.epoch) is int:
            self._step = actual.epoch - guess.epoch
        if guess.state is not None and actual.state is not None:
            generator = torch.Generator()
            generator.set_state(guess.state)
            for draws in range(_MAX_DRAWS + 1):
                if torch.equal(generator.get_state(), actual.state):
                    self._draws = draws
                    return
                _seed(generator)

    def _inner(self) -> Any:
        return self._sampler.sampler if type(self._sampler) is BatchSampler else self._sampler

    def _copied(self) -> Any:
        """Returns a copy of the sampler as the next epoch will find it; None for a sampler of another class than
        torch's.
        """
        outer, inner = self._sampler, self._inner()
        if outer is not inner and not _is_torchs(BatchSampler, indices.BATCHES):
            return None
        if not _is_torchs(type(inner), _KNOWN.get(type(inner))):
            return None
        # Reading another sequence may run code of the program.
        if type(inner) is SubsetRandomSampler and type(inner.indices) not in (list, tuple, range):
            return None
        guess, copied = _Guess(), copy.copy(inner)
        if type(inner) is DistributedSampler:
            guess.epoch = inner.epoch
            copied.epoch = inner.epoch + self._step
        elif type(inner) is not SequentialSampler:
            copied.generator = self._generator(inner, guess)
        self._guess = guess
        if outer is inner:
            return copied
        batches = copy.copy(outer)
        batches.sampler = copied
        return batches

    def _generator(self, inner: Any, guess: _Guess) -> torch.Generator:
        """Returns a generator that draws what a sampler will draw."""
        own = torch.default_generator if inner.generator is None else inner.generator
        generator = torch.Generator(own.device)
        generator.set_state(own.get_state())
        if inner.generator is not None:
            return generator
        guess.state = generator.get_state()
        for _ in range(self._draws):
            _seed(generator)
        return torch.Generator().manual_seed(_seed(generator)) if type(inner) is RandomSampler else generator


def _seed(generator: torch.Generator) -> int:
    """Returns a seed, as a RandomSampler and the ``iter()`` of a loader draw it."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


def _is_torchs(cls: type, code: Any) -> bool:
    return code is not None and getattr(cls.__iter__, "__code__", None) is code  # type: ignore[attr-defined]


def packed(message: dict[str, Any]) -> bytes:
    """Encodes a message to the workers of a persistent loader; an empty one has no bytes."""
    return pickle.dumps(message) if message else b""


def of(
    it: WorkersIterator, loader: LoaderLike, config: LoaderConfig, epochs: Epochs, is_tuned: bool
) -> Foresight | None:
    """Returns the foresight of a loader with ``overlap_epochs``. None if its epochs do not overlap.

    ``is_tuned``: the number of workers may change between epochs.
    """
    if not config.overlap_epochs or not config.persistent_workers:
        return None
    reason = _why_not(it, loader, config, is_tuned)
    if reason is None:
        return Foresight(it._index_sampler, epochs)
    text = f"overlap_epochs has no effect: {reason}"
    if loader_state.of(original(loader)).is_new(text):
        logger.info("a DataLoader: %s", text)
    return None


def _why_not(it: WorkersIterator, loader: LoaderLike, config: LoaderConfig, is_tuned: bool) -> str | None:
    """Returns the reason why the epochs of a loader cannot overlap, or None."""
    if it._dataset_kind != _DatasetKind.Map:
        return "an iterable dataset begins its next epoch in iter(dataset)"
    if config.snapshots:
        return "a dataset with a state of its own, or that worker_init_fn may have given one, changes with each batch"
    if config.max_restarts:
        return "with max_restarts, a worker that is started again begins with the current epoch"
    if config.window[1] is not None:
        return "with a reorder_window in bytes, batches of the next epoch would change how far the sampler is ahead"
    if is_tuned:
        return 'with num_workers="auto", the next epoch may have other workers'
    if is_remote(loader.multiprocessing_context):
        return "its workers run on other machines"
    return None
