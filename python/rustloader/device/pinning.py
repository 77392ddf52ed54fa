"""Callbacks of the pin thread, which use torch's allocator of pinned memory, its rules and its error messages."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils

from rustloader._core import Engine
from rustloader.system.torch_side import is_defined_in

# torch's function and method, or None if a program replaced them before this import.
_pin_memory: Any = _utils.pin_memory.pin_memory
if not is_defined_in(_pin_memory, _utils.pin_memory):
    _pin_memory = None
_tensor_pin_memory: Any = None if "pin_memory" in vars(torch.Tensor) else torch.Tensor.pin_memory

# torch 2.6 converts tuples to lists; torch 2.15 keeps tuples.
_TUPLES_BECOME_LISTS = _pin_memory is not None and isinstance(_pin_memory(()), list)

# CU_STREAM_CAPTURE_MODE_THREAD_LOCAL in cuda.h: only captures in the calling thread matter.
_CAPTURE_MODE_THREAD_LOCAL = 1


def allocate(nbytes: int) -> torch.Tensor:
    """Allocates an uninitialized ``uint8`` tensor of shape ``(nbytes,)`` in pinned memory.

    The memory comes from torch's caching host allocator, which tracks the streams that still read it.
    """
    # The device is explicit because the program may have set another default device.
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def ignore_captures_elsewhere() -> None:
    """Lets this thread allocate pinned memory while another thread captures a CUDA graph.

    In ``"global"``, the default mode of ``torch.cuda.graph``, CUDA would otherwise refuse this thread's allocation, and
    the other thread's capture would fail. torch has no function for this, so the driver's function is called.
    """
    if torch.version.cuda is None or not torch.cuda.is_initialized():
        return
    with contextlib.suppress(OSError, AttributeError):
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
        exchange(ctypes.byref(ctypes.c_int(_CAPTURE_MODE_THREAD_LOCAL)))


class Pinner:
    """The functions that the pin thread calls to pin the batches of one iterator."""

    def __init__(self, device: str | None) -> None:
        self.device = device
        # Each thread has its own current device. The default, the first device, is wrong for most ranks.
        self.device_index = torch.accelerator.current_device_index()
        # The allocator is initialized here. If the pin thread did this, it would hold locks of the C library meanwhile,
        # and a process forked at that moment could not exit. An error is ignored here, because each batch raises it
        # again.
        with contextlib.suppress(Exception):
            allocate(1)

    def begin(self) -> None:
        """Prepares the pin thread, which calls this first."""
        # With the default number of threads, a copy would use all cores.
        torch.set_num_threads(1)
        torch.accelerator.set_device_index(self.device_index)
        ignore_captures_elsewhere()

    def plain(self) -> tuple[Callable[[int], torch.Tensor], bool] | None:
        """Returns the allocator for batches of plain containers and tensors, and whether tuples become lists. Returns
        None if a program has replaced torch's function or method; the caller must then use ``pin``.
        """
        if _utils.pin_memory.pin_memory is _pin_memory and torch.Tensor.pin_memory is _tensor_pin_memory:
            return allocate, _TUPLES_BECOME_LISTS
        return None

    def pin(self, data: Any) -> Any:
        """Pins any batch with torch's function."""
        return _utils.pin_memory.pin_memory(data, self.device)

    def failure(self, error: Exception) -> ExceptionWrapper:
        """Wraps an error, to be delivered instead of a batch that could not be pinned."""
        where = f"in pin memory thread for device {self.device_index}"
        return ExceptionWrapper((type(error), error, error.__traceback__), where=where)


class Thread:
    """A stand-in for torch's ``_pin_memory_thread``."""

    name = "rl_pin"
    daemon = True

    def __init__(self, core: Engine) -> None:
        self._core = core

    def is_alive(self) -> bool:
        return self._core.pinning()

    def join(self, timeout: float | None = None) -> None:
        self._core.join_pinning(timeout)


class DoneEvent:
    """A stand-in for torch's ``_pin_memory_thread_done_event``."""

    def __init__(self, core: Engine) -> None:
        self._core = core
        self._set = False

    def set(self) -> None:
        self._set = True
        self._core.stop_pinning()

    def is_set(self) -> bool:
        return self._set or self._core.closing or not self._core.pinning()
