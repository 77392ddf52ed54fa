"""The streams, events and copies of one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class Streams:
    """Streams of a device, through torch's module for its type: ``torch.cuda``, ``torch.xpu`` or a backend's own
    module.

    Args:
        device: The device, with an index.
    """

    # The argument `non_blocking` of copies: True if copies are queued, False if the calling thread waits for them.
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
        """Makes a stream the calling thread's current stream in the body of a ``with`` statement."""
        guard = getattr(self._module, "device", None)
        # A backend's module may have imported `torch.device` under this name, which does not select the current device.
        device = contextlib.nullcontext() if guard in (None, torch.device) else guard(self.device)
        return _device_and_stream(device, self._module.stream(stream))

    def save(self) -> Any:
        """Returns the calling thread's streams for `restore`: the stream on this device and the stream on the thread's
        current device."""
        return self._module.current_stream(self.device), self._module.current_stream()

    def restore(self, saved: Any) -> None:
        """Restores the calling thread's streams, and with them its current device."""
        for stream in saved:
            self._module.set_stream(stream)

    def record(self, stream: Any, timed: bool = False) -> Any:
        """Records an event, which is done when all work queued in the stream so far is done."""
        event = self._module.Event(enable_timing=timed)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Makes the stream start later work only after the event. The calling thread does not wait."""
        stream.wait_event(event)

    def is_done(self, event: Any) -> bool:
        return bool(event.query())

    def synchronize(self, event: Any) -> None:
        """Waits in the calling thread until the event is done."""
        event.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Returns the seconds from one event to another, or 0 if the device does not measure time. Both events must be
        timed and done."""
        try:
            return float(start.elapsed_time(end)) / 1e3
        except RuntimeError:
            return 0.0

    def is_capturing(self) -> bool:
        """Returns True if the calling thread's stream is being captured into a graph."""
        query = getattr(self._module, "is_current_stream_capturing", None)
        return query is not None and bool(query())

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Makes torch's allocator wait for the stream before it reuses the tensor's memory."""
        tensor.record_stream(stream)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queues a copy in the calling thread's stream and returns it, or the tensor itself if it is on the device."""
        return tensor.to(self.device, non_blocking=self.non_blocking)

    def traced(self, call: Callable[[], Any], on_device: list[torch.Tensor], on_host: list[torch.Tensor]) -> Any:
        """Returns the result of a call. Adds the tensors that it made on the device and those that it read on the host
        to the lists, even if it fails."""
        with _Trace(self.device, on_device, on_host):
            return call()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "cpu" or tensor.numel() == 0 or tensor.is_pinned()


class NoStreams(Streams):
    """A device without streams, such as Apple's, which has a single queue for all work.

    The calling thread waits for copies, because no event shows when the device has read the host's memory.
    """

    non_blocking = False

    def make(self) -> Any:
        return None

    def current(self) -> Any:
        return None

    def using(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def save(self) -> Any:
        return None

    def restore(self, saved: Any) -> None:
        pass

    def record(self, stream: Any, timed: bool = False) -> Any:
        return None

    def wait(self, stream: Any, event: Any) -> None:
        pass

    def is_done(self, event: Any) -> bool:
        return True

    def synchronize(self, event: Any) -> None:
        pass

    def seconds(self, start: Any, end: Any) -> float:
        return 0.0

    def is_capturing(self) -> bool:
        return False

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        pass


class _Trace(TorchDispatchMode):
    """Collects the tensors that torch's operators read on the host and make on a device."""

    def __init__(self, device: torch.device, on_device: list[torch.Tensor], on_host: list[torch.Tensor]) -> None:
        super().__init__()
        self._device, self._on_device, self._on_host = device, on_device, on_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._on_host += [leaf for leaf in tree_leaves((args, kwargs)) if _is_on(leaf, "cpu")]
        self._on_device += [leaf for leaf in tree_leaves(result) if _is_on(leaf, self._device.type)]
        return result


@contextlib.contextmanager
def _device_and_stream(device: Any, stream: Any) -> Iterator[None]:
    """Enters the device before its stream. Otherwise, on leaving a stream of another device, torch sets the thread's
    previous stream, which creates a context on the current device."""
    with device, stream:
        yield


def _is_on(value: object, kind: str) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == kind


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors with separate memory that make up a tensor, such as the indices and values of a sparse
    tensor. Returns an empty list for a tensor without storage."""
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
    """Returns the streams of a device, or None for the CPU.

    Args:
        device: The device, or None for the accelerator of this process. A device without an index is the calling
            thread's current device of that type.

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
    # torch.mps has these names but takes other arguments.
    has_streams = device.type != "mps" and all(hasattr(module, name) for name in names)
    return Streams(device) if has_streams else NoStreams(device)
