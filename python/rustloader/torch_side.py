"""What is torch's own: its iterator, as it was before a program could replace it, its functions, and its place in
warnings."""

from __future__ import annotations

import types
from abc import ABCMeta
from collections.abc import Callable
from typing import Any

from torch.utils.data import dataloader as torch_dataloader

TorchIter = torch_dataloader._MultiProcessingDataLoaderIter


class IterType(ABCMeta):
    """The type of our iterator's class. While that stands in the place of torch's (``rustloader.install()``), torch's
    iterators are its instances as well: those from before, and those of classes that were made before.

    It is an ABCMeta, so that users' subclasses may have abstract base classes beside it, as torch's may.
    """

    stand_in: IterType | None = None

    def __instancecheck__(cls, instance: Any) -> bool:
        # torch's is a base of it.
        return type.__instancecheck__(TorchIter if cls is IterType.stand_in else cls, instance)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return type.__subclasscheck__(TorchIter if cls is IterType.stand_in else cls, subclass)


def is_torchs(function: Any, module: types.ModuleType) -> bool:
    """Whether a function was written in a module, torch's for example, and not put there by a program."""
    return getattr(function, "__globals__", None) is vars(module)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


# Warnings with `stacklevel=2` name the file of whoever called the function that warns: torch's, and users' filters go
# by it. This calls a function from a frame that is torch's by file and module.
in_torch: Callable[..., Any] = types.FunctionType(
    _call.__code__.replace(co_filename=torch_dataloader.__file__), vars(torch_dataloader)
)


def forget_locals(error: BaseException) -> None:
    """Clears the local variables of the function that the current one called, out of which ``error`` came.

    torch's ``ExceptionWrapper.reraise`` keeps the error that it raises in one. That is a cycle of error, traceback and
    frame, which would keep the iterator and its workers until the garbage collector runs.
    """
    called = error.__traceback__ and error.__traceback__.tb_next
    if called is not None:
        called.tb_frame.clear()
