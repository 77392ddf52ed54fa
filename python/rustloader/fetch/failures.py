"""Descriptions of failed samples, and their transport from a worker to the main process."""

# No `from __future__ import annotations`: field annotations must be types, not strings.
import contextlib
import dis
import operator
import reprlib
import traceback
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any, NoReturn

from rustloader.settings.limits import INDEX_SHOWN
from rustloader.system.package import FOLDER

# Maximum number of characters of an error's message in a description.
_MAX_TEXT = 1000


@dataclass(frozen=True)
class Failure:
    """Describes a sample that failed under ``on_error``.

    Attributes:
        index: Index of the sample; a string if it is not an integer. None for an iterable dataset, which has no
            indices.
        error_text: Type and message of the exception.
        action: "skipped" or "replaced": what was done with the sample instead of raising the exception.
        worker_id: ID of the worker, from 0; None with ``num_workers=0``.

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
    return Failure(_storable(index), text[:_MAX_TEXT], action, worker_id)


def _storable(index: Any) -> int | str | None:
    """Returns an index in a form that can be stored and written as JSON."""
    if index is None or type(index) is str:
        return index
    try:
        return operator.index(index)
    except TypeError:
        return reprlib.repr(index)


def index_text(index: Any) -> str:
    """Returns an index batch as a string of limited length."""
    try:
        text = repr(index)
    except Exception as error:  # an error in the user's __repr__ must not hide the death or the warning
        text = f"<{type(index).__name__}, whose repr() raised {type(error).__name__}>"
    return text if len(text) <= INDEX_SHOWN else text[:INDEX_SHOWN] + "..."


def put_note(wrapper: Any, worker_id: int, batch: int, index: Any, error: BaseException) -> None:
    """Attaches a note to the wrapper of an error. The note says at which batch and sample a worker raised the error.
    :func:`add_note` adds it to the error itself.

    Args:
        wrapper: torch's ``ExceptionWrapper`` of the error.
        worker_id: ID of the worker.
        batch: Number of the batch in its epoch, from 0.
        index: Its index batch, which contains no indices for an iterable dataset.
        error: The error.
    """
    text = f"Worker {worker_id} was fetching batch {batch}"
    if index is not None and not (isinstance(index, list) and index[:1] == [None]):
        text += f" (index {index_text(index)})"
        sample = _sample_of(error.__traceback__, index)
        text += "" if sample is None else f", and was at sample {sample}"
    wrapper.note = f"{text}."


def add_note(error: BaseException, wrapper: Any) -> None:
    """Adds the note of :func:`put_note` to the error that a wrapper has raised."""
    # Programs may use their own wrappers, and raise errors whose `__notes__` is not a list.
    if note := getattr(wrapper, "note", None):
        with contextlib.suppress(TypeError):
            error.add_note(note)


def _sample_of(trace: TracebackType | None, batch: Any) -> int | None:
    """Returns the index of the sample that the dataset was making. Reads it from the frame that torch's fetcher called;
    returns None if that frame does not show it.
    """
    in_fetcher = False
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename.endswith(("torch/utils/data/_utils/fetch.py", "rustloader/fetch/tables.py")):
            in_fetcher = True
        elif in_fetcher and not code.co_filename.startswith(FOLDER):
            if code.co_name != "__getitem__" or code.co_argcount < 2 or _assigns(code, code.co_varnames[1]):
                return None
            index = trace.tb_frame.f_locals.get(code.co_varnames[1])
            is_sample = type(index) is int and isinstance(batch, list) and index in batch
            return index if is_sample else None
        trace = trace.tb_next
    return None


def _assigns(code: CodeType, name: str) -> bool:
    """Returns True if a function assigns to one of its parameters."""
    stores = ("STORE_FAST", "STORE_DEREF", "DELETE_FAST", "DELETE_DEREF")
    # Python 3.13 combines two stores into one instruction.
    targets = (step.argval for step in dis.get_instructions(code) if step.opname.startswith(stores))
    return any(name in target if isinstance(target, tuple) else name == target for target in targets)


class EmptyBatchError(Exception):
    """Raised instead of a batch whose samples have all failed.

    Attributes:
        failures: The failures of its samples.
    """

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__("a batch without samples")
        self.failures = failures


class EmptyBatch:
    """A worker's result instead of a batch whose samples have all failed. It is sent like an error."""

    def __init__(self, failures: list[Failure]) -> None:
        self.failures = failures

    def reraise(self) -> NoReturn:
        """Raises EmptyBatchError, as torch's ``ExceptionWrapper`` raises its error."""
        raise EmptyBatchError(self.failures)


class BatchWithFailures:
    """A batch with the failures of its samples."""

    def __init__(self, batch: Any, failures: list[Failure]) -> None:
        self.batch, self.failures = batch, failures

    def pin_memory(self, device: Any = None) -> "BatchWithFailures":
        """Pins the batch. torch's ``pin_memory`` calls this."""
        # Imported here because code that computes statistics imports this module, but does not need torch.
        from torch.utils.data import _utils

        return BatchWithFailures(_utils.pin_memory.pin_memory(self.batch, device), self.failures)
