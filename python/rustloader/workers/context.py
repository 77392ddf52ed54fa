"""The state of its process that a worker changes."""

from __future__ import annotations

import contextlib

from torch.utils.data import _utils

from rustloader._core import Port
from rustloader.workers.collate import use_arena


class WorkerContext:
    """``get_worker_info()`` and the memory of ``default_collate``, while a worker runs."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def install(self, port: Port, info: _utils.worker.WorkerInfo) -> None:
        """Makes this process a worker with this port."""
        self._undo.callback(setattr, _utils.worker, "_worker_info", _utils.worker._worker_info)
        _utils.worker._worker_info = info
        self._undo.callback(use_arena(port))

    def restore(self) -> None:
        """Puts back what ``install`` found. Does nothing before it, and the second time."""
        self._undo.close()
