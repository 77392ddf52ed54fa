"""Keeps the memory of a delivered tensor alive for its views when torch moves the tensor to shared memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from rustloader._core import move_storage
from rustloader.system.patches import Patch

# The methods that move a storage to other memory. `share_memory_()` and torch's queues call them.
_MOVES = ("_share_fd_cpu_", "_share_filename_cpu_")


def watch() -> None:
    """Wraps torch's methods that move a storage, so that views keep the old memory. The methods otherwise behave as
    before. Does nothing if they are already wrapped in this process."""
    for name in _MOVES:
        function = getattr(torch.UntypedStorage, name)
        if not hasattr(function, "_rustloader_watches"):
            Patch(f"torch.UntypedStorage.{name}", torch.UntypedStorage).put_in(_watched(function))


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def moving(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        return move_storage(function, self, *args, **kwargs)

    moving._rustloader_watches = True  # type: ignore[attr-defined]
    return moving
