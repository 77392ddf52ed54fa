"""Notes the epochs that a program tells its dataset, so that persistent workers are told them, too."""

from __future__ import annotations

import functools
from typing import Any

# Attribute of a dataset: number of calls of ``set_epoch``, and the arguments of the last one.
_TOLD = "_rustloader_told"


class EpochRecorder:
    """What a program has told a dataset since the workers were last told.

    Args:
        dataset: A dataset whose class notes the calls, see ``recorder_of``.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._seen = self._told()[0]

    def since_last_epoch(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of the last ``set_epoch`` since the last call; None: there was none."""
        calls, args, kwargs = self._told()
        seen, self._seen = self._seen, calls
        return None if calls == seen else (args, kwargs)

    def _told(self) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        found: Any = getattr(self._dataset, "__dict__", {}).get(_TOLD)
        return found or (0, (), {})


def recorder_of(dataset: Any) -> EpochRecorder | None:
    """A recorder for a dataset with ``set_epoch``. Its class then notes calls, on the dataset itself."""
    cls = type(dataset)
    function = getattr(cls, "set_epoch", None)
    if not callable(function) or not hasattr(dataset, "__dict__"):
        return None
    if not hasattr(function, "_rustloader_notes"):
        try:
            cls.set_epoch = _noting(function)
        except TypeError:  # a class of an extension
            return None
    return EpochRecorder(dataset)


def _noting(function: Any) -> Any:
    @functools.wraps(function)
    def set_epoch(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        calls = self.__dict__.get(_TOLD, (0,))[0]
        # Past a class that refuses attributes.
        object.__setattr__(self, _TOLD, (calls + 1, args, kwargs))
        return result

    set_epoch._rustloader_notes = True  # type: ignore[attr-defined]
    return set_epoch
