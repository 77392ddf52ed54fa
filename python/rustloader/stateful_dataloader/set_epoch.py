"""Records the epochs that a program passes to its dataset's ``set_epoch``, to forward them to workers."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from rustloader.system.weak_table import WeakTable

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class EpochRecorder:
    """Finds the calls of a dataset's ``set_epoch`` that its workers have not received yet.

    Args:
        dataset: The dataset. Workers start with its current state.
        recording: Records the calls of the dataset's ``set_epoch``.

    Attributes:
        in_force: The arguments of the ``set_epoch`` call that applies to the current epoch; None without a call.
    """

    def __init__(self, dataset: Any, recording: _Recording) -> None:
        self._dataset, self._recording = dataset, recording
        self.in_force: _Arguments | None = None
        self._latest = self._seen = 0
        self.since_last_epoch()
        self.note_begun()

    def since_last_epoch(self) -> _Arguments | None:
        """Returns the arguments of the last ``set_epoch`` call since the last epoch began; None without a call.

        Also updates ``in_force``.
        """
        self._latest, self.in_force = self._recording.calls.find(self._dataset) or (0, None)
        return None if self._latest == self._seen else self.in_force

    def note_begun(self) -> None:
        """Records that an epoch has begun, so that all workers have received its ``set_epoch`` call."""
        self._seen = self._latest


class _Recording:
    """The calls of the ``set_epoch`` of a class, which is replaced as long as this object exists.

    Attributes:
        calls: For each dataset, the number of calls, and the arguments of the last one.
    """

    def __init__(self, cls: Any) -> None:
        self.calls: WeakTable[tuple[int, _Arguments]] = WeakTable()
        before = vars(cls)["set_epoch"]
        cls.set_epoch = replacement = _recorded(cls.set_epoch, self.calls)
        weakref.finalize(self, _restore, cls, replacement, before).atexit = False


# For each class that defines a replaced `set_epoch`, its recording. For each loader that needs it, the same.
_recordings: weakref.WeakValueDictionary[type, _Recording] = weakref.WeakValueDictionary()
_needed: WeakTable[_Recording] = WeakTable()


def recorder_of(dataset: Any, loader: Any) -> EpochRecorder | None:
    """Returns a recorder of a dataset's ``set_epoch``. As long as ``loader`` exists, the method is replaced with one
    that also records its calls.

    Returns None if the dataset's class has no ``set_epoch``, or if it cannot be replaced.
    """
    cls: Any = next((cls for cls in type(dataset).__mro__ if "set_epoch" in vars(cls)), None)
    if cls is None or not callable(cls.set_epoch) or not type(dataset).__weakrefoffset__:
        return None
    recording = _recordings.get(cls)
    if recording is None:
        try:
            recording = _recordings[cls] = _Recording(cls)
        except TypeError:  # a class of an extension module
            return None
    return EpochRecorder(dataset, _needed.keep(loader, recording))


def _recorded(function: Any, calls: WeakTable[tuple[int, _Arguments]]) -> Any:
    """Returns a method that calls ``function``, and records its calls in ``calls``."""

    @functools.wraps(function)
    def set_epoch(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        count, _ = calls.find(self) or (0, None)
        calls.keep(self, (count + 1, (args, kwargs)))
        return result

    return set_epoch


def _restore(cls: Any, replacement: Any, before: Any) -> None:
    if vars(cls).get("set_epoch") is replacement:
        cls.set_epoch = before
