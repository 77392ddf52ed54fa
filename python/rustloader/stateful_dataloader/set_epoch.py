"""Notes the epochs that a program tells its dataset, so that persistent workers are told them, too."""

from __future__ import annotations

import contextlib
from typing import Any


class Recorder:
    """Stands before the ``set_epoch`` of a dataset and remembers the last epoch.

    It is an attribute of the dataset itself, and travels with its copies.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.last: int | None = None

    def __call__(self, epoch: int, *args: Any, **kwargs: Any) -> Any:
        result = type(self._dataset).set_epoch(self._dataset, epoch, *args, **kwargs)
        self.last = epoch
        return result


def record(dataset: Any) -> Recorder | None:
    """The recorder of a dataset's ``set_epoch``, put there now if need be; None for a dataset without one."""
    if not callable(getattr(type(dataset), "set_epoch", None)):
        return None
    present = getattr(dataset, "__dict__", {}).get("set_epoch")
    if present is None:
        present = Recorder(dataset)
        # A dataset that takes no attributes is left alone.
        with contextlib.suppress(Exception):
            dataset.set_epoch = present
    return present if isinstance(present, Recorder) else None
