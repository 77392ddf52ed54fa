"""Predicts the next epoch of a persistent loader, so that its workers can start it before the current one has ended."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

from rustloader.iterator.adaptation import log_once
from rustloader.iterator.epochs import Epochs
from rustloader.order.stream import is_exact, predicted, stream
from rustloader.remote.context import is_remote
from rustloader.settings.config import LoaderConfig
from rustloader.system.interrupts import is_interrupt
from rustloader.system.protocols import LoaderLike, WorkersIterator

logger = logging.getLogger("rustloader")


class EpochPredictor:
    """Predicts the index batches of a loader's next epoch, and iterates over them.

    The predictor draws from copies of the sampler and of its generator, so nothing that a program can see changes. The
    prediction may be wrong: when the epoch starts, the engine draws from the sampler itself and compares. After one
    wrong prediction the predictor makes no more.

    Args:
        index_sampler: The source of the loader's index batches.
        epochs: Predicts the message that starts the next epoch in the workers.

    Attributes:
        is_right: Whether the last epoch was predicted correctly; None if the workers did not start it early.
        has_stopped: Whether no more epochs are predicted, because one prediction was wrong.
    """

    is_right: bool | None = None
    has_stopped = False

    def __init__(self, index_sampler: Any, epochs: Epochs) -> None:
        self._sampler, self._epochs = index_sampler, epochs
        self._batches: Iterator[Any] = iter(())
        # True once `begin` has been called in the current epoch.
        self._was_called = False

    def begin(self) -> bytes | None:
        """Predicts the next epoch, and returns the message that starts it in the workers. The predictor then yields the
        epoch's index batches. Returns None if the epoch cannot be predicted, or if this method has already been called
        in the current epoch.
        """
        if self._was_called or self.has_stopped:
            return None
        self._was_called = True
        try:
            message, sampler = self._epochs.next_message(), predicted(self._sampler)
            if message is None or sampler is None:
                return None
            self._batches = iter(stream(sampler, iter(sampler)))
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
        """Allows `begin` to be called again. Must be called before the epoch starts, because a short epoch asks for the
        next prediction while it is still starting."""
        self._was_called, self._batches = False, iter(())

    def after_start(self, is_right: bool | None) -> None:
        """Records ``is_right`` for the epoch that has started."""
        self.is_right = is_right
        if is_right is False:
            self.has_stopped = True
            logger.info(
                "a DataLoader: overlap_epochs has no effect from now on, because an epoch did not begin as predicted"
            )


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
    log_once(loader, f"overlap_epochs has no effect: {reason}")
    return None


def _why_not(it: WorkersIterator, loader: LoaderLike, config: LoaderConfig, is_tuned: bool) -> str | None:
    """Returns the reason why a loader's epochs cannot overlap; None if they can."""
    if it._dataset_kind != _DatasetKind.Map:
        return "an iterable dataset begins its next epoch in iter(dataset)"
    if not is_exact(it._index_sampler):
        return "its sampler is not torch's own, so the order of its next epoch is unknown"
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
