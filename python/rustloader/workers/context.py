"""The state of its process that a worker changes."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.data import _utils

from rustloader._core import Port
from rustloader.workers.collate import use_arena

__all__ = ["WorkerContext"]


class WorkerContext:
    """``get_worker_info()`` and the memory of ``default_collate``, while a worker runs."""

    def __init__(self) -> None:
        self._undo: Callable[[], None] | None = None

    def install(self, port: Port, info: _utils.worker.WorkerInfo) -> None:
        """Makes this process a worker with this port."""
        before = _utils.worker._worker_info
        _utils.worker._worker_info = info
        restore_collate = use_arena(port)

        def undo() -> None:
            restore_collate()
            _utils.worker._worker_info = before

        self._undo = undo

    def restore(self) -> None:
        """Puts back what ``install`` found. Does nothing before it, and the second time."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
