"""Failed samples under ``on_error``: what is known of one, and how it travels from a worker to the main process."""

# No `from __future__ import annotations`: field annotations must be types, not strings.
import operator
import reprlib
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

# Characters of an error's text that are kept.
_LONGEST_TEXT = 1000


@dataclass(frozen=True)
class Failure:
    """Describes a sample that failed under ``on_error``.

    Attributes:
        index: Index of the sample; as text if it is no integer. None for an iterable dataset, which has no indices.
        error_text: Type and message of the exception.
        action: "skipped" or "replaced": what was done instead of raising the exception.
        worker_id: Number of the worker, from 0; None with ``num_workers=0``.

    Examples:
        >>> class Squares(rustloader.Dataset):
        ...     def __len__(self):
        ...         return 4
        ...
        ...     def __getitem__(self, index):
        ...         if index == 2:
        ...             raise ValueError("broken")
        ...         return index**2
        >>> loader = rustloader.DataLoader(Squares(), batch_size=2, num_workers=1, on_error="skip")
        >>> list(loader)
        [tensor([0, 1]), tensor([9])]
        >>> rustloader.stats(loader).faults.failures
        (Failure(index=2, error_text='ValueError: broken', action='skipped', worker_id=0),)
    """

    index: int | str | None
    error_text: str
    action: str
    worker_id: int | None = None


# Pickles and reprs name the module that programs import from.
Failure.__module__ = "rustloader"


def failure_of(index: Any, error: BaseException, action: str, worker_id: int | None) -> Failure:
    """Describes the failure of the sample at an index."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return Failure(_plain(index), text[:_LONGEST_TEXT], action, worker_id)


def _plain(index: Any) -> int | str | None:
    """An index in a form that can be kept and written as JSON."""
    if index is None or type(index) is str:
        return index
    try:
        return operator.index(index)
    except TypeError:
        return reprlib.repr(index)


class EmptyBatchError(Exception):
    """Raised in place of a batch that has no samples left.

    Attributes:
        failures: Why.
    """

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__("a batch without samples")
        self.failures = failures


class EmptyBatch:
    """What a worker sends in place of a batch that has no samples left, as it sends errors."""

    def __init__(self, failures: list[Failure]) -> None:
        self.failures = failures

    def reraise(self) -> NoReturn:
        """Raises EmptyBatchError, as torch's ``ExceptionWrapper`` raises its error."""
        raise EmptyBatchError(self.failures)


class Reported:
    """A batch with the failures of its samples."""

    def __init__(self, batch: Any, failures: list[Failure]) -> None:
        self.batch, self.failures = batch, failures

    def pin_memory(self, device: Any = None) -> "Reported":
        """Pins the batch; called by torch's function."""
        # Here: statistics need this module, and not torch.
        from torch.utils.data import _utils

        return Reported(_utils.pin_memory.pin_memory(self.batch, device), self.failures)
