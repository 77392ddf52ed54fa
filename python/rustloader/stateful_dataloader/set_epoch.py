"""Records the epochs that a program passes to its dataset's ``set_epoch``, to forward them to workers."""

from __future__ import annotations

import functools
from typing import Any

# Attribute of a dataset: the number of calls of `set_epoch`, and the arguments of the last call.
_RECORD = "_rustloader_set_epoch"

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class EpochRecorder:
    """Finds the calls of a dataset's ``set_epoch`` that its workers have not received yet.

    Args:
        dataset: A dataset whose class records the calls (see ``recorder_of``). Workers start with its current state.

    Attributes:
        in_force: The arguments of the ``set_epoch`` call that applies to the current epoch; None without a call.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.in_force: _Arguments | None = None
        self._latest = self._seen = 0
        self.since_last_epoch()
        self.note_begun()

    def since_last_epoch(self) -> _Arguments | None:
        """Returns the arguments of the last ``set_epoch`` call since the last epoch began; None without a call.

        Also updates ``in_force``.
        """
        self._latest, args, kwargs = getattr(self._dataset, "__dict__", {}).get(_RECORD) or (0, (), {})
        self.in_force = (args, kwargs) if self._latest else None
        return None if self._latest == self._seen else self.in_force

    def note_begun(self) -> None:
        """Records that an epoch has begun, so that all workers have received its ``set_epoch`` call."""
        self._seen = self._latest


def recorder_of(dataset: Any) -> EpochRecorder | None:
    """Replaces ``set_epoch`` of a dataset's class with a method that also records its calls. Returns a recorder.

    Returns None if there is no ``set_epoch``, or if it cannot be replaced. Calls are recorded on the dataset itself.
    """
    cls = type(dataset)
    function = getattr(cls, "set_epoch", None)
    if not callable(function) or not hasattr(dataset, "__dict__"):
        return None
    if not hasattr(function, "_rustloader_records"):
        try:
            cls.set_epoch = _recording(function)
        except TypeError:  # a class of an extension module
            return None
    return EpochRecorder(dataset)


def _recording(function: Any) -> Any:
    @functools.wraps(function)
    def set_epoch(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        calls = self.__dict__.get(_RECORD, (0,))[0]
        # Works even if the class's `__setattr__` refuses attributes.
        object.__setattr__(self, _RECORD, (calls + 1, args, kwargs))
        return result

    set_epoch._rustloader_records = True  # type: ignore[attr-defined]
    return set_epoch
