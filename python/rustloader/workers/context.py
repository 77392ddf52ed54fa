"""The process-wide state that a worker replaces.

This state is why workers are processes and not threads. ``get_worker_info()``, the seeds of ``random``, NumPy and
torch, and the port that allocates torch's shared memory and NumPy's arrays exist once per process.
"""

from __future__ import annotations

import contextlib

from torch.utils.data import _utils

from rustloader._core import Port
from rustloader.system import moved_storages
from rustloader.system.patches import Patch
from rustloader.workers.collate import use_arena


class WorkerContext:
    """Sets the result of ``get_worker_info()`` and the memory that ``default_collate`` uses while a worker runs."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def install(self, port: Port, info: _utils.worker.WorkerInfo) -> None:
        patch = Patch("torch.utils.data._utils.worker._worker_info", _utils.worker)
        self._undo.callback(patch.take_out, anyway=True)
        patch.put_in(info)
        self._undo.callback(use_arena(port))
        moved_storages.watch()

    def restore(self) -> None:
        """Undoes ``install``. Does nothing if that was not called or is already undone."""
        self._undo.close()
