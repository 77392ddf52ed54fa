"""Records the epochs that a program sets in its dataset, for its workers."""

from __future__ import annotations

import functools
from typing import Any

# Attribute of a dataset: number of calls of ``set_epoch``, and the arguments of the last one.
_RECORD = "_rustloader_set_epoch"

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class EpochRecorder:
    """Finds the calls of a dataset's ``set_epoch`` that its workers have not received yet.

    Args:
        dataset: A dataset whose class records the calls, see ``recorder_of``. The workers start with it as it is now.

    Attributes:
        in_force: The arguments of the ``set_epoch`` that applies to the current epoch; None without a call.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.in_force: _Arguments | None = None
        self._latest = self._seen = 0
        self.since_last_epoch()
        self.note_begun()

    def since_last_epoch(self) -> _Arguments | None:
        """Returns the arguments of the last ``set_epoch`` since the last epoch began; None without a call."""
        self._latest, args, kwargs = getattr(self._dataset, "__dict__", {}).get(_RECORD) or (0, (), {})
        self.in_force = (args, kwargs) if self._latest else None
        return None if self._latest == self._seen else self.in_force

    def note_begun(self) -> None:
        """Notes that an epoch has begun: all workers have received its ``set_epoch``."""
        self._seen = self._latest


def recorder_of(dataset: Any) -> EpochRecorder | None:
    """Returns a recorder for a dataset with ``set_epoch``, whose class then records the calls on the dataset itself."""
    cls = type(dataset)
    function = getattr(cls, "set_epoch", None)
    if not callable(function) or not hasattr(dataset, "__dict__"):
        return None
    if not hasattr(function, "_rustloader_records"):
        try:
            cls.set_epoch = _recording(function)
        except TypeError:  # a class of an extension
            return None
    return EpochRecorder(dataset)


def _recording(function: Any) -> Any:
    @functools.wraps(function)
    def set_epoch(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        calls = self.__dict__.get(_RECORD, (0,))[0]
        # Works even if the class refuses attributes.
        object.__setattr__(self, _RECORD, (calls + 1, args, kwargs))
        return result

    set_epoch._rustloader_records = True  # type: ignore[attr-defined]
    return set_epoch
