"""The streams, events and copies of one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class Streams:
    """Streams of a device, by torch's module for its kind: ``torch.cuda``, ``torch.xpu`` or a backend's own.

    Args:
        device: The device, with an index.
    """

    # True if objects are asked to queue their copies.
    non_blocking = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)

    def make(self) -> Any:
        """Creates a stream."""
        return self._module.Stream(device=self.device)

    def current(self) -> Any:
        """Returns the calling thread's stream."""
        return self._module.current_stream(self.device)

    def using(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        """Makes a stream the calling thread's for the body of a ``with`` statement."""
        guard = getattr(self._module, "device", None)
        # A backend's module may have imported torch's class, which is no guard.
        device = contextlib.nullcontext() if guard in (None, torch.device) else guard(self.device)
        return _device_and_stream(device, self._module.stream(stream))

    def place(self) -> Any:
        """Returns the calling thread's streams, of this device and of its current one, for `restore`."""
        return self._module.current_stream(self.device), self._module.current_stream()

    def restore(self, place: Any) -> None:
        """Makes streams the calling thread's again, and with them its current device."""
        for stream in place:
            self._module.set_stream(stream)

    def record(self, stream: Any, timed: bool = False) -> Any:
        """Records an event, which is done when all work that the stream has so far is done."""
        event = self._module.Event(enable_timing=timed)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Lets later work of the stream begin after the event. The calling thread does not wait."""
        stream.wait_event(event)

    def is_done(self, event: Any) -> bool:
        return bool(event.query())

    def synchronize(self, event: Any) -> None:
        """Waits in the calling thread until the event is done."""
        event.synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        """Returns the time from one event to another; both are timed and done. 0 if the device does not measure it."""
        try:
            return float(begin.elapsed_time(end)) / 1e3
        except RuntimeError:
            return 0.0

    def is_capturing(self) -> bool:
        """Returns True if the calling thread's stream is captured into a graph."""
        query = getattr(self._module, "is_current_stream_capturing", None)
        return query is not None and bool(query())

    def hand_over(self, tensor: torch.Tensor, stream: Any) -> None:
        """Lets torch's allocator wait for the stream when the tensor's memory is freed."""
        tensor.record_stream(stream)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queues a copy in the calling thread's stream, and returns it; the tensor itself if it is on the device."""
        return tensor.to(self.device, non_blocking=self.non_blocking)

    def traced(self, call: Callable[[], Any], on_device: list[torch.Tensor], on_host: list[torch.Tensor]) -> Any:
        """Returns the result of a call. Adds the tensors on the device that it made, and those of the host that it
        read, also if it fails."""
        with _Trace(self.device, on_device, on_host):
            return call()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "cpu" or tensor.numel() == 0 or tensor.is_pinned()


class NoStreams(Streams):
    """A device without streams, such as Apple's: each copy is a part of its one queue.

    The thread waits for the copies, because no event says when the device has read the host's memory.
    """

    non_blocking = False

    def make(self) -> Any:
        return None

    def current(self) -> Any:
        return None

    def using(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def place(self) -> Any:
        return None

    def restore(self, place: Any) -> None:
        pass

    def record(self, stream: Any, timed: bool = False) -> Any:
        return None

    def wait(self, stream: Any, event: Any) -> None:
        pass

    def is_done(self, event: Any) -> bool:
        return True

    def synchronize(self, event: Any) -> None:
        pass

    def seconds(self, begin: Any, end: Any) -> float:
        return 0.0

    def is_capturing(self) -> bool:
        return False

    def hand_over(self, tensor: torch.Tensor, stream: Any) -> None:
        pass


class _Trace(TorchDispatchMode):
    """Notes what torch's operators read on the host and make on a device."""

    def __init__(self, device: torch.device, on_device: list[torch.Tensor], on_host: list[torch.Tensor]) -> None:
        super().__init__()
        self._device, self._made, self._read = device, on_device, on_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._read += [it for it in tree_leaves((args, kwargs)) if _is_on(it, "cpu")]
        self._made += [it for it in tree_leaves(result) if _is_on(it, self._device.type)]
        return result


@contextlib.contextmanager
def _device_and_stream(device: Any, stream: Any) -> Iterator[None]:
    """Enters the device before its stream: leaving a stream of another device makes torch set the thread's previous
    stream, which creates a context on the current device."""
    with device, stream:
        yield


def _is_on(value: object, kind: str) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == kind


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors with their own memory that a tensor consists of: of a sparse one its indices and values."""
    anything: Any = tensor
    if is_traceable_wrapper_subclass(anything):
        names, _ = anything.__tensor_flatten__()
        return [part for name in names for part in parts(getattr(tensor, name))]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return []
    return [tensor]


def streams_of(device: torch.device | str | int | None) -> Streams | None:
    """Returns the streams of a device; None: it is the CPU.

    Args:
        device: The device, or None for the accelerator of this process. Without an index it is the calling thread's
            current one.

    Raises:
        ValueError: The device holds no data (``meta``).
        RuntimeError: This torch or this machine lacks the device.
    """
    if device is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = torch.device("cpu") if accelerator is None else accelerator
    device = torch.device(device)
    if device.type == "cpu":
        return None
    if device.type == "meta":
        raise ValueError(f"device must be an accelerator or the CPU, got {str(device)!r}, which holds no data")
    module = torch.get_device_module(device)
    index: int | None = device.index
    if index is None:
        current = getattr(module, "current_device", None)
        device = torch.device(device.type, 0 if current is None else current())
    names = ("Stream", "Event", "current_stream", "set_stream", "stream")
    # torch.mps has these names and takes other arguments.
    has_streams = device.type != "mps" and all(hasattr(module, name) for name in names)
    return Streams(device) if has_streams else NoStreams(device)
