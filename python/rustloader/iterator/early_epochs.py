"""Predicts the next epoch of a persistent loader, so that its workers can start it before the current one has ended."""

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

# A prediction can account for at most this number of seeds that the program draws from torch's global generator between
# two epochs. The `iter()` of another loader draws one such seed.
_MAX_SEEDS = 8
# Number of consecutive wrong predictions after which no more are made.
_MAX_WRONG = 3

# The sampler classes whose order can be predicted, each with the code object of torch's `__iter__`; None if rustloader
# does not know this version of the code.
_PREDICTABLE = {
    SequentialSampler: indices.SEQUENTIAL,
    RandomSampler: indices.RANDOM,
    SubsetRandomSampler: indices.SUBSET,
    WeightedRandomSampler: indices.WEIGHTED,
    DistributedSampler: indices.SHARD,
}


@dataclass
class _Origin:
    """The values that determine an epoch's order.

    Attributes:
        state: The state of torch's global generator.
        epoch: The epoch of a DistributedSampler, as ``set_epoch`` sets it.
    """

    state: torch.Tensor | None = None
    epoch: int | None = None


class EpochPredictor:
    """Predicts the index batches of a loader's next epoch, and iterates over them.

    The predictor draws from copies of the sampler and of its generator, so nothing that a program can see changes. The
    prediction may be wrong: when the epoch starts, the engine draws from the sampler itself and compares.

    From a wrong prediction the predictor learns what the program does between two epochs: how many seeds the program
    draws from torch's global generator, and what it adds to the sampler's epoch.

    Args:
        index_sampler: The source of the loader's index batches.
        epochs: Predicts the message that starts the next epoch in the workers.
    """

    def __init__(self, index_sampler: Any, epochs: Epochs) -> None:
        self._sampler, self._epochs = index_sampler, epochs
        self._batches: Iterator[Any] = iter(())
        # True once `begin` has been called in the current epoch.
        self._was_called = False
        # The values from which the next epoch was predicted.
        self._origin: _Origin | None = None
        # For the epoch that is starting: the values from which it was predicted, and the values at its start.
        self._compared: tuple[_Origin, _Origin] | None = None
        # Number of consecutive wrong predictions.
        self._wrong = 0
        # Number of seeds that the program draws between two epochs, and what it adds to the sampler's epoch.
        self._seeds_between, self._epoch_step = 0, 1

    def begin(self) -> bytes | None:
        """Predicts the next epoch, and returns the message that starts it in the workers. The predictor then yields the
        epoch's index batches. Returns None if the epoch cannot be predicted, or if this method has already been called
        in the current epoch.
        """
        if self._was_called or self._wrong >= _MAX_WRONG:
            return None
        self._was_called = True
        try:
            message, sampler = self._epochs.next_message(), self._predicted_sampler()
            if message is None or sampler is None:
                return None
            self._batches = iter(indices.stream(sampler, iter(sampler)))
        except Exception as error:
            if is_interrupt(error):
                raise
            return None
        return encoded(message)

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
        # The prediction ends here. The sampler itself will raise the error when the actual epoch draws from it.
        raise StopIteration

    def before_epoch(self) -> None:
        """Records the values at the start of an epoch, and allows `begin` to be called again. Must be called before the
        epoch's sampler draws anything."""
        origin, self._origin, self._compared = self._origin, None, None
        # Reset before the epoch starts: a short epoch asks for the next prediction while it is still starting.
        self._was_called, self._batches = False, iter(())
        if origin is not None:
            actual = _Origin(torch.default_generator.get_state(), getattr(self._inner(), "epoch", None))
            self._compared = origin, actual

    def after_start(self, is_right: bool | None) -> None:
        """Learns from the epoch that has started.

        Args:
            is_right: Whether the epoch was predicted correctly; None if the workers did not start it early.
        """
        if self._compared is None or is_right is None:
            self._compared = None
            return
        self._wrong = 0 if is_right else self._wrong + 1
        if not is_right:
            self._learn(*self._compared)
        if self._wrong == _MAX_WRONG:
            logger.info(
                "a DataLoader: overlap_epochs has no effect from now on, because %d epochs in a row did not begin as "
                "predicted",
                _MAX_WRONG,
            )

    def _learn(self, origin: _Origin, actual: _Origin) -> None:
        """Infers from a wrong prediction what the program did between the prediction and the start of the epoch."""
        if origin.epoch is not None and type(actual.epoch) is int:
            self._epoch_step = actual.epoch - origin.epoch
        if origin.state is not None and actual.state is not None:
            generator = torch.Generator()
            generator.set_state(origin.state)
            for count in range(_MAX_SEEDS + 1):
                if torch.equal(generator.get_state(), actual.state):
                    self._seeds_between = count
                    return
                _draw_seed(generator)

    def _inner(self) -> Any:
        """Returns the sampler that yields single indices: the one in a BatchSampler, or the index sampler itself."""
        return self._sampler.sampler if type(self._sampler) is BatchSampler else self._sampler

    def _predicted_sampler(self) -> Any:
        """Returns a copy of the index sampler in the state in which the next epoch is expected to find it. Returns None
        unless its class, and that of the sampler inside it, are torch's own and have torch's code.
        """
        outer, inner = self._sampler, self._inner()
        if outer is not inner and not _has_code(BatchSampler, indices.BATCHES):
            return None
        if not _has_code(type(inner), _PREDICTABLE.get(type(inner))):
            return None
        # Reading any other sequence may run the program's code.
        if type(inner) is SubsetRandomSampler and type(inner.indices) not in (list, tuple, range):
            return None
        origin, copied = _Origin(), copy.copy(inner)
        if type(inner) is DistributedSampler:
            origin.epoch = inner.epoch
            copied.epoch = inner.epoch + self._epoch_step
        elif type(inner) is not SequentialSampler:
            copied.generator = self._predicted_generator(inner, origin)
        self._origin = origin
        if outer is inner:
            return copied
        batches = copy.copy(outer)
        batches.sampler = copied
        return batches

    def _predicted_generator(self, inner: Any, origin: _Origin) -> torch.Generator:
        """Returns a new generator that produces the draws that a sampler is expected to make in the next epoch. Sets
        ``origin.state`` if the sampler uses torch's global generator."""
        own = torch.default_generator if inner.generator is None else inner.generator
        generator = torch.Generator(own.device)
        generator.set_state(own.get_state())
        if inner.generator is not None:
            return generator
        origin.state = generator.get_state()
        for _ in range(self._seeds_between):
            _draw_seed(generator)
        return torch.Generator().manual_seed(_draw_seed(generator)) if type(inner) is RandomSampler else generator


def _draw_seed(generator: torch.Generator) -> int:
    """Draws a seed from a generator, in the same way as a RandomSampler and the ``iter()`` of a loader do."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


def _has_code(cls: type, code: Any) -> bool:
    """Returns True if the ``__iter__`` of a sampler class still has torch's code, ``code``. Returns False if ``code``
    is None, which means that rustloader does not know this version of torch's code."""
    return code is not None and getattr(cls.__iter__, "__code__", None) is code  # type: ignore[attr-defined]


def encoded(message: dict[str, Any]) -> bytes:
    """Encodes a message to the workers of a persistent loader. An empty message becomes an empty bytes object."""
    return pickle.dumps(message) if message else b""


def predictor(
    it: WorkersIterator, loader: LoaderLike, config: LoaderConfig, epochs: Epochs, is_tuned: bool
) -> EpochPredictor | None:
    """Returns the predictor of a persistent loader with ``overlap_epochs``, or None if its epochs do not overlap. If
    they cannot overlap although the option is set, logs the reason once per loader.

    ``is_tuned`` tells whether the number of workers may change between epochs.
    """
    if not config.overlap_epochs or not config.persistent_workers:
        return None
    reason = _why_not(it, loader, config, is_tuned)
    if reason is None:
        return EpochPredictor(it._index_sampler, epochs)
    text = f"overlap_epochs has no effect: {reason}"
    if loader_state.of(original(loader)).first_time(text):
        logger.info("a DataLoader: %s", text)
    return None


def _why_not(it: WorkersIterator, loader: LoaderLike, config: LoaderConfig, is_tuned: bool) -> str | None:
    """Returns the reason why a loader's epochs cannot overlap; None if they can."""
    if it._dataset_kind != _DatasetKind.Map:
        return "an iterable dataset begins its next epoch in iter(dataset)"
    if config.snapshots:
        return "its dataset is stateful, or worker_init_fn may make it so, and its state changes with each batch"
    if config.max_restarts:
        return "with max_restarts, a restarted worker begins with the current epoch"
    if config.window[1] is not None:
        return "with a reorder_window in bytes, batches of the next epoch would change how far ahead the sampler runs"
    if is_tuned:
        return 'with num_workers="auto", the number of workers may change before the next epoch'
    if is_remote(loader.multiprocessing_context):
        return "its workers run on other machines"
    return None
