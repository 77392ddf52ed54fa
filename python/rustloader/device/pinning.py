"""What the pin thread calls in Python: torch's pinned allocator, torch's rules, torch's texts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils

from rustloader._core import Engine
from rustloader.torch_side import is_torchs

# torch's function and method; None if a program had replaced them before this import.
_pin_memory: Any = _utils.pin_memory.pin_memory
if not is_torchs(_pin_memory, _utils.pin_memory):
    _pin_memory = None
_tensor_pin_memory: Any = None if "pin_memory" in vars(torch.Tensor) else torch.Tensor.pin_memory

# In 2.6 torch's function makes lists of tuples, in 2.15 tuples.
_TUPLES_BECOME_LISTS = _pin_memory is not None and isinstance(_pin_memory(()), list)


def allocate(nbytes: int) -> torch.Tensor:
    """Pinned memory of torch's caching host allocator, which knows what streams still read of it.

    Args:
        nbytes: how many bytes.

    Returns:
        A ``uint8`` tensor of shape ``(nbytes,)`` with whatever was there before.
    """
    # The device is named because the default type of tensors may be another device's.
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class Pinner:
    """Pins the batches of one iterator, on its pin thread."""

    def __init__(self, device: str | None) -> None:
        self.device = device
        # Each thread has a current device of its own, and the first one is not that of every rank.
        self.device_index = torch.accelerator.current_device_index()
        # What the allocator sets up at its first use is set up here: under way in the thread, some of it would hold
        # locks of the C library, and a process forked just then could not exit. An error comes again at each batch.
        with contextlib.suppress(Exception):
            allocate(1)

    def begin(self) -> None:
        """The thread's first act."""
        # Otherwise a copy would take all cores.
        torch.set_num_threads(1)
        torch.accelerator.set_device_index(self.device_index)

    def plain(self) -> tuple[Callable[[int], torch.Tensor], bool] | None:
        """For batches of plain containers and tensors: what allocates, and whether tuples become lists. None where
        torch's function or method has been replaced, which then has to be called."""
        if _utils.pin_memory.pin_memory is _pin_memory and torch.Tensor.pin_memory is _tensor_pin_memory:
            return allocate, _TUPLES_BECOME_LISTS
        return None

    def pin(self, data: Any) -> Any:
        """Any batch, pinned as torch does it."""
        return _utils.pin_memory.pin_memory(data, self.device)

    def failure(self, error: Exception) -> ExceptionWrapper:
        """What is delivered in the place of a batch that could not be pinned."""
        where = f"in pin memory thread for device {self.device_index}"
        return ExceptionWrapper((type(error), error, error.__traceback__), where=where)


class Thread:
    """In the place of torch's ``_pin_memory_thread``."""

    name = "rl_pin"
    daemon = True

    def __init__(self, core: Engine) -> None:
        self._core = core

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._core.pinning()

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread's end, at most ``timeout`` seconds."""
        self._core.join_pinning(timeout)


class DoneEvent:
    """In the place of torch's ``_pin_memory_thread_done_event``."""

    def __init__(self, core: Engine) -> None:
        self._core = core
        self._set = False

    def set(self) -> None:
        """Tells the thread to end."""
        self._set = True
        self._core.stop_pinning()

    def is_set(self) -> bool:
        """Whether it was told to, or has ended by itself."""
        return self._set or self._core.closing or not self._core.pinning()
